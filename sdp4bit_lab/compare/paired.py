"""Compare the losses of two kinds of runs seed by seed, so that the seeds' own effect cancels."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtrit

CONFIDENCE = 0.95
FEWEST_PAIRS = 3
"""Seeds that significance needs: the interval of two is 3.6 times as wide as of three with equal spread."""

Significance = Literal["not significantly different", "higher", "lower", "unstable baseline"]


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Validation losses of a strategy minus those of the baseline with the same seed."""

    by_seed: dict[int, float]
    percent_by_seed: dict[int, float]
    """The same, relative to the baseline's loss of that seed."""
    unstable_seeds: tuple[int, ...] = ()
    """Seeds whose baseline trained unstably, so that differences from it mean little."""

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.by_seed.values())

    @property
    def mean_percent(self) -> float:
        """Mean over the seeds, in percent."""
        return statistics.fmean(self.percent_by_seed.values())

    @property
    def interval(self) -> tuple[float, float] | None:
        """Interval of the mean with 95 % confidence; None for one seed."""
        return confidence_interval(list(self.by_seed.values()))

    @property
    def percent_interval(self) -> tuple[float, float] | None:
        """Interval of the mean in percent with 95 % confidence; None for one seed."""
        return confidence_interval(list(self.percent_by_seed.values()))

    @property
    def significance(self) -> Significance | None:
        """Side of 0 on which the interval lies; None for fewer than three seeds."""
        interval = self.interval
        if interval is None or len(self.by_seed) < FEWEST_PAIRS:
            return None
        if self.unstable_seeds:
            return "unstable baseline"
        low, high = interval
        if low <= 0 <= high:
            return "not significantly different"
        return "higher" if low > 0 else "lower"


def interval_text(difference: PairedDifference) -> str:
    """Return the interval in nats and in percent as two lines; a dash for one seed."""
    interval, percent = difference.interval, difference.percent_interval
    if interval is None or percent is None:
        return "–"
    return f"{interval[0]:+.4f} to {interval[1]:+.4f}\n({percent[0]:+.2f} to {percent[1]:+.2f} %)"


def paired_difference(
    pairs: Mapping[int, tuple[float, float]], *, unstable_seeds: Sequence[int] = ()
) -> PairedDifference:
    """Return the differences of the losses of a strategy and of its baseline.

    Args:
        pairs: by seed, the loss of the strategy and of the baseline.
        unstable_seeds: those whose baseline trained unstably.
    """
    return PairedDifference(
        by_seed={seed: loss - reference for seed, (loss, reference) in pairs.items()},
        percent_by_seed={seed: 100 * (loss / reference - 1) for seed, (loss, reference) in pairs.items()},
        unstable_seeds=tuple(seed for seed in pairs if seed in unstable_seeds),
    )


def confidence_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean, by Student's t; None for one value."""
    if len(values) < 2:
        return None
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * error
    return mean - half, mean + half
