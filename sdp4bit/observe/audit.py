"""Replica audit: ranks compare checksums of their copies of the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sdp4bit.collectives.errors import ranks_in_words
from sdp4bit.collectives.group import Group
from sdp4bit.collectives.topology import Nodes
from sdp4bit.collectives.transport import all_gather_dense
from sdp4bit.config import AuditConfig
from sdp4bit.quantization.ops import checksum
from sdp4bit.traffic import TrafficCounter
from sdp4bit.warn import warn_user


class ReplicaMismatchError(RuntimeError):
    """Copies of the same weights are not bit-identical; the message names groups and ranks."""


@dataclass(frozen=True, kw_only=True)
class ReplicaCopy:
    """This rank's copy of one group's weights, and the ranks with equal copies."""

    name: str
    rows: Tensor
    layout: Nodes
    process_group: ProcessGroup  # the ranks of the layout
    is_full: bool  # whether all ranks have equal copies, or only those with the same local rank
    traffic: TrafficCounter
    can_be_refreshed: bool = True  # False for main weights, from which replicas are refreshed

    def peers(self) -> list[list[int]]:
        """Return the sets of group ranks whose copies must be equal."""
        ranks = list(range(self.layout.size))
        if self.is_full:
            return [ranks]
        return [ranks[local :: self.layout.ranks_per_node] for local in range(self.layout.ranks_per_node)]


def replica_copy(group: Group) -> ReplicaCopy | None:
    """Return this rank's copy of a group's weights, after a refresh in flight; None if it holds none."""
    process_group = group.view.process_group
    if group.weights.replica is None or process_group is None:  # a single process has a single copy
        return None
    group.weights.replica.wait()
    if group.weights.replica.rows is None:
        return None
    return ReplicaCopy(
        name=group.view.name,
        rows=group.weights.replica.rows,
        layout=group.layout,
        process_group=process_group,
        is_full=group.weights.replica.holds_all_rows,
        traffic=group.weights.traffic,
    )


@torch.no_grad()
def audit_replicas(copies: Sequence[ReplicaCopy], config: AuditConfig) -> list[str]:
    """Return the names of the groups with differing copies, which the caller refreshes.

    Called on all ranks of the groups, with the same groups in the same order and no refresh in flight. For
    each layout the ranks all-gather one checksum per group and vote on the host, with the same result.

    Raises:
        ReplicaMismatchError: copies differ and the configuration asks for an error, or they can't be
            refreshed; on all ranks of the layout.
    """
    layouts = {copy.layout.ranks: copy.layout for copy in copies}
    wrong: dict[str, str] = {}
    first_ranks: set[int] = set()
    are_replicas = True
    for ranks in sorted(layouts):
        sharing = [copy for copy in copies if copy.layout.ranks == ranks]
        for copy, sums in zip(sharing, _gather_checksums(sharing), strict=True):
            votes = [_vote([(ranks[peer], sums[peer]) for peer in peers]) for peers in copy.peers()]
            if any(votes):
                wrong[copy.name] = f"group {copy.name}: {'; '.join(filter(None, votes))}"
                first_ranks.add(ranks[0])
                are_replicas = are_replicas and copy.can_be_refreshed
    if not wrong:
        return []
    what = "copies of the same weights differ between ranks. " + ". ".join(wrong.values())
    if config.on_mismatch == "error" or not are_replicas:
        way_out = "Resume from a checkpoint, or copy the weights and optimizer states of one replica to all"
        if are_replicas:
            way_out = (
                "Resume from a checkpoint, call comm.resync() on all ranks to copy the main weights, or set "
                'AuditConfig(on_mismatch="resync")'
            )
        raise ReplicaMismatchError(
            f"sdp4bit: {what}. A bit has flipped in memory or in transit, or weights were edited on some "
            f"ranks only. {way_out}"
        )
    if dist.get_rank() in first_ranks:
        warn_user(f"{what}. These replicas are refreshed in full precision")
    return list(wrong)


def _gather_checksums(copies: Sequence[ReplicaCopy]) -> list[list[int]]:
    """Return every rank's checksum for each of these groups of the same ranks."""
    mine = torch.stack([checksum(copy.rows) for copy in copies])
    first = copies[0]
    gathered = mine.new_empty(first.layout.size * len(copies))
    all_gather_dense(gathered, mine, first.process_group, what="audit of replicas")
    first.traffic.count_ring(mine.nbytes)
    by_rank = gathered.view(first.layout.size, len(copies))
    sums: list[list[int]] = by_rank.t().tolist()
    return sums


def _vote(sums: Sequence[tuple[int, int]]) -> str:
    """Describe the ranks that differ from the majority in pairs (rank, sum); "" if all agree."""
    ranks_of: dict[int, list[int]] = {}
    for rank, value in sums:
        ranks_of.setdefault(value, []).append(rank)
    if len(ranks_of) <= 1:
        return ""
    (right, majority), *others = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
    odd = [rank for _, ranks in others for rank in ranks]
    shown = ", ".join(f"{value & (1 << 64) - 1:016x}" for value in (right, *(v for v, _ in others[:3])))
    if 2 * len(majority) > len(sums):
        return (
            f"the replica of {ranks_in_words(sorted(odd))} differs from that of {ranks_in_words(majority)} "
            f"(checksums, the majority's first: {shown})"
        )
    sides = " and of ".join(ranks_in_words(ranks) for ranks in ranks_of.values())
    return f"the replicas of {sides} differ, without a majority (checksums {shown})"
