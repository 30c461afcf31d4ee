"""Answer three questions: does the loss increase, how many bytes are saved, are the runs healthy?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from markupsafe import Markup

from sdp4bit.addresses import page
from sdp4bit.traffic import format_bytes
from sdp4bit_lab.compare.paired import PairedDifference, interval_text, paired_difference, signed
from sdp4bit_lab.report.runs import Run

LARGEST_LIST = 6
"""Sentences of an answer; the tables have the rest."""
_SAVINGS = "How many bytes are saved?"
LARGE_PERCENT = 1.0
"""Significant increase of the loss above which the answer is marked as bad."""
_SIGNIFICANCE: dict[str | None, str] = {
    "not significantly different": "no significant difference",
    "lower": "the loss is significantly lower",
    "higher": "the loss is significantly higher",
    "in the warm-up": "undecided in the warm-up of the learning rate",
    "unstable baseline": "undecided, because the baseline was unstable too",
    None: "undecided with fewer than 3 seeds",
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer, with a sentence per strategy or run."""

    question: str
    mood: Literal["good", "bad", "open"]
    sentences: list[str]


def answers(runs: Sequence[Run]) -> list[Answer]:
    """Return the three answers; the first run's strategy is the baseline."""
    return [_loss(runs), _savings(runs), _health(runs)]


def baseline_of(run: Run, runs: Sequence[Run]) -> Run | None:
    """Return the run of the first run's strategy with the same seed, or None.

    Different seeds are never compared, because they change the loss more than quantization does.
    """
    same = (other for other in runs if other.label == runs[0].label and other.seed == run.seed)
    return next(same, None) if run.seed is not None and run.label != runs[0].label else None


def validated_together(run: Run, baseline: Run) -> tuple[int, float, float] | None:
    """Return the last step that both runs validated, and their losses; None if there is none."""
    ours, theirs = (
        {step: loss for step, loss in zip(each.validation, each.validation_losses(), strict=True) if loss > 0}
        for each in (run, baseline)
    )
    step = max(ours.keys() & theirs.keys(), default=None)
    return None if step is None else (step, float(ours[step]), float(theirs[step]))


def median(run: Run, name: str) -> float | None:
    """Return the median over the steps, because the first steps differ; None without values.

    Times leave out the first step, which opens connections, as `step_seconds` of result.json does.
    """
    values = run.column(name)
    if name == "step_seconds" and len(values) > 1:
        values = values[1:]
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _loss(runs: Sequence[Run]) -> Answer:
    question, baseline_label = "Does the loss increase?", str(runs[0].label)
    losses: dict[str, dict[int, tuple[float, float]]] = {}
    unstable = [
        run.seed for run in runs if run.label == runs[0].label and run.seed is not None and run.spikes()
    ]
    for run in runs:
        baseline = baseline_of(run, runs)
        validated = baseline and validated_together(run, baseline)
        if validated and run.seed is not None:
            losses.setdefault(str(run.label), {})[run.seed] = validated[1:]
    if not losses:
        return Answer(question=question, mood="open", sentences=[f"Not compared: {_why_not_compared(runs)}."])
    differences = {
        label: paired_difference(pairs, unstable_seeds=unstable) for label, pairs in losses.items()
    }
    is_good = [d.significance in ("not significantly different", "lower") for d in differences.values()]
    is_bad = [d.significance == "higher" and d.mean_percent > LARGE_PERCENT for d in differences.values()]
    sentences = [_loss_sentence(label, each, baseline_label) for label, each in differences.items()]
    return Answer(
        question=question,
        mood="bad" if any(is_bad) else "good" if all(is_good) else "open",
        sentences=_shortened(sentences),
    )


def _why_not_compared(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return "there is one run; add the folder of a run without quantization"
    if any(run.label is None or run.seed is None for run in runs):
        return f"config.json of a run lacks the strategy or seed ({', '.join(run.name for run in runs)})"
    if len({run.label for run in runs}) == 1:
        return f"all runs have the strategy {runs[0].label}"
    if all(baseline_of(run, runs) is None for run in runs):
        return f"no other strategy has a seed in common with {runs[0].label}"
    return "no two runs of the same seed were validated at the same step"


def _loss_sentence(label: str, difference: PairedDifference, baseline: str) -> str:
    interval, seeds = difference.percent_interval, len(difference.by_seed)
    between = "" if interval is None else f", 95 % interval {interval_text(interval, digits=2, unit=' %')}"
    nats = signed(difference.mean, digits=4, beside=difference.interval)
    percent = signed(difference.mean_percent, digits=2, beside=interval)
    return (
        f"{label}: {_SIGNIFICANCE[difference.significance]}. Validation loss {nats} ({percent} %) "
        f"relative to {baseline}{between}; {seeds} seed{'s' * (seeds > 1)}."
    )


def _savings(runs: Sequence[Run]) -> Answer:
    sentences = []
    for label in dict.fromkeys(run.label for run in runs):
        same = [run for run in runs if run.label == label]
        ratio, sent = _mean(same, "compression_ratio"), _mean(same, "inter_bytes")
        if ratio is not None and ratio > 1:
            size = f" ({format_bytes(sent)} per step)" if sent else ""
            sentences.append(
                f"{label or same[0].name}: {ratio:.1f}x fewer inter-node bytes than plain FSDP2{size}."
                + _speed(same, [run for run in runs if run.label == runs[0].label])
            )
    if not sentences:
        nothing = ["None: no run sent fewer bytes than plain FSDP2."]
        return Answer(question=_SAVINGS, mood="open", sentences=nothing)
    return Answer(question=_SAVINGS, mood="good", sentences=[*_shortened(sentences), _why_ratios_differ()])


def _why_ratios_differ() -> str:
    where = page("telemetry#why-your-ratio-differs")
    # A file of the repository, which lies elsewhere than the page, is text.
    link = Markup('<a href="{}">why yours differs</a>').format(where) if "://" in where else where
    return Markup("Ratios depend on nodes, gathers and micro-batches ({}).").format(link)


def _speed(runs: Sequence[Run], baselines: Sequence[Run]) -> str:
    together = (*runs, *baselines)
    if any(run.simulated_ranks for run in together):
        return " Step times are not compared because the ranks are simulated."
    ours, plain = _mean(runs, "step_seconds"), _mean(baselines, "step_seconds")
    is_comparable = runs[0].label != baselines[0].label and len({run.ranks for run in together}) == 1
    if not (is_comparable and ours and plain):
        return ""
    change = f"{plain / ours:.2f}x faster" if plain >= ours else f"{ours / plain:.2f}x slower"
    return f" A step was {change} than with {baselines[0].label} on these machines."


def _mean(runs: Sequence[Run], name: str) -> float | None:
    """Return the mean of the runs' medians; None if a run has none."""
    medians = [median(run, name) for run in runs]
    known = [value for value in medians if value is not None]
    return statistics.fmean(known) if len(known) == len(medians) else None


def _health(runs: Sequence[Run]) -> Answer:
    faults, notes = [_faults(run) for run in runs], []
    for run, found in zip(runs, faults, strict=True):
        planned, done = run.setting("training", "steps"), max(run.train, default=0)
        is_unfinished = isinstance(planned, int) and done < planned
        found = found + [f"{done} of {planned} steps done"] * is_unfinished
        if found:
            notes.append(f"{run.name}: {'; '.join(found)}.")
    return Answer(
        question="Is the run healthy?" if len(runs) == 1 else "Are the runs healthy?",
        mood="bad" if any(faults) else "open" if notes else "good",
        sentences=_shortened(notes)
        or ["Yes: all steps done, no alerts, no gradient spikes, no NaN or infinite losses."],
    )


def _faults(run: Run) -> list[str]:
    losses, spikes = np.concatenate([run.column("loss"), run.validation_losses()]), run.spikes()
    # Every spike also has an alert.
    alerts = [a for a in run.alerts if not any(a.message.startswith(str(spike)) for spike in spikes)]
    counts = {
        "NaN or infinite losses": int(np.isnan(losses).sum()),
        "gradient spikes": len(spikes),
        "alerts": len(alerts),
    }
    largest = [f"largest spike: {spikes[0]}"] if spikes else []
    return [f"{name}: {count}" for name, count in counts.items() if count] + largest


def _shortened(sentences: Sequence[str]) -> list[str]:
    left = len(sentences) - LARGEST_LIST
    return [*sentences[:LARGEST_LIST], *([f"{left} more: see the table of runs."] if left > 0 else [])]
