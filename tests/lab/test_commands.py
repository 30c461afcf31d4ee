"""The `sdp4bit` command without, with unknown and with known commands. Layer: fresh processes."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from sdp4bit_lab.cli import COMMANDS, main
from sdp4bit_lab.common.files import shorten_warnings
from tests import ROOT
from tests.test_package import python

HELP_OF_EVERYTHING = """
import sys
from sdp4bit_lab.cli import COMMANDS, main
for arguments in [], *([name] for name in COMMANDS):
    try:
        main([*arguments, "--help"])
    except SystemExit as error:
        assert error.code == 0
assert "torch" not in sys.modules
"""


@pytest.mark.gloo
def test_no_help_imports_torch() -> None:
    pytest.importorskip("rich")
    python(HELP_OF_EVERYTHING)


def outcome(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "sdp4bit_lab", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.gloo
def test_without_a_command_the_known_ones_are_listed_one_per_line() -> None:
    code, printed, listed = outcome()
    assert (code, printed) == (2, "")
    assert outcome("help") == (0, listed, "")
    lines = listed.splitlines()
    assert [line.split()[0] for line in lines[lines.index("commands:") + 1 :]] == list(COMMANDS)
    assert max(map(len, lines)) <= 80


@pytest.mark.gloo
def test_an_unknown_command_is_one_line() -> None:
    code, printed, told = outcome("pretrian")
    assert (code, printed) == (2, "")
    assert told == "sdp4bit: error: 'pretrian' is not a command: did you mean pretrain?\n"


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["pretrain", "--load", "nowhere"], "--load nowhere: no such folder"),
        (
            ["report", "nowhere"],
            "nowhere: no such folder. Give an --out folder of pretrain, compare or demo",
        ),
    ],
)
def test_a_folder_that_does_not_exist_is_found_before_torch_is_imported(
    arguments: list[str], error: str
) -> None:
    # The first phase would be a line, too.
    assert outcome(*arguments) == (2, "", f"sdp4bit: error: {error}\n")


def test_our_warnings_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    shorten_warnings()
    ours, theirs = (
        warnings.formatwarning(text, UserWarning, "file.py", 3) for text in ("sdp4bit: some\nthing", "old")
    )
    assert ours == "sdp4bit: warning: some thing\n"
    assert theirs == "file.py:3: UserWarning: old\n"


def test_a_plan_without_a_cluster_says_that_it_is_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 0
    assert "this is the paper's, as an example" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "--cluster", "a100"]) == 0
    assert "example" not in capsys.readouterr().out
