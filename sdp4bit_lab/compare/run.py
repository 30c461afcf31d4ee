"""Several strategies and seeds under the same conditions, and what came out: summary, table, curves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from sdp4bit_lab.common.ranks import Ranks, agree, decide_on_rank_0
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.compare.config import CompareConfig
from sdp4bit_lab.compare.finished_run import FinishedRun, RunRecord, environment, run_settings
from sdp4bit_lab.compare.run_folders import PlannedFolder, find_finished, merge_finished
from sdp4bit_lab.compare.tables import Report
from sdp4bit_lab.pretrain.data.batches import prepare_dataset
from sdp4bit_lab.pretrain.trainer import pretrain


def compare(config: CompareConfig, *, ranks: Ranks) -> list[FinishedRun]:
    """Return every finished run; the folder holds summary, table and curves, written by rank 0.

    1. Runs whose folder has a result of the same settings are taken from there.
    2. Each other one is trained; its result and the report are written before the next one starts.

    A run that diverges is a result. A signal ends the comparison after the step; it can be started again.

    Raises:
        SettingError: on all ranks, before anything is trained: a folder has a result of other settings.
    """
    if ranks.world_size == 1 and config.parallel.simulated_ranks is None:
        raise SettingError(
            "one rank sends nothing, so all strategies are the same: start several, for example "
            "--nproc-per-node 4 --ranks-per-node 2, or let this one stand for several with "
            "--simulated-ranks 4 --ranks-per-node 2"
        )
    console = Console()
    planned = _folders(config, ranks=ranks)
    finished = decide_on_rank_0(lambda: find_finished(list(planned.values())))
    if finished and ranks.is_first:
        names = ", ".join(record.run.name for record in finished.values())
        console.print(f"trained before: {names}", highlight=False, markup=False, soft_wrap=True)

    def records() -> list[RunRecord]:
        return [finished[folder] for folder in planned if folder in finished]

    def report() -> Report:
        return _report(records(), baseline=config.baseline_label, planned=len(planned))

    stopped = None
    for number, (variant, run) in enumerate(config.planned(), start=1):
        folder = run.logging.out
        if folder in finished:
            continue
        part = f"seed {run.seed}, run {number} of {len(planned)}"
        result = pretrain(
            run, ranks=ranks, console=console, label=variant.label, part=part, keep_diverged=True
        )
        stopped = result.stopped
        if stopped is not None:
            break
        finished[folder] = record = RunRecord(
            settings=planned[folder].settings,
            quantization=planned[folder].quantization,
            environment=environment(ranks.device),
            run=FinishedRun.of(result),
        )

        def write(record: RunRecord = record, folder: Path = folder) -> None:
            if ranks.is_first:
                record.write(folder)
                report().write(config.out)

        agree(write)
    if finished:
        agree(lambda: _conclude(report(), config.out, console) if ranks.is_first else None)
    if stopped is not None and ranks.is_first:
        console.print(f"Stopped by {stopped}: the same command goes on with the runs that are left.")
    return [record.run for record in records()]


def merge_comparisons(config: CompareConfig) -> list[FinishedRun]:
    """Return the finished runs of the folders of --merge; --out holds their summary, table and curves."""
    records = merge_finished(config.merge)
    labels = list(dict.fromkeys(record.run.strategy for record in records))
    baseline = config.choose_baseline(labels)
    _conclude(_report(records, baseline=baseline, planned=len(records)), config.out, Console())
    return [record.run for record in records]


def _folders(config: CompareConfig, *, ranks: Ranks) -> dict[Path, PlannedFolder]:
    """Return what the folder of every run has to hold when it is done; called on every rank."""
    runs = config.planned()
    dataset = prepare_dataset(runs[0][1].resolved_data, ranks=ranks).key
    return {
        run.logging.out: PlannedFolder(
            folder=run.logging.out,
            strategy=variant.label,
            settings=run_settings(run, dataset=dataset, world_size=ranks.world_size),
            quantization=json.loads(json.dumps(asdict(run.quantization))),
        )
        for variant, run in runs
    }


def _report(records: Iterable[RunRecord], *, baseline: str | None, planned: int) -> Report:
    records = list(records)
    remarks = []
    for what in ("torch", "device"):
        kinds = list(dict.fromkeys(record.environment.get(what, "unknown") for record in records))
        if len(kinds) > 1:
            remarks.append(f"WARNING: runs differ in {what}: {', '.join(kinds)}.")
    return Report(
        runs=[record.run for record in records], baseline=baseline, planned=planned, remarks=remarks
    )


def _conclude(report: Report, out: Path, console: Console) -> None:
    report.write(out)
    report.print(console)
    console.print(f"Curves, table and summary are in {out}", highlight=False, soft_wrap=True)
    console.print(f"Next: sdp4bit report {out}", highlight=False, soft_wrap=True)
