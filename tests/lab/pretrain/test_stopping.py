"""Leaving early and what a run says of itself: signals, limits, the line of an interval."""

from __future__ import annotations

import os
import shlex
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from sdp4bit_lab.common.launch.signals import SIGNALS, keeping_handlers, listen
from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import LoggingConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig
from sdp4bit_lab.pretrain.metrics import MetricsWriter
from sdp4bit_lab.pretrain.stopping import StopRequests
from tests.lab.common.launch.started_ranks import PRETRAIN, Process, options, outcome_of, wait_for_lines
from tests.lab.pretrain.saved_runs import names
from tests.lab.pretrain.tiny_runs import losses, read_log, small, step_metrics, train_here
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def after_step(stops: StopRequests, step: int) -> str | None:
    """Return what all ranks together find, as a training step puts it together."""
    code = torch.tensor(stops.code(step))
    torch.distributed.all_reduce(code, op=torch.distributed.ReduceOp.MAX)
    return stops.reason(int(code))


def reasons() -> list[str | None]:
    """Return what each rank learns of a limit or a signal that only rank 1 has."""
    rank = torch.distributed.get_rank()
    limited = TrainingConfig(exit_interval=2) if rank == 1 else TrainingConfig()
    stops = StopRequests(limited, device=CPU)
    found = [after_step(stops, step) for step in (1, 2, 3)]
    expired = TrainingConfig(exit_duration_in_mins=0) if rank == 1 else TrainingConfig()
    # The reason is named by what this rank was configured with, so both know the number.
    stops = StopRequests(replace(expired, exit_duration_in_mins=0 if rank == 1 else 1e9), device=CPU)
    found.append(after_step(stops, 1))
    stops = StopRequests(TrainingConfig(), device=CPU)
    before = [signal.getsignal(number) for number in SIGNALS]
    with keeping_handlers():
        listen()
        found.append(stops.before_first_step())
        # The first one counts; Python runs handlers at the next line.
        for number in (signal.SIGUSR1, signal.SIGTERM) if rank == 1 else ():
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        # Nested, as a program does it that its launcher has made listen already.
        with keeping_handlers():
            listen()
            found.append(stops.before_first_step())
        found.append(after_step(stops, 1))
    assert [signal.getsignal(number) for number in SIGNALS] == before
    # What came before is over.
    with keeping_handlers():
        listen()
        found.append(after_step(stops, 1))
    return found


@pytest.mark.gloo
def test_one_rank_s_reason_to_leave_is_every_rank_s():
    outcomes = run_ranks(reasons, 2, timeout=60)
    assert [found[0] for found in outcomes] == [None, None]
    assert all(found[1] is not None and found[1].startswith("--exit-interval") for found in outcomes)
    assert [found[2] for found in outcomes] == [None, None]
    assert all(found[3].startswith("--exit-duration-in-mins") for found in outcomes)
    assert [found[4:] for found in outcomes] == [[None, "SIGUSR1", "SIGUSR1", None]] * 2


@pytest.mark.gloo
@pytest.mark.slow
def test_a_run_left_at_an_interval_resumes_to_the_same_losses(text, tmp_path):
    whole = small(text, tmp_path / "whole", parallel=ParallelConfig(ranks_per_node=1))
    folder = CheckpointConfig(save=tmp_path / "checkpoints")
    left = replace(
        whole,
        training=replace(whole.training, exit_interval=4),
        logging=replace(whole.logging, out=tmp_path / "left"),
        checkpoint=folder,
    )
    resumed = replace(whole, logging=left.logging, checkpoint=CheckpointConfig(load=tmp_path / "checkpoints"))
    results = run_ranks(train_here, 2, whole, left, resumed, resumed, timeout=150)
    assert [run.stopped for run in results[0]] == [None, "--exit-interval 4", None, None]
    # The validation that belongs after step 4 was left out, and is made up for.
    assert ("validation", 4) in losses(tmp_path / "left")
    assert losses(tmp_path / "left") == losses(tmp_path / "whole")
    # Also where that has been done by an earlier continuation, after which nothing was saved.
    places = [
        [(line["event"], line["step"]) for line in read_log(tmp_path / run) if line["event"] != "resume"]
        for run in ("left", "whole")
    ]
    assert places[0] == places[1]


@pytest.mark.gloo
@pytest.mark.slow
def test_a_signal_to_the_command_saves_and_leaves(text, tmp_path):
    out, saved = tmp_path / "run", tmp_path / "checkpoints"

    def strike(process: Process) -> None:
        wait_for_lines(process, out)
        process.send_signal(signal.SIGUSR1)

    command = [*PRETRAIN, *options(text, out, "--save", str(saved))]
    code, output = outcome_of(command, strike)
    assert code == 0 and "because of SIGUSR1; saved in" in output, output
    last = max(step for event, step in losses(out) if event == "train")
    assert max(names(saved)) == f"step-{last:08d}"
    # The last line continues the run, and the same command prints it again.
    continuing = f"continue: python -m sdp4bit_lab {shlex.join([*command[3:], '--auto-resume'])}"
    assert output.splitlines()[-1].endswith(continuing)
    code, output = outcome_of(command)
    assert (
        code == 2 and f"has the metrics of an earlier run (to {continuing.replace(':', ' it:', 1)})" in output
    )
    code, output = outcome_of([*command, "--auto-resume", "--exit-interval", "1"])
    assert code == 0 and f"resumed from step {last} of {saved}" in output, output


def written_lines(tmp_path: Path, config: LoggingConfig) -> list[str]:
    console = Console(file=(tmp_path / "console").open("w+"))
    writer = MetricsWriter(config, prefix="qwd:", steps=4, first_step=0, console=console)
    for step in range(1, 5):
        writer.log_step(step_metrics(step))
    writer.close()
    console.file.close()
    return (tmp_path / "console").read_text().splitlines()


def test_a_line_has_the_means_since_the_last_one(tmp_path):
    config = LoggingConfig(out=tmp_path, tensorboard=False, log_interval=3, log_throughput=True)
    lines = written_lines(tmp_path, config)
    assert [line.split(" | ")[0] for line in lines[:3]] == [f"qwd: step {s}/4" for s in (1, 3, 4)]
    assert lines[1].split(" | ")[1:] == [
        "loss 2.5000", "grad norm 0.500", "500 ms", "2 TFLOP/s per device", "500 B inter-node (5.90x)",
    ]  # fmt: skip


def test_tensorboard_events_go_where_they_are_wanted(tmp_path):
    written_lines(tmp_path, LoggingConfig(out=tmp_path / "run", tensorboard_dir=tmp_path / "events"))
    assert list((tmp_path / "events").glob("events.out.tfevents*"))
    assert not (tmp_path / "run" / "tensorboard").exists()
