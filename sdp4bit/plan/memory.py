"""Memory of one rank in a step, by use, without activations."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sdp4bit.collectives.pieces import is_long_enough, piece_places
from sdp4bit.collectives.pipeline import SLICES_UNDER_WAY, slice_lengths
from sdp4bit.config import GradientConfig, SDP4BitConfig
from sdp4bit.plan.model import ShardedGroup
from sdp4bit.plan.traffic import (
    GATHERED_BYTES,
    ONE_RANK,
    REDUCED_BYTES,
    GroupTraffic,
    RankGrid,
    gathered_layout,
    is_full,
)
from sdp4bit.quantization.layout import FULL_PRECISION, message_layout
from sdp4bit.quantization.lossless_layout import largest_message

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
    if weights is not None and ranks > 1 and not is_flat and weights.saves_bytes(nodes=grid.nodes):
        held = ranks if is_full(weights, grid=grid) else grid.nodes
        used["weight replica, bf16"] = GATHERED_BYTES * held * sum(rows)
    messages = _message_buffers(largest, grid=grid, replicas=replicas, config=config, is_flat=is_flat)
    if messages:
        used["message buffers"] = messages
    if communicator_bytes and ranks * replicas.size > 1:
        count = communicators(grid=grid, replicas=replicas, config=config, is_flat=is_flat)
        used["communicators"] = round(count * communicator_bytes)
    return used


def communicators(
    *, grid: RankGrid, config: SDP4BitConfig, replicas: RankGrid = ONE_RANK, is_flat: bool = False
) -> int:
    """Return how many communicators a data-parallel rank uses: the engine's, and one per level and purpose.

    Weights and gradients have their own, as one communicator carries out its collectives one by one.
    """
    weights = config.weights
    saves = weights is not None and (is_flat or weights.saves_bytes(nodes=grid.nodes))
    quantizes = config.gradients is not None
    engines = 1 + (replicas.size > 1)
    return engines + _levels(grid) * (saves + quantizes) + _levels(replicas) * quantizes


def _levels(grid: RankGrid) -> int:
    return (grid.ranks_per_node > 1) + (grid.nodes > 1)


def _message_buffers(
    row: int, *, grid: RankGrid, replicas: RankGrid, config: SDP4BitConfig, is_flat: bool
) -> int:
    """Return the bytes of the buffers that the largest group needs; all groups share them."""
    total = 0
    gradients, weights = config.gradients, config.weights
    if gradients is not None and row >= gradients.min_numel:
        total += _reduction_buffers(row, grid=grid, config=gradients)
    if gradients is not None and is_long_enough(row, ranks=replicas.size, config=gradients):
        _, piece = piece_places(row, ranks=replicas.size)
        total += _reduction_buffers(piece, grid=replicas, config=gradients)
        total += _gather_buffers(piece, grid=replicas, config=gradients)
    saves = weights is not None and (is_flat or weights.saves_bytes(nodes=grid.nodes))
    if grid.size > 1 and saves and weights is not None and weights.bits is not None:
        # The first message of lossless weights has room for all their bits.
        nbytes = largest_message(row)
        if not weights.is_lossless:
            nbytes = message_layout(numel=row, bits=weights.bits, group_size=weights.group_size).nbytes
        rows = grid.nodes
        if (is_flat or is_full(weights, grid=grid)) and grid.ranks_per_node > 1:
            rows += grid.size
        total += (1 + rows) * nbytes
    return total


def _reduction_buffers(row: int, *, grid: RankGrid, config: GradientConfig) -> int:
    """Return the bytes that are sent and received by a reduction of rows of this length."""
    hops = []
    if grid.ranks_per_node > 1:
        hops.append((config.intra_bits, config.intra_group_size, grid.nodes, grid.ranks_per_node))
    if grid.nodes > 1:
        hops.append((config.inter_bits, config.inter_group_size, 1, grid.nodes))
    total = 0
    lengths = slice_lengths(row, config=config, nodes=grid.nodes, ranks_per_node=grid.ranks_per_node)
    # The first ones are the longest, and those after them use their buffers.
    for numel in lengths[:SLICES_UNDER_WAY]:
        for bits, group_size, parts, size in hops:
            layout = message_layout(
                numel=numel, bits=bits or FULL_PRECISION, group_size=group_size, parts=parts
            )
            total += 2 * size * layout.nbytes
    return total


def _gather_buffers(piece: int, *, grid: RankGrid, config: GradientConfig) -> int:
    """Return the bytes of the messages that an all-reduce gathers after its reduction."""
    if grid.size == 1:
        return 0
    levels = (grid.nodes, grid.nodes > 1), (grid.size, grid.ranks_per_node > 1)
    messages = 1 + sum(count for count, sends in levels if sends)
    return messages * gathered_layout(piece, grid=grid, config=config).nbytes


def identifier(use: str) -> str:
    """Return the name of a use as a key of JSON: "Adam, fp32" is adam_fp32."""
    return re.sub(r"\W+", "_", use.lower())
