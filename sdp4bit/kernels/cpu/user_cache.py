"""The place of compiled kernels: a folder of the user's cache, for all checkouts with the same sources.

numba would keep them beside the sources, so each clone would compile the same kernels again. The folders of
`~/.cache/sdp4bit/kernels` are named by a hash of the sources, of the versions that compile them, and of the
processor. A process whose folder is removed compiles again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import binding
from numba.core import caching

from sdp4bit.quantization import formats, random

_SOURCES = sorted([*Path(__file__).parent.glob("*.py"), Path(formats.__file__), Path(random.__file__)])
_MOST_FOLDERS = 8
"""Of which a new one leaves those that were used last. Each takes up to 25 MB."""


def _key() -> str:
    """Return a hash of everything that compiled kernels and their files depend on."""
    found = hashlib.sha256()
    for path in _SOURCES:
        found.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    processor = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    chosen = numba.config.CPU_NAME, numba.config.CPU_FEATURES, numba.config.OPT
    versions = numba.__version__, llvmlite.__version__, sys.implementation.cache_tag
    found.update(repr((processor, chosen, versions)).encode())
    return found.hexdigest()[:20]


def _remove_unused(folder: Path) -> None:
    """Remove the folders that were used least recently, beyond the number that is kept."""
    used = []
    for each in folder.iterdir():
        with suppress(OSError):  # another process may remove it
            used.append((each.stat().st_mtime, each))
    for _, each in sorted(used, reverse=True)[_MOST_FOLDERS:]:
        shutil.rmtree(each, ignore_errors=True)


@cache
def user_folder() -> Path | None:
    """Return the folder of this process's kernels; None if the user has no cache that can be written."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "sdp4bit" / "kernels" / _key()
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Files of the cache are programs: they must be the user's own.
        if folder.stat().st_uid != os.geteuid() or not os.access(folder, os.W_OK):
            return None
        os.utime(folder)
        if is_new:
            _remove_unused(folder.parent)
    except (OSError, RuntimeError):  # no home, or it is read-only or full
        return None
    return folder


class _Locator:
    """Tell numba where the functions of this package are cached, unless the user has set NUMBA_CACHE_DIR."""

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        self._line, self._folder = function.__code__.co_firstlineno, folder

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _Locator | None:
        """Return the place of a function in a file; None leaves it to numba."""
        if numba.config.CACHE_DIR or Path(file).parent != Path(__file__).parent:
            return None
        folder = user_folder()
        return None if folder is None else cls(function, folder)

    def ensure_cache_path(self) -> None:
        """Create the folder again if somebody has removed it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def get_cache_path(self) -> str:
        """Return the folder."""
        return str(self._folder)

    def get_source_stamp(self) -> str:
        """Return the key of the sources."""
        return self._folder.name

    def get_disambiguator(self) -> str:
        """Return a name of the function besides its own."""
        return str(self._line)


def install() -> None:
    """Let numba ask for this package's place first."""
    places = caching.CompileResultCacheImpl._locator_classes
    if _Locator not in places:
        places.insert(0, _Locator)
