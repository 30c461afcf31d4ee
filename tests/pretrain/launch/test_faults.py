"""What ends a run: errors on one rank, a loss that is not finite, a killed rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("tyro")
pytest.importorskip("tokenizers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from sdp4bit.pretrain.config.pretrain import OptimizerConfig, PretrainConfig
from sdp4bit.pretrain.launch.config import ParallelConfig
from sdp4bit.pretrain.launch.ranks import agree, decide_on_rank_0
from sdp4bit.pretrain.loop import TrainingDivergedError
from sdp4bit.pretrain.options import SettingError
from sdp4bit.pretrain.trainer import pretrain
from tests.pretrain.launch.started_ranks import ranks_of
from tests.pretrain.tiny_runs import small, this_rank, write_text
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def errors_of_all_kinds() -> list[str]:
    def fail_on_rank_1(error: Exception) -> int:
        if dist.get_rank() == 1:
            raise error
        return dist.get_rank()

    def fail_on_rank_0() -> int:
        if dist.get_rank() == 0:
            raise SettingError("rank 0 says no")
        raise AssertionError("only rank 0 is asked")

    assert agree(dist.get_rank) == dist.get_rank()
    assert decide_on_rank_0(lambda: f"from {dist.get_rank()}") == "from 0"
    messages = []
    for work in (
        lambda: agree(lambda: fail_on_rank_1(SettingError("change it"))),
        lambda: agree(lambda: fail_on_rank_1(OSError("disk full"))),
        lambda: decide_on_rank_0(fail_on_rank_0),
    ):
        try:
            work()
        except (SettingError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_an_error_on_one_rank_is_raised_on_all():
    results = run_ranks(errors_of_all_kinds, 2)
    assert (
        results[0]
        == results[1]
        == [
            "SettingError: change it",
            "RuntimeError: rank 1: OSError: disk full",
            "SettingError: rank 0 says no",
        ]
    )


def diverge(config: PretrainConfig) -> str:
    with pytest.raises(TrainingDivergedError) as error:
        pretrain(config, ranks=this_rank())
    return str(error.value)


def test_a_loss_that_is_not_finite_ends_the_run(text, tmp_path):
    config = small(text, tmp_path, optimizer=OptimizerConfig(learning_rate=1e30, clip_grad=0))
    messages = run_ranks(diverge, 2, replace(config, parallel=ParallelConfig(ranks_per_node=1)))
    assert messages[0] == messages[1]
    assert "lower --lr" in messages[0]


@pytest.fixture
def command(text, tmp_path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The command and its two ranks, which are training."""
    settings = {
        "nproc-per-node": 2,
        "steps": 100000,
        "strategy": "baseline",
        "layers": 1,
        "hidden": 64,
        "heads": 2,
        "data-path": text,
        "vocabulary-size": 512,
        "cache-dir": text.parent / "cache",
        "out": tmp_path,
        "sequence-length": 32,
    }
    line = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [sys.executable, "-m", "sdp4bit", "pretrain", *line, "--no-tensorboard"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 240
        log = tmp_path / "metrics.jsonl"
        while not (log.exists() and log.read_text()):
            assert time.monotonic() < deadline, "training has not started"
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.2)
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2
        yield process, ranks
    finally:
        process.kill()
        process.wait()


def test_a_killed_rank_ends_the_others(command):
    process, ranks = command
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 failed (ended by SIGKILL); the other ranks have been stopped" in errors
    wait_for_the_end_of(ranks)


@pytest.mark.slow
def test_no_rank_outlives_the_killed_command(command):
    process, ranks = command
    process.kill()
    wait_for_the_end_of(ranks)


def wait_for_the_end_of(processes: list[int]) -> None:
    """None of the processes runs any more."""
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < deadline, f"{processes} still run"
        time.sleep(0.1)
