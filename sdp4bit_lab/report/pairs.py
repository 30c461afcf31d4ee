"""Runs held against those of the same seed: a difference between two seeds says nothing about a strategy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from sdp4bit_lab.compare.paired import CONFIDENCE, FEWEST_PAIRS, interval_text, paired_difference
from sdp4bit_lab.pretrain.stability import gradient_spikes
from sdp4bit_lab.report.runs import Run

NONE = "–"


def reference_of(run: Run, runs: Sequence[Run]) -> Run | None:
    """Return what a run is compared with: the first run's strategy with the same seed.

    The first such run stands for itself, and what follows with the same strategy and seed is compared with
    it. None if there is none, or a seed is not recorded.
    """
    seed = run.seed
    if run is runs[0] or seed is None:
        return run if run is runs[0] else None
    return next((other for other in runs if other.label == runs[0].label and other.seed == seed), None)


def validated_together(run: Run, reference: Run) -> tuple[int, float, float] | None:
    """Return the last step at which both were validated, and their losses there; None without one."""
    own, other = run.validation_losses(), reference.validation_losses()
    common = [step for step in own if step in other]
    return (max(common), own[max(common)], other[max(common)]) if common else None


def difference_text(run: Run, runs: Sequence[Run]) -> str:
    """Return the difference of the validation loss to the run with the same seed, for people."""
    reference = reference_of(run, runs)
    if reference is None:
        missing = "its seed is not recorded" if run.seed is None else f"none has seed {run.seed}"
        return f"{NONE} ({missing})"
    if reference is run:
        return "compared with"
    found = validated_together(run, reference)
    if found is None:
        return NONE
    step, loss, other = found
    percent = f" ({100 * (loss / other - 1):+.2f} %)" if other else ""
    return f"{loss - other:+.4f}{percent} at step {step}"


def pair_titles(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return the titles of the columns of `pair_rows`."""
    return (
        *("Strategy", "Seeds", "Validation loss", f"Difference to {runs[0].label}, same seed"),
        *(f"{CONFIDENCE:.0%} interval", "Verdict"),
    )


def paired_losses(runs: Sequence[Run]) -> tuple[dict[str, dict[int, tuple[float, float]]], set[int]]:
    """Return, by strategy and seed, the losses of a run and of the first run's strategy; and unstable seeds.

    Of the seeds that both have validated, at the last common step. Unstable are those with which the first
    run's strategy had spikes of the gradient norm.
    """
    pairs: dict[str, dict[int, tuple[float, float]]] = {}
    unstable: set[int] = set()
    for run in runs:
        reference = reference_of(run, runs)
        if reference is None or run.seed is None or run.label == runs[0].label or run.label is None:
            continue
        found = validated_together(run, reference)
        if found is not None and found[2] > 0:
            pairs.setdefault(run.label, {}).setdefault(run.seed, found[1:])
        if spikes_of(reference):
            unstable.add(run.seed)
    return pairs, unstable


def pair_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return one row per strategy, of the seeds that it and the first run's strategy have both validated.

    Nothing if there is no such pair. Where the two have done different numbers of steps, their losses are
    those of the last common one.
    """
    pairs, unstable = paired_losses(runs)
    if not pairs:
        return []
    references = {seed: losses[1] for found in pairs.values() for seed, losses in found.items()}
    first = (
        *(str(runs[0].label), _seeds(references), _spread(list(references.values()))),
        *("compared with", NONE, "unstable" if unstable else NONE),
    )
    rows: list[tuple[str, ...]] = [first]
    for label, losses in pairs.items():
        difference = paired_difference(losses, unstable_seeds=sorted(unstable))
        needs = f"none: {FEWEST_PAIRS} seeds are needed"
        rows.append(
            (
                *(label, _seeds(losses), _spread([loss for loss, _ in losses.values()])),
                f"{difference.mean:+.4f} ({difference.mean_percent:+.2f} %)",
                interval_text(difference),
                difference.verdict or needs,
            )
        )
    return rows


def spikes_of(run: Run) -> list[str]:
    """Return the spikes of the gradient norm, a sentence each, the largest first."""
    found = gradient_spikes(zip(run.train, run.column("grad_norm").tolist(), strict=True))
    return [str(spike) for spike in sorted(found, key=lambda spike: -spike.ratio)]


def _seeds(losses: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(losses)))


def _spread(losses: Sequence[float]) -> str:
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return NONE
    mean = f"{statistics.fmean(finite):.4f}"
    return f"{mean} ± {statistics.stdev(finite):.4f}" if len(finite) > 1 else mean
