"""Train several strategies and seeds under identical conditions and tabulate losses and bytes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import torch

from sdp4bit_lab.common.files import lock_folder, note
from sdp4bit_lab.common.launch.signals import listen, received
from sdp4bit_lab.common.progress import console, end_progress, phase
from sdp4bit_lab.common.ranks import Ranks, broadcast_from_rank0, run_on_all_ranks
from sdp4bit_lab.common.settings import EXIT_FAILED, SettingError, require
from sdp4bit_lab.compare.config import CompareConfig
from sdp4bit_lab.compare.finished_run import FinishedRun, run_settings
from sdp4bit_lab.compare.jobs import Job, train, train_at_once
from sdp4bit_lab.compare.run_folders import find_finished, merge_finished
from sdp4bit_lab.compare.tables import Report
from sdp4bit_lab.pretrain.data.batches import prepare_dataset


def compare(
    config: CompareConfig, *, ranks: Ranks, command: Literal["compare", "demo"] = "compare"
) -> list[FinishedRun]:
    """Train the runs that have no result yet, and return all finished runs.

    The report is updated after every run. A signal stops the comparison after the current step.

    Args:
        command: demo prints no time of a step, because its link has no limit, and no options of compare.

    Raises:
        SettingError: on all ranks before training: a folder has a result with other settings, or another
        comparison writes there.
        SystemExit: a run of --jobs failed; the others have ended.
    """
    lock = run_on_all_ranks(lambda: lock_folder(config.out, option="--out") if ranks.is_first else None)
    try:
        return _compare(config, ranks=ranks, command=command)
    finally:
        if lock is not None:
            lock.close()


def _compare(
    config: CompareConfig, *, ranks: Ranks, command: Literal["compare", "demo"]
) -> list[FinishedRun]:
    world_size = ranks.world_size
    if config.jobs > 1:
        require(world_size == 1, "--jobs starts its own processes: run it without torchrun")
        world_size = config.parallel.processes(torch.cuda.device_count())
        config.parallel.check_world(world_size)
    if world_size == 1 and config.parallel.simulated_ranks is None:
        raise SettingError(
            "one rank sends nothing, so all strategies are identical: start several with --nproc-per-node 4 "
            "--ranks-per-node 2, or simulate them with --simulated-ranks 4 --ranks-per-node 2"
        )
    runs = config.runs()
    dataset = prepare_dataset(runs[0][1].resolved_data, ranks=ranks).key
    jobs = [
        Job(
            config=run,
            label=variant.label,
            part=f"run {number} of {len(runs)}",
            planned={
                "strategy": variant.label,
                "settings": run_settings(run, dataset=dataset, world_size=world_size),
                "quantization": json.loads(json.dumps(asdict(run.quantization))),
            },
        )
        for number, (variant, run) in enumerate(runs, start=1)
    ]
    baseline = config.choose_baseline([variant.label for variant, _ in runs])

    def report() -> Report:
        planned = {job.folder: job.planned for job in jobs}
        finished = broadcast_from_rank0(lambda: find_finished(planned))
        return Report(runs=list(finished.values()), baseline=baseline, planned=len(jobs), command=command)

    def write() -> None:
        current = report()
        run_on_all_ranks(lambda: _write(current, config.out) if ranks.is_first else None)

    done = report().runs
    if done and ranks.is_first:
        console().print(f"trained before: {', '.join(run.name for run in done)}")
    names = {run.name for run in done}
    remaining = [job for job in jobs if f"{job.label}, seed {job.config.seed}" not in names]
    stopped: str | None = None
    failed: list[str] = []
    if config.jobs > 1:
        listen()
        end_progress()  # the runs print theirs
        for place, (job, code) in enumerate(train_at_once(remaining, most=config.jobs), start=1):
            if code and received() is None:
                failed.append(f"{job.label}, seed {job.config.seed} (exit code {code})")
            if place < len(remaining):
                write()
        stopped = number.name if (number := received()) else None
    else:
        for place, job in enumerate(remaining, start=1):
            steps_after = (len(remaining) - place) * config.training.steps
            stopped = train(replace(job, steps_after=steps_after), ranks=ranks)
            if stopped is not None:
                break
            if place < len(remaining):
                write()
    last = report()
    if last.runs:
        run_on_all_ranks(lambda: _conclude(last, config.out) if ranks.is_first else None)
    if stopped is not None and ranks.is_first:
        console().print(f"Stopped by {stopped}. The same command continues with the remaining runs.")
    if failed:
        note(f"error: failed runs: {', '.join(failed)}")
        raise SystemExit(EXIT_FAILED)
    return list(last.runs)


def merge_comparisons(config: CompareConfig) -> list[FinishedRun]:
    """Write summary, table and curves for the finished runs of --merge; return the runs."""
    runs = merge_finished(config.merge)
    baseline = config.choose_baseline([run.strategy for run in runs])
    report = Report(runs=runs, baseline=baseline, planned=len(runs))
    _conclude(report, config.out)
    return runs


def _write(report: Report, out: Path) -> None:
    phase("writing summary.json, table.md and curves.png")
    report.write(out)
    end_progress()


def _conclude(report: Report, out: Path) -> None:
    _write(report, out)
    console().print(report.text())  # already wrapped at 80 columns
    if report.command == "compare":
        console().print(f"\nWrote summary.json, table.md and curves.png to {out}\nnext: sdp4bit report {out}")
