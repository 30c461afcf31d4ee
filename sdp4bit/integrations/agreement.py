"""All ranks agree on what to set up, or all raise the same error, before anything is changed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sdp4bit.collectives.exchange_error import naming, ranks_in_words
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


@dataclass(frozen=True, kw_only=True)
class ShardedRows:
    """A parameter group as its peers must see it too."""

    name: str
    ranks: tuple[int, ...]
    row_numel: int
    dtypes: tuple[str, ...]
    skipped: bool = False
    parts: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Stretches of a row that are quantized apart from each other."""
    whole: str = ""
    """Why its weights cannot be quantized, if so."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What one rank is about to set up, in full: what an error message may have to show."""

    config: str
    topology: str | int | MeshRows
    groups: tuple[ShardedRows, ...]
    unmatched: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A proposal as a few hundred bytes, whatever the size of the model and of the job."""

    host: str
    settings: bytes
    """Digest of what must be equal on all ranks."""
    spec: str | int | MeshRows
    """The topology; of a mesh, the row that holds this rank."""
    groups: tuple[tuple[Sequence[int], bytes], ...]
    """Ranks of each data-parallel group of this rank, and a digest of its parameter groups in order."""
    unmatched: tuple[str, ...]
    failed: bool


def agree(
    groups: Sequence[ShardedRows],
    *,
    config: str,
    topology: TopologySpec,
    unmatched: Sequence[str] = (),
    error: str | None,
) -> dict[tuple[int, ...], NodeLayout]:
    """Return the node layout of every data-parallel group of the job; collective over the whole job.

    Steps: 1. all ranks gather a summary of each other's proposal;  2. only if these do not fit, the proposals
    themselves, to say what is wrong.

    Args:
        unmatched: patterns that match none of the groups on this rank; they must match on some rank.
        error: what is wrong on this rank; every rank then raises it.

    Raises:
        ValueError: the same on every rank: an error on some rank, settings or versions that differ, or a
            group whose ranks do not fill its nodes evenly.
    """
    # Before anything else: versions may not understand each other's proposals.
    versions = [""] * dist.get_world_size()
    with naming("agreement on versions"):
        dist.all_gather_object(versions, f"sdp4bit {VERSION}, torch {torch.__version__}")
    _raise_differences(
        "versions", list(map(str, versions)), verb="run", way_out="install the same on all nodes"
    )
    spec: str | int | MeshRows = ""
    try:
        spec = _sendable(topology)
    except ValueError as failure:
        error = error or str(failure)
    proposal = Proposal(
        config=config, topology=spec, groups=tuple(groups), unmatched=tuple(unmatched), error=error
    )
    summaries = _gather(_summary(proposal))
    if not _fit(summaries):
        proposals = _gather(proposal)
        _raise_errors(proposals)
        _raise_differences("configurations", [p.config for p in proposals])
        _raise_differences("topologies", [_kind(p.topology) for p in proposals])
        _raise_unlike_peers(proposals)
        _raise_unmatched(proposals)
    return _arrange_all(summaries)


def _gather(mine: Sent) -> list[Sent]:
    gathered = [mine] * dist.get_world_size()
    with naming("agreement on what to quantize"):
        dist.all_gather_object(gathered, mine)
    return gathered


def _summary(proposal: Proposal) -> Summary:
    by_ranks: dict[tuple[int, ...], list[ShardedRows]] = {}
    for rows in proposal.groups:
        by_ranks.setdefault(rows.ranks, []).append(rows)
    spec = proposal.topology
    if not isinstance(spec, str | int):
        spec = tuple(row for row in spec if dist.get_rank() in row) or spec  # all of it for an error message
    return Summary(
        host=host_name(),
        settings=_digest((proposal.config, _kind(proposal.topology))),
        spec=spec,
        groups=tuple((_compact(ranks), _digest(rows)) for ranks, rows in by_ranks.items()),
        unmatched=proposal.unmatched,
        failed=proposal.error is not None,
    )


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


def _fit(summaries: Sequence[Summary]) -> bool:
    """Whether nothing failed, settings are equal, peers list equal parameter groups, patterns match."""
    if any(summary.failed for summary in summaries) or len({s.settings for s in summaries}) != 1:
        return False
    if set.intersection(*(set(summary.unmatched) for summary in summaries)):
        return False
    listed = [dict(summary.groups) for summary in summaries]
    digests = {(ranks, digest) for summary in summaries for ranks, digest in summary.groups}
    return all(listed[rank].get(ranks) == digest for ranks, digest in digests for rank in ranks)


def _sendable(topology: TopologySpec) -> str | int | MeshRows:
    if isinstance(topology, DeviceMesh):
        return mesh_rows(topology)
    if isinstance(topology, str | int):
        return topology
    raise ValueError(
        f'topology={topology!r} is unknown: use "auto", ranks per node, or an (inter, intra) mesh'
    )


def _raise_errors(proposals: Sequence[Proposal]) -> None:
    failed: dict[str, list[int]] = {}
    for rank, proposal in enumerate(proposals):
        if proposal.error is not None:
            failed.setdefault(proposal.error, []).append(rank)
    if failed:
        lines = [f"{message} [{ranks_in_words(ranks)}]" for message, ranks in failed.items()]
        raise ValueError("sdp4bit.quantize_communication: " + "; ".join(lines))


def _raise_differences(
    what: str, values: Sequence[str], *, verb: str = "ask for", way_out: str = "pass the same to all"
) -> None:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    if len(ranks_of) > 1:
        table = "\n".join(f"  {ranks_in_words(ranks)}: {value}" for value, ranks in ranks_of.items())
        raise ValueError(f"the ranks {verb} different {what}; {way_out}:\n{table}")


def _raise_unlike_peers(proposals: Sequence[Proposal]) -> None:
    """Check that all members of a process group list the same parameter groups in the same order."""
    listed: list[dict[tuple[int, ...], list[ShardedRows]]] = []
    for proposal in proposals:
        listed.append({})
        for rows in proposal.groups:
            listed[-1].setdefault(rows.ranks, []).append(rows)
    for members in dict.fromkeys(ranks for groups in listed for ranks in groups):
        first, *others = members
        own = listed[first].get(members, [])
        for peer in others:
            other = listed[peer].get(members, [])
            if other != own:
                pair = next(
                    (pair for pair in zip(own, other, strict=False) if pair[0] != pair[1]),
                    (f"{len(own)} parameter groups", f"{len(other)}"),
                )
                raise ValueError(
                    f"ranks {first} and {peer} share a data-parallel group but not its parameter groups; "
                    "build the same model and skip the same modules on both. "
                    f"First difference: {pair[0]} and {pair[1]}"
                )


def _raise_unmatched(proposals: Sequence[Proposal]) -> None:
    """Check that every pattern matches on some rank; the stages of a pipeline have different modules."""
    nowhere = set.intersection(*(set(p.unmatched) for p in proposals))
    if nowhere:
        names = dict.fromkeys(rows.name for p in proposals for rows in p.groups)
        raise ValueError(f"skip={min(nowhere)!r} matches no FSDP module; there are {', '.join(names)}")


def _arrange_all(summaries: Sequence[Summary]) -> dict[tuple[int, ...], NodeLayout]:
    first = summaries[0].spec
    spec = first if isinstance(first, str | int) else [cast(MeshRows, s.spec) for s in summaries]
    labels = node_labels(spec, hosts=[summary.host for summary in summaries])
    members = {tuple(ranks) for ranks in {ranks for summary in summaries for ranks, _ in summary.groups}}
    return {ranks: arrange(ranks, labels) for ranks in sorted(members)}
