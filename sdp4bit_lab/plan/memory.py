"""Memory of one rank in a step, by use, without activations."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sdp4bit.collectives.pieces import is_long_enough
from sdp4bit.collectives.pipeline import SLICES_UNDER_WAY, slice_places
from sdp4bit.collectives.sections import Section
from sdp4bit.config import GradientConfig, SDP4BitConfig
from sdp4bit_lab.plan.model import ShardedGroup
from sdp4bit_lab.plan.traffic import (
    GATHERED_BYTES,
    ONE_RANK,
    REDUCED_BYTES,
    GroupTraffic,
    RankGrid,
    applied_config,
    gathered_layout,
    is_full,
    pieces_of,
)

MAIN_BYTES = 4
ADAM_BYTES = 8
"""Two fp32 averages."""
COMMUNICATOR_BYTES = 600e6
"""Of an NCCL communicator: 544 and 688 MB on A100s with NVLink, as reported in NCCL#964; not measured here.
An all-to-all can take more: NCCL#1685 reports 3.3 GB for the first one among 8 H100."""
GATHERED_AT_ONCE = 2
"""FSDP2 gathers the next group while one computes."""


def memory_per_rank(
    groups: Sequence[ShardedGroup],
    traffic: Sequence[GroupTraffic],
    *,
    grid: RankGrid,
    config: SDP4BitConfig,
    accumulation: int,
    replicas: RankGrid = ONE_RANK,
    communicator_bytes: float = 0,
) -> dict[str, int]:
    """Return bytes by use: main weights, Adam, gradients, gathered weights, replica, buffers, communicators.

    FSDP2 keeps shards of gradients (whole ones while micro batches accumulate) and gathers few groups at a
    time. A flat buffer keeps all weights and gradients on every rank, and its weights are the replica.
    """
    config = applied_config(config, grid=grid, replicas=replicas)
    ranks = grid.size
    rows = [group.row_numel for group in traffic]
    is_flat = any(group.is_flat for group in groups)
    kept = [row for row, group in zip(rows, groups, strict=True) if not group.freed_after_forward]
    freed = sorted(row for row, group in zip(rows, groups, strict=True) if group.freed_after_forward)
    gathered = ranks * (sum(kept) + sum(freed[-GATHERED_AT_ONCE:]))
    largest = max(rows)
    whole_gradients = is_flat or accumulation > 1
    used = {
        "main weights, fp32": MAIN_BYTES * sum(rows),
        "Adam, fp32": ADAM_BYTES * sum(rows),
        "gradients, fp32": REDUCED_BYTES * sum(rows) * (ranks if whole_gradients else 1),
        "gathered weights, bf16": GATHERED_BYTES * gathered,
    }
    if not is_flat:
        used["rows being reduced, fp32"] = REDUCED_BYTES * ranks * largest
    weights = config.weights
    if weights is not None and ranks > 1 and not is_flat:
        held = ranks if is_full(weights, grid=grid) else grid.nodes
        used["weight replica, bf16"] = GATHERED_BYTES * held * sum(rows)
    longest = max(traffic, key=lambda group: group.row_numel)
    messages = _message_buffers(longest, grid=grid, replicas=replicas, config=config, is_flat=is_flat)
    if messages:
        used["message buffers"] = messages
    if communicator_bytes and ranks * replicas.size > 1:
        count = communicators(grid=grid, replicas=replicas, config=config)
        used["communicators"] = round(count * communicator_bytes)
    return used


def communicators(*, grid: RankGrid, config: SDP4BitConfig, replicas: RankGrid = ONE_RANK) -> int:
    """Return how many communicators a data-parallel rank uses: the engine's, and one per level and purpose.

    Weights and gradients have their own, as one communicator carries out its collectives one by one.
    """
    config = applied_config(config, grid=grid, replicas=replicas)
    weights, gradients = config.weights is not None, config.gradients is not None
    engines = 1 + (replicas.size > 1)
    return engines + _levels(grid) * (weights + gradients) + _levels(replicas) * gradients


def _levels(grid: RankGrid) -> int:
    return (grid.ranks_per_node > 1) + (grid.nodes > 1)


def _message_buffers(
    group: GroupTraffic, *, grid: RankGrid, replicas: RankGrid, config: SDP4BitConfig, is_flat: bool
) -> int:
    """Return the bytes of the buffers that the largest group needs; all groups share them."""
    total, row = 0, group.row_numel
    gradients, weights = config.gradients, config.weights
    if gradients is not None and row >= gradients.min_numel:
        total += _reduction_buffers(group.cut.reduced, grid=grid, config=gradients)
    if gradients is not None and is_long_enough(row, ranks=replicas.size, config=gradients):
        pieces = pieces_of(group.cut.summed, ranks=replicas.size)
        total += _reduction_buffers(pieces, grid=replicas, config=gradients)
        total += _gather_buffers(pieces, grid=replicas, config=gradients)
    if grid.size > 1 and weights is not None and weights.bits is not None:
        nbytes = sum(
            section.layout(section.numel, bits=weights.bits, group_size=weights.group_size).nbytes
            for section in group.cut.refreshed
        )
        rows = grid.nodes
        if (is_flat or is_full(weights, grid=grid)) and grid.ranks_per_node > 1:
            rows += grid.size
        total += (1 + rows) * nbytes
    return total


def _reduction_buffers(sections: Sequence[Section], *, grid: RankGrid, config: GradientConfig) -> int:
    """Return the bytes that are sent and received by a reduction of rows of these sections."""
    hops = []
    if grid.ranks_per_node > 1:
        hops.append((config.intra_bits, config.intra_group_size, grid.nodes, grid.ranks_per_node))
    if grid.nodes > 1:
        hops.append((config.inter_bits, config.inter_group_size, 1, grid.nodes))
    lengths = [section.numel for section in sections]
    slices = slice_places(lengths, config=config, nodes=grid.nodes, ranks_per_node=grid.ranks_per_node)
    total = 0
    for bits, group_size, parts, size in hops:
        messages = [
            sum(
                sections[i].layout(p.stop - p.start, bits=bits, group_size=group_size, parts=parts).nbytes
                for i, p in chosen
            )
            for chosen in slices
        ]
        # Slices take turns with the buffers, which are as long as the longest message.
        turns = [messages[turn::SLICES_UNDER_WAY] for turn in range(SLICES_UNDER_WAY)]
        total += sum(2 * size * max(turn) for turn in turns if turn)
    return total


def _gather_buffers(pieces: Sequence[Section], *, grid: RankGrid, config: GradientConfig) -> int:
    """Return the bytes of the messages that an all-reduce gathers after its reduction."""
    if grid.size == 1:
        return 0
    levels = (grid.nodes, grid.nodes > 1), (grid.size, grid.ranks_per_node > 1)
    messages = 1 + sum(count for count, sends in levels if sends)
    return messages * gathered_layout(pieces, grid=grid, config=config).nbytes


def identifier(use: str) -> str:
    """Return the name of a use as a key of JSON: "Adam, fp32" is adam_fp32."""
    return re.sub(r"\W+", "_", use.lower())
