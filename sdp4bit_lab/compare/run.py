"""Train several strategies and seeds under the same conditions, and report their losses and bytes."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from sdp4bit_lab.common.ranks import Ranks, broadcast_from_rank0, run_on_all_ranks
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.compare.config import CompareConfig
from sdp4bit_lab.compare.finished_run import FinishedRun, environment, run_settings
from sdp4bit_lab.compare.run_folders import find_finished, merge_finished
from sdp4bit_lab.compare.tables import Report
from sdp4bit_lab.pretrain.data.batches import prepare_dataset
from sdp4bit_lab.pretrain.trainer import pretrain


def compare(config: CompareConfig, *, ranks: Ranks) -> list[FinishedRun]:
    """Train the runs without a result, report all of them, and return them.

    1. Runs whose folder has a result of the same settings are taken from there.
    2. Each other one is trained; its result and the report are written before the next one starts.

    A run that diverges is a result. A signal ends the comparison after the step; it can be started again.

    Raises:
        SettingError: on all ranks, before anything is trained: a folder has a result of other settings.
    """
    if ranks.world_size == 1 and config.parallel.simulated_ranks is None:
        raise SettingError(
            "one rank sends nothing, so all strategies are the same: start several, for example "
            "--nproc-per-node 4 --ranks-per-node 2, or simulate them with "
            "--simulated-ranks 4 --ranks-per-node 2"
        )
    console = Console(highlight=False, markup=False, soft_wrap=True)
    runs = config.runs()
    dataset = prepare_dataset(runs[0][1].resolved_data, ranks=ranks).key
    # By folder, the settings that its result must have.
    planned: dict[Path, dict[str, Any]] = {
        run.logging.out: {
            "strategy": variant.label,
            "settings": run_settings(run, dataset=dataset, world_size=ranks.world_size),
            "quantization": json.loads(json.dumps(asdict(run.quantization))),
        }
        for variant, run in runs
    }
    finished = broadcast_from_rank0(lambda: find_finished(planned))
    if finished and ranks.is_first:
        console.print(f"trained before: {', '.join(run.name for run in finished.values())}")

    baseline = config.choose_baseline([variant.label for variant, _ in runs])

    def report() -> Report:
        ended = [finished[folder] for folder in planned if folder in finished]
        return Report(runs=ended, baseline=baseline, planned=len(planned))

    def write(run: FinishedRun, folder: Path) -> None:
        if ranks.is_first:
            run.write(folder)
            report().write(config.out)

    stopped = None
    for number, (variant, run_config) in enumerate(runs, start=1):
        folder = run_config.logging.out
        if folder in finished:
            continue
        part = f"seed {run_config.seed}, run {number} of {len(planned)}"
        result = pretrain(
            run_config, ranks=ranks, console=console, label=variant.label, part=part, keep_diverged=True
        )
        stopped = result.stopped
        if stopped is not None:
            break
        settings = {name: planned[folder][name] for name in ("settings", "quantization")}
        finished[folder] = FinishedRun.of(result, **settings, environment=environment(ranks.device))
        run_on_all_ranks(partial(write, finished[folder], folder))
    if finished:
        run_on_all_ranks(lambda: _conclude(report(), config.out, console) if ranks.is_first else None)
    if stopped is not None and ranks.is_first:
        console.print(f"Stopped by {stopped}: the same command continues with the remaining runs.")
    return list(report().runs)


def merge_comparisons(config: CompareConfig) -> list[FinishedRun]:
    """Write summary, table and curves of the finished runs of --merge to --out, and return the runs."""
    runs = merge_finished(config.merge)
    baseline = config.choose_baseline([run.strategy for run in runs])
    report = Report(runs=runs, baseline=baseline, planned=len(runs))
    _conclude(report, config.out, Console(highlight=False, markup=False, soft_wrap=True))
    return runs


def _conclude(report: Report, out: Path, console: Console) -> None:
    report.write(out)
    report.print(console)
    console.print(f"Curves, table and summary are in {out}")
    console.print(f"Next: sdp4bit report {out}")
