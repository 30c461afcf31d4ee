"""All ranks agree on what to set up, or all raise the same error, before anything is changed."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sdp4bit.collectives.errors import comm_error_context, ranks_in_words
from sdp4bit.collectives.topology import (
    NodeLayout,
    TopologySpec,
    arrange,
    host_name,
    mesh_row,
    node_labels,
)
from sdp4bit.config import VERSION

Sent = TypeVar("Sent")
Scope = tuple[Sequence[int], str]
"""The ranks that must propose the same, and the subject: "settings", "shards" or "replicas"."""
Texts = dict[str, str]
"""Names and values, as error messages show them."""
_SHOWN_DIFFERENCES = 8
_WAY_OUT = {
    "settings": "have different settings or versions; make them equal on all ranks",
    "shards": "share a data-parallel group but not its parameter groups; build the same model and skip the "
    "same modules on all of them",
    "replicas": "are replicas but do not share parameter groups; build the same model and skip the same "
    "modules on all of them",
}


@dataclass(frozen=True, kw_only=True)
class ShardedRows:
    """A parameter group as its peers must see it too."""

    name: str
    ranks: tuple[int, ...]
    shard_numel: int
    dtypes: tuple[str, ...]
    skipped: bool = False
    parameters: tuple[tuple[int, int], ...] = ()
    """Values and dimensions of each parameter in a row, which is quantized by them."""
    unquantizable_weights: str = ""
    """Why its weights cannot be quantized, if so."""
    are_replicas: bool = False
    """The ranks hold the same shard, and all-reduce its gradients (HSDP)."""


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """The nodes of the ranks that communicate, by these ranks; the same in one order on all of the job."""

    shards: dict[tuple[int, ...], NodeLayout]
    """Of those that parameter groups are sharded over."""
    replicas: dict[tuple[int, ...], NodeLayout]
    """Of those that hold the same shards (HSDP)."""


class Summary(TypedDict):
    """A rank's proposal in a few hundred bytes, whatever the size of the model and of the job.

    Of built-in types, as is all that is sent here: ranks with another version can read it, too.
    """

    host: str
    ranks_on_node: int | None
    """As torchrun says."""
    topology: str | int | tuple[int, ...] | None
    """Of a mesh, the row with this rank; None if there is none."""
    digests: dict[Scope, bytes]
    unmatched: list[str]
    failed: bool
    checks_layouts: bool


class Proposal(TypedDict):
    """What a rank is about to set up; sent if the summaries do not fit."""

    error: str | None
    is_type_error: bool
    texts: dict[Scope, Texts]
    names: list[str]
    """Of the parameter groups."""


def agree(
    groups: Sequence[ShardedRows],
    *,
    settings: Mapping[str, object],
    topology: TopologySpec,
    unmatched: Sequence[str] = (),
    failure: Exception | None,
    check: Callable[[Layouts], None] | None = None,
    call: str = "quantize_communication",
) -> Layouts:
    """Return the node layout of every data-parallel group; collective over the job.

    Steps: 1. all ranks gather a summary of each other's proposal;  2. only if these do not fit, the proposals
    themselves, to say what differs;  3. if some rank has to check the layouts, its result.

    Args:
        settings: by name, the values that must be equal on all ranks.
        unmatched: patterns that match none of the groups on this rank; they must match on some rank.
        failure: an error on this rank; every rank then raises it.
        call: what the ranks have called, for errors.
        check: raises ValueError for layouts that this rank's groups cannot have; every rank then raises it.

    Raises:
        ValueError: the same on every rank: an error on some rank, settings or versions that differ, or a
            group whose ranks do not fill its nodes evenly.
        TypeError: likewise, if nothing is wrong on any rank but the types of arguments.
    """
    row: str | int | tuple[int, ...] | None = None
    try:
        row = _own_part(topology, has_groups=bool(groups))
    except ValueError as caught:
        failure = failure or caught
    common: Texts = {"sdp4bit": VERSION, "torch": str(torch.__version__)}
    # Under tensor parallelism each data-parallel group has a mesh of its own.
    common["topology"] = repr(topology) if isinstance(topology, str | int) else "a mesh"
    for name, value in settings.items():
        common |= _texts(name, value)
    texts: dict[Scope, Texts] = {(range(dist.get_world_size()), "settings"): common}
    for rows in groups if failure is None else ():
        scope = _compact(rows.ranks), "replicas" if rows.are_replicas else "shards"
        own = texts.setdefault(scope, {"parameter groups": "0"})
        number = int(own["parameter groups"]) + 1
        own["parameter groups"] = str(number)
        own |= _texts(f"group {number} ({rows.name})", rows)
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    summary: Summary = {
        "host": host_name(),
        "ranks_on_node": int(said) if said.isdecimal() else None,
        "topology": row,
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
    subject = f"what to quantize, in {call}, which all ranks call, also those without a model"
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
    _warn_of_hosts(summaries)
    return layouts


def _own_part(topology: TopologySpec, *, has_groups: bool) -> str | int | tuple[int, ...] | None:
    """Return the part of a topology that the other ranks must know."""
    if isinstance(topology, str | int):
        return topology
    if not isinstance(topology, DeviceMesh):
        raise ValueError(
            f'topology={topology!r} is unknown: use "auto", ranks per node, or an (inter, intra) mesh'
        )
    row = mesh_row(topology, dist.get_rank())
    if row is None and has_groups:
        raise ValueError(f"topology: this rank is not in the (inter, intra) mesh it passes, {topology}")
    return row


def _gather(own: Sent, subject: str) -> list[Sent]:
    """Return the object of each rank."""
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
    """Return the same ranks as a range, a few bytes, if they are evenly spaced, as they are on a mesh."""
    if len(ranks) > 1 and ranks[0] < ranks[1]:
        evenly = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
        if tuple(evenly) == ranks:
            return evenly
    return ranks


def _raise_mismatch(proposals: Sequence[Proposal], failure: Exception | None, *, call: str) -> None:
    """Raise the errors of all ranks, else the first difference; on a rank that failed, with its traceback."""
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
            # A part that is None on some ranks has no fields there: one line tells that, not one per field.
            shared = [name for name in differing if all(name in each for each in texts.values())]
            lines = [f"{name}: {_by_value(texts, name, ', ')}" for name in shared or differing]
            raise ValueError(
                f"{ranks_in_words(scope[0])} {_WAY_OUT[scope[1]]}:\n  "
                + "\n  ".join(lines[:_SHOWN_DIFFERENCES])
            )


def _by_value(texts: Mapping[int, Texts], name: str, separator: str) -> str:
    """Return the values of a name, each with the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, each in texts.items():
        ranks_of.setdefault(each.get(name, "none"), []).append(rank)
    return separator.join(f"{value} [{ranks_in_words(ranks)}]" for value, ranks in ranks_of.items())


def _arrange_all(summaries: Sequence[Summary]) -> Layouts:
    """Return the layout of every data-parallel group."""
    first = summaries[0]["topology"]
    labels = node_labels(
        first
        if isinstance(first, str | int)
        else [None if isinstance(each["topology"], str | int) else each["topology"] for each in summaries],
        hosts=[each["host"] for each in summaries],
    )
    distinct = {(tuple(ranks), kind) for each in summaries for ranks, kind in each["digests"]}
    layouts = {
        wanted: {ranks: arrange(ranks, labels) for ranks, kind in sorted(distinct) if kind == wanted}
        for wanted in ("shards", "replicas")
    }
    return Layouts(shards=layouts["shards"], replicas=layouts["replicas"])


def _warn_of_hosts(summaries: Sequence[Summary]) -> None:
    """Warn if the nodes that host names make are not those of torchrun."""
    if summaries[0]["topology"] != "auto":
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
    risk = "ranks of several nodes exchange as if they were on one, with more bits than between nodes"
    if count < said:
        risk = "ranks of one node exchange as if they were on several, and each keeps a whole replica"
    warnings.warn(
        f'sdp4bit: topology="auto" takes ranks with equal host names for one node: {count} on '
        f"{hosts[0]!r}{f' and {len(hosts) - 1} more' if len(hosts) > 1 else ''}. LOCAL_WORLD_SIZE says "
        f"{said}. If that is right, {risk}: pass topology={said}, or give every node a host name of its "
        f"own. If not, pass topology={count}",
        stacklevel=4,
    )
