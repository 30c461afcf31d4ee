"""Summarize the runs of each strategy: means, deviations, and paired differences from the baseline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sdp4bit_lab.compare.finished_run import FinishedRun
from sdp4bit_lab.compare.paired import PairedDifference, paired_difference


@dataclass(frozen=True, kw_only=True)
class StrategyOutcome:
    """Summary of one strategy over its seeds; losses exclude diverged runs."""

    strategy: str
    seeds: tuple[int, ...]
    """Seeds of the complete runs."""
    diverged: dict[int, int]
    """Seeds of the diverged runs, with the step of each."""
    validation_loss: float | None
    """Mean over the seeds; like train_loss, None if all runs diverged."""
    validation_spread: float | None
    """Standard deviation over the seeds; None for fewer than two."""
    train_loss: float | None
    difference: PairedDifference | None
    """None for the baseline itself, and without a common seed."""
    intra_bytes_per_step: int
    inter_bytes_per_step: int
    step_seconds: float | None
    """Median duration of a step."""


def outcomes(runs: Sequence[FinishedRun], *, baseline: str | None) -> list[StrategyOutcome]:
    """Return one outcome per strategy, in order of first appearance."""
    losses = {(run.strategy, run.seed): run.validation_loss for run in runs if run.diverged_at is None}
    unstable = [run.seed for run in runs if run.strategy == baseline and run.spikes]
    results = []
    for strategy in dict.fromkeys(run.strategy for run in runs):
        all_runs = [run for run in runs if run.strategy == strategy]
        ended = [run for run in all_runs if run.diverged_at is None]
        validation = [run.validation_loss for run in ended]
        pairs = {
            run.seed: (run.validation_loss, losses[baseline, run.seed])
            for run in ended
            if baseline is not None and strategy != baseline and (baseline, run.seed) in losses
        }
        results.append(
            StrategyOutcome(
                strategy=strategy,
                seeds=tuple(run.seed for run in ended),
                diverged={run.seed: run.diverged_at for run in all_runs if run.diverged_at is not None},
                validation_loss=statistics.fmean(validation) if ended else None,
                validation_spread=statistics.stdev(validation) if len(ended) > 1 else None,
                train_loss=statistics.fmean(run.train_loss for run in ended) if ended else None,
                difference=paired_difference(
                    pairs, unstable_seeds=unstable, is_early=any(run.ends_in_warm_up for run in ended)
                )
                if pairs
                else None,
                intra_bytes_per_step=all_runs[0].intra_bytes_per_step,
                inter_bytes_per_step=all_runs[0].inter_bytes_per_step,
                step_seconds=_median([run.step_seconds for run in all_runs if run.step_seconds is not None]),
            )
        )
    return results


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
