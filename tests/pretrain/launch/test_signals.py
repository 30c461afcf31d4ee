"""Signals to a whole process group, as `timeout`, Slurm and Ctrl-C send them: the run saves and leaves.

Layer: the command line in a session of its own, 2 processes; torchrun.
"""

from __future__ import annotations

import contextlib
import json
import os
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

from tests.pretrain.launch.started_ranks import children_of, ranks_of
from tests.pretrain.tiny_runs import losses, write_text

STEPS = 12
# Never imported here: it changes what saves and trains in its process.
SIGNALLED = [sys.executable, str(Path(__file__).with_name("signalled_command.py"))]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def options(text: Path, out: Path, *, steps: int = STEPS) -> list[str]:
    return [
        *("--layers", "1", "--hidden", "64", "--heads", "2", "--dropout", "0.1", "--sequence-length", "32"),
        *("--steps", str(steps), "--eval-interval", "4", "--learning-rate", "5e-3"),
        *("--ranks-per-node", "1", "--data-path", str(text), "--vocabulary-size", "512"),
        *("--cache-dir", str(text.parent / "cache"), "--out", str(out)),
    ]


def saving(folder: Path) -> list[str]:
    return ["--save", str(folder), "--save-interval", "3", "--auto-resume"]


def start(arguments: list[str], *, plan: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "SIGNALLED": str(plan)},
    )


def end_of(process: subprocess.Popen[str], *, timeout: float = 240) -> tuple[int, str]:
    """Return exit code and output; nothing that the process has started runs any more."""
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
        for pid in descendants(process.args[-1]):
            os.kill(pid, signal.SIGKILL)
    return process.returncode, output


def descendants(mark: str) -> list[int]:
    """Return the processes with this in their environment: torchrun's ranks are in sessions of their own."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
    return found


def wait_for_steps(process: subprocess.Popen[str], out: Path, *, steps: int = 2) -> None:
    log = out / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.is_file() and log.read_text().count("\n") >= steps):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def last_step(out: Path) -> int:
    return int(json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"])


def saved_step(folder: Path) -> int:
    return int((folder / "latest").read_text().strip().removeprefix("step-"))


def test_a_signal_to_the_process_group_saves_and_leaves(tmp_path):
    text, out, folder = write_text(tmp_path / "text.txt"), tmp_path / "run", tmp_path / "checkpoints"
    run = [sys.executable, "-m", "sdp4bit", "pretrain", "--nproc-per-node", "2"]
    process = start([*run, *options(text, out, steps=100_000), "--save", str(folder)])
    try:
        wait_for_steps(process, out)
        # As `timeout` does it: one wish, twice.
        os.kill(process.pid, signal.SIGTERM)
        os.killpg(process.pid, signal.SIGTERM)
    finally:
        code, output = end_of(process)
    assert code == 0, output
    assert output.count("SIGTERM: the ranks leave after this step") == 1
    assert "because of SIGTERM; saved in" in output
    assert saved_step(folder) == last_step(out)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("launcher", "faults"),
    [
        ("sdp4bit", ["TERM start", "TERM training", "INT validation", "TERM saving", "INT start"]),
        ("torchrun", ["TERM training", "INT validation"]),
    ],
)
def test_a_run_signalled_in_every_phase_has_the_losses_of_an_undisturbed_one(launcher, faults, tmp_path):
    text, out, folder = write_text(tmp_path / "text.txt"), tmp_path / "run", tmp_path / "checkpoints"
    whole = [sys.executable, "-m", "sdp4bit", "pretrain", "--nproc-per-node", "2"]
    code, output = end_of(start([*whole, *options(text, tmp_path / "whole")]))
    assert code == 0, output
    if launcher == "sdp4bit":
        command = [*SIGNALLED, "pretrain", "--nproc-per-node", "2"]
    else:
        command = [*TORCHRUN, SIGNALLED[-1], "pretrain"]
    plan, saved = tmp_path / "plan", [0]
    for fault in (*faults, ""):
        plan.write_text(fault and f"SIG{fault}")
        code, output = end_of(start([*command, *options(text, out), *saving(folder)], plan=plan))
        assert plan.read_text() == "", output
        name, _, phase = fault.partition(" ")
        if launcher == "sdp4bit":
            assert code == (130 if name == "INT" else 0), output
        else:
            assert (code == 0) == (not fault), output
        saved.append(saved_step(folder) if (folder / "latest").exists() else 0)
        if phase == "start":
            # Before the first step nothing is trained or saved.
            assert f"because of SIG{name}; nothing was trained" in output
            assert saved[-1] == saved[-2]
        else:
            assert not fault or f"because of SIG{name}; saved in" in output
            assert saved[-1] > saved[-2]
    assert saved[-1] == STEPS
    assert losses(out) == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_signal_before_there_are_ranks_reaches_them(tmp_path):
    text, folder = write_text(tmp_path / "text.txt"), tmp_path / "checkpoints"
    run = [sys.executable, "-m", "sdp4bit", "pretrain", "--nproc-per-node", "2"]
    process = start([*run, *options(text, tmp_path / "run"), "--save", str(folder)])
    try:
        deadline = time.monotonic() + 60
        # The process that ranks are copies of imports torch for seconds.
        while not children_of(process.pid, command=b"forkserver"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ranks_of(process.pid) == []
        os.killpg(process.pid, signal.SIGTERM)
    finally:
        code, output = end_of(process)
    assert code == 0, output
    assert "left after step 0 because of SIGTERM; nothing was trained" in output
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_ranks_at_once(number, tmp_path):
    text, out, folder = write_text(tmp_path / "text.txt"), tmp_path / "run", tmp_path / "checkpoints"
    run = [sys.executable, "-m", "sdp4bit", "pretrain", "--nproc-per-node", "2"]
    process = start([*run, *options(text, out, steps=100_000), "--save", str(folder)])
    try:
        wait_for_steps(process, out)
        # A rank that hangs does not leave.
        ranks = ranks_of(process.pid)
        os.kill(ranks[0], signal.SIGSTOP)
        os.killpg(process.pid, number)
        time.sleep(2)
        assert process.poll() is None
        os.killpg(process.pid, number)
    finally:
        code, output = end_of(process, timeout=60)
    assert code == 128 + number
    assert f"{number.name} has ended the ranks at once" in output
    assert not (folder / "latest").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compare_demo_and_probe_leave_on_a_signal_to_the_group(tmp_path):
    text = write_text(tmp_path / "text.txt")
    command = [sys.executable, "-m", "sdp4bit"]
    ranks = ("--nproc-per-node", "2")
    out = tmp_path / "compare"
    compare = [*command, "compare", *ranks, *options(text, out, steps=100_000)]
    process = start(compare)
    try:
        wait_for_steps(process, out / "baseline-seed1")
        os.killpg(process.pid, signal.SIGINT)
    finally:
        code, output = end_of(process)
    assert code == 130, output
    assert "Stopped by SIGINT: the same command goes on with the runs that are left." in output

    out = tmp_path / "demo"
    process = start([*command, "demo", "--out", str(out), "--cache-dir", str(tmp_path / "cache")])
    try:
        wait_for_steps(process, out / "baseline-seed1")
        os.killpg(process.pid, signal.SIGTERM)
    finally:
        code, output = end_of(process)
    assert code == 0, output
    assert "Stopped by SIGTERM: the same command begins again." in output
    assert not (out / "summary.json").exists()

    probe = [*command, "probe", *ranks, "--rounds", "1000000", "--out", str(tmp_path / "probe.json")]
    process = start(probe)
    try:
        deadline = time.monotonic() + 60
        while len(ranks_of(process.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGTERM)
    finally:
        code, output = end_of(process, timeout=60)
    assert code == 143, output
    assert not (tmp_path / "probe.json").exists()
