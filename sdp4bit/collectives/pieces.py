"""Into which pieces an all-reduce cuts a tensor, one for each rank."""

from __future__ import annotations

from sdp4bit.config import GradientConfig
from sdp4bit.quantization.layout import BLOCK


def piece_places(numel: int, *, ranks: int, unit: int = BLOCK) -> tuple[int, int]:
    """Return how far apart the pieces of a tensor begin, and how long each is.

    They begin at multiples of `unit` values and end together with the tensor: neighbours overlap by fewer
    than `unit` values per rank, so that nothing has to be copied or padded. What overlaps is reduced twice;
    the rank behind has the last word.

    Args:
        unit: a multiple of 32, at which the tensor may be cut.
    """
    stride = numel // ranks // unit * unit
    return stride, numel - stride * (ranks - 1)


def is_long_enough(numel: int, *, ranks: int, config: GradientConfig) -> bool:
    """Return whether so many values are quantized: each rank's part is no shorter than `min_numel`."""
    return numel // ranks >= config.min_numel
