"""What a lead asks first: did it train as well, what did it save, was anything wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from sdp4bit.traffic import format_bytes
from sdp4bit_lab.compare.paired import PairedDifference, paired_difference
from sdp4bit_lab.report.pairs import paired_losses, reference_of, spikes_of
from sdp4bit_lab.report.runs import Run
from sdp4bit_lab.report.summary import median, ranks_text

_SHOWN = 6
"""Strategies that an answer names; what others have is in the tables."""
_VERDICTS = {
    "not significantly different": "yes, no significant difference",
    "lower": "yes, the loss is lower",
    "higher": "no, the loss is higher",
    "unstable baseline": "cannot be told, as training was unstable without it, too",
    None: "cannot be told from so few seeds",
}


def verdict(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the three questions, each with its answers: one per strategy that is compared, or a reason."""
    return [
        ("Did it train as well?", _quality(runs)),
        ("What did it save?", _savings(runs)),
        ("Was anything wrong?", _faults(runs)),
    ]


def _quality(runs: Sequence[Run]) -> list[str]:
    pairs, unstable = paired_losses(runs)
    if not pairs:
        return [f"Not comparable, because {_why_not_comparable(runs)}."]
    answers = [
        _loss_text(label, paired_difference(losses, unstable_seeds=sorted(unstable)), str(runs[0].label))
        for label, losses in pairs.items()
    ]
    return _shortened(answers)


def _why_not_comparable(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return "there is one run: name the folder of a run without quantization, too"
    if any(run.label is None for run in runs):
        return "a run does not say what its strategy was"
    if len({run.label for run in runs}) == 1:
        return f"all runs are of one strategy, {runs[0].label}"
    if any(run.seed is None for run in runs):
        return "a run does not say what its seed was"
    others = [run for run in runs if run.label != runs[0].label]
    if all(reference_of(run, runs) is None for run in others):
        return f"no other strategy was trained with a seed of {runs[0].label}"
    return "no two runs of the same seed were validated at the same step"


def _loss_text(label: str, difference: PairedDifference, reference: str) -> str:
    seeds = len(difference.by_seed)
    text = f"validation loss {difference.mean:+.4f} ({difference.mean_percent:+.2f} %) to {reference}"
    interval = difference.percent_interval
    if interval is None:
        return f"{label}: {_VERDICTS[difference.verdict]}; {text}, of one seed"
    between = f"95 % interval {interval[0]:+.2f} to {interval[1]:+.2f} %"
    return f"{label}: {_VERDICTS[difference.verdict]}; {text}, {between}, {seeds} seeds"


def _savings(runs: Sequence[Run]) -> list[str]:
    """Return bytes, ratio and time of every strategy that sends less than plain FSDP2 would."""
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(run.label or run.name, []).append(run)
    answers = []
    for label, same in by_label.items():
        ratio = _mean(same, "compression_ratio")
        if ratio is None or ratio == 1.0:
            continue
        sent = _mean(same, "inter_bytes")
        where = "inter-node" if sent else "intra-node"
        sent = sent or _mean(same, "intra_bytes")
        size = "" if sent is None else f", {format_bytes(sent)} a step {where}"
        answers.append(f"{label}: {ratio:.1f}x fewer bytes than plain FSDP2{size}; {_time(same, runs)}")
    return _shortened(answers) or ["Nothing: no run sent fewer bytes than plain FSDP2 would have."]


def _time(same: Sequence[Run], runs: Sequence[Run]) -> str:
    reference = [run for run in runs if run.label == runs[0].label]
    if any(run.simulated_ranks is not None for run in (*same, *reference)):
        return "its time means nothing, as the ranks were simulated"
    if same[0].label == runs[0].label or same[0].label is None:
        return "no time to compare with"
    if len({ranks_text(run) for run in (*same, *reference)}) > 1:
        return "times are not comparable, as the ranks differ"
    ours, plain = _mean(same, "step_seconds"), _mean(reference, "step_seconds")
    if not ours or not plain:
        return "no time to compare with"
    change = f"{plain / ours:.2f}x faster" if plain >= ours else f"{ours / plain:.2f}x slower"
    return f"a step {change} than {runs[0].label}'s here"


def _mean(runs: Sequence[Run], name: str) -> float | None:
    """Return the mean over runs of their medians; None if a run has none."""
    values = [median(run, name) for run in runs]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _faults(runs: Sequence[Run]) -> list[str]:
    answers = [f"{run.name}: {', '.join(found)}" for run in runs if (found := list(_faults_of(run)))]
    return _shortened(answers) or ["Nothing: no alert, spike, fallback, restart or loss that is no number."]


def _faults_of(run: Run) -> Iterator[str]:
    planned, done = run.setting("training", "steps"), max(run.train, default=0)
    if isinstance(planned, int) and done < planned:
        yield f"{done} of {planned} steps are done"
    yield from _counted(int(np.isnan(run.column("loss")).sum()), "step", "whose loss is not a number")
    spikes = spikes_of(run)
    if spikes:
        yield from _counted(len(spikes), "spike", f"of the gradient norm (largest: {spikes[0]})")
    # A spike is written as an alert of the whole run, too.
    of_groups = [alert for alert in run.alerts if alert.group is not None or not spikes]
    fallbacks = sum("-> " in alert.message for alert in of_groups)
    yield from _counted(fallbacks, "change", "of precision by the fallback")
    yield from _counted(len(of_groups) - fallbacks, "alert", "")
    yield from _counted(len(run.restarts), "restart", "")
    yield from _counted(int(np.nansum(run.column("skipped"))), "step", "skipped (fp16 overflow)")


def _counted(count: int, noun: str, rest: str) -> Iterator[str]:
    if count:
        yield f"{count} {noun}{'s' if count > 1 else ''} {rest}".rstrip()


def _shortened(answers: Sequence[str]) -> list[str]:
    left = len(answers) - _SHOWN
    more = [f"and {left} more, in the tables below"] if left > 0 else []
    return [*itertools.islice(answers, _SHOWN), *more]
