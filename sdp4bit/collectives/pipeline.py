"""Into how many slices a row is cut, so that its two levels overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sdp4bit.config import GradientConfig
from sdp4bit.quantization.layout import BLOCK, FULL_PRECISION, SCALE_BYTES, round_up

INTRA_RATE, INTER_RATE = 300e9, 25e9
"""Bytes per second that one rank is taken to send inside its node (NVLink of an H100) and to other nodes
(200 Gbit/s per GPU). The choice goes with the root of them: a network four times slower or faster moves it by
a factor of two at most, and so do GPUs of another generation."""
SLICE_SECONDS = 50e-6
"""What a further slice is taken to cost: two more all-to-alls before their first byte (10 to 20 us each) and
three more kernels."""
MOST_SLICES = 16
SLICES_UNDER_WAY = 2
"""Slices of a row that use messages of one level at once: a slice's are filled before the one before it is
waited for, and those of the one before that have been read."""


def pipeline_chunks(numel: int, *, config: GradientConfig, nodes: int, ranks_per_node: int) -> int:
    """Return into how many slices a row of so many values is to be cut; the same on every rank.

    With c slices the shorter level shows for a c-th of its time, and the slices cost c times SLICE_SECONDS:
    the sum is least where c is the root of their quotient. Rounded down, so a first cut saves at least as
    much as it costs. One level has nothing to overlap with.
    """
    if config.pipeline_chunks is not None:
        return config.pipeline_chunks
    if nodes == 1 or ranks_per_node == 1:
        return 1
    intra = _message_bytes(numel * nodes, config.intra_bits, config.intra_group_size) * (ranks_per_node - 1)
    inter = _message_bytes(numel, config.inter_bits, config.inter_group_size) * (nodes - 1)
    shorter = min(intra / INTRA_RATE, inter / INTER_RATE)
    return min(MOST_SLICES, max(1, int(math.sqrt(shorter / SLICE_SECONDS))))


def _message_bytes(numel: int, bits: float | None, group_size: int) -> float:
    if bits is None:
        return numel * FULL_PRECISION / 8
    return numel * (bits / 8 + SCALE_BYTES / group_size)


def slice_places(
    lengths: Sequence[int], *, config: GradientConfig, nodes: int, ranks_per_node: int
) -> list[list[tuple[int, slice]]]:
    """Cut the sections of a row into slices; no quantization group is divided.

    Args:
        lengths: of the sections, none of them 0.

    Returns:
        For each slice the numbers of its sections and the places in them; none if there are no sections.
    """
    total = sum(lengths)
    chunks = pipeline_chunks(total, config=config, nodes=nodes, ranks_per_node=ranks_per_node)
    unit = group_unit(config, nodes=nodes, ranks_per_node=ranks_per_node)
    length = round_up(-(-total // chunks), unit)
    slices: list[list[tuple[int, slice]]] = []
    room = 0
    for section, numel in enumerate(lengths):
        start = 0
        while start < numel:
            if room <= 0:
                slices.append([])
                room = length
            end = min(numel, start + round_up(room, unit))
            slices[-1].append((section, slice(start, end)))
            room -= end - start
            start = end
    return slices


def group_unit(config: GradientConfig, *, nodes: int, ranks_per_node: int) -> int:
    """Return the shortest range of values that divides no quantization group of either level."""
    sizes = [config.intra_group_size] * (ranks_per_node > 1) + [config.inter_group_size] * (nodes > 1)
    return math.lcm(BLOCK, *sizes)
