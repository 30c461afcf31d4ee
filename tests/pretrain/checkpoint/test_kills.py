"""Ranks killed at random moments while checkpoints are written all the time: nothing is lost, bit for bit.

Layer: the command line, 2 processes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("tyro")
pytest.importorskip("tokenizers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from tests.pretrain.launch.started_ranks import ranks_of
from tests.pretrain.tiny_runs import losses, write_text

STEPS = 80
KILLS = 6


def command(text: Path, out: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "sdp4bit", "pretrain", "--nproc-per-node", "2", "--ranks-per-node", "1"),
        *("--layers", "1", "--hidden", "64", "--heads", "2", "--dropout", "0.1", "--sequence-length", "32"),
        *("--steps", str(STEPS), "--eval-interval", "7", "--learning-rate", "5e-3", "--no-tensorboard"),
        *("--data-path", str(text), "--vocabulary-size", "512", "--cache-dir", str(text.parent / "cache")),
        *("--out", str(out), *more),
    ]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def lines(out: Path) -> int:
    log = out / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def kill_at_random(process: subprocess.Popen[str], out: Path, *, chance: random.Random) -> None:
    """A rank of the run has been killed, some moments after a few more steps were trained."""
    deadline = time.monotonic() + 100
    begun = lines(out)
    goal = begun + chance.randrange(2, 8)
    # The log is written anew when the run has loaded its checkpoint.
    while lines(out) < goal:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline, "training does not go on"
        time.sleep(0.005)
    time.sleep(chance.random() * 0.05)
    os.kill(chance.choice(ranks_of(process.pid)), signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_killed_again_and_again_ends_as_if_it_had_not_been(seed, tmp_path):
    chance = random.Random(seed)
    text = write_text(tmp_path / "text.txt")
    undisturbed = start(command(text, tmp_path / "undisturbed"))
    _, errors = undisturbed.communicate(timeout=200)
    assert undisturbed.returncode == 0, errors

    saved, out = tmp_path / "saved", tmp_path / "killed"
    saving = ("--save", str(saved), "--save-interval", "1", "--keep-last", "2")
    for killed in range(KILLS + 1):
        resume = ("--load", str(saved)) if any(saved.glob("step-*")) else ()
        process = start(command(text, out, *saving, *resume))
        try:
            if killed < KILLS:
                kill_at_random(process, out, chance=chance)
            else:
                _, errors = process.communicate(timeout=200)
                assert process.returncode == 0, errors
        finally:
            process.kill()
            process.wait()
    assert losses(out) == losses(tmp_path / "undisturbed")
    assert sorted(path.name for path in saved.iterdir()) == [
        *("latest", f"step-{STEPS - 1:08d}", f"step-{STEPS:08d}")
    ]
