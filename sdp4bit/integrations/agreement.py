"""All ranks agree on what to set up, or all raise the same error, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sdp4bit.collectives.topology import (
    MeshRows,
    NodeLayout,
    TopologySpec,
    arrange,
    host_name,
    mesh_rows,
    node_labels,
)


@dataclass(frozen=True, kw_only=True)
class ShardedRows:
    """A parameter group as its peers must see it too."""

    name: str
    ranks: tuple[int, ...]
    row_numel: int
    dtypes: tuple[str, ...]
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What one rank is about to set up."""

    config: str
    topology: str | int | MeshRows
    groups: tuple[ShardedRows, ...]
    unmatched: tuple[str, ...] = ()
    error: str | None = None
    host: str = ""


def agree(
    groups: Sequence[ShardedRows],
    *,
    config: str,
    topology: TopologySpec,
    unmatched: Sequence[str] = (),
    error: str | None,
) -> dict[tuple[int, ...], NodeLayout]:
    """Return the node layout of every data-parallel group of the job; collective over the whole job.

    Args:
        unmatched: patterns that match none of the groups on this rank; they must match on some rank.
        error: what is wrong on this rank; every rank then raises it.

    Raises:
        ValueError: the same on every rank: an error on some rank, settings that differ, or a group whose
            ranks do not fill its nodes evenly.
    """
    spec: str | int | MeshRows = ""
    try:
        spec = _sendable(topology)
    except ValueError as failure:
        error = error or str(failure)
    mine = Proposal(
        config=config,
        topology=spec,
        groups=tuple(groups),
        unmatched=tuple(unmatched),
        error=error,
        host=host_name(),
    )
    proposals: list[Proposal] = [mine] * dist.get_world_size()
    dist.all_gather_object(proposals, mine)
    _raise_errors(proposals)
    _raise_differences("configurations", [p.config for p in proposals])
    # Under tensor parallelism each data-parallel group has a mesh of its own.
    specs = [p.topology for p in proposals]
    _raise_differences("topologies", [repr(s) if isinstance(s, str | int) else "a mesh" for s in specs])
    _raise_unlike_peers(proposals)
    _raise_unmatched(proposals)
    return _arrange_all(proposals)


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
        lines = [f"{message} [{name_ranks(ranks)}]" for message, ranks in failed.items()]
        raise ValueError("sdp4bit.quantize_communication: " + "; ".join(lines))


def _raise_differences(what: str, values: Sequence[str]) -> None:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    if len(ranks_of) > 1:
        table = "\n".join(f"  {name_ranks(ranks)}: {value}" for value, ranks in ranks_of.items())
        raise ValueError(f"the ranks ask for different {what}; pass the same to all:\n{table}")


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


def _arrange_all(proposals: Sequence[Proposal]) -> dict[tuple[int, ...], NodeLayout]:
    first = proposals[0].topology
    spec = first if isinstance(first, str | int) else [cast(MeshRows, p.topology) for p in proposals]
    labels = node_labels(spec, hosts=[p.host for p in proposals])
    members = {rows.ranks for proposal in proposals for rows in proposal.groups}
    return {ranks: arrange(ranks, labels) for ranks in sorted(members)}


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a text that names these ranks, the first eight of them."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
