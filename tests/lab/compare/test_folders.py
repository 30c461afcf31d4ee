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
from sdp4bit_lab.compare.finished_run import RESULT, FinishedRun, RunRecord, first_difference, run_settings
from sdp4bit_lab.compare.run_folders import PlannedFolder, find_finished
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import OptimizerConfig, PretrainConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig
from sdp4bit_lab.pretrain.data.config import DataConfig
from tests.lab.compare.synthetic_runs import SETTINGS, finished, record


def plan(folder: Path, run: FinishedRun, **changes: Any) -> PlannedFolder:
    settings = {"settings": SETTINGS, "quantization": record(run).quantization, **changes}
    return PlannedFolder(folder=folder, strategy=run.strategy, **settings)


@pytest.mark.parametrize("diverged_at", [None, 5])
def test_a_result_is_read_as_it_was_written(tmp_path, diverged_at):
    written = record(finished("tlq:replica=full", 3, 1 / 3, diverged_at=diverged_at))
    written.write(tmp_path)
    assert "NaN" not in (tmp_path / RESULT).read_text()
    read = RunRecord.read(tmp_path)
    assert repr(read) == repr(written)
    assert read.run.validation_loss == pytest.approx(1 / 3 if diverged_at is None else math.nan, nan_ok=True)


def test_finished_runs_are_found_and_unfinished_ones_are_not(tmp_path):
    done, killed = finished("qw", 1, 4.0), finished("qw", 2, 4.0)
    record(done).write(tmp_path / "qw-seed1")
    (tmp_path / "qw-seed2").mkdir()
    (tmp_path / "qw-seed2" / "metrics.jsonl").write_text("{}\n")
    plans = [plan(tmp_path / "qw-seed1", done), plan(tmp_path / "qw-seed2", killed)]
    assert find_finished(plans) == {tmp_path / "qw-seed1": record(done)}


def test_a_result_of_other_settings_is_refused_with_the_first_difference(tmp_path):
    run = finished("qw", 1, 4.0)
    record(run).write(tmp_path)
    longer = {**SETTINGS, "training": {"steps": 40, "exit_interval": None}}
    with pytest.raises(SettingError, match=r"other settings, training\.steps 20 \(now 40\): choose another"):
        find_finished([plan(tmp_path, run, settings=longer)])
    other = {"weights": None, "gradients": {"bits": 8}, "seed": 1}
    with pytest.raises(
        SettingError, match=r"quantization\.gradients\.bits 4 \(now 8\).*or delete that folder"
    ):
        find_finished([plan(tmp_path, run, quantization=other)])
    with pytest.raises(SettingError, match=r"strategy qw \(now tlq\)"):
        find_finished([plan(tmp_path, finished("tlq", 1, 4.0))])
    newer = {**SETTINGS, "optimizer": {"fused": True}}
    with pytest.raises(SettingError, match=r"optimizer\.fused None \(now True\)"):
        find_finished([plan(tmp_path, run, settings=newer)])
    unchanged = {**SETTINGS, "optimizer": {"fused": None}}
    assert len(find_finished([plan(tmp_path, run, settings=unchanged)])) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": {}}'])
def test_a_damaged_result_is_named(tmp_path, content):
    (tmp_path / RESULT).write_text(content)
    with pytest.raises(SettingError, match=rf"{RESULT} cannot be read .* delete it"):
        RunRecord.read(tmp_path)


def test_settings_are_equal_where_runs_are():
    config = PretrainConfig(training=TrainingConfig(bf16=True), data=DataConfig(mock_data=True))

    def difference(**changes: Any) -> str | None:
        one = run_settings(config, dataset="key", world_size=4)
        other = run_settings(replace(config, **changes), dataset="key", world_size=4)
        found = first_difference(one, other)
        return found[0] if found is not None else None

    assert difference(seed=7, strategy="baseline") is None
    assert difference(parallel=ParallelConfig(nproc_per_node=4)) is None
    assert difference(training=TrainingConfig(precision="bf16", sequence_length=128)) is None
    assert difference(data=DataConfig(mock_data=True, cache_dir=Path("elsewhere"))) is None
    assert difference(training=TrainingConfig(precision="fp32")) == "training.param_dtype"
    assert difference(optimizer=OptimizerConfig(learning_rate=1.0)) == "optimizer.learning_rate"
    assert difference(parallel=ParallelConfig(ranks_per_node=2)) == "parallel.ranks_per_node"
    assert first_difference(
        run_settings(config, dataset="key", world_size=4), run_settings(config, dataset="other", world_size=2)
    ) == ("data.dataset", "key", "other")


def write_comparison(out: Path, seed: int, **changes: Any) -> None:
    for strategy, loss in (("tlq", 4.1), ("baseline", 4.0), ("qwd:wq-group-size=64", 3.9)):
        run = finished(strategy, seed, loss + 0.01 * seed + (0.02 * seed if strategy == "tlq" else 0))
        record(run, **changes).write(out / f"{strategy.replace(':', '+')}-seed{seed}")


def merge(*folders: Path, out: Path, more: tuple[str, ...] = ()) -> int:
    return main(["compare", "--merge", *map(str, folders), "--out", str(out), *more])


def test_merged_comparisons_are_one(tmp_path, capsys):
    write_comparison(tmp_path / "a", 2)
    write_comparison(tmp_path / "b", 1)
    assert merge(tmp_path / "a", tmp_path / "b", tmp_path / "a", out=tmp_path / "all") == 0
    summary = json.loads((tmp_path / "all" / "summary.json").read_text())
    assert list(summary["strategies"]) == ["baseline", "qwd:wq-group-size=64", "tlq"]
    assert [run["seed"] for run in summary["runs"]] == [1, 2] * 3
    assert summary["complete"] is True
    assert summary["strategies"]["tlq"]["difference_to_baseline_by_seed"] == pytest.approx(
        {"1": 0.12, "2": 0.14}
    )
    assert {"table.md", "curves.png"} <= {path.name for path in (tmp_path / "all").iterdir()}
    assert "qwd:wq-group" in capsys.readouterr().out

    assert merge(tmp_path / "a", out=tmp_path / "one", more=("--baseline", "tlq")) == 0
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["baseline"] == "tlq"
    assert merge(tmp_path / "a", out=tmp_path / "one", more=("--baseline", "qw")) == 2
    assert "--baseline: qw is not among the strategies" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"settings": {**SETTINGS, "training": {"steps": 40, "exit_interval": None}}},
            "/a/baseline-seed2 has training.steps 20, ",
        ),
        (
            {"quantization": {"weights": None, "gradients": {"bits": 8}, "seed": 1}},
            "/a/baseline-seed2 has gradients.bits 4, ",
        ),
    ],
)
def test_runs_of_other_settings_are_not_merged(tmp_path, capsys, changes, message):
    write_comparison(tmp_path / "a", 2)
    write_comparison(tmp_path / "b", 1, **changes)
    assert merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "all") == 2
    error = capsys.readouterr().err
    assert message in error and "/b/baseline-seed1 has " in error and error.count("\n") == 1
    assert not (tmp_path / "all").exists()


def test_two_results_of_one_run_and_folders_without_runs_are_refused(tmp_path, capsys):
    write_comparison(tmp_path / "a", 1)
    write_comparison(tmp_path / "b", 1)
    assert merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "all") == 0  # copies
    record(finished("tlq", 1, 4.5)).write(tmp_path / "b" / "tlq-seed1")
    assert merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "all") == 2
    assert "are two runs of tlq, seed 1, with different results" in capsys.readouterr().err
    assert merge(tmp_path / "a", tmp_path / "nowhere", out=tmp_path / "all") == 2
    assert "nowhere: there is no finished run" in capsys.readouterr().err


def test_runs_made_with_other_versions_are_merged_with_a_warning(tmp_path):
    write_comparison(tmp_path / "a", 1)
    write_comparison(tmp_path / "b", 2, environment={"torch": "2.10", "device": "cpu"})
    assert merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "all") == 0
    assert "* WARNING: runs differ in torch: 2.9, 2.10.\n" in (tmp_path / "all" / "table.md").read_text()
