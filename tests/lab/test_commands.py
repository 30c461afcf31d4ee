"""The `sdp4bit` command without, with unknown and with known commands. Layer: fresh processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


def test_no_help_imports_torch() -> None:
    pytest.importorskip("tyro")
    python(HELP_OF_EVERYTHING)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command given: use one of pretrain, compare, demo"),
        (["pretrian"], "'pretrian' is not a command: did you mean pretrain?"),
    ],
)
def test_without_a_known_command_the_known_ones_are_named(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "sdp4bit_lab", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
