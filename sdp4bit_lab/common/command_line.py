"""The command of this process as a line for a shell."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import sys
from pathlib import Path


def own_command(*more: str) -> str | None:
    """Return the `sdp4bit` command that was started, with more options; None in another program.

    Also None for a rank of torchrun or another launcher, whose own command is unknown. Child processes have
    the arguments of the process that started them.
    """
    program = Path(sys.argv[0])
    if "RANK" in os.environ and multiprocessing.parent_process() is None:
        return None
    if program.name == "sdp4bit":
        start = ["sdp4bit"]
    elif (program.parent.name, program.name) == ("sdp4bit_lab", "__main__.py"):
        start = ["python", "-m", "sdp4bit_lab"]
    else:
        return None
    return shlex.join([*start, *sys.argv[1:], *more])


def continuing_command(*more: str) -> str:
    """Return the command that continues a run, or a description of it."""
    known = own_command(*more)
    return known or " ".join(["the same command", *(["with", *more] if more else [])])
