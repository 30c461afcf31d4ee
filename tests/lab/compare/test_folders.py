"""Finished runs in folders: kept, found again, refused when their settings differ, merged. No process."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdp4bit_lab.cli import main
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.compare.finished_run import RESULT, FinishedRun, first_difference, run_settings
from sdp4bit_lab.compare.run_folders import find_finished, merge_finished
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import OptimizerConfig, PretrainConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig
from sdp4bit_lab.pretrain.data.config import DataConfig
from sdp4bit_lab.pretrain.stability import GradientSpike
from tests.lab.compare.synthetic_runs import SETTINGS, finished

LONGER = {**SETTINGS, "training": {"steps": 40, "loss_scale": None}}
OTHER_BITS = {"weights": None, "gradients": {"bits": 8}, "seed": 1}


def planned(run: FinishedRun, **changes: Any) -> dict[str, Any]:
    return {
        "strategy": run.strategy,
        "settings": run.settings,
        "quantization": run.quantization,
        **changes,
    }


@pytest.mark.parametrize("diverged_at", [None, 5])
def test_a_result_is_read_as_it_was_written(tmp_path, diverged_at):
    spikes = (GradientSpike(10, 43.6, 1.5),)
    run = finished("tlq:replica=full", 3, 1 / 3, diverged_at=diverged_at, spikes=spikes, test_loss=math.nan)
    run.write(tmp_path)
    assert "NaN" not in (tmp_path / RESULT).read_text()
    read = FinishedRun.read(tmp_path)
    assert repr(read) == repr(replace(run, test_loss=None))
    assert read.validation_loss == pytest.approx(1 / 3 if diverged_at is None else math.nan, nan_ok=True)


def test_finished_runs_are_found_and_unfinished_ones_are_not(tmp_path):
    done, killed = finished("qw", 1, 4.0), finished("qw", 2, 4.0)
    done.write(tmp_path / "qw-seed1")
    (tmp_path / "qw-seed2").mkdir()
    (tmp_path / "qw-seed2" / "metrics.jsonl").write_text("{}\n")
    plans = {tmp_path / "qw-seed1": planned(done), tmp_path / "qw-seed2": planned(killed)}
    assert find_finished(plans) == {tmp_path / "qw-seed1": done}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": LONGER}, r"other settings, settings\.training\.steps 20 \(now 40\): choose another"),
        ({"quantization": OTHER_BITS}, r"quantization\.gradients\.bits 4 \(now 8\).*or delete that folder"),
        (
            {"settings": {**SETTINGS, "optimizer": {"fused": True}}},
            r"optimizer\.fused None \(now True\)",
        ),
    ],
)
def test_a_result_of_other_settings_is_refused_with_the_first_difference(tmp_path, changes, message):
    run = finished("qw", 1, 4.0)
    run.write(tmp_path)
    with pytest.raises(SettingError, match=message):
        find_finished({tmp_path: planned(run, **changes)})
    unchanged = {**SETTINGS, "optimizer": {"fused": None}}
    assert len(find_finished({tmp_path: planned(run, settings=unchanged)})) == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"losses": []}'])
def test_a_damaged_result_is_named(tmp_path, content):
    (tmp_path / RESULT).write_text(content)
    with pytest.raises(SettingError, match=rf"{RESULT} cannot be read .* delete it"):
        FinishedRun.read(tmp_path)


def test_settings_are_equal_for_comparable_runs():
    config = PretrainConfig(training=TrainingConfig(), data=DataConfig(mock_data=True))

    def difference(**changes: Any) -> str | None:
        one = run_settings(config, dataset="key", world_size=4)
        other = run_settings(replace(config, **changes), dataset="key", world_size=4)
        result = first_difference(one, other)
        return None if result is None else result[0]

    assert difference(seed=7, strategy="baseline") is None
    assert difference(parallel=ParallelConfig(nproc_per_node=4)) is None
    assert difference(training=TrainingConfig(param_dtype="bf16", sequence_length=128)) is None
    assert difference(data=DataConfig(mock_data=True, cache_dir=Path("elsewhere"))) is None
    assert difference(training=TrainingConfig(param_dtype="fp32")) == "training.param_dtype"
    assert difference(optimizer=OptimizerConfig(learning_rate=1.0)) == "optimizer.learning_rate"
    assert difference(parallel=ParallelConfig(ranks_per_node=2)) == "parallel.ranks_per_node"
    assert first_difference(
        run_settings(config, dataset="key", world_size=4), run_settings(config, dataset="other", world_size=2)
    ) == ("data.dataset", "key", "other")


def write_comparison(out: Path, seed: int, **changes: Any) -> None:
    for strategy, loss in (("tlq", 4.1), ("baseline", 4.0), ("ulq:gq-group-size-inter=64", 3.9)):
        loss += 0.01 * seed + (0.02 * seed if strategy == "tlq" else 0)
        finished(strategy, seed, loss, **changes).write(out / f"{strategy.replace(':', '+')}-seed{seed}")


def test_merged_comparisons_are_one(tmp_path, capsys):
    write_comparison(tmp_path / "a", 2)
    write_comparison(tmp_path / "b", 1, environment={"torch": "2.10", "device": "cpu"})
    command = [
        "compare",
        "--merge",
        *(str(tmp_path / name) for name in "aba"),
        "--out",
        str(tmp_path / "all"),
    ]
    assert main(command) == 0
    summary = json.loads((tmp_path / "all" / "summary.json").read_text())
    assert list(summary["strategies"]) == ["baseline", "ulq:gq-group-size-inter=64", "tlq"]
    assert [run["seed"] for run in summary["runs"]] == [1, 2] * 3
    assert summary["complete"] is True
    assert summary["strategies"]["tlq"]["difference_to_baseline_by_seed"] == pytest.approx(
        {"1": 0.12, "2": 0.14}
    )
    assert "* WARNING: runs differ in torch: 2.10, 2.9.\n" in (tmp_path / "all" / "table.md").read_text()
    assert (tmp_path / "all" / "curves.png").exists()
    assert "ulq:gq-group" in capsys.readouterr().out

    assert main([*command, "--baseline", "qw"]) == 2
    assert "--baseline: qw is not among the strategies" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seed", "changes", "message"),
    [
        (
            1,
            {"settings": LONGER},
            "/a/baseline-seed2 has settings.training.steps 20, .*/b/baseline-seed1 has ",
        ),
        (1, {"quantization": OTHER_BITS}, "/a/baseline-seed2 has gradients.bits 4, .*/b/baseline-seed1 has "),
        (2, {"first": 7.0}, "have different results of baseline, seed 2"),
        (None, {}, "b: no finished run"),
    ],
)
def test_runs_that_do_not_belong_together_are_not_merged(tmp_path, seed, changes, message):
    write_comparison(tmp_path / "a", 2)
    if seed is not None:
        write_comparison(tmp_path / "b", seed, **changes)
    with pytest.raises(SettingError, match=message):
        merge_finished([tmp_path / "a", tmp_path / "b"])
