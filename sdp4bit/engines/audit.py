"""Replica audit: ranks that hold copies of the same weights compare what they hold, by checksums."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sdp4bit.collectives.errors import ranks_in_words
from sdp4bit.collectives.exchange import all_gather_dense
from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.config import AuditConfig
from sdp4bit.quantization.checksum import checksum
from sdp4bit.traffic import TrafficCounter


class ReplicaMismatchError(RuntimeError):
    """Ranks that should hold the same weights bit for bit do not; the message names groups and ranks."""


@dataclass(frozen=True, kw_only=True)
class ReplicaCopy:
    """What this rank holds of one group's weights, and which ranks must hold the same."""

    name: str
    rows: Tensor
    layout: NodeLayout
    process_group: ProcessGroup
    """The ranks of the layout."""
    is_full: bool
    """Every rank holds the same; otherwise only ranks with the same local rank do."""
    traffic: TrafficCounter
    can_be_refreshed: bool = True
    """From main weights; these themselves are not."""

    def peers(self) -> list[list[int]]:
        """Return the sets of group ranks whose copies must be equal."""
        ranks = list(range(self.layout.size))
        if self.is_full:
            return [ranks]
        return [ranks[local :: self.layout.ranks_per_node] for local in range(self.layout.ranks_per_node)]


@torch.no_grad()
def audit_replicas(copies: Sequence[ReplicaCopy], config: AuditConfig) -> list[str]:
    """Return the names of the groups whose copies differ and are to be refreshed; none if all are equal.

    Called on all ranks of the groups, with the same groups in the same order, while no refresh is under way.
    Steps, for each set of ranks that groups are spread over: 1. a checksum per group, on the device;  2. one
    all-gather of them;  3. on the host, the same on every rank, the vote.

    Raises:
        ReplicaMismatchError: copies differ and the configuration asks for an error, or they can't be
            refreshed; on all ranks of the set.
    """
    layouts = {copy.layout.ranks: copy.layout for copy in copies}
    wrong: dict[str, str] = {}
    are_replicas = True
    for ranks in sorted(layouts):
        sharing = [copy for copy in copies if copy.layout.ranks == ranks]
        for copy, sums in zip(sharing, _gather_checksums(sharing), strict=True):
            votes = [_vote([(ranks[peer], sums[peer]) for peer in peers]) for peers in copy.peers()]
            if any(votes):
                wrong[copy.name] = f"group {copy.name}: {'; '.join(filter(None, votes))}"
                are_replicas = are_replicas and copy.can_be_refreshed
    if not wrong:
        return []
    what = "sdp4bit: copies of the same weights differ between ranks. " + ". ".join(wrong.values())
    if config.on_mismatch == "error" or not are_replicas:
        way_out = "Resume from a checkpoint, or copy the weights and optimizer states of one replica to all"
        if are_replicas:
            way_out = (
                "Resume from a checkpoint, call comm.resync() on all ranks to take over the main weights, or "
                'set AuditConfig(on_mismatch="resync")'
            )
        raise ReplicaMismatchError(
            f"{what}. A bit has flipped in memory or on the way, or weights were edited on some ranks only. "
            f"{way_out}"
        )
    warnings.warn(f"{what}. These replicas are refreshed in full precision", stacklevel=2)
    return list(wrong)


def _gather_checksums(copies: Sequence[ReplicaCopy]) -> list[list[int]]:
    """Return, for each group, every rank's checksum; all groups are spread over the same ranks."""
    mine = torch.stack([checksum(copy.rows) for copy in copies])
    first = copies[0]
    gathered = mine.new_empty(first.layout.size * len(copies))
    all_gather_dense(gathered, mine, first.process_group, what="audit of replicas")
    first.traffic.count_ring(mine.nbytes)
    by_rank = gathered.view(first.layout.size, len(copies))
    sums: list[list[int]] = by_rank.t().tolist()
    return sums


def _vote(sums: Sequence[tuple[int, int]]) -> str:
    """Return who differs from the majority, or that there is none; empty if all pairs (rank, sum) agree."""
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
    return f"the replicas of {sides} differ, and no majority says which is right (checksums {shown})"
