"""Agreement of all ranks on the setup, or the same error on all, before anything is changed."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sdp4bit.collectives.errors import comm_error_context, ranks_in_words
from sdp4bit.collectives.topology import (
    Nodes,
    TopologySpec,
    arrange,
    block_numbers,
    host_name,
    machine_id,
    mesh_row,
    node_labels,
    node_names,
    split_spec,
    unknown_spec,
)
from sdp4bit.config import VERSION
from sdp4bit.engines.arrival import wait_for_ranks
from sdp4bit.launcher import find_launcher
from sdp4bit.warn import warn_user

Sent = TypeVar("Sent")
Scope = tuple[Sequence[int], str]
"""The ranks that must agree and the subject: "settings", "shards" or "replicate"."""
Texts = dict[str, str]  # names and values for error messages
_SHOWN_DIFFERENCES, _SHOWN_NODES = 8, 3
_WAY_OUT = {
    "settings": "have different settings or versions; make them equal on all ranks",
    "shards": "share a data-parallel group but not its parameter groups; build the same model and skip the "
    "same modules on all of them",
    "replicate": "hold the same shards (HSDP) but do not share parameter groups; build the same model and "
    "skip the same modules on all of them",
}


@dataclass(frozen=True, kw_only=True)
class ShardedRows:
    """Properties of a parameter group that must be equal on all of its ranks."""

    name: str
    ranks: tuple[int, ...]
    shard_numel: int
    dtypes: tuple[str, ...]
    skipped: bool = False
    parameters: tuple[tuple[int, int], ...] = ()
    """(Values, dimensions) of each parameter in a row, which determine its sections."""
    unquantizable_weights: str = ""  # why its weights cannot be quantized; "" if they can
    replicate: bool = False  # whether the ranks hold the same shard and all-reduce its gradients (HSDP)


@dataclass(frozen=True, kw_only=True)
class AgreedNodes:
    """Node layouts by ranks; the same, in the same order, on all ranks of the job."""

    shards: dict[tuple[int, ...], Nodes]  # layouts of ranks that parameter groups are sharded over
    replicate: dict[tuple[int, ...], Nodes]  # layouts of ranks that hold the same shards (HSDP)
    found: str = ""  # nodes of topology="auto", for a reader

    def connected(self, links: Iterable[Sequence[int]] = ()) -> Sequence[int]:
        """Return this rank and all ranks that share groups with it, directly or through others.

        Args:
            links: further ranks that belong together; the same on all ranks.
        """
        every = [*self.shards, *self.replicate, *links]
        found = {dist.get_rank()}
        while joining := [
            ranks for ranks in every if not found.isdisjoint(ranks) and not found.issuperset(ranks)
        ]:
            found.update(*joining)
        return sorted(found)


class Summary(TypedDict):
    """A rank's proposal in a few hundred bytes, independent of the size of the model and the job.

    All messages consist of built-in types, so that ranks with another version can read them.
    """

    host: str
    machine: str
    ranks_on_node: int | None  # LOCAL_WORLD_SIZE of torchrun
    topology: str | int | tuple[int, ...] | None  # for a mesh the row with this rank; None if there is none
    nodes_per_block: int | None
    digests: dict[Scope, bytes]
    unmatched: list[str]
    failed: bool
    checks_layouts: bool


class Proposal(TypedDict):
    """A rank's full proposal, which is sent only if the summaries do not match."""

    error: str | None
    is_type_error: bool
    texts: dict[Scope, Texts]
    names: list[str]  # names of the parameter groups


def agree(
    groups: Sequence[ShardedRows],
    *,
    settings: Mapping[str, object],
    topology: TopologySpec,
    unmatched: Sequence[str] = (),
    failure: Exception | None,
    check: Callable[[AgreedNodes], None] | None = None,
    call: str = "quantize_communication",
) -> AgreedNodes:
    """Return the node layout of every data-parallel group; collective over the job.

    The ranks wait for each other in the store, before their first collective. They gather summaries. They
    gather the full proposals only to report a mismatch, and the results of `check` only if a rank has one.

    Args:
        settings: values by name that must be equal on all ranks.
        unmatched: patterns without a match on this rank; they must match on some rank.
        failure: an error on this rank; every rank then raises it.
        check: raises ValueError for layouts that this rank does not support; every rank then raises it.
        call: name of the function that the ranks have called, for errors.

    Raises:
        ValueError: the same on every rank: some rank failed, settings or versions differ, or the ranks of a
            group do not fill its nodes evenly.
        TypeError: the same, if all failures are TypeErrors.
        ExchangeError: some ranks did not call before the timeout of the default group.
    """
    row: str | int | tuple[int, ...] | None = None
    nodes_per_block: int | None = None
    try:
        nodes, nodes_per_block = split_spec(topology)
        row = _own_part(nodes, has_groups=bool(groups))
    except ValueError as caught:
        failure = failure or caught
    counts = Counter(rows.name for rows in groups if not rows.replicate)
    if twice := [name for name, count in counts.items() if count > 1]:  # reports and audits go by name
        failure = failure or ValueError(
            f"two parameter groups are named {twice[0]!r}: give each a name of its own"
        )
    common: Texts = {"sdp4bit": VERSION, "torch": str(torch.__version__)}
    # Under tensor parallelism each data-parallel group has its own mesh.
    common["topology"] = "a mesh" if isinstance(topology, DeviceMesh) else repr(topology)
    for name, value in settings.items():
        common |= _texts(name, value)
    texts: dict[Scope, Texts] = {(range(dist.get_world_size()), "settings"): common}
    for rows in groups if failure is None else ():
        scope = _compact(rows.ranks), "replicate" if rows.replicate else "shards"
        own = texts.setdefault(scope, {"parameter groups": "0"})
        number = int(own["parameter groups"]) + 1
        own["parameter groups"] = str(number)
        own |= _texts(f"group {number} ({rows.name})", rows)
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    summary: Summary = {
        "host": host_name(),
        "machine": machine_id(),
        "ranks_on_node": int(said) if said.isdecimal() else None,
        "topology": row,
        "nodes_per_block": nodes_per_block,
        "digests": {scope: hashlib.sha256(repr(own).encode()).digest() for scope, own in texts.items()},
        "unmatched": list(unmatched),
        "failed": failure is not None,
        "checks_layouts": check is not None,
    }
    proposal: Proposal = {
        "error": None if failure is None else _describe(failure),
        "is_type_error": isinstance(failure, TypeError),
        "texts": texts,
        "names": [rows.name for rows in groups],
    }
    subject = f"the setup in {call}, which all ranks must call, including those without a model"
    wait_for_ranks(range(dist.get_world_size()), call=f"sdp4bit.{call}")
    summaries = _gather(summary, subject)
    distinct = {(scope, digest) for each in summaries for scope, digest in each["digests"].items()}
    unequal = [
        scope for scope, digest in distinct for r in scope[0] if summaries[r]["digests"].get(scope) != digest
    ]
    if unequal or any(each["failed"] for each in summaries):
        _raise_mismatch(_gather(proposal, subject), failure, call=call)
    nowhere = set.intersection(*(set(each["unmatched"]) for each in summaries))
    if nowhere:
        names = dict.fromkeys(name for each in _gather(proposal, subject) for name in each["names"])
        raise ValueError(f"skip={min(nowhere)!r} matches no FSDP module; there are {', '.join(names)}")
    layouts = _arrange_all(summaries)
    if any(each["checks_layouts"] for each in summaries):
        try:
            if check is not None:
                check(layouts)
        except ValueError as caught:
            failure = caught
            proposal["error"] = _describe(caught)
        _raise_mismatch(_gather(proposal, "layouts"), failure, call=call)
    _warn_if_alone()
    _warn_of_hosts(summaries)
    return layouts


def _own_part(topology: object, *, has_groups: bool) -> str | int | tuple[int, ...] | None:
    if isinstance(topology, str | int):
        return topology
    if not isinstance(topology, DeviceMesh):
        raise unknown_spec(topology)
    row = mesh_row(topology, dist.get_rank())
    if row is None and has_groups:
        raise ValueError(f"topology: this rank is not in its (inter, intra) mesh {topology}")
    return row


def _gather(own: Sent, subject: str) -> list[Sent]:
    gathered = [own] * dist.get_world_size()
    with comm_error_context(f"agreement on {subject}"):
        dist.all_gather_object(gathered, own)
    return gathered


def _describe(failure: Exception) -> str:
    is_known = isinstance(failure, ValueError | TypeError)
    return str(failure) if is_known else f"{type(failure).__name__}: {failure}"


def _texts(name: str, value: object) -> Texts:
    """Return a value as text; a dataclass also field by field."""
    if not is_dataclass(value):
        return {name: repr(value)}
    texts = {name: f"{type(value).__name__}(...)"}
    for field in fields(value):
        texts |= _texts(f"{name}.{field.name}", getattr(value, field.name))
    return texts


def _compact(ranks: tuple[int, ...]) -> Sequence[int]:
    """Return evenly spaced ranks as a range, which takes a few bytes; others unchanged."""
    if len(ranks) > 1 and ranks[0] < ranks[1]:
        evenly = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
        if tuple(evenly) == ranks:
            return evenly
    return ranks


def _raise_mismatch(proposals: Sequence[Proposal], failure: Exception | None, *, call: str) -> None:
    """Raise the errors of all ranks, with this rank's traceback, or else report the first difference."""
    errors = {r: {"": p["error"]} for r, p in enumerate(proposals) if p["error"] is not None}
    if errors:
        are_types = all(p["is_type_error"] for p in proposals if p["error"] is not None)
        kind = TypeError if are_types else ValueError
        refusal = kind(f"sdp4bit.{call}: " + _by_value(errors, "", "; "))
        raise refusal.with_traceback(failure.__traceback__ if failure else None)
    for scope in dict.fromkeys(scope for proposal in proposals for scope in proposal["texts"]):
        texts = {rank: proposals[rank]["texts"].get(scope, {}) for rank in scope[0]}
        names = dict.fromkeys(name for each in texts.values() for name in each)
        differing = [name for name in names if len({each.get(name) for each in texts.values()}) > 1]
        if differing:
            # A setting that is None on some ranks has no fields there. Report it in one line, not per field.
            shared = [name for name in differing if all(name in each for each in texts.values())]
            lines = [f"{name}: {_by_value(texts, name, ', ')}" for name in shared or differing]
            raise ValueError(
                f"{ranks_in_words(scope[0])} {_WAY_OUT[scope[1]]}:\n  "
                + "\n  ".join(lines[:_SHOWN_DIFFERENCES])
            )


def _by_value(texts: Mapping[int, Texts], name: str, separator: str) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, each in texts.items():
        ranks_of.setdefault(each.get(name, "none"), []).append(rank)
    return separator.join(f"{value} [{ranks_in_words(ranks)}]" for value, ranks in ranks_of.items())


def _arrange_all(summaries: Sequence[Summary]) -> AgreedNodes:
    first = summaries[0]["topology"]
    labels = node_labels(
        first
        if isinstance(first, str | int)
        else [None if isinstance(each["topology"], str | int) else each["topology"] for each in summaries],
        hosts=_node_names(summaries),
    )
    nodes_per_block = summaries[0]["nodes_per_block"]
    block_of = None if nodes_per_block is None else block_numbers(labels, nodes_per_block=nodes_per_block)
    # As ranges, because tuples of all ranks would take a time that grows with their square.
    distinct = {scope for each in summaries for scope in each["digests"]}
    layouts = {
        wanted: {
            ranks: arrange(ranks, labels, block_of=block_of)
            for ranks in sorted(tuple(ranks) for ranks, kind in distinct if kind == wanted)
        }
        for wanted in ("shards", "replicate")
    }
    names = list(dict.fromkeys(_node_names(summaries))) if first == "auto" else []
    listed = ", ".join(names[:_SHOWN_NODES]) + (", ..." if len(names) > _SHOWN_NODES else "")
    found = f"{len(names)} node{'s' * (len(names) > 1)} by host name: {listed}" if names else ""
    return AgreedNodes(shards=layouts["shards"], replicate=layouts["replicate"], found=found)


def _node_names(summaries: Sequence[Summary]) -> list[str]:
    return node_names([each["host"] for each in summaries], [each["machine"] for each in summaries])


def _warn_if_alone() -> None:
    """Warn if a launcher has started more processes than this job of one rank."""
    found = find_launcher(os.environ) if dist.get_world_size() == 1 else None
    if found is not None and (found.world_size or 1) > 1:
        warn_user(
            f"this job has one rank, but {found} announces {found.world_size}, which train separately: start "
            "the script with torchrun, or pass rank and world_size to init_process_group"
        )


def _warn_of_hosts(summaries: Sequence[Summary]) -> None:
    """Warn if the nodes by host names differ from the machines, or from the nodes of torchrun."""
    if summaries[0]["topology"] != "auto":
        return
    names_on: dict[str, dict[str, list[int]]] = {}
    for rank, summary in enumerate(summaries):
        names_on.setdefault(summary["machine"], {}).setdefault(summary["host"], []).append(rank)
    names_on.pop("", None)
    together = next((names for names in names_on.values() if len(names) > 1), None)
    if together is not None:
        (first, ranks), (second, others), *_ = together.items()
        number = sum(map(len, together.values()))
        warn_user(
            f'topology="auto" counts {len(together)} nodes on one machine, which has several host names '
            f"({first!r}: {ranks_in_words(ranks)}; {second!r}: {ranks_in_words(others)}), as of containers. "
            f"If they exchange data inside the machine, pass topology={number}. If they represent nodes, "
            f"pass topology={len(ranks)}",
            range(len(summaries)),
        )
        return
    on_host: dict[str, list[Summary]] = {}
    for summary in summaries:
        on_host.setdefault(summary["host"], []).append(summary)
    differing: dict[tuple[int, int], list[str]] = {}
    for host, members in on_host.items():
        said = members[0]["ranks_on_node"]
        if said is not None and said != len(members):
            differing.setdefault((len(members), said), []).append(host)
    if not differing:
        return
    (count, said), hosts = next(iter(differing.items()))
    risk = "ranks of several nodes are treated as one node and exchange more bits than between nodes"
    if count < said:
        risk = "ranks of one node are treated as several nodes, and each keeps a full replica"
    warn_user(
        f'topology="auto" assumes one node per host name, with {count} ranks on '
        f"{hosts[0]!r}{f' and {len(hosts) - 1} more' if len(hosts) > 1 else ''}, but LOCAL_WORLD_SIZE is "
        f"{said}. If {said} is right, {risk}: pass topology={said} or give every node its own host name. If "
        f"{count} is right, pass topology={count}",
        range(len(summaries)),
    )
