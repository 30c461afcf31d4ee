"""Runs of a comparison trained at the same time. Layer: the command line; processes of two or more runs."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.lab.common.launch.started_ranks import COMMAND, Process, outcome_of, wait_for_lines

pytestmark = pytest.mark.gloo

COMPARE = [
    *(*COMMAND, "compare", "--simulated-ranks", "2", "--ranks-per-node", "1", "--mock-data"),
    *("--vocab-size", "300", "--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--dropout", "0.1"),
]


def result(folder: Path) -> dict[str, object]:
    content = json.loads((folder / "result.json").read_text())
    assert content.pop("seconds") > 0 and content.pop("step_seconds") > 0
    return content


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_jobs_have_the_results_of_one_after_another_and_outlive_one_that_fails(tmp_path):
    pytest.importorskip("matplotlib")
    short = [*COMPARE, "--train-iters", "3", "--out"]
    code, output = outcome_of([*short, str(tmp_path / "one")])
    assert code == 0, output
    assert output.count("summary.json, table.md and curves.png") == 1
    assert output.endswith(f"next: sdp4bit report {tmp_path / 'one'}\n")
    obstacle = tmp_path / "two" / "sdp4bit-seed1"
    obstacle.parent.mkdir()
    obstacle.touch()
    code, output = outcome_of([*short, str(tmp_path / "two"), "--jobs", "2"])
    assert code == 1, output
    assert "sdp4bit: error: failed runs: sdp4bit, seed 1 (exit code 2)" in output
    assert "Not trained yet: 1 of 2 runs." in output
    obstacle.unlink()
    code, output = outcome_of([*short, str(tmp_path / "two"), "--jobs", "2"])
    assert code == 0, output
    assert "trained before: baseline, seed 1\n" in output and "[baseline 1] step" not in output
    assert "[sdp4bit 1] step 3/3 | loss" in output and "2 simulated ranks (2 x 1, cpu)" in output
    for name in ("baseline-seed1", "sdp4bit-seed1"):
        assert result(tmp_path / "two" / name) == result(tmp_path / "one" / name)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_all_jobs_and_starts_no_other(number, code, tmp_path):
    pytest.importorskip("matplotlib")

    def strike(process: Process) -> None:
        for name in ("baseline-seed1", "sdp4bit-seed1"):
            wait_for_lines(process, tmp_path / name)
        process.send_signal(number)

    command = [*COMPARE, "--train-iters", "100000", "--seeds", "1,2", "--jobs", "2", "--out", str(tmp_path)]
    ended, output = outcome_of(command, strike)
    assert ended == code, output
    assert output.count(f"because of {number.name}; not saved") == 2
    assert f"Stopped by {number.name}. The same command continues with the remaining runs." in output
    assert "seed 2" not in output
