"""What several runs of each strategy say: means, spreads, and differences to a baseline seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtrit

from sdp4bit.compare.finished_run import FinishedRun

CONFIDENCE = 0.95

Verdict = Literal["not significantly different", "higher", "lower"]


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Validation losses of a strategy minus those of the baseline with the same seed."""

    by_seed: dict[int, float]
    percent_by_seed: dict[int, float]
    """The same, relative to the baseline's loss of that seed."""

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
    def verdict(self) -> Verdict | None:
        """Whether the interval holds 0; None without an interval."""
        interval = self.interval
        if interval is None:
            return None
        low, high = interval
        if low <= 0 <= high:
            return "not significantly different"
        return "higher" if low > 0 else "lower"


@dataclass(frozen=True, kw_only=True)
class StrategyOutcome:
    """The runs of one strategy, over the seeds; losses are of the runs that did not diverge."""

    strategy: str
    seeds: tuple[int, ...]
    """Seeds of the runs that reached their end."""
    diverged: dict[int, int]
    """Seeds of the others, with the step at which each diverged."""
    validation_loss: float | None
    """Mean over the seeds; None if all diverged, like the next two."""
    validation_spread: float | None
    """Standard deviation over the seeds; None for one seed, too."""
    train_loss: float | None
    difference: PairedDifference | None
    """To the baseline; None for the baseline itself, and without a seed that both have."""
    intra_bytes_per_step: int
    inter_bytes_per_step: int
    seconds: float
    """Mean duration of a run's steps."""


def outcomes(runs: Sequence[FinishedRun], *, baseline: str | None) -> list[StrategyOutcome]:
    """Return one outcome per strategy, in the order of their first runs."""
    losses = {(run.strategy, run.seed): run.validation_loss for run in runs if run.diverged_at is None}
    found = []
    for strategy in dict.fromkeys(run.strategy for run in runs):
        mine = [run for run in runs if run.strategy == strategy]
        ended = [run for run in mine if run.diverged_at is None]
        validation = [run.validation_loss for run in ended]
        pairs = {
            run.seed: (run.validation_loss, losses[baseline, run.seed])
            for run in ended
            if baseline is not None and strategy != baseline and (baseline, run.seed) in losses
        }
        found.append(
            StrategyOutcome(
                strategy=strategy,
                seeds=tuple(run.seed for run in ended),
                diverged={run.seed: run.diverged_at for run in mine if run.diverged_at is not None},
                validation_loss=statistics.fmean(validation) if ended else None,
                validation_spread=statistics.stdev(validation) if len(ended) > 1 else None,
                train_loss=statistics.fmean(run.train_loss for run in ended) if ended else None,
                difference=paired_difference(pairs) if pairs else None,
                intra_bytes_per_step=mine[0].intra_bytes_per_step,
                inter_bytes_per_step=mine[0].inter_bytes_per_step,
                seconds=statistics.fmean(run.seconds for run in mine),
            )
        )
    return found


def paired_difference(pairs: Mapping[int, tuple[float, float]]) -> PairedDifference:
    """Return the differences of the losses of a strategy and of its baseline, by seed."""
    return PairedDifference(
        by_seed={seed: loss - reference for seed, (loss, reference) in pairs.items()},
        percent_by_seed={seed: 100 * (loss / reference - 1) for seed, (loss, reference) in pairs.items()},
    )


def confidence_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the interval that holds the mean with 95 % confidence, by Student's t; None for one value."""
    if len(values) < 2:
        return None
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * error
    return mean - half, mean + half
