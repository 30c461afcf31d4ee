"""Train the runs of a comparison, one at a time on the command's ranks or concurrently in child processes."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from sdp4bit_lab.common.launch.child import end_with_parent
from sdp4bit_lab.common.launch.local import run_on_ranks, start
from sdp4bit_lab.common.launch.signals import received
from sdp4bit_lab.common.ranks import Ranks, run_on_all_ranks
from sdp4bit_lab.compare.finished_run import FinishedRun, environment
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.trainer import pretrain

_POLL = 0.1


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to train."""

    config: PretrainConfig
    label: str
    part: str
    """Its position among all runs, for the output."""
    planned: dict[str, Any]
    """Strategy, settings and quantization that its result must have."""
    steps_after: int | None = None
    """Steps of the runs that follow, for the time left; None if runs train concurrently."""

    @property
    def folder(self) -> Path:
        return self.config.logging.folder


def train(job: Job, *, ranks: Ranks) -> str | None:
    """Train a run and write its result, also if it diverges; return the reason if it stopped early."""
    result = pretrain(
        job.config,
        ranks=ranks,
        label=job.label,
        part=job.part,
        steps_after=job.steps_after,
        keep_diverged=True,
    )
    if result.stopped is None:
        settings = {name: job.planned[name] for name in ("settings", "quantization")}
        run = FinishedRun.of(result, **settings, environment=environment(ranks.device))
        run_on_all_ranks(lambda: run.write(job.folder) if ranks.is_first else None)
    return result.stopped


def train_with_one_thread(job: Job, *, ranks: Ranks) -> None:
    """Train a run on cores shared with other runs."""
    torch.set_num_threads(1)
    train(job, ranks=ranks)


def train_at_once(jobs: Sequence[Job], *, most: int) -> Iterator[tuple[Job, int]]:
    """Train up to `most` runs concurrently in child processes; yield each with its exit code.

    A signal to this process is forwarded to all runs, and no further run starts.
    """
    context = multiprocessing.get_context("spawn")
    waiting, running = list(jobs), dict[SpawnProcess, Job]()
    was_forwarded = False
    try:
        while running or (waiting and received() is None):
            while waiting and len(running) < most and received() is None:
                process = context.Process(target=_run_job, args=(waiting[0],))
                start(process)
                running[process] = waiting.pop(0)
            wait([process.sentinel for process in running], timeout=_POLL)
            number = received()
            if number is not None and not was_forwarded:
                was_forwarded = True
                for process in running:
                    if process.exitcode is None and process.pid is not None:
                        os.kill(process.pid, number)
            for process in [process for process in running if process.exitcode is not None]:
                yield running.pop(process), process.exitcode or 0
    finally:
        for process in running:
            process.kill()
            process.join()


def _run_job(job: Job) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    # The updating lines of several runs would overwrite each other; a dumb terminal gets lines like a file.
    os.environ["TERM"] = "dumb"
    program = f"{__name__}:{train_with_one_thread.__name__}"
    sys.exit(run_on_ranks(program, config=job, parallel=job.config.parallel))
