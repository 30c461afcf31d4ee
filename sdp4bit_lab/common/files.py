"""Text that programs print or write to files."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 80


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
