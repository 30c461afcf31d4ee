"""Print a comparison as tables, write it as Markdown and JSON, and add notes on its limits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from sdp4bit.traffic import format_bytes
from sdp4bit_lab.common.files import write_atomically
from sdp4bit_lab.compare.config import DEFAULT_BASELINE
from sdp4bit_lab.compare.finished_run import FinishedRun, finite
from sdp4bit_lab.compare.outcomes import StrategyOutcome
from sdp4bit_lab.compare.outcomes import outcomes as strategy_outcomes
from sdp4bit_lab.compare.paired import CONFIDENCE, FEWEST_PAIRS, interval_text


@dataclass(frozen=True, kw_only=True)
class Report:
    """The finished runs of a comparison, to be printed and written."""

    runs: Sequence[FinishedRun]
    baseline: str | None
    """Label of the strategy that the others are compared with; None where it is not among them."""
    planned: int
    """Runs that the comparison has when it is complete."""
    remarks: Sequence[str] = ()
    """Further notes on the runs."""

    def outcomes(self) -> list[StrategyOutcome]:
        """Return one outcome per strategy."""
        return strategy_outcomes(self.runs, baseline=self.baseline)

    def write(self, out: Path) -> None:
        """Write summary.json, table.md and curves.png."""
        from sdp4bit_lab.compare.curves import draw_curves  # imports matplotlib: a second, on rank 0 only

        write_atomically(out / "summary.json", json.dumps(self.summary(), indent=2, allow_nan=False) + "\n")
        write_atomically(out / "table.md", self.markdown())
        draw_curves(self.runs, baseline=self.baseline, path=out / "curves.png")

    def notes(self) -> list[str]:
        """Return the limits of the numbers, a sentence each."""
        notes = list(unstable_notes(self.runs, baseline=self.baseline))
        left = self.planned - len(self.runs)
        if left:
            notes.append(f"Still to be trained: {left} of {self.planned} runs.")
        outcomes = self.outcomes()
        differences = {o.strategy: o.difference for o in outcomes if o.difference is not None}
        if self.baseline is None:
            notes.append(
                f"There are no differences, as {DEFAULT_BASELINE} is not among the strategies: add it, or "
                "choose another to compare with by --baseline."
            )
        elif len(outcomes) > 1 and not differences:
            notes.append(
                f"There are no differences, as no seed has runs of {self.baseline} and of another strategy."
            )
        pairs = min((len(difference.by_seed) for difference in differences.values()), default=FEWEST_PAIRS)
        if pairs < FEWEST_PAIRS:
            notes.append(
                f"Differences of {pairs} seed{'s' if pairs > 1 else ''} have no significance: give --seeds "
                f"{FEWEST_PAIRS} numbers or more."
            )
        for outcome in outcomes:
            paired = outcome.difference.by_seed if outcome.difference is not None else outcome.seeds
            alone = ", ".join(str(seed) for seed in outcome.seeds if seed not in paired)
            if alone:
                notes.append(
                    f"{outcome.strategy}: {self.baseline} has no finished run with seed {alone}, so the "
                    "difference is over the other seeds."
                )
        for run in self.runs:
            if run.diverged_at is not None:
                notes.append(f"{run.name} diverged at step {run.diverged_at}; no mean contains it.")
        for seed in dict.fromkeys(run.seed for run in self.runs):
            starts: dict[
                str, str
            ] = {}  # by the loss of the initial weights, as text: NaN differs from itself
            for run in self.runs:
                if run.seed == seed and run.losses:
                    starts.setdefault(repr(run.losses[0]), run.strategy)
            if len(starts) > 1:
                (loss, strategy), (other_loss, other), *_ = starts.items()
                notes.append(
                    f"WARNING: with seed {seed}, {strategy} and {other} started differently: the loss of "
                    f"step 1, before any update, is {loss} and {other_loss}."
                )
        return [*notes, *self.remarks]

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json; docs/pretraining.md explains its members."""
        return {
            "baseline": self.baseline,
            "confidence": CONFIDENCE,
            "complete": len(self.runs) == self.planned,
            "notes": self.notes(),
            "strategies": {outcome.strategy: _strategy_member(outcome) for outcome in self.outcomes()},
            "runs": [_run_member(run) for run in self.runs],
        }

    def loss_table(self) -> list[tuple[str, ...]]:
        """Return titles and rows; those of differences only where there is a baseline."""
        has_baseline = self.baseline is not None
        differences = (f"difference to {self.baseline}", f"{CONFIDENCE:.0%} interval", "significance")
        titles = ("strategy", "seeds", "validation loss", *(differences if has_baseline else ()))
        rows = [
            (
                outcome.strategy,
                _seeds_cell(outcome),
                _spread_cell(outcome),
                *(_difference_cells(outcome) if has_baseline else ()),
            )
            for outcome in self.outcomes()
        ]
        return [titles, *rows]

    def cost_table(self) -> list[tuple[str, ...]]:
        """Return titles and rows; bytes are per step, summed over all ranks."""
        titles = ("strategy", "training loss", "intra-node bytes", "inter-node bytes", "seconds")
        plain = [o.inter_bytes_per_step for o in self.outcomes() if o.strategy == self.baseline]

        def fewer(sent: float) -> str:
            ratio = plain[0] / sent if plain and sent else 1.0
            return f" ({ratio:.2f}x fewer)" if ratio > 1 else ""

        rows = [
            (
                outcome.strategy,
                "-" if outcome.train_loss is None else f"{outcome.train_loss:.4f}",
                f"{format_bytes(outcome.intra_bytes_per_step)}/step",
                f"{format_bytes(outcome.inter_bytes_per_step)}/step{fewer(outcome.inter_bytes_per_step)}",
                f"{outcome.seconds:.1f}",
            )
            for outcome in self.outcomes()
        ]
        return [titles, *rows]

    def print(self, console: Console) -> None:
        """Print the tables and their notes."""
        for titles, *rows in (self.loss_table(), self.cost_table()):
            table = Table(*(Column(title, overflow="fold") for title in titles))
            for row in rows:
                table.add_row(*row)
            console.print(table)
        for note in self.notes():
            console.print(note, highlight=False, markup=False, soft_wrap=True)

    def markdown(self) -> str:
        """Return the tables and their notes as Markdown."""
        parts = [_markdown_table(self.loss_table()), _markdown_table(self.cost_table())]
        notes = "".join(f"* {note}\n" for note in self.notes())
        return "\n".join([*parts, notes] if notes else parts)


def unstable_notes(runs: Sequence[FinishedRun], *, baseline: str | None) -> Iterator[str]:
    """Yield the runs with spikes of the gradient norm, and a warning if the baseline is among them."""
    unstable = [run for run in runs if run.spikes]
    for run in unstable:
        worst = max(run.spikes, key=lambda spike: spike.ratio)
        more = f" (and {len(run.spikes) - 1} more)" if len(run.spikes) > 1 else ""
        yield f"{run.name} was unstable: {worst}{more}."
    if any(run.strategy == baseline for run in unstable):
        yield (
            "WARNING: the baseline itself is unstable: differences mean little. Lower --lr or raise "
            "--lr-warmup-iters until it has no such steps."
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
        "seconds_mean": outcome.seconds,
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
        "seconds": run.seconds,
        "spikes": [spike._asdict() for spike in run.spikes],
    }


def _seeds_cell(outcome: StrategyOutcome) -> str:
    diverged = len(outcome.diverged)
    return f"{len(outcome.seeds)}" + (f", {diverged} diverged" if diverged else "")


def _spread_cell(outcome: StrategyOutcome) -> str:
    if outcome.validation_loss is None:
        return "-"
    spread = outcome.validation_spread
    return f"{outcome.validation_loss:.4f}" + ("" if spread is None else f" ± {spread:.4f}")


def _difference_cells(outcome: StrategyOutcome) -> tuple[str, str, str]:
    difference = outcome.difference
    if difference is None:
        return "-", "-", "-"
    mean = f"{difference.mean:+.4f} ({difference.mean_percent:+.2f} %)"
    return mean, interval_text(difference), difference.significance or "-"
