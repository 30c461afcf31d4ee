"""Compile a small function like a kernel, in processes that share a cache.

Every compilation, as opposed to a load from the cache, adds a line to the log when it begins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numba
from numba import njit, types

from sdp4bit.kernels.cpu import compilation
from tests.ranks import copies


def doubled(number):
    return 2 * number


def slow(
    folder: Path, seconds: float, *args: object, **options: object
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    def build(function: Callable[..., int]) -> Callable[..., int]:
        if "pipeline_class" not in options:
            with (folder / "log").open("a") as log:
                log.write(f"{os.getpid()}\n")
            time.sleep(seconds)
        compiled: Callable[..., int] = njit(*args, **options)(function)
        return compiled

    return build


def compile_in(folder: Path, seconds: float) -> None:
    os.dup2(os.open(folder / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    numba.config.CACHE_DIR = str(folder / "cache")
    assert compilation._compile(partial(slow, folder, seconds), doubled, types.int64(types.int64))(4) == 8


def compile_one(folder: Path, *, seconds: float) -> ForkServerProcess:
    """Start a process that compiles for this long, into a cache in the folder; it has imported numba."""
    process = copies([__name__]).Process(target=compile_in, args=(folder, seconds), daemon=True)
    process.start()
    return process
