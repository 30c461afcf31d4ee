"""Several strategies and seeds under the same conditions, and what came out: summary, table, curves."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sdp4bit.pretrain.comparison import CompareConfig
from sdp4bit.pretrain.metrics import format_bytes, write_atomically
from sdp4bit.pretrain.ranks import Ranks, agree
from sdp4bit.pretrain.settings import SettingError
from sdp4bit.pretrain.trainer import TrainingResult, pretrain


def compare(config: CompareConfig, *, ranks: Ranks) -> list[TrainingResult]:
    """Return the result of every run; the folder holds summary, table and curves, written by rank 0.

    The summary is there after the first run already and grows with every other.
    """
    if ranks.world_size == 1 and config.parallel.virtual_ranks is None:
        raise SettingError(
            "one rank sends nothing, so all strategies are the same: start several, for example "
            "--nproc-per-node 4 --ranks-per-node 2, or let this one stand for several with --virtual-ranks 4 "
            "--ranks-per-node 2"
        )
    console = Console()
    results: list[TrainingResult] = []
    for run in config.runs():
        results.append(pretrain(run, ranks=ranks, console=console))
        agree(lambda: _write_summary(config.out, results) if ranks.is_first else None)
    agree(lambda: _write_report(config.out, results, console) if ranks.is_first else None)
    return results


@dataclass(frozen=True, kw_only=True)
class StrategyOutcome:
    """The runs of one strategy, over the seeds."""

    strategy: str
    validation_loss: float
    validation_spread: float | None
    """Standard deviation over the seeds; None for one seed."""
    train_loss: float
    difference_percent: float | None
    """Mean over the seeds of how much higher the validation loss is than the baseline's; None without one."""
    intra_bytes_per_step: int
    inter_bytes_per_step: int
    seconds: float
    """Mean duration of a run's steps."""


def outcomes(results: Sequence[TrainingResult]) -> list[StrategyOutcome]:
    """Return one outcome per strategy, in the order of their first runs."""
    baseline = {r.seed: r.validation_loss for r in results if r.strategy == "baseline"}
    found = []
    for strategy in dict.fromkeys(result.strategy for result in results):
        runs = [result for result in results if result.strategy == strategy]
        losses = [run.validation_loss for run in runs]
        differences = [
            100 * (run.validation_loss / baseline[run.seed] - 1) for run in runs if run.seed in baseline
        ]
        found.append(
            StrategyOutcome(
                strategy=strategy,
                validation_loss=statistics.fmean(losses),
                validation_spread=statistics.stdev(losses) if len(losses) > 1 else None,
                train_loss=statistics.fmean(run.train_loss for run in runs),
                difference_percent=statistics.fmean(differences) if differences else None,
                intra_bytes_per_step=runs[0].intra_bytes_per_step,
                inter_bytes_per_step=runs[0].inter_bytes_per_step,
                seconds=statistics.fmean(run.seconds for run in runs),
            )
        )
    return found


_COLUMNS = (
    "strategy",
    "validation loss",
    "to baseline",
    "training loss",
    "sent in nodes",
    "sent between nodes",
    "seconds",
)


def table_rows(results: Sequence[TrainingResult]) -> list[tuple[str, ...]]:
    """Return the cells of the table; bytes are per step, summed over all ranks."""
    rows: list[tuple[str, ...]] = []
    for outcome in outcomes(results):
        spread, difference = outcome.validation_spread, outcome.difference_percent
        rows.append(
            (
                outcome.strategy,
                f"{outcome.validation_loss:.4f}" + ("" if spread is None else f" ± {spread:.4f}"),
                "-" if difference is None else f"{difference:+.2f} %",
                f"{outcome.train_loss:.4f}",
                f"{format_bytes(outcome.intra_bytes_per_step)}/step",
                f"{format_bytes(outcome.inter_bytes_per_step)}/step",
                f"{outcome.seconds:.1f}",
            )
        )
    return rows


def print_table(results: Sequence[TrainingResult], *, console: Console) -> None:
    """The outcome stands on the console."""
    table = Table(*_COLUMNS)
    for row in table_rows(results):
        table.add_row(*row)
    console.print(table)


def markdown_table(results: Sequence[TrainingResult]) -> str:
    """Return the outcome as a Markdown table."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *table_rows(results)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _write_summary(out: Path, results: Sequence[TrainingResult]) -> None:
    summary: dict[str, Any] = {
        "strategies": {
            outcome.strategy: {
                "val_loss_mean": outcome.validation_loss,
                "val_loss_std": outcome.validation_spread,
                "difference_to_baseline_percent": outcome.difference_percent,
                "train_loss_mean": outcome.train_loss,
                "intra_bytes_per_step": outcome.intra_bytes_per_step,
                "inter_bytes_per_step": outcome.inter_bytes_per_step,
                "seconds_mean": outcome.seconds,
            }
            for outcome in outcomes(results)
        },
        "runs": [
            {"strategy": result.strategy, "seed": result.seed, **result.summary()} for result in results
        ],
    }
    write_atomically(out / "summary.json", json.dumps(summary, indent=2) + "\n")


def _write_report(out: Path, results: Sequence[TrainingResult], console: Console) -> None:
    from sdp4bit.pretrain.curves import draw_curves  # matplotlib takes a second that only this rank spends

    write_atomically(out / "table.md", markdown_table(results))
    draw_curves(results, path=out / "curves.png")
    print_table(results, console=console)
    console.print(f"Curves, table and summary are in {out}", highlight=False)
