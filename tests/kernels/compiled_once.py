"""Compile a small function like a kernel: `compiled_once.py LOG SECONDS`, which takes this long.

Every compilation, as opposed to a load from the cache, adds a line to the log when it begins.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from numba import njit, types

from sdp4bit.kernels.cpu import compilation


def doubled(number):
    return 2 * number


def slow(*args: object, **options: object) -> Callable[[Callable[..., int]], Callable[..., int]]:
    def build(function: Callable[..., int]) -> Callable[..., int]:
        if "pipeline_class" not in options:
            with Path(sys.argv[1]).open("a") as log:
                log.write(f"{os.getpid()}\n")
            time.sleep(float(sys.argv[2]))
        compiled: Callable[..., int] = njit(*args, **options)(function)
        return compiled

    return build


if __name__ == "__main__":
    assert compilation._compile(slow, doubled, types.int64(types.int64))(4) == 8
