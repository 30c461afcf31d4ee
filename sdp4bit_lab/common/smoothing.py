"""Smooth curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

WINDOW_SHARE = 20
"""Number of values divided by the window of the moving average."""


def smoothed(numbers: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return a centered average over a twentieth of the values, NaN where they are not finite."""
    values = np.asarray(numbers, dtype=np.float64)
    half = max(1, len(values) // (2 * WINDOW_SHARE))
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    first = np.maximum(np.arange(len(values)) - half, 0)
    last = np.minimum(np.arange(len(values)) + half + 1, len(values))
    count = counts[last] - counts[first]
    means = (sums[last] - sums[first]) / np.maximum(count, 1)
    return np.where(finite & (count > 0), means, math.nan)
