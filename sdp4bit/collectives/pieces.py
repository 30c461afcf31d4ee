"""Into which pieces an all-reduce cuts a tensor."""

from __future__ import annotations

from sdp4bit.config import GradientConfig
from sdp4bit.quantization.layout import BLOCK


def piece_count(*, nodes: int, ranks_per_node: int) -> int:
    """Return into how many pieces a tensor is cut.

    Each rank has a piece, whose sum it quantizes once more and sends to the others. Two nodes have the same
    pieces, one for each of their ranks, and exchange their own sums: the same bytes, and gradients are
    rounded to few bits once instead of twice. Between N nodes that would take N / 2 times the bytes.
    """
    return ranks_per_node if nodes == 2 else nodes * ranks_per_node


def piece_places(numel: int, *, pieces: int, unit: int = BLOCK) -> tuple[int, int]:
    """Return how far apart the pieces of a tensor begin, and how long each is.

    They begin at multiples of `unit` values and end together with the tensor: neighbours overlap by fewer
    than `unit` values per piece, so that nothing has to be copied or padded. What overlaps is reduced twice;
    the later piece has the last word.

    Args:
        unit: a multiple of 32, at which the tensor may be cut.
    """
    stride = numel // pieces // unit * unit
    return stride, numel - stride * (pieces - 1)


def is_long_enough(numel: int, *, ranks: int, config: GradientConfig) -> bool:
    """Return whether so many values are quantized: each rank's part is no shorter than `min_numel`."""
    return numel // ranks >= config.min_numel
