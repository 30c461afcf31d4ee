"""Write files atomically and print progress."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdp4bit_lab.common.settings import SettingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 80
_QUIET_SECONDS = 5.0


class Progress:
    """Report the progress of a long task, at most every 5 seconds."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._last > _QUIET_SECONDS:
            self._last = time.monotonic()
            self._say(text)


def note(text: str) -> None:
    """Print a line to standard error."""
    sys.stderr.write(f"sdp4bit: {text}\n")
    sys.stderr.flush()


def wrapped(lines: Iterable[str]) -> str:
    """Wrap lines at 80 columns, with indented continuation lines."""
    return "\n".join(
        textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        if len(line) > _WIDTH
        else line
        for line in lines
    )


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return one line per row, with the first column left-aligned and the others right-aligned."""
    rows = list(rows)
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([name.ljust(first), *map(str.rjust, cells, others)]).rstrip() for name, *cells in rows]


def write_atomically(path: Path, content: str) -> None:
    """Write a text file; readers see the old or the new content, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    working = path.with_name(f".{path.name}.{os.getpid()}")
    working.write_text(content, encoding="utf-8")
    working.replace(path)


def write_output(path: Path, content: str, *, option: str) -> None:
    """Write a file atomically; SettingError names the option."""
    try:
        write_atomically(path, content)
    except OSError as error:
        raise SettingError(f"cannot write {option} {path}: {error}") from error


def save_figure(figure: Figure, path: Path, *, dpi: int) -> None:
    """Write a PNG atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    working = path.with_name(f".{path.name}")
    figure.savefig(working, format="png", dpi=dpi)
    working.replace(path)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
