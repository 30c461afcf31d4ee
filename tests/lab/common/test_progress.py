"""The phase of a program is shown: a line after 30 silent seconds, or an updating line on a terminal.

Layer: fresh processes, one with a pseudo-terminal.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = pytest.mark.gloo

PROGRAM = """
import os, sys, time
from sdp4bit_lab.common import progress
os.environ["RANK"] = sys.argv[1]
progress._LOG_SECONDS = 0.4
progress.phase("before the start")
progress.start_progress("first", began=time.monotonic() - 70)
time.sleep(0.7)
for done in range(5):
    progress.phase("steps", total=20, done=done)
    time.sleep(0.25)
progress.console().print("row")
progress.end_progress()
time.sleep(0.7)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_log_file_has_a_line_of_the_first_rank_after_a_silence(rank: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(rank)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "row\n"
    lines = done.stderr.splitlines()
    if rank:
        assert lines == []
        return
    first, *others = lines
    assert re.fullmatch(r"sdp4bit: first: 7\d s", first)
    steps = [line for line in others if "steps" in line]
    assert 1 <= len(steps) <= 8 and len(others) <= 1 + len(steps), lines
    assert re.fullmatch(r"sdp4bit: steps: 7\d s, [1-4] of 20, \d+ s left", steps[-1])


ROWS = """
import time
from sdp4bit_lab.common import progress
progress._LOG_SECONDS = 2.0
progress.start_progress("training")
for _ in range(10):
    time.sleep(0.3)
    progress.console().print("row")
"""


def test_a_log_file_whose_rows_follow_each_other_has_no_other_line() -> None:
    done = subprocess.run([sys.executable, "-c", ROWS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("row\n" * 10, "")


def in_terminal(*command: str, columns: int = 100) -> str:
    """Return the text that a command writes to a terminal."""
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    main, side = pty.openpty()
    with subprocess.Popen(
        command, cwd=ROOT, stdin=side, stdout=side, stderr=side, env=environment
    ) as process:
        os.close(side)
        text = b""
        while True:
            try:
                part = os.read(main, 1 << 16)
            except OSError:  # the other side is closed
                break
            text += part
        os.close(main)
        assert process.wait() == 0, text
    return text.decode()


LINE = """
import sys, time
from sdp4bit_lab.common.files import note
from sdp4bit_lab.common.progress import console, end_progress, phase, start_progress
start_progress("importing")
for done in range(4):
    phase("a long name " * 20, total=4, done=done)
    time.sleep(0.3)
console().print("a row")
note("a note")
print("printed")
end_progress()
console().print("the end")
"""


def test_a_terminal_has_one_updating_line_below_the_others() -> None:
    text = in_terminal(sys.executable, "-c", LINE)
    # A line is drawn over by returning to its start; it never takes two.
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    lines = [line.split("\r")[-1] for line in plain.replace("\r\n", "\n").split("\n")]
    for row in ("a row", "sdp4bit: a note", "printed", "the end"):
        assert row in lines, lines
    drawn = [part for part in re.split(r"[\r\n]", plain) if "a long name" in part]
    assert drawn and all(len(part) <= 100 for part in drawn)
    assert any("3 of 4" in part and "left" in part for part in drawn), drawn
    assert "\x1b[?25l" not in text  # the cursor is never hidden


def test_results_in_a_file_are_not_drawn_on_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "out"
    text = in_terminal("sh", "-c", f"exec {sys.executable} -c '{LINE}' >{file}")
    assert file.read_text() == "a row\nprinted\nthe end\n"
    assert "a note" in text and "a row" not in text


COMMAND = """
import sys, time
from sdp4bit_lab import cli
from sdp4bit_lab.common import progress
progress._LOG_SECONDS = 0.2
assert cli.main(["report", sys.argv[1]]) == 2
time.sleep(0.7)
"""


def test_a_command_that_has_ended_shows_no_phase(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMAND, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1].startswith("sdp4bit: error: ")
