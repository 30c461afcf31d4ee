"""Runs started by the command line in processes of their own, and the processes that it starts as ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

COMMAND = [sys.executable, "-m", "sdp4bit_lab"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
Process = subprocess.Popen[str]
PRETRAIN = [*COMMAND, "pretrain", "--nproc-per-node", "2", "--no-tensorboard"]


def options(text: Path, out: Path, *more: str, steps: int = 100_000) -> list[str]:
    """Return the settings of a small run on 2 ranks that represent 2 nodes; by default, it does not end."""
    return [
        *("--layers", "1", "--hidden", "64", "--heads", "2", "--dropout", "0.1", "--sequence-length", "32"),
        *("--steps", str(steps), "--eval-interval", "4", "--learning-rate", "5e-3"),
        *("--ranks-per-node", "1", "--data-path", str(text), "--vocabulary-size", "512"),
        *("--cache-dir", str(text.parent / "cache"), "--out", str(out), *more),
    ]


def outcome_of(
    arguments: list[str],
    during: Callable[[subprocess.Popen[str]], object] = lambda _: None,
    *,
    timeout: float = 240,
    plan: Path | None = None,
) -> tuple[int, str]:
    """Return exit code and output of a command in a session of its own, beside which a function runs.

    Nothing that the command has started runs any more.
    """
    mark = uuid4().hex
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "SIGNALLED": str(plan), "STARTED_AS": mark},
    )
    try:
        during(process)
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
        for pid in _descendants(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    return process.returncode, output


def wait_until(condition: Callable[[], object], *, process: subprocess.Popen[str]) -> None:
    """Return as soon as the condition holds, while the process runs."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lines_of_log(out: Path) -> int:
    """Return how many lines the log of a run has; none before there is one."""
    log = out / "metrics.jsonl"
    return log.read_text().count("\n") if log.is_file() else 0


def wait_for_lines(process: subprocess.Popen[str], out: Path, *, lines: int = 2) -> None:
    """Return once the run has written so many lines of its log."""
    wait_until(lambda: lines_of_log(out) >= lines, process=process)


def wait_for_the_end_of(processes: list[int]) -> None:
    """Return once none of the processes runs any more."""
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < deadline, f"{processes} still run"
        time.sleep(0.05)


def ranks_of(launcher: int) -> list[int]:
    """Return the processes that a launcher has started as ranks, in order."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            line = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == launcher and b"spawn_main" in line:
            found.append(int(stat.parent.name))
    return sorted(found)


def _descendants(mark: str) -> list[int]:
    """Return the processes with this in their environment: torchrun's ranks are in sessions of their own."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
    return found
