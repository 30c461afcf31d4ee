"""Print a comparison as tables, write it as Markdown and JSON, and add notes on its limits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from sdp4bit.traffic import format_bytes
from sdp4bit_lab.common.files import write_atomically
from sdp4bit_lab.compare.config import DEFAULT_BASELINE
from sdp4bit_lab.compare.finished_run import FinishedRun, finite
from sdp4bit_lab.compare.outcomes import StrategyOutcome, outcomes
from sdp4bit_lab.compare.paired import CONFIDENCE, FEWEST_PAIRS, interval_text

NONE = "–"
LINKS = (100, 250, 1000)
"""Mbit/s between nodes."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The finished runs of a comparison, to be printed and written."""

    runs: Sequence[FinishedRun]
    baseline: str | None
    """Label of the strategy that the others are compared with; None where it is not among them."""
    planned: int
    """Runs that the comparison has when it is complete."""

    @cached_property
    def outcomes(self) -> list[StrategyOutcome]:
        """One outcome per strategy."""
        return outcomes(self.runs, baseline=self.baseline)

    def write(self, out: Path) -> None:
        """Write summary.json, table.md and curves.png."""
        from sdp4bit_lab.compare.curves import draw_curves  # imports matplotlib: a second, on rank 0 only

        write_atomically(out / "summary.json", json.dumps(self.summary(), indent=2, allow_nan=False) + "\n")
        write_atomically(out / "table.md", self.markdown())
        draw_curves(self.runs, baseline=self.baseline, path=out / "curves.png")

    def notes(self) -> list[str]:
        """Return the limits of the numbers, a sentence each."""
        notes = list(_unstable_notes(self.runs, baseline=self.baseline))
        left = self.planned - len(self.runs)
        if left:
            notes.append(f"Not trained yet: {left} of {self.planned} runs.")
        differences = [outcome.difference for outcome in self.outcomes if outcome.difference is not None]
        if self.baseline is None:
            notes.append(
                f"There are no differences because {DEFAULT_BASELINE} is not among the strategies: add it, "
                "or choose another one with --baseline."
            )
        elif len(self.outcomes) > 1 and not differences:
            notes.append(
                f"There are no differences because no seed has runs of {self.baseline} and of another "
                "strategy."
            )
        pairs = min((len(difference.by_seed) for difference in differences), default=FEWEST_PAIRS)
        if pairs < FEWEST_PAIRS:
            notes.append(
                f"Differences of {pairs} seed{'s' if pairs > 1 else ''} have no significance: give "
                f"{FEWEST_PAIRS} seeds or more, such as --seeds 1,2,3."
            )
        for outcome in self.outcomes:
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
        starts: dict[int, FinishedRun] = {}
        for run in self.runs:
            first = starts.setdefault(run.seed, run)
            # As text: NaN differs from itself.
            if run.losses and first.losses and repr(run.losses[0]) != repr(first.losses[0]):
                notes.append(
                    f"WARNING: with seed {run.seed}, {first.strategy} and {run.strategy} started "
                    f"differently: the loss of step 1, before any update, is {first.losses[0]} and "
                    f"{run.losses[0]}."
                )
        for name in ("torch", "device"):
            kinds = list(dict.fromkeys(run.environment.get(name, "unknown") for run in self.runs))
            if len(kinds) > 1:
                notes.append(f"WARNING: runs differ in {name}: {', '.join(kinds)}.")
        return notes

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json; docs/pretraining.md explains its members."""
        return {
            "baseline": self.baseline,
            "confidence": CONFIDENCE,
            "complete": len(self.runs) == self.planned,
            "notes": self.notes(),
            "strategies": {outcome.strategy: _strategy_member(outcome) for outcome in self.outcomes},
            "runs": [_run_member(run) for run in self.runs],
        }

    def loss_table(self) -> list[tuple[str, ...]]:
        """Return titles and rows; those of differences only if there is a baseline.

        Line breaks are for the terminal; Markdown has spaces.
        """
        titles = ["strategy", "seeds", "validation loss"]
        if self.baseline is not None:
            titles += [
                f"difference from {self.baseline}",
                f"{100 * CONFIDENCE:.0f} % interval",
                "significance",
            ]
        rows = []
        for outcome in self.outcomes:
            seeds, spread = f"{len(outcome.seeds)}", outcome.validation_spread
            if outcome.diverged:
                seeds += f", {len(outcome.diverged)} diverged"
            loss = NONE if outcome.validation_loss is None else f"{outcome.validation_loss:.4f}"
            row = [outcome.strategy, seeds, loss if spread is None else f"{loss}\n± {spread:.4f}"]
            difference = outcome.difference
            if difference is not None:
                mean = f"{difference.mean:+.4f}\n({difference.mean_percent:+.2f} %)"
                row += [mean, interval_text(difference), difference.significance or NONE]
            rows.append(tuple(row + [NONE] * (len(titles) - len(row))))
        return [tuple(titles), *rows]

    def cost_table(self) -> list[tuple[str, ...]]:
        """Return titles and rows; bytes are per step, summed over all ranks."""
        titles = ("strategy", "training loss", "intra-node bytes", "inter-node bytes", "seconds")
        plain = [o.inter_bytes_per_step for o in self.outcomes if o.strategy == self.baseline]

        def fewer(sent: float) -> str:
            ratio = plain[0] / sent if plain and sent else 1.0
            return f"\n({ratio:.2f}x fewer)" if ratio > 1 else ""

        rows = [
            (
                outcome.strategy,
                NONE if outcome.train_loss is None else f"{outcome.train_loss:.4f}",
                f"{format_bytes(outcome.intra_bytes_per_step)}/step",
                f"{format_bytes(outcome.inter_bytes_per_step)}/step{fewer(outcome.inter_bytes_per_step)}",
                f"{outcome.seconds:.1f}",
            )
            for outcome in self.outcomes
        ]
        return [titles, *rows]

    def print(self, console: Console) -> None:
        """Print the tables and their notes."""
        for titles, *rows in (self.loss_table(), self.cost_table()):
            columns = (
                Column(title, overflow="fold", width=_width(title, cells))
                for title, *cells in zip(titles, *rows, strict=True)
            )
            table = Table(*columns, box=SIMPLE, pad_edge=False, show_edge=False, collapse_padding=True)
            for row in rows:
                table.add_row(*row)
            console.print(table, "", soft_wrap=False)
        for note in self.notes():
            console.print(note, highlight=False, markup=False, soft_wrap=False)

    def markdown(self) -> str:
        """Return the tables and their notes as Markdown."""
        parts = [_markdown_table(self.loss_table()), _markdown_table(self.cost_table())]
        notes = "".join(f"* {note}\n" for note in self.notes())
        return "\n".join([*parts, notes] if notes else parts)


def _width(title: str, cells: Sequence[str]) -> int:
    """Return the width of a column: titles and words break at spaces, numbers at line breaks alone."""
    texts = [line for cell in cells for line in cell.split("\n")]
    if not any(character.isdigit() for text in texts for character in text):
        texts = [word for text in texts for word in text.split()]
    return min(24, max(map(len, [*title.split(), *texts])))


def link_times(summary: dict[str, Any], *, nodes: int) -> str:
    """Return the time that a node needs to send its bytes of a step, by strategy and network.

    Args:
        summary: content of summary.json.
        nodes: nodes of the runs, which send equally many bytes.
    """
    sent = {name: each["inter_bytes_per_step"] / nodes for name, each in summary["strategies"].items()}
    titles = ("plain FSDP2" if name == DEFAULT_BASELINE else name for name in sent)
    rows: list[tuple[str, ...]] = [
        ("", *titles),
        ("a node sends per step", *map(format_bytes, sent.values())),
    ]
    for megabits in LINKS:
        rate = megabits * 1e6 / 8
        rows.append((f"at {megabits:,} Mbit/s", *(f"{1000 * size / rate:,.0f} ms" for size in sent.values())))
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([name.ljust(first), *map(str.rjust, cells, widths)]) for name, *cells in rows]
    return "\n".join(
        [
            *lines,
            "The seconds of the runs do not show this: all processes share the cores of this machine,",
            "and their messages pass through its memory instead of a network.",
        ]
    )


def _unstable_notes(runs: Sequence[FinishedRun], *, baseline: str | None) -> Iterator[str]:
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
    return "".join(f"| {' | '.join(cells)} |".replace("\n", " ") + "\n" for cells in lines)


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
