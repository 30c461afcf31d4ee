"""Format a comparison as text, Markdown and JSON, with notes on its limits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sdp4bit.addresses import page
from sdp4bit.traffic import format_bytes
from sdp4bit_lab.common.files import aligned, wrapped, write_atomically
from sdp4bit_lab.compare.config import DEFAULT_BASELINE
from sdp4bit_lab.compare.finished_run import FinishedRun, finite
from sdp4bit_lab.compare.outcomes import StrategyOutcome, outcomes
from sdp4bit_lab.compare.paired import CONFIDENCE, FEWEST_PAIRS, interval_text, signed

NONE = "–"
INTERVAL = f"{100 * CONFIDENCE:.0f} % interval"
LONGEST_NAME = 16
"""Longest name of a strategy that leaves room for the other cells in 80 columns."""
Table = list[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Finished runs of a comparison."""

    runs: Sequence[FinishedRun]
    baseline: str | None
    """Label of the baseline; None if it is not among the runs."""
    planned: int
    """Number of runs of the complete comparison."""
    command: Literal["compare", "demo"] = "compare"
    """Command that prints it; demo has no step times here, and one seed."""

    @cached_property
    def outcomes(self) -> list[StrategyOutcome]:
        return outcomes(self.runs, baseline=self.baseline)

    def write(self, out: Path) -> None:
        """Write summary.json, table.md and curves.png."""
        from sdp4bit_lab.compare.curves import draw_curves  # imports matplotlib, which takes a second

        write_atomically(out / "summary.json", json.dumps(self.summary(), indent=2, allow_nan=False) + "\n")
        write_atomically(out / "table.md", self.markdown())
        draw_curves(self.runs, baseline=self.baseline, path=out / "curves.png")

    def notes(self) -> list[str]:
        """Return the limits of the numbers, one sentence each."""
        notes = list(_unstable_notes(self.runs, baseline=self.baseline))
        left = self.planned - len(self.runs)
        if left:
            notes.append(f"Not trained yet: {left} of {self.planned} runs.")
        differences = [outcome.difference for outcome in self.outcomes if outcome.difference is not None]
        if self.baseline is None:
            notes.append(
                f"There are no differences because {DEFAULT_BASELINE} is not among the strategies: add it, "
                "or choose another with --baseline."
            )
        elif len(self.outcomes) > 1 and not differences:
            notes.append(
                f"There are no differences because {self.baseline} shares no seed with another strategy."
            )
        pairs = min((len(difference.by_seed) for difference in differences), default=FEWEST_PAIRS)
        if pairs < FEWEST_PAIRS:
            give = "give" if self.command == "compare" else "`sdp4bit compare` trains several, with"
            notes.append(
                f"Differences of {pairs} seed{'s' if pairs > 1 else ''} have no significance: {give} "
                f"{FEWEST_PAIRS} seeds or more, such as --seeds 1,2,3."
            )
        if any(difference.is_early for difference in differences):
            notes.append("Losses differ more in the warm-up than later: compare after it, with more steps.")
        for outcome in self.outcomes:
            paired = outcome.difference.by_seed if outcome.difference is not None else outcome.seeds
            alone = ", ".join(str(seed) for seed in outcome.seeds if seed not in paired)
            if alone:
                notes.append(
                    f"{outcome.strategy}: {self.baseline} has no finished run with seed {alone}, so the "
                    "difference covers the other seeds."
                )
        for run in self.runs:
            if run.diverged_at is not None:
                notes.append(f"{run.name} diverged at step {run.diverged_at} and is excluded from the means.")
        starts: dict[int, FinishedRun] = {}
        for run in self.runs:
            first = starts.setdefault(run.seed, run)
            # Compared as text, because NaN differs from itself.
            if run.losses and first.losses and repr(run.losses[0]) != repr(first.losses[0]):
                notes.append(
                    f"WARNING: with seed {run.seed}, {first.strategy} and {run.strategy} started "
                    f"differently: their losses before the first update are {first.losses[0]} and "
                    f"{run.losses[0]}."
                )
        for name in ("torch", "device"):
            kinds = list(dict.fromkeys(run.environment.get(name, "unknown") for run in self.runs))
            if len(kinds) > 1:
                notes.append(f"WARNING: runs differ in {name}: {', '.join(kinds)}.")
        return notes

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json, described in docs/pretraining.md."""
        return {
            "baseline": self.baseline,
            "confidence": CONFIDENCE,
            "complete": len(self.runs) == self.planned,
            "notes": self.notes(),
            "strategies": {outcome.strategy: _strategy_member(outcome) for outcome in self.outcomes},
            "runs": [_run_member(run) for run in self.runs],
        }

    def tables(self) -> list[tuple[str, Table]]:
        """Return captions and tables; the first row of a table has its titles."""
        losses: Table = [("strategy", "seeds", "validation loss", "significance")]
        differences: Table = [("strategy", "nats", INTERVAL, "percent", INTERVAL)]
        costs: Table = [("strategy", "training loss", "intra-node", "inter-node", "fewer", "ms/step")]
        plain = [o.inter_bytes_per_step for o in self.outcomes if o.strategy == self.baseline]
        for outcome in self.outcomes:
            name, difference, sent = outcome.strategy, outcome.difference, outcome.inter_bytes_per_step
            seeds = f"{len(outcome.seeds)}"
            if outcome.diverged:
                seeds += f", {len(outcome.diverged)} diverged"
            loss = _number(outcome.validation_loss, ".4f")
            if outcome.validation_spread is not None:
                loss += f" ± {outcome.validation_spread:.4f}"
            losses.append((name, seeds, loss, (difference and difference.significance) or NONE))
            if difference is not None:
                percent = difference.percent_interval
                differences.append(
                    (
                        *(
                            name,
                            signed(difference.mean, digits=4, beside=difference.interval),
                            interval_text(difference.interval, digits=4),
                        ),
                        *(
                            f"{signed(difference.mean_percent, digits=2, beside=percent)} %",
                            interval_text(percent, digits=2, unit=" %"),
                        ),
                    )
                )
            ratio = plain[0] / sent if plain and sent else 1.0
            costs.append(
                (
                    *(name, _number(outcome.train_loss, ".4f"), format_bytes(outcome.intra_bytes_per_step)),
                    *(
                        format_bytes(sent),
                        f"{ratio:.2f}x" if ratio > 1 else NONE,
                        _number(outcome.step_seconds and 1000 * outcome.step_seconds, ",.0f"),
                    ),
                )
            )
        if not differences[1:]:
            losses = [row[:-1] for row in losses]
        if self.command == "demo":
            costs = [row[:-1] for row in costs]
        tables = [
            ("", losses),
            (f"Validation loss minus that of {self.baseline} with the same seeds:", differences),
            (f"Bytes per step of all ranks ({page('telemetry#why-your-ratio-differs')}):", costs),
        ]
        return [(caption, table) for caption, table in tables if table[1:]]

    def text(self) -> str:
        """Return the tables and their notes for a terminal of 80 columns."""
        blocks = []
        for caption, table in self.tables():
            lines = [caption] if caption else []
            short = [(name if len(name) <= LONGEST_NAME else "", *cells) for name, *cells in table]
            for (name, *_), line in zip(table, aligned(short), strict=True):
                # A long name gets a line of its own.
                lines += [name, line] if len(name) > LONGEST_NAME else [line]
            blocks.append("\n".join(lines))
        return "\n\n".join([*blocks, *filter(None, [wrapped(self.notes())])])

    def markdown(self) -> str:
        """Return the tables and their notes as Markdown."""
        parts = [
            f"{caption}\n\n" * bool(caption) + _markdown_table(table) for caption, table in self.tables()
        ]
        notes = "".join(f"* {note}\n" for note in self.notes())
        return "\n".join([*parts, notes] if notes else parts)


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else f"{value:{form}}"


def _unstable_notes(runs: Sequence[FinishedRun], *, baseline: str | None) -> Iterator[str]:
    """Yield runs with spikes of the gradient norm, and a warning if the baseline is one of them."""
    unstable = [run for run in runs if run.spikes]
    for run in unstable:
        worst = max(run.spikes, key=lambda spike: spike.ratio)
        more = f" (and {len(run.spikes) - 1} more)" if len(run.spikes) > 1 else ""
        yield f"{run.name} was unstable: {worst}{more}."
    if any(run.strategy == baseline for run in unstable):
        yield (
            "WARNING: the baseline is unstable, so differences mean little. Lower --lr or raise "
            "--lr-warmup-iters until it has no spikes."
        )


def _markdown_table(table: Sequence[Sequence[str]]) -> str:
    lines = [table[0], ("---",) * len(table[0]), *table[1:]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _strategy_member(outcome: StrategyOutcome) -> dict[str, Any]:
    difference = outcome.difference
    return {
        "seeds": list(outcome.seeds),
        "diverged": {str(seed): step for seed, step in outcome.diverged.items()},
        "val_loss_mean": outcome.validation_loss,
        "val_loss_std": outcome.validation_spread,
        "train_loss_mean": outcome.train_loss,
        "intra_bytes_per_step": outcome.intra_bytes_per_step,
        "inter_bytes_per_step": outcome.inter_bytes_per_step,
        "step_seconds": outcome.step_seconds,
        "difference_to_baseline": difference and difference.mean,
        "difference_to_baseline_interval": difference and difference.interval,
        "difference_to_baseline_by_seed": difference and difference.by_seed,
        "difference_to_baseline_percent": difference and difference.mean_percent,
        "difference_to_baseline_percent_interval": difference and difference.percent_interval,
        "difference_to_baseline_percent_by_seed": difference and difference.percent_by_seed,
        "significance": difference and difference.significance,
    }


def _run_member(run: FinishedRun) -> dict[str, Any]:
    return {
        "strategy": run.strategy,
        "seed": run.seed,
        "train_loss": finite(run.train_loss),
        "val_loss": finite(run.validation_loss),
        "test_loss": finite(run.test_loss),
        "first_loss": finite(run.losses[0]) if run.losses else None,
        "diverged_at": run.diverged_at,
        "intra_bytes_per_step": run.intra_bytes_per_step,
        "inter_bytes_per_step": run.inter_bytes_per_step,
        "step_seconds": run.step_seconds,
        "spikes": [spike._asdict() for spike in run.spikes],
    }
