"""Whole runs over gloo: the command line, resuming, strategies side by side, the demo, and failures.

Ranks are processes: 4 of them stand for 2 nodes of 2. The text is a few files of the standard library.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("tyro")
pytest.importorskip("tokenizers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from sdp4bit.pretrain import demo as demo_module
from sdp4bit.pretrain.comparison import DEMO_PROCESSES, CompareConfig, DemoConfig
from sdp4bit.pretrain.config import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PretrainConfig,
    SettingError,
    TrainingConfig,
)
from sdp4bit.pretrain.corpus import END_OF_TEXT
from sdp4bit.pretrain.ranks import Ranks, agree, first_rank_decides
from sdp4bit.pretrain.trainer import TrainingDivergedError, TrainingResult, pretrain
from tests.ranks import run_ranks

SOURCES = (
    "argparse",
    "ast",
    "base64",
    "calendar",
    "csv",
    "enum",
    "heapq",
    "inspect",
    "pickle",
    "queue",
    "tarfile",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = Path(json.__file__).parent.parent
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        END_OF_TEXT.join((library / f"{name}.py").read_text("utf-8") for name in SOURCES), "utf-8"
    )
    return path


def small(text: Path, out: Path, **changes: Any) -> PretrainConfig:
    """Return a run of 8 steps of a model with 0.1 million parameters, with dropout."""
    config = PretrainConfig(
        seed=5,
        model=ModelConfig(layers=2, hidden=64, heads=2, dropout=0.1),
        data=DataConfig(data_path=(text,), vocabulary_size=512, cache_dir=text.parent / "cache"),
        training=TrainingConfig(
            steps=8,
            sequence_length=32,
            micro_batch_size=2,
            eval_interval=4,
            eval_batches=2,
            accumulation=2,
        ),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_fraction=0.25),
        parallel=ParallelConfig(ranks_per_node=2),
        logging=LoggingConfig(out=out, tensorboard=False),
    )
    return replace(config, **changes)


def this_rank() -> Ranks:
    rank, size = dist.get_rank(), dist.get_world_size()
    return Ranks(
        rank=rank, world_size=size, local_rank=rank, local_world_size=size, device=torch.device("cpu")
    )


def train_here(*configs: PretrainConfig) -> list[TrainingResult]:
    return [pretrain(config, ranks=this_rank()) for config in configs]


def command_line(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sdp4bit", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def read_log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> dict[tuple[str, int], float]:
    return {(line["event"], line["step"]): line["loss"] for line in read_log(out)}


def test_the_command_line_trains_on_four_processes(text, tmp_path):
    done = command_line(
        *("pretrain", "--nproc-per-node", "4", "--ranks-per-node", "2", "--steps", "8"),
        *(
            "--layers",
            "1",
            "--hidden",
            "64",
            "--heads",
            "2",
            "--learning-rate",
            "5e-3",
            "--sequence-length",
            "32",
        ),
        *("--data-path", str(text), "--vocabulary-size", "512", "--cache-dir", str(text.parent / "cache")),
        *("--out", str(tmp_path), "--log-interval", "4"),
    )
    assert done.returncode == 0, done.stderr
    lines = read_log(tmp_path)
    steps = [line for line in lines if line["event"] == "train"]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert set(steps[0]) == {
        *("event", "step", "loss", "lr", "grad_norm", "tokens_per_second", "step_seconds"),
        *("intra_bytes", "inter_bytes", "compression_ratio", "weight_drift", "gradient_error"),
    }
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert all(line["intra_bytes"] > 0 and line["inter_bytes"] > 0 for line in steps)
    assert steps[-1]["compression_ratio"] > 4
    assert [line["step"] for line in lines if line["event"] == "validation"] == [8]
    assert "sdp4bit: step 4/8  loss" in done.stdout
    assert "sdp4bit: step 8/8  validation loss" in done.stdout
    assert json.loads((tmp_path / "config.json").read_text())["strategy"] == "sdp4bit"
    assert any((tmp_path / "tensorboard").iterdir())


def test_a_setting_that_only_the_ranks_can_refuse_is_one_line_and_exit_code_2(text, tmp_path):
    done = command_line(
        *("pretrain", "--nproc-per-node", "2", "--data-path", str(text), "--sequence-length", "10000000"),
        *("--vocabulary-size", "512", "--cache-dir", str(text.parent / "cache"), "--out", str(tmp_path)),
    )
    assert done.returncode == 2
    assert done.stderr.startswith("sdp4bit: error: the training text has ")
    assert done.stderr.count("\n") == 1


def test_a_resumed_run_is_the_same_bit_for_bit(text, tmp_path):
    straight = small(text, tmp_path / "straight")
    saving = small(
        text, tmp_path / "parts", checkpoint=CheckpointConfig(save=tmp_path / "saved", save_interval=4)
    )
    resumed = replace(saving, checkpoint=CheckpointConfig(load=tmp_path / "saved" / "step-00000004"))
    run_ranks(train_here, 4, straight, saving, timeout=250)
    assert (tmp_path / "saved" / "latest").read_text() == "step-00000008\n"
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == [
        "latest",
        "step-00000004",
        "step-00000008",
    ]
    expected = losses(tmp_path / "straight")
    assert losses(tmp_path / "parts") == expected

    # New processes. The log keeps the first four steps of the interrupted part and continues.
    results = run_ranks(train_here, 4, resumed, timeout=250)
    assert [step.step for step in results[0][0].steps] == [5, 6, 7, 8]
    assert losses(tmp_path / "parts") == expected
    assert [(line["event"], line["step"]) for line in read_log(tmp_path / "parts")] == list(expected)


def load_differently(saved: Path, config: PretrainConfig) -> list[str]:
    other_model = replace(
        config, model=ModelConfig(layers=1, hidden=64, heads=2), checkpoint=CheckpointConfig(load=saved)
    )
    nothing_there = replace(config, checkpoint=CheckpointConfig(load=saved / "nowhere"))
    nothing_left = replace(config, checkpoint=CheckpointConfig(load=saved))
    messages = []
    for refused in (other_model, nothing_there, nothing_left):
        with pytest.raises(SettingError) as error:
            pretrain(refused, ranks=this_rank())
        messages.append(str(error.value))
    on = replace(config, training=replace(config.training, steps=10), checkpoint=CheckpointConfig(load=saved))
    (result,) = train_here(on)
    assert [step.step for step in result.steps] == [9, 10]
    assert math.isfinite(result.validation_loss)
    return messages


def test_checkpoints_are_checked_and_may_change_the_world_size(text, tmp_path):
    config = small(text, tmp_path / "run", parallel=ParallelConfig(ranks_per_node=1))
    run_ranks(
        train_here, 1, replace(config, checkpoint=CheckpointConfig(save=tmp_path / "saved")), timeout=250
    )
    messages = run_ranks(load_differently, 2, tmp_path / "saved", config, timeout=250)
    assert messages[0] == messages[1]
    assert "another model: layers 2 (now 1)" in messages[0][0]
    assert "nowhere: no checkpoint there" in messages[0][1]
    assert "has done 8 steps: set --steps to more" in messages[0][2]


def sampled_losses(config: PretrainConfig) -> list[float]:
    return [step.loss for step in train_here(config)[0].steps]


def test_the_same_training_on_any_number_of_ranks(text, tmp_path):
    """Plain FSDP2 in fp32: one and four ranks with the same global batch differ by rounding alone."""
    curves = []
    for world_size in (1, 4):
        config = small(
            text,
            tmp_path / str(world_size),
            strategy="baseline",
            model=ModelConfig(layers=1, hidden=64, heads=2),
            parallel=ParallelConfig(),
        )
        training = replace(
            config.training, precision="fp32", micro_batch_size=8 // world_size, accumulation=1, steps=4
        )
        config = replace(config, training=training)
        curves.append(run_ranks(sampled_losses, world_size, config, timeout=250)[0])
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def compare_here(config: CompareConfig) -> None:
    from sdp4bit.pretrain.compare import compare

    compare(config, ranks=this_rank())


def test_compare_writes_summary_table_and_curves(text, tmp_path):
    base = small(text, tmp_path)
    config = CompareConfig(
        strategies="baseline,qw,sdp4bit",
        seeds="1,2",
        out=tmp_path / "out",
        model=base.model,
        data=base.data,
        training=replace(base.training, steps=3, accumulation=1),
        optimizer=base.optimizer,
        parallel=ParallelConfig(ranks_per_node=1),
    )
    run_ranks(compare_here, 2, config, timeout=250)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(summary["strategies"]) == ["baseline", "qw", "sdp4bit"]
    assert len(summary["runs"]) == 6
    baseline, _, quantized = summary["strategies"].values()
    assert baseline["difference_to_baseline_percent"] == 0
    assert baseline["val_loss_std"] > 0
    assert quantized["difference_to_baseline_percent"] != 0
    assert 0 < quantized["inter_bytes_per_step"] < baseline["inter_bytes_per_step"] / 4
    table = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == ["baseline", "qw", "sdp4bit"]
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    # The same weights and the same samples: before any update, quantization changes nothing.
    first = {log.parent.name: read_log(log.parent)[0]["loss"] for log in tmp_path.glob("out/*/metrics.jsonl")}
    assert first["baseline-seed1"] == first["sdp4bit-seed1"] != first["baseline-seed2"]


def demo_here(config: DemoConfig) -> None:
    demo_module.demo(config, ranks=this_rank())


def test_demo_summary_has_its_shape(tmp_path):
    config = DemoConfig(steps=2, out=tmp_path / "demo", cache_dir=tmp_path / "cache")
    run_ranks(demo_here, DEMO_PROCESSES, config, timeout=250)
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert list(summary) == ["baseline", "sdp4bit"]
    for run in summary.values():
        assert list(run) == [
            "train_loss",
            "val_loss",
            "intra_bytes_per_step",
            "inter_bytes_per_step",
            "seconds",
        ]
        assert all(value > 0 for value in run.values())
    assert summary["baseline"]["inter_bytes_per_step"] > 5 * summary["sdp4bit"]["inter_bytes_per_step"]
    assert (tmp_path / "demo" / "curves.png").stat().st_size > 10_000


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
    assert first_rank_decides(lambda: f"from {dist.get_rank()}") == "from 0"
    messages = []
    for work in (
        lambda: agree(lambda: fail_on_rank_1(SettingError("change it"))),
        lambda: agree(lambda: fail_on_rank_1(OSError("disk full"))),
        lambda: first_rank_decides(fail_on_rank_0),
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
    assert "lower --learning-rate" in messages[0]


def test_a_killed_rank_ends_the_others(text, tmp_path):
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "sdp4bit", "pretrain", "--nproc-per-node", "2", "--steps", "100000"),
            *(
                "--strategy",
                "baseline",
                "--layers",
                "1",
                "--hidden",
                "64",
                "--heads",
                "2",
                "--no-tensorboard",
            ),
            *(
                "--data-path",
                str(text),
                "--vocabulary-size",
                "512",
                "--cache-dir",
                str(text.parent / "cache"),
            ),
            *("--out", str(tmp_path), "--sequence-length", "32"),
        ],
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
        children = ranks_of(process.pid)
        assert len(children) == 2
        os.kill(children[1], 9)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert "failed (ended by SIGKILL); the other ranks have been stopped" in errors
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def ranks_of(parent: int) -> list[int]:
    """Return the processes that a launcher has started as ranks, in order."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and b"spawn_main" in command:
            found.append(int(stat.parent.name))
    return sorted(found)
