"""Division of a tensor into the pieces of an all-reduce."""

from __future__ import annotations

from sdp4bit.config import GradientConfig
from sdp4bit.quantization.formats import BLOCK
from sdp4bit.traffic import Grid


def piece_count(grid: Grid) -> int:
    """Return the number of pieces of a tensor.

    Each rank sums one piece, quantizes the sum and sends it to the others. With two nodes both have the same
    pieces, one per local rank, and exchange the sums of their node. This takes the same bytes and rounds
    gradients to few bits once instead of twice. With N nodes it would take N / 2 times the bytes.
    """
    return grid.ranks_per_node if grid.nodes == 2 else grid.size


def piece_stride_and_length(numel: int, *, pieces: int, unit: int = BLOCK) -> tuple[int, int]:
    """Return the stride and the length of the pieces of a tensor.

    Pieces begin at multiples of `unit`, a multiple of 32, and the last one ends with the tensor. To avoid
    copies and padding, neighbors overlap by fewer than `unit` values per piece. Overlapping values are
    reduced twice, and those of the later piece are the result: a piece ends where the next one begins.
    """
    stride = numel // pieces // unit * unit
    return stride, numel - stride * (pieces - 1)


def is_long_enough(numel: int, *, ranks: int, config: GradientConfig) -> bool:
    """Return whether each rank's part of this many values has at least `min_numel`."""
    return numel // ranks >= config.min_numel
