"""Write files atomically and print progress."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdp4bit_lab.common.settings import SettingError, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMS = "SHA256SUMS"
"""File with the checksums of the other files of a folder, as `sha256sum` writes it."""
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


def time_left(seconds: float) -> str:
    """Describe an estimate of the time left."""
    if seconds < 45:
        return "less than a minute left"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"about {minutes} minute{'s' * (minutes > 1)} left"
    return f"about {round(seconds / 3600)} hours left"


def note(text: str) -> None:
    """Print a line to standard error."""
    sys.stderr.write(f"sdp4bit: {text}\n")
    sys.stderr.flush()


def shorten_warnings() -> None:
    """Print warnings in one line, our own without their place in the code.

    Standard output then escapes characters that its encoding lacks, as standard error always does.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")

    def one_line(message: object, category: type, filename: str, lineno: int, line: object = None) -> str:
        text = " ".join(str(message).split())
        ours = f"sdp4bit: warning: {text.removeprefix('sdp4bit: ')}\n"
        return ours if text.startswith("sdp4bit: ") else f"{filename}:{lineno}: {category.__name__}: {text}\n"

    warnings.formatwarning = one_line


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


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; SettingError names a file with other content."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{path}: not JSON: {error}") from error
    require(isinstance(value, dict), f"{path}: not a JSON object but {type(value).__name__}")
    return dict(value)


def write_atomically(path: Path, content: str) -> None:
    """Write a text file; readers see the old or the new content, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    working = path.with_name(f".{path.name}.{os.getpid()}")
    working.write_text(content, encoding="utf-8")
    working.replace(path)


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


def sha256(path: Path) -> str:
    """Return the checksum of a file."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_sums(folder: Path, *, known: Mapping[str, str]) -> None:
    """Write SHA256SUMS for all files of a folder; known sums are not computed again."""
    sums = {**known, **{path.name: sha256(path) for path in folder.iterdir() if path.name not in known}}
    (folder / SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))


def check_sums(folder: Path, *, needed: Iterable[str], part: slice = slice(None)) -> None:
    """Compare a part of the files in SHA256SUMS, which lists the needed ones; ValueError names the damage."""
    name = SUMS
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
        matches = [re.fullmatch(r"([0-9a-f]{64})  ([^/]+)", line) for line in lines]
        sums = {match[2]: match[1] for match in matches if match}
        if None in matches or not set(needed) <= set(sums):
            raise ValueError(f"{SUMS} is not a list of this folder's files")
        for name in sorted(sums)[part]:
            if sha256(folder / name) != sums[name]:
                raise ValueError(f"the checksum of {name} differs from {SUMS}")
    except OSError as error:
        raise ValueError(f"{name} cannot be read ({error.strerror})") from None
