"""Signals to a whole process group, as `timeout`, Slurm and Ctrl-C send them: the run saves and leaves.

Layer: the command line in a session of its own, 2 processes; torchrun.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sdp4bit_lab.compare.links import LinkTimes
from tests.lab.common.launch.started_ranks import (
    COMMAND,
    PRETRAIN,
    TORCHRUN,
    options,
    outcome_of,
    ranks_of,
    wait_for_lines,
    wait_until,
)
from tests.lab.pretrain.saved_runs import names
from tests.lab.pretrain.tiny_runs import losses, write_text

pytestmark = pytest.mark.gloo

STEPS = 12
# Never imported here: it changes what saves and trains in its process.
SIGNALLED = [sys.executable, str(Path(__file__).with_name("signalled_command.py"))]
LEAVING = "the ranks stop after this step; a second one kills them"
ENDED = "killed the ranks"
PHASE = re.compile(r"sdp4bit: \d+ s: (still )?(starting|importing|joining) ")
Process = subprocess.Popen[str]


def saved_step(folder: Path) -> int:
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*")]
    return max(steps, default=0)


@pytest.mark.parametrize(
    ("deed", "ranks", "code", "output"),
    [
        ("setting", 2, 2, ["sdp4bit: error: change it"]),
        ("SIGTERM", 2, 0, [f"sdp4bit: SIGTERM: {LEAVING}", "left because of SIGTERM"]),
        ("early SIGTERM", 1, -signal.SIGTERM, []),
        ("early SIGTERM", 2, 143, [f"sdp4bit: error: SIGTERM: {ENDED}, which had nothing to save"]),
        ("SIGINT", 1, 130, ["left because of SIGINT"]),
        ("second SIGTERM", 1, -signal.SIGTERM, []),
        ("second SIGTERM", 2, 143, [f"sdp4bit: SIGTERM: {LEAVING}", f"sdp4bit: error: SIGTERM: {ENDED}"]),
        ("SIGKILL", 2, 1, None),
    ],
)
def test_faults_and_signals_end_all_ranks(deed, ranks, code, output):
    """A process that still ran would keep the output open."""
    program = [sys.executable, "-u", "-m", "tests.lab.common.launch.launched_program", deed, str(ranks)]
    ended = outcome_of(program)
    assert ended[0] == code, ended[1]
    if output is None:
        assert "rank 1 failed (killed by SIGKILL); the other ranks were stopped" in ended[1]
    else:
        lines = [line for line in ended[1].splitlines() if not PHASE.match(line)]
        if torch.__version__ < "2.10":  # gloo says there which ranks are connected, in the middle of lines
            assert set(lines) >= {*output}
        else:
            assert sorted(lines) == sorted(output)


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
    code, output = outcome_of([*PRETRAIN, *options(text, tmp_path / "whole", steps=STEPS)])
    assert code == 0, output
    if launcher == "sdp4bit":
        command = [*SIGNALLED, "pretrain", "--nproc-per-node", "2"]
    else:
        command = [*TORCHRUN, SIGNALLED[-1], "pretrain"]
    saving = ("--save", str(folder), "--save-interval", "3", "--auto-resume")
    plan, saved = tmp_path / "plan", [0]
    for fault in (*faults, ""):
        plan.write_text(fault and f"SIG{fault}")
        code, output = outcome_of([*command, *options(text, out, *saving, steps=STEPS)], plan=plan)
        assert plan.read_text() == "", output
        name, _, phase = fault.partition(" ")
        if launcher == "sdp4bit":
            ends_at_once = 128 + signal.Signals[f"SIG{name}"] if phase == "start" else 0
            assert code == (130 if name == "INT" else ends_at_once), output
        else:
            assert (code == 0) == (not fault), output
        saved.append(saved_step(folder))
        if phase == "start":
            # Before the first step nothing is trained or saved.
            assert f"/{STEPS} |" not in output
            assert saved[-1] == saved[-2]
        else:
            assert not fault or f"because of SIG{name}; saved in" in output
            assert saved[-1] > saved[-2]
    assert saved[-1] == STEPS
    assert losses(out) == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_the_ranks_at_once(tmp_path):
    text, folder = write_text(tmp_path / "text.txt"), tmp_path / "checkpoints"

    def signal_early(process: Process) -> None:
        # They import torch for seconds, and do not listen yet.
        wait_until(lambda: len(ranks_of(process.pid)) == 2, process=process)
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=10)

    run = [*PRETRAIN, *options(text, tmp_path / "run"), "--save", str(folder)]
    code, output = outcome_of(run, signal_early)
    assert code == 143 and "nothing to save" in output, output
    assert not folder.exists() or names(folder) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compare_demo_and_probe_leave_on_a_signal_to_the_group(tmp_path):
    pytest.importorskip("matplotlib")
    ranks = ("--nproc-per-node", "2")

    def outcome_of_signal(number: signal.Signals, command: list[str], *, out: Path | None) -> tuple[int, str]:
        def strike(process: Process) -> None:
            if out is not None:
                wait_for_lines(process, out / "baseline-seed1")
            else:
                wait_until(lambda: len(ranks_of(process.pid)) == 2, process=process)
            os.killpg(process.pid, number)

        return outcome_of([*COMMAND, *command], strike)

    text, out = write_text(tmp_path / "text.txt"), tmp_path / "compare"
    code, output = outcome_of_signal(signal.SIGINT, ["compare", *ranks, *options(text, out)], out=out)
    assert code == 130, output
    assert "Stopped by SIGINT. The same command continues with the remaining runs." in output

    out = tmp_path / "demo"
    out.mkdir()
    seconds = dict.fromkeys((100, 250, 1000), ([1.0], [0.5]))
    times = LinkTimes(seconds=seconds, sent=(2.0, 1.0), why_calculated="", unreliable={}, dtype="auto")
    times.write(out / "links.json")
    demo = ["demo", "--out", str(out), "--cache-dir", str(tmp_path / "cache")]
    code, output = outcome_of_signal(signal.SIGTERM, demo, out=out)
    assert code == 0, output
    assert "Stopped by SIGTERM. The same command continues with the remaining runs." in output
    assert not (out / "summary.json").exists()

    probe = ["probe", *ranks, "--rounds", "1000000", "--out", str(tmp_path / "probe.json")]
    code, output = outcome_of_signal(signal.SIGTERM, probe, out=None)
    assert code == 143, output
    assert not (tmp_path / "probe.json").exists()
