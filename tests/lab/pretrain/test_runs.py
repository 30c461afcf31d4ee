"""Whole runs over gloo: the command line, strategies side by side, and failures.

Ranks are processes, which represent nodes of one or two. The text is a few files of the standard library.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sdp4bit.config import AlertConfig
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.compare.config import CompareConfig
from sdp4bit_lab.compare.finished_run import FinishedRun
from sdp4bit_lab.compare.run import compare
from sdp4bit_lab.pretrain.config.communication import ReliabilityConfig
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig, OptimizerConfig
from tests.lab.pretrain.tiny_runs import command_line, read_log, small, this_rank, train_here
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo


def test_the_command_line_trains_on_two_processes(text, tmp_path):
    done = command_line(
        *("pretrain", "--nproc-per-node", "2", "--ranks-per-node", "1", "--steps", "8"),
        *("--layers", "1", "--hidden", "64", "--heads", "2", "--learning-rate", "5e-3"),
        *("--lr-warmup-iters", "1", "--sequence-length", "32"),
        *("--data-path", str(text), "--vocabulary-size", "512", "--cache-dir", str(text.parent / "cache")),
        *("--out", str(tmp_path), "--log-interval", "4", "--telemetry-interval", "3"),
    )
    assert done.returncode == 0, done.stderr
    lines = read_log(tmp_path)
    steps = [line for line in lines if line["event"] == "train"]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert set(steps[0]) == {
        *("event", "step", "samples", "loss", "lr", "grad_norm"),
        *("tokens_per_second", "tflops_per_device", "step_seconds"),
        *("intra_bytes", "inter_bytes", "compression_ratio", "weight_drift", "gradient_error"),
    }
    measured = [line for line in lines if line["event"] == "communication"]
    assert [line["step"] for line in measured] == [3, 6]
    assert [steps[at]["gradient_error"] is not None for at in range(8)] == [False] * 3 + [True] * 5
    for group in measured[0]["groups"]:
        assert 0 < group["weight_drift"] < group["weight_error"] < 0.5 and group["inter_bytes"] > 0
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert all(line["inter_bytes"] > 0 for line in steps)
    assert steps[-1]["compression_ratio"] > 4
    assert [line["step"] for line in lines if line["event"] == "validation"] == [8]
    assert "sdp4bit: step 4/8 | loss" in done.stdout
    assert "sdp4bit: step 8/8  validation loss" in done.stdout
    assert json.loads((tmp_path / "config.json").read_text())["strategy"] == "sdp4bit"
    assert any((tmp_path / "tensorboard").iterdir())


def test_a_run_that_chooses_trains_as_the_strategies_do(text, tmp_path):
    """Warm-up and the first block, as plain FSDP2 trains; then blocks that send fewer bytes.

    A step has two passes, so the warm-up of ten ends after five steps.
    """
    chosen = small(text, tmp_path / "auto", strategy="auto", parallel=ParallelConfig(ranks_per_node=1))
    chosen = replace(chosen, training=replace(chosen.training, steps=30, eval_interval=100))
    run_ranks(train_here, 2, chosen)
    plain = replace(chosen, strategy="baseline", logging=replace(chosen.logging, out=tmp_path / "plain"))
    run_ranks(train_here, 2, plain)
    auto, plain = ([s for s in read_log(tmp_path / n) if s["event"] == "train"] for n in ("auto", "plain"))
    before = 5 + 6
    assert [step["loss"] for step in auto[:before]] == [step["loss"] for step in plain[:before]]
    assert [step["inter_bytes"] > 0 for step in auto] == [
        before <= number < 23 or number == 29 for number in range(30)
    ]
    # In turns: bf16 on the wire, then 4 bits. The first step of a block gathers weights in full precision.
    bf16, ours = auto[before + 2]["inter_bytes"], auto[before + 8]["inter_bytes"]
    assert 8 < bf16 / ours < 10 and plain[-1]["inter_bytes"] / bf16 > 1.2
    assert json.loads((tmp_path / "auto" / "config.json").read_text())["strategy"] == "auto"


def train_with_alerts(config):
    sensitive = partial(AlertConfig, gradient_error=0.004)
    with mock.patch("sdp4bit_lab.pretrain.config.communication.AlertConfig", sensitive):
        return train_here(config)


def test_alerts_are_in_the_metrics(text, tmp_path):
    config = small(text, tmp_path / "out")
    config = replace(
        config,
        training=replace(config.training, steps=4),
        logging=replace(config.logging, telemetry_interval=2),
        reliability=ReliabilityConfig(audit_interval=2, alerts="warn"),
        communication=replace(config.communication, gradients_inside_one_node=True),
    )
    run_ranks(train_with_alerts, 2, config)
    alerts = [line for line in read_log(tmp_path / "out") if line["event"] == "alert"]
    assert alerts and alerts[0]["step"] == 2
    for line in alerts:
        assert line["message"].startswith("gradient error ") and line["value"] > line["threshold"]


def comparison(text: Path, folder: Path, *, steps: int, **changes: Any) -> CompareConfig:
    """Return a comparison of runs of one layer on nodes of one rank."""
    base = small(text, folder)
    settings: dict[str, Any] = {"data": base.data, "optimizer": base.optimizer, **changes}
    return CompareConfig(
        out=folder / "out",
        model=ModelConfig(layers=1, hidden=64, heads=2),
        training=replace(base.training, steps=steps, accumulation=1),
        parallel=ParallelConfig(ranks_per_node=1),
        **settings,
    )


def compare_here(config: CompareConfig) -> list[FinishedRun]:
    return compare(config, ranks=this_rank())


def compare_in_parts(config: CompareConfig) -> tuple[list[str], str]:
    """Train one seed, then two of which one is there, then with other settings in the same folder."""
    compare_here(replace(config, seeds="1"))
    compare_here(config)
    names = [run.name for run in compare_here(config)]
    with pytest.raises(SettingError) as error:
        compare_here(replace(config, optimizer=OptimizerConfig(learning_rate=1.0)))
    return names, str(error.value)


def test_compare_writes_summary_table_and_curves(text, tmp_path):
    variant = "sdp4bit:wq-group-size=64"
    config = comparison(text, tmp_path, steps=3, strategies=f"baseline,qw,{variant}", seeds="1,2")
    answers = run_ranks(compare_in_parts, 2, config, timeout=250)
    names = [f"{strategy}, seed {seed}" for seed in (1, 2) for strategy in ("baseline", "qw", variant)]
    assert answers[0] == answers[1]
    assert answers[0][0] == names
    assert (
        "baseline-seed1 has a result with other settings, settings.optimizer.learning_rate 0.005"
        in (answers[0][1])
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(summary["strategies"]) == ["baseline", "qw", variant]
    assert summary["complete"] is True
    # The same weights and the same samples: before any update, quantization changes nothing.
    assert [note[:38] for note in summary["notes"]] == ["Differences of 2 seeds have no signifi"]
    assert len(summary["runs"]) == 6
    baseline, _, quantized = summary["strategies"].values()
    assert baseline["difference_to_baseline_percent"] is None
    assert baseline["val_loss_std"] > 0
    assert quantized["difference_to_baseline_percent"] != 0
    assert len(quantized["difference_to_baseline_interval"]) == 2
    assert 0 < quantized["inter_bytes_per_step"] < baseline["inter_bytes_per_step"] / 4
    table = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in table[2:5]] == ["baseline", "qw", variant]
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    settings = json.loads((tmp_path / "out" / "sdp4bit+wq-group-size=64-seed2" / "config.json").read_text())
    assert settings["quantization"]["weights"]["group_size"] == 64
    assert len({run["first_loss"] for run in summary["runs"]}) == 2  # one per seed


def test_runs_that_diverge_do_not_end_a_comparison(text, tmp_path):
    wild = OptimizerConfig(learning_rate=1e30, clip_grad=0)
    config = comparison(text, tmp_path, steps=4, strategies="baseline,qwd", optimizer=wild)
    runs, others = run_ranks(compare_here, 2, config, timeout=250)
    assert [run.strategy for run in runs] == ["baseline", "qwd"]
    assert [run.diverged_at for run in runs] == [run.diverged_at for run in others] != [None, None]
    member = json.loads((tmp_path / "out" / "summary.json").read_text())["strategies"]["baseline"]
    assert member["diverged"] == {"1": runs[0].diverged_at}
    assert member["val_loss_mean"] is None
