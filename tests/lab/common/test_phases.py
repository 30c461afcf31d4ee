"""Phases of a program are printed when they begin and while they last. Layer: fresh processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

PROGRAM = """
import os, sys, time
from sdp4bit_lab.common import phases
os.environ["RANK"] = sys.argv[1]
phases._INTERVAL = 0.2
phases.phase("before the start")
phases.start_phases("first", began=time.monotonic() - 70)
time.sleep(0.7)
phases.phase("second")
phases.end_phases()
time.sleep(0.7)
phases.lasting("short")
phases.lasting("long")
time.sleep(0.7)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_repeats_a_phase_until_the_next_one(rank: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(rank)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [re.sub(r"7\d s", "70 s", line) for line in done.stderr.splitlines()]
    assert done.stdout == ""
    if rank:
        assert lines == []
        return
    end = lines.index("sdp4bit: 70 s: second")
    (before, first, *still), (second, *long) = lines[:end], lines[end:]
    assert (before, first) == ("sdp4bit: before the start", "sdp4bit: 70 s: first")
    assert still and set(still) == {"sdp4bit: 70 s: still first"}
    assert second == "sdp4bit: 70 s: second"
    assert long and set(long) == {"sdp4bit: 70 s: still long"}


COMMAND = """
import sys, time
from sdp4bit_lab import cli
from sdp4bit_lab.common import phases
phases._INTERVAL = 0.2
assert cli.main(["export", "--load", sys.argv[1], "--out", sys.argv[1] + "/out"]) == 2
time.sleep(0.7)
"""


def test_a_command_that_has_ended_repeats_no_phase(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMAND, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    first, *_, last = done.stderr.splitlines()
    assert "reading " in first and last.startswith("sdp4bit: error: ")
