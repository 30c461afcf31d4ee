"""Compare losses seed by seed, so that the effect of the seed cancels."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtrit

CONFIDENCE = 0.95
FEWEST_PAIRS = 3
"""Seeds needed for significance: with two, the interval is 3.6 times as wide as with three."""

_ZERO = 1e-9
"""Smaller differences are rounding errors of their calculation."""

Significance = Literal[
    "not significantly different", "higher", "lower", "unstable baseline", "in the warm-up"
]


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Validation losses of a strategy minus those of the baseline with the same seeds."""

    by_seed: dict[int, float]
    percent_by_seed: dict[int, float]
    """Relative to the baseline's loss with that seed."""
    unstable_seeds: tuple[int, ...] = ()
    """Seeds with an unstable baseline, for which differences mean little."""
    is_early: bool = False
    """Whether losses are compared in the warm-up of the learning rate. Differences there vanish later."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())

    @property
    def mean_percent(self) -> float:
        return statistics.fmean(self.percent_by_seed.values())

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean; None for one seed."""
        return confidence_interval(list(self.by_seed.values()))

    @property
    def percent_interval(self) -> tuple[float, float] | None:
        return confidence_interval(list(self.percent_by_seed.values()))

    @property
    def significance(self) -> Significance | None:
        """Position of the interval relative to 0; None for fewer than three seeds."""
        interval = self.interval
        if interval is None or len(self.by_seed) < FEWEST_PAIRS:
            return None
        if self.is_early:
            return "in the warm-up"
        if self.unstable_seeds:
            return "unstable baseline"
        low, high = interval
        if low <= 0 <= high:
            return "not significantly different"
        return "higher" if low > 0 else "lower"


def signed(value: float, *, digits: int, beside: Sequence[float] | None = None) -> str:
    """Format a value with a sign and this many decimals, or with more if all values would be 0.

    Args:
        beside: further values with the same decimals.
    """
    largest = max(map(abs, (value, *(beside or ()))))
    if _ZERO < largest < 0.5 * 10**-digits:
        digits = 1 - math.floor(math.log10(largest))
    return f"{value:+.{digits}f}"


def interval_text(interval: tuple[float, float] | None, *, digits: int, unit: str = "") -> str:
    """Format an interval; a dash for one seed."""
    if interval is None:
        return "–"
    return " to ".join(signed(end, digits=digits, beside=interval) for end in interval) + unit


def paired_difference(
    pairs: Mapping[int, tuple[float, float]], *, unstable_seeds: Sequence[int] = (), is_early: bool = False
) -> PairedDifference:
    """Return the differences of a strategy's losses from the baseline's.

    Args:
        pairs: loss of the strategy and of the baseline, by seed.
        unstable_seeds: seeds with an unstable baseline.
        is_early: whether the losses are of a step in the warm-up of the learning rate.
    """
    return PairedDifference(
        by_seed={seed: loss - reference for seed, (loss, reference) in pairs.items()},
        percent_by_seed={seed: 100 * (loss / reference - 1) for seed, (loss, reference) in pairs.items()},
        unstable_seeds=tuple(seed for seed in pairs if seed in unstable_seeds),
        is_early=is_early,
    )


def confidence_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean by Student's t; None for one value."""
    if len(values) < 2:
        return None
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * error
    return mean - half, mean + half
