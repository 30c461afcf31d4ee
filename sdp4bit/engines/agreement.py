"""All ranks agree on what to set up, or all raise the same error, before anything is changed."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from sdp4bit.collectives.errors import comm_error_context, ranks_in_words
from sdp4bit.collectives.topology import (
    MeshRows,
    NodeLayout,
    TopologySpec,
    arrange,
    host_name,
    mesh_rows,
    node_labels,
)
from sdp4bit.config import VERSION

Sent = TypeVar("Sent")
_CALL = "quantize_communication"


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
    whole: str = ""
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


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What one rank is about to set up, in full: what an error message may have to show."""

    settings: tuple[tuple[str, object], ...]
    topology: str | int | MeshRows
    groups: tuple[ShardedRows, ...]
    unmatched: tuple[str, ...] = ()
    error: str | None = None
    is_type_error: bool = False


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A proposal as a few hundred bytes, whatever the size of the model and of the job."""

    host: str
    ranks_on_node: int | None
    """As torchrun says."""
    settings: bytes
    """Digest of what must be equal on all ranks."""
    spec: str | int | MeshRows
    """The topology; of a mesh, the row that holds this rank."""
    groups: tuple[tuple[Sequence[int], bytes], ...]
    """Ranks of each data-parallel group of this rank, and a digest of its parameter groups in order."""
    replicas: tuple[tuple[Sequence[int], bytes], ...]
    """The same of those that hold the same shards as this rank."""
    unmatched: tuple[str, ...]
    failed: bool
    checks_layouts: bool = False


def participants(process_group: object, *, call: str = _CALL) -> ProcessGroup | None:
    """Return the ranks that attach, as a process group; None for all of the job.

    Args:
        call: what they call, for errors.

    Raises:
        TypeError: not a process group.
        ValueError: this rank is not in it.
    """
    if process_group is None:
        return None
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} is not in process_group: only its ranks call {call}")
    if not isinstance(process_group, ProcessGroup):
        raise TypeError(
            f"process_group={process_group!r} must be a torch.distributed.ProcessGroup, as new_group and "
            "DeviceMesh.get_group return it, or None for all ranks of the job"
        )
    return None if process_group.size() == dist.get_world_size() else process_group


def agree(
    groups: Sequence[ShardedRows],
    *,
    settings: Mapping[str, object],
    topology: TopologySpec,
    unmatched: Sequence[str] = (),
    failure: Exception | None,
    check: Callable[[Layouts], None] | None = None,
    within: ProcessGroup | None = None,
    call: str = _CALL,
) -> Layouts:
    """Return the node layout of every data-parallel group; collective over the job, or over `within`.

    Steps: 1. all ranks gather a summary of each other's proposal;  2. only if these do not fit, the proposals
    themselves, to say what is wrong;  3. if some rank has to check the layouts, what it has found.

    Args:
        settings: by name, what must be equal on all ranks.
        unmatched: patterns that match none of the groups on this rank; they must match on some rank.
        failure: what is wrong on this rank; every rank then raises it.
        call: what the ranks have called, for errors.
        check: raises ValueError for layouts that this rank's groups cannot have; every rank then raises it.

    Raises:
        ValueError: the same on every rank: an error on some rank, settings or versions that differ, or a
            group whose ranks do not fill its nodes evenly.
        TypeError: likewise, if nothing is wrong on any rank but the types of arguments.
    """
    everyone = f"{call}, which all ranks call, also those without a model, unless process_group= is given"
    # Before anything else: versions may not understand each other's proposals.
    versions = _gather(
        f"sdp4bit {VERSION}, torch {torch.__version__}", within, what=f"versions in {everyone}"
    )
    _raise_differences("versions", versions, verb="run", way_out="install the same on all nodes")
    spec: str | int | MeshRows = ""
    try:
        spec = _sendable(topology)
        if within is not None:
            _check_members(groups, dist.get_process_group_ranks(within))
    except ValueError as caught:
        failure = failure or caught
    proposal = Proposal(
        settings=tuple(settings.items()),
        topology=spec,
        groups=tuple(groups) if failure is None else (),
        unmatched=tuple(unmatched),
        error=None if failure is None else _describe(failure),
        is_type_error=isinstance(failure, TypeError),
    )
    mine = replace(_summary(proposal), checks_layouts=check is not None)
    summaries = _gather(mine, within, what="what to quantize")
    if not _fit(summaries):
        proposals = _gather(proposal, within, what="what to quantize")
        _raise_errors(proposals, failure, call=call)
        _raise_settings(proposals)
        _raise_differences(
            "topologies", {rank: _kind(p.topology) for rank, p in proposals.items() if p.groups}
        )
        _raise_unlike_peers(proposals)
        _raise_unmatched(proposals)
    layouts = _arrange_all(summaries)
    if any(summary.checks_layouts for summary in summaries.values()):
        try:
            if check is not None:
                check(layouts)
        except ValueError as caught:
            failure = caught
        proposal = replace(proposal, error=None if failure is None else _describe(failure))
        _raise_errors(_gather(proposal, within, what="layouts"), failure, call=call)
    _warn_of_hosts(summaries)
    return layouts


def _gather(mine: Sent, within: ProcessGroup | None, *, what: str) -> dict[int, Sent]:
    """Return what each rank passes."""
    ranks = dist.get_process_group_ranks(within or dist.group.WORLD)
    gathered = [mine] * len(ranks)
    with comm_error_context(f"agreement on {what}", group=within):
        dist.all_gather_object(gathered, mine, group=within)
    return dict(zip(ranks, gathered, strict=True))


def _describe(failure: Exception) -> str:
    """Return what the ranks tell each other of a failure on one of them."""
    known = isinstance(failure, ValueError | TypeError)
    return str(failure) if known else f"{type(failure).__name__}: {failure}"


def _check_members(groups: Sequence[ShardedRows], members: Sequence[int]) -> None:
    for rows in groups:
        outside = sorted(set(rows.ranks).difference(members))
        if outside:
            raise ValueError(
                f"{rows.name} is sharded over {len(rows.ranks)} ranks, of which {ranks_in_words(outside)} "
                f"are not in process_group ({ranks_in_words(members)}): pass one with all ranks of the model"
            )


def _summary(proposal: Proposal) -> Summary:
    spec = proposal.topology
    if not isinstance(spec, str | int):
        spec = tuple(row for row in spec if dist.get_rank() in row) or spec  # all of it for an error message
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Summary(
        host=host_name(),
        ranks_on_node=int(said) if said.isdecimal() else None,
        settings=_digest(proposal.settings),
        spec=spec,
        groups=_digests([rows for rows in proposal.groups if not rows.are_replicas]),
        replicas=_digests([rows for rows in proposal.groups if rows.are_replicas]),
        unmatched=proposal.unmatched,
        failed=proposal.error is not None,
    )


def _digests(groups: Sequence[ShardedRows]) -> tuple[tuple[Sequence[int], bytes], ...]:
    by_ranks: dict[tuple[int, ...], list[ShardedRows]] = {}
    for rows in groups:
        by_ranks.setdefault(rows.ranks, []).append(rows)
    return tuple((_compact(ranks), _digest(rows)) for ranks, rows in by_ranks.items())


def _kind(spec: str | int | MeshRows) -> str:
    # Under tensor parallelism each data-parallel group has a mesh of its own.
    return repr(spec) if isinstance(spec, str | int) else "a mesh"


def _digest(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


def _compact(ranks: tuple[int, ...]) -> Sequence[int]:
    """Return the same ranks as a range, a few bytes, if they are evenly spaced, as they are on a mesh."""
    if len(ranks) > 1 and ranks[0] < ranks[1]:
        evenly = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
        if tuple(evenly) == ranks:
            return evenly
    return ranks


def _fit(summaries: Mapping[int, Summary]) -> bool:
    """Whether nothing failed, settings are equal, peers list equal parameter groups, patterns match."""
    everyone = list(summaries.values())
    if any(summary.failed for summary in everyone) or len({s.settings for s in everyone}) != 1:
        return False
    if len({_kind(summary.spec) for summary in everyone if summary.groups}) > 1:
        return False
    if set.intersection(*(set(summary.unmatched) for summary in everyone)):
        return False
    shards = {rank: summary.groups for rank, summary in summaries.items()}
    replicas = {rank: summary.replicas for rank, summary in summaries.items()}
    return _peers_fit(shards) and _peers_fit(replicas)


def _peers_fit(listed: Mapping[int, Sequence[tuple[Sequence[int], bytes]]]) -> bool:
    """Whether all members of every group list the same of it."""
    known = {rank: dict(groups) for rank, groups in listed.items()}
    digests = {group for groups in listed.values() for group in groups}
    return all(known[rank].get(ranks) == digest for ranks, digest in digests for rank in ranks)


def _sendable(topology: TopologySpec) -> str | int | MeshRows:
    if isinstance(topology, DeviceMesh):
        return mesh_rows(topology)
    if isinstance(topology, str | int):
        return topology
    raise ValueError(
        f'topology={topology!r} is unknown: use "auto", ranks per node, or an (inter, intra) mesh'
    )


def _raise_errors(proposals: Mapping[int, Proposal], failure: Exception | None, *, call: str) -> None:
    """Raise what is wrong on some ranks; on these, with the traceback of where it was found."""
    failed: dict[str, list[int]] = {}
    for rank, proposal in proposals.items():
        if proposal.error is not None:
            failed.setdefault(proposal.error, []).append(rank)
    if failed:
        lines = [f"{message} [{ranks_in_words(ranks)}]" for message, ranks in failed.items()]
        kind = TypeError if all(p.is_type_error for p in proposals.values() if p.error) else ValueError
        refusal = kind(f"sdp4bit.{call}: " + "; ".join(lines))
        raise refusal.with_traceback(failure.__traceback__ if failure else None)


def _raise_settings(proposals: Mapping[int, Proposal]) -> None:
    """Check that settings are equal; the error names the fields that are not."""
    first, *_ = proposals.values()
    for place, (name, _) in enumerate(first.settings):
        differing = _differing(name, {rank: p.settings[place][1] for rank, p in proposals.items()})
        if differing:
            lines = "\n".join(f"  {field}: {_by_value(values)}" for field, values in differing.items())
            raise ValueError(f"the ranks ask for different configurations; pass the same to all:\n{lines}")


def _differing(name: str, values: Mapping[int, object]) -> dict[str, dict[int, str]]:
    """Return what each rank has in each of the fields that are not equal on all ranks."""
    first, *_ = values.values()
    if is_dataclass(first) and len({type(value) for value in values.values()}) == 1:
        found: dict[str, dict[int, str]] = {}
        for field in fields(first):
            parts = {rank: getattr(value, field.name) for rank, value in values.items()}
            found |= _differing(f"{name}.{field.name}", parts)
        return found
    shown = {rank: _short(value) for rank, value in values.items()}
    return {name: shown} if len(set(shown.values())) > 1 else {}


def _short(value: object) -> str:
    return f"{type(value).__name__}(...)" if is_dataclass(value) else repr(value)


def _by_value(values: Mapping[int, str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return ", ".join(f"{value} [{ranks_in_words(ranks)}]" for value, ranks in ranks_of.items())


def _raise_differences(
    what: str, values: Mapping[int, str], *, verb: str = "ask for", way_out: str = "pass the same to all"
) -> None:
    if len(set(values.values())) > 1:
        raise ValueError(f"the ranks {verb} different {what}; {way_out}: {_by_value(values)}")


def _raise_unlike_peers(proposals: Mapping[int, Proposal]) -> None:
    """Check that all members of a process group list the same parameter groups in the same order."""
    listed: dict[int, dict[tuple[tuple[int, ...], bool], list[ShardedRows]]] = {}
    for rank, proposal in proposals.items():
        own_groups = listed.setdefault(rank, {})
        for rows in proposal.groups:
            own_groups.setdefault((rows.ranks, rows.are_replicas), []).append(rows)
    for key in dict.fromkeys(key for groups in listed.values() for key in groups):
        (first, *others), _ = key
        own = listed[first].get(key, [])
        for peer in others:
            other = listed[peer].get(key, [])
            if other != own:
                raise ValueError(
                    f"ranks {first} and {peer} share a data-parallel group but not its parameter groups; "
                    "build the same model and skip the same modules on both. First difference: "
                    + _first_difference({first: own, peer: other})
                )


def _first_difference(listed: Mapping[int, Sequence[ShardedRows]]) -> str:
    """Return which parameter group differs between two ranks, and in which fields."""
    for number, pair in enumerate(zip(*listed.values(), strict=False), start=1):
        rows = dict(zip(listed, pair, strict=True))
        differing = _differing(f"group {number}", rows)
        if differing:
            names = dict.fromkeys(each.name for each in pair)
            fields = (f"{name.partition('.')[2]} {_by_value(values)}" for name, values in differing.items())
            return f"group {number} ({' or '.join(names)}): {'; '.join(fields)}"
    return _by_value({rank: f"{len(groups)} groups" for rank, groups in listed.items()})


def _raise_unmatched(proposals: Mapping[int, Proposal]) -> None:
    """Check that every pattern matches on some rank; the stages of a pipeline have different modules."""
    nowhere = set.intersection(*(set(p.unmatched) for p in proposals.values()))
    if nowhere:
        names = dict.fromkeys(rows.name for p in proposals.values() for rows in p.groups)
        raise ValueError(f"skip={min(nowhere)!r} matches no FSDP module; there are {', '.join(names)}")


def _arrange_all(summaries: Mapping[int, Summary]) -> Layouts:
    """Return the layout of every data-parallel group; the topology of ranks without one is ignored."""
    spec = _common_spec(summaries)
    world = range(dist.get_world_size())
    meshes = [_mesh_of(rank, summaries) for rank in world]
    labels = node_labels(
        meshes if spec is None else spec,
        hosts=[summaries[rank].host if rank in summaries else "" for rank in world],
    )
    shards = {tuple(ranks) for ranks in {r for summary in summaries.values() for r, _ in summary.groups}}
    replicas = {tuple(ranks) for ranks in {r for summary in summaries.values() for r, _ in summary.replicas}}
    return Layouts(
        shards={ranks: arrange(ranks, labels) for ranks in sorted(shards)},
        replicas={ranks: arrange(ranks, labels) for ranks in sorted(replicas)},
    )


def _common_spec(summaries: Mapping[int, Summary]) -> str | int | None:
    """Return the topology, None if it is meshes."""
    first = next((s.spec for s in summaries.values() if s.groups), "auto")
    return first if isinstance(first, str | int) else None


def _mesh_of(rank: int, summaries: Mapping[int, Summary]) -> MeshRows | None:
    summary = summaries.get(rank)
    if summary is None or isinstance(summary.spec, str | int):
        return None
    is_in_it = any(rank in row for row in summary.spec)
    return summary.spec if summary.groups or is_in_it else None


def _warn_of_hosts(summaries: Mapping[int, Summary]) -> None:
    """Compare the nodes that host names make with what torchrun says, and tell if they differ."""
    if _common_spec(summaries) != "auto":
        return
    on_host: dict[str, list[int]] = {}
    for rank, summary in summaries.items():
        on_host.setdefault(summary.host, []).append(rank)
    everyone = len(summaries) == dist.get_world_size()
    differing: dict[tuple[int, int], list[str]] = {}
    for host, ranks in on_host.items():
        said = summaries[ranks[0]].ranks_on_node
        # Of some ranks of a job, a node may hold fewer than of all.
        if said is not None and (len(ranks) > said or (everyone and len(ranks) < said)):
            differing.setdefault((len(ranks), said), []).append(host)
    if differing:
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
