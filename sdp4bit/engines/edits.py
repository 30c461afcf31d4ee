"""The size of weight edits, which decides between a quantized difference and full precision."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_SMALL_EDIT = 1 / 128
"""Largest edit that is sent as a quantized difference, relative to the weights (Euclidean norms). 4 bits then
leave an error of about a quarter of it, the cost of rounding weights to bf16."""


def change_squares(main: Tensor, held: Tensor) -> Tensor:
    """Return |main - held|^2 and |main|^2 of weights and their replica, of one dtype; fp64 [2]."""
    change = main.float() - held.float()
    return torch.stack([change.square().sum(), main.float().square().sum()]).double()


def is_large_change(squares: Tensor) -> Tensor:
    """Return which changes are sent in full precision, bool [n]; NaN and infinity count as large.

    Args:
        squares: [n, 2], per group the sum of `change_squares` over its ranks.
    """
    change, size = squares.unbind(-1)
    # An infinite change is not larger than a part of infinite weights.
    return ~((change <= LARGEST_SMALL_EDIT**2 * size) & change.isfinite())
