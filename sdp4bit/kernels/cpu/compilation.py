"""Compilation of the CPU kernels, on first use by one process of a user, into numba's cache."""

from __future__ import annotations

import fcntl
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from numba import cfunc, njit, types
from numba.core.compiler import Compiler

from sdp4bit.kernels.cpu import user_cache
from sdp4bit.kernels.cpu.kernels import run_parallel, sum_words
from sdp4bit.kernels.cpu.parameters import Flags, Group, Parameters
from sdp4bit.log import logger

_TYPICAL_SECONDS = 3, 30
"""Time to compile the kernels of a training run."""
_RECENT_SECONDS = 600.0
"""Time in which the ranks of one launcher announce compilation only once."""


class _NotCachedError(Exception):
    """Report that numba's cache lacks a kernel."""


class _CachedOnly(Compiler):
    """Refuse to compile; numba creates its pipeline only for a kernel that its cache lacks."""

    def __init__(self, *_: Any) -> None:
        raise _NotCachedError


def _compile(decorator: Callable[..., Any], function: Callable[..., None], *args: Any, **options: Any) -> Any:
    """Return a compiled function from numba's cache; if it is not there, one process compiles it for all."""

    def build(**caching: Any) -> Any:
        return decorator(*args, **options, **caching)(function)

    user_cache.install()
    try:
        folder = Path(njit(cache=True)(function).stats.cache_path)
    except RuntimeError:  # numba has no writable cache directory
        _announce(None, "in every process, because numba cannot write its cache: set NUMBA_CACHE_DIR")
        return build()

    def cached() -> Any:
        try:
            return build(cache=True, pipeline_class=_CachedOnly)
        except (AttributeError, EOFError, ImportError, pickle.UnpicklingError):
            # The index is damaged, or names classes of another version of this library.
            for index in folder.glob(f"*.{function.__qualname__}-*.nbi"):
                index.unlink(missing_ok=True)
            raise _NotCachedError from None

    with suppress(_NotCachedError):
        return cached()
    with _locked(folder / "sdp4bit-kernels.lock") as lock:
        # Another process may have compiled it meanwhile.
        with suppress(_NotCachedError):
            return cached()
        _announce(lock, "that are not in the cache")
        try:
            return build(cache=True)
        except OSError:  # the disk of the cache is full
            return build()


@contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """Hold a lock of this machine's processes, which ends with its process; yield its file, None without.

    Not `flock`, whose lock a forked child would keep.
    """
    file: int | None = None
    try:
        with suppress(OSError):  # another user's, or a file system without locks
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield file
    finally:
        if file is not None:
            os.close(file)


_is_announced = False


def _announce(lock: int | None, where: str) -> None:
    """Log that kernels are compiled, unless another process of the same parent has just done so."""
    global _is_announced
    is_known, _is_announced = _is_announced, True
    if not is_known and lock is not None:
        parent = str(os.getppid()).encode()
        is_recent = time.time() - os.fstat(lock).st_mtime < _RECENT_SECONDS
        is_known = is_recent and os.pread(lock, 32, 0) == parent
        os.ftruncate(lock, os.pwrite(lock, parent, 0))
    if not is_known:
        logger.warning("compiling CPU kernels %s (%d to %d s for a training run)", where, *_TYPICAL_SECONDS)


def compile_kernel(kernel: Callable[..., None], flags: Flags, groups: tuple[type[Group], ...]) -> int:
    """Return the address of a kernel compiled for these flags and groups of parameters."""
    kind = types.void(types.int64, types.int64, Parameters(flags, groups))
    compiled: int = _compile(cfunc, kernel, kind, error_model="numpy").address
    return compiled


def compile_runner(runner: Callable[..., None]) -> Callable[..., None]:
    """Return a function that runs kernels by their addresses, compiled."""
    kind = types.void(*[types.int64] * runner.__code__.co_argcount)
    parallel = runner is run_parallel
    compiled: Callable[..., None] = _compile(njit, runner, kind, nogil=True, parallel=parallel)
    return compiled


def compile_sum_words() -> Callable[..., int]:
    """Return `sum_words`, compiled."""
    kind = types.int64(types.int64[::1], types.int64[:, ::1], types.int64, types.int64)
    compiled: Callable[..., int] = _compile(njit, sum_words, kind, nogil=True)
    return compiled
