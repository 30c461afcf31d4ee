"""Chunks of a row, whose transfers inside a node and between nodes overlap. Without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sdp4bit.config import GradientConfig
from sdp4bit.quantization.formats import BLOCK, format_of
from sdp4bit.quantization.layout import bytes_per_value, round_up
from sdp4bit.traffic import Grid

INTRA_RATE, INTER_RATE = 300e9, 25e9
"""Assumed bytes per second and rank inside a node (NVLink of an H100) and between nodes (200 Gbit/s per GPU).
The number of chunks depends on their square root, so a factor of four in a rate changes it by at most two."""
CHUNK_SECONDS, PEER_SECONDS = 50e-6, 2e-6
"""Assumed cost of another chunk on two nodes, the latency of two all-to-alls (10 to 20 us each) and three
kernels, and of each further message to another node."""
MOST_CHUNKS = 16
CHUNKS_UNDER_WAY = 2
"""Chunks of a row that use messages of one level at the same time. A chunk fills its messages while its
predecessor's are in flight; those before have been read."""


def pipeline_chunks(numel: int, *, config: GradientConfig, grid: Grid) -> int:
    """Return the number of chunks of a row, the same on every rank; 1 if there is only one level.

    With c chunks, 1 / c of the shorter level's time T is not hidden, and chunks cost t each, which grows with
    the number of messages. The sum is smallest for c = sqrt(T / t), rounded down.
    """
    if config.pipeline_chunks is not None:
        return config.pipeline_chunks
    nodes, ranks_per_node = grid.nodes, grid.ranks_per_node
    if nodes == 1 or ranks_per_node == 1:
        return 1
    intra = bytes_per_value(format_of(config.intra_bits), group_size=config.intra_group_size)
    inter = bytes_per_value(format_of(config.inter_bits), group_size=config.inter_group_size)
    intra, inter = numel * nodes * intra * (ranks_per_node - 1), numel * inter * (nodes - 1)
    shorter = min(intra / INTRA_RATE, inter / INTER_RATE)
    hops = [size - 1 for size in grid.levels.values() if size > 1]
    cost = CHUNK_SECONDS * len(hops) / 2 + PEER_SECONDS * (sum(hops[1:]) - 1)
    return min(MOST_CHUNKS, max(1, int(math.sqrt(shorter / cost))))


def cut_into_chunks(
    lengths: Sequence[int], *, config: GradientConfig, grid: Grid
) -> list[list[tuple[int, slice]]]:
    """Cut the sections of a row into chunks without dividing a quantization group.

    Args:
        lengths: lengths of the sections, all positive.

    Returns:
        For each chunk its sections by number and the range in each.
    """
    total = sum(lengths)
    count = pipeline_chunks(total, config=config, grid=grid)
    unit = group_unit(config, grid=grid)
    length = round_up(-(-total // count), unit)
    chunks: list[list[tuple[int, slice]]] = []
    left = 0
    for section, numel in enumerate(lengths):
        start = 0
        while start < numel:
            if left <= 0:
                chunks.append([])
                left = length
            # Complete groups; the chunk becomes longer than `length` by less than one.
            end = min(numel, start + round_up(left, unit))
            chunks[-1].append((section, slice(start, end)))
            left -= end - start
            start = end
    return chunks


def group_unit(config: GradientConfig, *, grid: Grid) -> int:
    """Return the least common multiple of the group sizes of both levels."""
    intra, inter = grid.ranks_per_node > 1, grid.nodes > 1
    return math.lcm(BLOCK, *[config.intra_group_size] * intra, *[config.inter_group_size] * inter)
