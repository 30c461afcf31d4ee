"""All ranks agree on what to set up, or all raise the same error, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from sdp4bit.collectives.topology import NodeLayout, TopologySpec, arrange, host_name, node_labels


@dataclass(frozen=True, kw_only=True)
class ShardedRows:
    """A parameter group as its peers must see it too."""

    name: str
    ranks: tuple[int, ...]
    row_numel: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What one rank is about to set up."""

    config: str
    topology: str
    groups: tuple[ShardedRows, ...]
    error: str | None = None
    host: str = ""


def agree(
    groups: Sequence[ShardedRows], *, config: str, topology: TopologySpec, error: str | None
) -> dict[tuple[int, ...], NodeLayout]:
    """Return the node layout of every data-parallel group of the job; collective over the whole job.

    Args:
        error: what is wrong on this rank; every rank then raises it.

    Raises:
        ValueError: the same on every rank: an error on some rank, settings that differ, or a group whose
            ranks do not fill its nodes evenly.
    """
    name = topology if isinstance(topology, str | int) else f"mesh {topology.mesh.tolist()}"
    mine = Proposal(config=config, topology=repr(name), groups=tuple(groups), error=error, host=host_name())
    proposals: list[Proposal] = [mine] * dist.get_world_size()
    dist.all_gather_object(proposals, mine)
    _raise_errors(proposals)
    _raise_differences("configurations", [p.config for p in proposals])
    if isinstance(topology, str | int):
        _raise_differences("topologies", [p.topology for p in proposals])
    _raise_unlike_peers(proposals)
    return _arrange_all(topology, proposals)


def _raise_errors(proposals: Sequence[Proposal]) -> None:
    failed: dict[str, list[int]] = {}
    for rank, proposal in enumerate(proposals):
        if proposal.error is not None:
            failed.setdefault(proposal.error, []).append(rank)
    if failed:
        lines = [f"{message} [{_ranks(ranks)}]" for message, ranks in failed.items()]
        raise ValueError("sdp4bit.quantize_communication: " + "; ".join(lines))


def _raise_differences(what: str, values: Sequence[str]) -> None:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    if len(ranks_of) > 1:
        table = "\n".join(f"  {_ranks(ranks)}: {value}" for value, ranks in ranks_of.items())
        raise ValueError(f"the ranks ask for different {what}; pass the same to all:\n{table}")


def _raise_unlike_peers(proposals: Sequence[Proposal]) -> None:
    """Check that all members of a process group list the same parameter groups in the same order."""
    for rank, proposal in enumerate(proposals):
        for members in dict.fromkeys(rows.ranks for rows in proposal.groups):
            own = [rows for rows in proposal.groups if rows.ranks == members]
            for peer in members:
                other = [rows for rows in proposals[peer].groups if rows.ranks == members]
                if other != own:
                    first = next(
                        (pair for pair in zip(own, other, strict=False) if pair[0] != pair[1]),
                        (len(own), len(other)),
                    )
                    raise ValueError(
                        f"ranks {rank} and {peer} share a data-parallel group but not its parameter groups; "
                        f"build the same model on both. First difference: {first[0]} and {first[1]}"
                    )


def _arrange_all(topology: TopologySpec, proposals: Sequence[Proposal]) -> dict[tuple[int, ...], NodeLayout]:
    labels = node_labels(topology, hosts=[p.host for p in proposals])
    members = {rows.ranks for proposal in proposals for rows in proposal.groups}
    return {ranks: arrange(ranks, labels) for ranks in sorted(members)}


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
