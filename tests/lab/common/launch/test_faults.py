"""What ends a run: errors on one rank, a loss that is not finite, a killed rank; and that nothing is lost.

Layer: gloo, 2 processes; the command line.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from sdp4bit import ExchangeError
from sdp4bit_lab.common.ranks import broadcast_from_rank0, join_ranks, run_on_all_ranks
from sdp4bit_lab.common.settings import RunError, SettingError, TrainingDivergedError
from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import OptimizerConfig, PretrainConfig
from sdp4bit_lab.pretrain.metrics import MetricsWriter, StepMetrics
from sdp4bit_lab.pretrain.trainer import pretrain
from tests.lab.common.launch.started_ranks import (
    PRETRAIN,
    lines_of_log,
    options,
    outcome_of,
    ranks_of,
    wait_for_lines,
    wait_for_the_end_of,
)
from tests.lab.pretrain.saved_runs import names
from tests.lab.pretrain.tiny_runs import losses, small, this_rank
from tests.ranks import run_ranks


def errors_of_all_kinds() -> list[str]:
    def fail_on_rank_1(error: Exception) -> int:
        if dist.get_rank() == 1:
            raise error
        return dist.get_rank()

    def fail_on_rank_0() -> int:
        if dist.get_rank() == 0:
            raise SettingError("rank 0 says no")
        raise AssertionError("only rank 0 is asked")

    assert run_on_all_ranks(dist.get_rank) == dist.get_rank()
    assert broadcast_from_rank0(lambda: f"from {dist.get_rank()}") == "from 0"
    messages = []
    for work in (
        lambda: run_on_all_ranks(lambda: fail_on_rank_1(SettingError("change it"))),
        lambda: run_on_all_ranks(lambda: fail_on_rank_1(OSError("disk full"))),
        lambda: broadcast_from_rank0(fail_on_rank_0),
    ):
        try:
            work()
        except RunError as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


@pytest.mark.gloo
def test_an_error_on_one_rank_is_raised_on_all():
    results = run_ranks(errors_of_all_kinds, 2)
    assert (
        results[0]
        == results[1]
        == [
            "SettingError: change it",
            "RunError: rank 1: disk full",
            "SettingError: rank 0 says no",
        ]
    )


def end(config: PretrainConfig) -> str:
    with pytest.raises(RunError) as error:
        pretrain(config, ranks=this_rank())
    assert error.value.exit_code == (3 if error.type is TrainingDivergedError else 2)
    return str(error.value)


def ends_of(config: PretrainConfig) -> tuple[str, str]:
    """Return the errors of a run that diverges, and of one whose log is on a full disk from step 3 on."""
    wild = replace(config, optimizer=OptimizerConfig(learning_rate=1e30, clip_grad=0))
    wild = replace(wild, logging=replace(config.logging, out=config.logging.out / "diverged"))
    log = MetricsWriter.log_step

    def log_on_a_full_disk(writer: MetricsWriter, metrics: StepMetrics) -> None:
        if metrics.step == 3 and writer._lines is not None:
            writer._lines.close()
            writer._lines = open("/dev/full", "w")  # noqa: SIM115
        log(writer, metrics)

    diverged = end(
        replace(wild, checkpoint=CheckpointConfig(save=config.logging.out / "wild", save_interval=1))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsWriter, "log_step", log_on_a_full_disk)
        return diverged, end(config)


@pytest.mark.gloo
def test_a_divergence_and_a_full_disk_end_all_ranks_with_one_error(text, tmp_path):
    config = small(text, tmp_path, parallel=ParallelConfig(ranks_per_node=1))
    first, second = run_ranks(ends_of, 2, config)
    assert first == second
    diverged, full = first
    assert re.search(r"(not finite|loss is .* norm (nan|inf)) at step \d: lower --lr", diverged), diverged
    step = int(diverged.partition(" at step ")[2].partition(":")[0])
    assert names(tmp_path / "wild") == [f"step-{number:08d}" for number in range(1, step)]
    log = tmp_path / "metrics.jsonl"
    size = f"{log.stat().st_size:,} bytes are written"
    assert full.startswith(f"{log}: No space left on device; {size}, "), full
    assert losses(tmp_path).keys() == {("train", 1), ("train", 2)}


@pytest.mark.gloo
def test_a_job_on_one_machine_listens_on_loopback_alone():
    program = [sys.executable, "-m", "tests.lab.common.launch.launched_program", "addresses", "2"]
    code, output = outcome_of(program)
    assert code == 0, output
    assert output.splitlines()[-1] == "listens on 0100007F"


def test_a_rank_that_never_joins_is_an_exchange_error(monkeypatch):
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**alone, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ExchangeError, match=r"start of the ranks: rank 0 has waited .* 1/2 clients joined"):
        join_ranks(timeout=timedelta(seconds=1)).__enter__()


@pytest.mark.gloo
@pytest.mark.slow
def test_no_rank_outlives_the_killed_command(text, tmp_path):
    def kill_the_command(process: subprocess.Popen[str]) -> None:
        wait_for_lines(process, tmp_path, lines=1)
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2
        process.kill()
        wait_for_the_end_of(ranks)

    outcome_of([*PRETRAIN, *options(text, tmp_path)], kill_the_command)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_killed_again_and_again_while_it_saves_ends_as_if_it_had_not_been(seed, text, tmp_path):
    """A checkpoint is written after every step; ranks are killed some moments after a few more steps."""
    chance, steps, kills = random.Random(seed), 80, 6
    saved, out = tmp_path / "saved", tmp_path / "killed"

    def kill_at_random(process: subprocess.Popen[str]) -> None:
        # The log is written anew when the run has loaded its checkpoint.
        wait_for_lines(process, out, lines=lines_of_log(out) + chance.randrange(2, 8))
        time.sleep(chance.random() * 0.05)
        os.kill(chance.choice(ranks_of(process.pid)), signal.SIGKILL)

    code, output = outcome_of([*PRETRAIN, *options(text, tmp_path / "undisturbed", steps=steps)])
    assert code == 0, output
    saving = ("--save", str(saved), "--save-interval", "1", "--keep-last", "2", "--load", str(saved))
    run = [*PRETRAIN, *options(text, out, *saving, steps=steps)]
    for _ in range(kills):
        assert outcome_of(run, kill_at_random)[0] == 1
    code, output = outcome_of(run)
    assert code == 0, output
    assert losses(out) == losses(tmp_path / "undisturbed")
    assert names(saved) == [f"step-{steps - 1:08d}", f"step-{steps:08d}"]
