"""Samples of a shard, on which errors of quantization are measured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdp4bit.collectives.sections import Range, take_ranges

_PIECES = 8


def sample_ranges(numel: int, *, sample_numel: int, unit: int) -> list[Range]:
    """Return at most eight evenly spaced ranges of a shard with about `sample_numel` values.

    Args:
        unit: size of a quantization group. Ranges have complete groups, unless the only one is the shard.
    """
    if numel <= max(sample_numel, unit):
        return [(0, numel)]
    units = -(-numel // unit)
    length = max(1, sample_numel // (_PIECES * unit))
    count = min(_PIECES, max(1, sample_numel // (length * unit)), units // length)
    starts = [(index * units // count) * unit for index in range(count)]
    return [(start, start + length * unit) for start in starts]


def sample_of(values: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return a concatenated copy of these ascending ranges of values [n]."""
    return torch.cat(take_ranges(values, ranges))
