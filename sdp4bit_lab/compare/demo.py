"""Train plain FSDP2 and 4-bit communication on one machine: 4 processes as 2 nodes of 2 ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sdp4bit.traffic import format_bytes
from sdp4bit_lab.common.files import write_atomically
from sdp4bit_lab.common.ranks import Ranks, run_on_all_ranks
from sdp4bit_lab.compare.config import DemoConfig
from sdp4bit_lab.compare.finished_run import FinishedRun
from sdp4bit_lab.compare.tables import unstable_notes
from sdp4bit_lab.pretrain.trainer import TrainingResult, pretrain


def demo(config: DemoConfig, *, ranks: Ranks) -> None:
    """Train both runs, write the summary and the curves, and print the table.

    A signal ends the demo after the step, with the logs alone.
    """
    console = Console()
    results: list[TrainingResult] = []
    for number, run in enumerate(config.comparison().runs(), start=1):
        result = pretrain(run, ranks=ranks, console=console, part=f"run {number} of 2")
        if result.stopped is not None:
            if ranks.is_first:
                console.print(f"Stopped by {result.stopped}: the same command begins again.")
            return
        results.append(result)
    run_on_all_ranks(lambda: _write_report(config.out, results, console) if ranks.is_first else None)


def _write_report(out: Path, results: Sequence[TrainingResult], console: Console) -> None:
    from sdp4bit_lab.compare.curves import draw_curves  # matplotlib takes a second that only this rank spends

    summary = {result.strategy: result.summary() for result in results}
    write_atomically(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    runs = [FinishedRun.of(result) for result in results]
    draw_curves(runs, baseline=results[0].strategy, path=out / "curves.png")
    print_outcome(runs, console=console)
    for note in unstable_notes(runs, baseline=results[0].strategy):
        console.print(note, highlight=False, soft_wrap=True)
    console.print(f"Curves and summary are in {out}", highlight=False, soft_wrap=True)
    console.print(f"Next: sdp4bit report {out}", highlight=False, soft_wrap=True)


def print_outcome(results: Sequence[FinishedRun], *, console: Console) -> None:
    """Print losses, bytes and times of the two runs side by side."""
    baseline, quantized = results
    table = Table("", "plain FSDP2", "sdp4bit", "difference", title="Bytes are sums over all ranks")
    for name, before, after in (
        ("training loss, last 20 steps", baseline.train_loss, quantized.train_loss),
        ("validation loss", baseline.validation_loss, quantized.validation_loss),
    ):
        table.add_row(name, f"{before:.4f}", f"{after:.4f}", f"{100 * (after / before - 1):+.2f} %")
    for level in ("intra", "inter"):
        sent, fewer = (getattr(result, f"{level}_bytes_per_step") for result in results)
        ratio = f"{sent / fewer:.2f}x fewer" if fewer else "-"
        table.add_row(f"{level}-node bytes per step", format_bytes(sent), format_bytes(fewer), ratio)
    table.add_row("seconds of training", f"{baseline.seconds:.0f}", f"{quantized.seconds:.0f}", "")
    console.print(table)
