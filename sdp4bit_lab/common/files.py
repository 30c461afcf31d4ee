"""Text that programs print or write to files."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 80
_QUIET_SECONDS = 5.0


class Progress:
    """Report how far a long task is, at most every 5 seconds."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        """Print the text, unless the last one was printed just before."""
        if time.monotonic() - self._last > _QUIET_SECONDS:
            self._last = time.monotonic()
            self._say(text)


def note(text: str) -> None:
    """Print a line about the start of a program to the standard error stream."""
    sys.stderr.write(f"sdp4bit: {text}\n")
    sys.stderr.flush()


def wrapped(lines: Iterable[str]) -> str:
    """Return lines as text of 80 columns; continuation lines are indented."""
    return "\n".join(
        textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        if len(line) > _WIDTH
        else line
        for line in lines
    )


def write_atomically(path: Path, content: str) -> None:
    """Write a file; a reader sees the old or the new content, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    working = path.with_name(f".{path.name}.{os.getpid()}")
    working.write_text(content, encoding="utf-8")
    working.replace(path)


def save_figure(figure: Figure, path: Path, *, dpi: int) -> None:
    """Write a picture as PNG; a reader sees the old or the new file, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    working = path.with_name(f".{path.name}")
    figure.savefig(working, format="png", dpi=dpi)
    working.replace(path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
