"""Write files atomically, and print lines and tables."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import socket
import sys
import textwrap
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from uuid import uuid4

from sdp4bit_lab.common.settings import SettingError, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOCK = ".lock"
SUMS = "SHA256SUMS"
"""File with the checksums of the other files of a folder, as `sha256sum` writes it."""
_WIDTH = 80
_LOCK_SECONDS = 3.0
"""Time that an ended process has to give up its lock."""


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
    # On a terminal, another process may show its progress in the last line.
    start = "\r\x1b[2K" if sys.stderr.isatty() and not hasattr(sys.stderr, "rich_proxied_file") else ""
    sys.stderr.write(f"{start}sdp4bit: {text}\n")
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
    # Containers that share the folder may have the same process numbers.
    working = path.with_name(f".{path.name}.{uuid4().hex}")
    working.write_text(content, encoding="utf-8")
    working.replace(path)


def save_figure(figure: Figure, path: Path, *, dpi: int) -> None:
    """Write a PNG atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    working = path.with_name(f".{path.name}")
    figure.savefig(working, format="png", dpi=dpi)
    working.replace(path)


def lock_folder(folder: Path, *, option: str, name: str = LOCK) -> TextIO:
    """Reserve a folder for this process, until it closes the returned file or exits.

    Args:
        option: option that has named the folder.
        name: file of the lock.

    Raises:
        SettingError: another process holds the lock; names its host and number.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / name).open("a+", encoding="utf-8")
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                raise SettingError(
                    f"{option} {folder}: another run writes here ({file.read().strip()}). End it, or give "
                    "another folder"
                ) from None
            time.sleep(0.1)
        except OSError as error:
            note(
                f"warning: {folder} cannot be locked ({error.strerror}): start only one run that writes here"
            )
            return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


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
