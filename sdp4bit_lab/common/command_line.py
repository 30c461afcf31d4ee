"""The command of this process as a line for a shell."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def own_command(*more: str) -> str | None:
    """Return the `sdp4bit` command that was started, with more options; None in another program.

    Child processes have the arguments of the process that started them.
    """
    program = Path(sys.argv[0])
    if program.name == "sdp4bit":
        start = ["sdp4bit"]
    elif (program.parent.name, program.name) == ("sdp4bit_lab", "__main__.py"):
        start = ["python", "-m", "sdp4bit_lab"]
    else:
        return None
    return shlex.join([*start, *sys.argv[1:], *more])
