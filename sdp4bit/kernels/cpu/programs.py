"""Runs compiled kernels: rows of parameters, working memory and threads.

Work is divided among torch.get_num_threads() threads. Calls from several Python threads are safe: one at a
time runs in parallel, the others on their own thread.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, cast

import numba
import numpy as np
import torch

from sdp4bit.kernels.cpu import compilation, kernels, tiles
from sdp4bit.kernels.cpu.parameters import Flags, Group, Layout, Work
from sdp4bit.quantization.layout import MessageLayout, round_up
from sdp4bit.quantization.tables import Recording

_TILE = 1024
"""Values per tile, unless a group is larger."""
_VALUES_PER_THREAD = 1 << 15
_NOTHING_MOVES = (*[-1, 0, 0] * kernels.MOST_MOVED, *[-1, *[0] * 6] * 2)
"""The head of a row whose parameters are complete."""
_MODES = {None: tiles.NEAREST, False: tiles.STOCHASTIC, True: tiles.DITHER}
"""Rounding modes by `rounding and rounding.dither`."""


class Workspace(threading.local):
    """Working memory of the calling thread, reused so that its pages stay mapped."""

    size = start = 0

    def address(self, size: int) -> int:
        """Return the address of working memory of at least this size."""
        if self.size < size:
            self._buffer = np.empty(size + 64, dtype=np.uint8)
            self.size, self.start = size, round_up(self._buffer.ctypes.data, 64)
        return self.start


class ParallelRegion:
    """Permission to run a kernel on numba's threads, for one caller at a time and never in a forked child.

    So numba's simplest threading layer is safe, and ranks that are threads of one process do not each occupy
    every core.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = False
        self._allowed = True

    def enter(self) -> bool:
        """Return whether the caller may use the threads; it must then call leave()."""
        if not (self._allowed and self._lock.acquire(blocking=False)):
            return False
        if not self._started:
            # numba starts its threads here. If it shares OpenMP with torch, that changes torch's number of
            # threads for the calling thread, so use a temporary one.
            try:
                with ThreadPoolExecutor(1) as starter:
                    starter.submit(numba.get_num_threads).result()
            except BaseException:
                self._lock.release()
                raise
            self._started = True
        return True

    def leave(self) -> None:
        self._lock.release()

    def forbid(self) -> None:
        """Disable the threads in a forked child, which does not have them."""
        self._allowed = False


class Compiled:
    """Kernels and the functions that run them, compiled when they are first needed, by one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[object, ...], Any] = {}
        self.seconds = 0.0
        """Time in which this process has compiled or loaded kernels, or has waited for them."""

    def of(self, make: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a function of `compilation.py` for these arguments, which is kept."""
        key = (make, *args)
        if key not in self._made:
            with self._lock:
                start = time.perf_counter()
                try:
                    if key not in self._made:
                        self._made[key] = make(*args)
                finally:
                    self.seconds += time.perf_counter() - start
        return self._made[key]


class Recorded(NamedTuple):
    """A call of a kernel."""

    program: Program
    work: int  # values
    groups: tuple[Group, ...]


recording = Recording[Recorded]()
_workspace = Workspace()
parallel = ParallelRegion()
compiled = Compiled()
os.register_at_fork(after_in_child=parallel.forbid)


class Program:
    """A kernel with its flags and the numbers of its layouts: everything that equal calls share.

    It works in tiles of complete groups, or of a row; `terms` is the number of messages to sum.
    """

    def __init__(
        self,
        kernel: Callable[..., None],
        *,
        received: MessageLayout | None = None,
        sent: MessageLayout | None = None,
        rounding: bool | None = None,
        clip: float = 1.0,
        terms: int = 0,
        **flags: bool,
    ) -> None:
        layouts = [each for each in (received, sent) if each]
        padded, group_size = layouts[-1].padded_numel, layouts[-1].group_size
        tile = min(max(1, _TILE // group_size) * group_size, padded)
        self.memory = round_up(5 * tile + 128 + tile // 8 + 8 * terms, 64)  # bytes of a thread
        self.groups: tuple[type[Group], ...] = (*[Layout] * len(layouts), Work)
        work = Work(tile=tile, offset=0, memory_stride=self.memory)
        self.numbers = *chain.from_iterable(_numbers_of(each, clip) for each in layouts), *work
        self.flags = Flags(
            received=None if received is None else received.format,
            sent=None if sent is None else sent.format,
            rounding=_MODES[rounding],
            is_clipped=clip < 1,
            **flags,
        )
        self.kernel = kernel

    def row(self, groups: tuple[Group, ...], head: Sequence[int] = _NOTHING_MOVES) -> list[int]:
        """Return the row of a call with these groups of parameters; see `kernels.HEAD_WORDS`."""
        kinds = (*map(type, groups), *self.groups)
        address = compiled.of(compilation.compile_kernel, self.kernel, self.flags, kinds)
        parameters = *map(int, chain.from_iterable(groups)), *self.numbers
        return [address, len(parameters) - 2, *head, *parameters]


def run(program: Program, work: int, *groups: Group) -> None:
    """Run a program on enough threads for `work` values, or record it."""
    if not work:
        return
    if recording.noted is not None:
        recording.noted.append(Recorded(program, work, groups))
        return
    row = program.row(groups)
    table = np.array([0] * kernels.MOST_MOVING + row)  # in no torch mode or default device
    run_rows(table.ctypes.data, len(row), 1, work=work, memory=program.memory)


def run_rows(table: int, width: int, rows: int, *, work: int, memory: int, call: int = 0) -> None:
    """Run the rows of a table on enough threads for `work` values, each with this much memory."""
    threads = work // _VALUES_PER_THREAD
    if threads > 1:
        threads = min(threads, torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    if threads < 2 or not parallel.enter():
        run_here = compiled.of(compilation.compile_runner, kernels.run_here)
        run_here(table, width, rows, 1, _workspace.address(memory), call)
        return
    try:
        run_parallel = compiled.of(compilation.compile_runner, kernels.run_parallel)
        previous = numba.get_num_threads()
        if previous != threads:
            numba.set_num_threads(threads)
        try:
            run_parallel(table, width, rows, threads, _workspace.address(threads * memory), call)
        finally:
            if previous != threads:
                numba.set_num_threads(previous)
    finally:
        parallel.leave()


def float_bits(number: float) -> int:
    """Return the bits of a number rounded to fp32, or to infinity."""
    bits: int = struct.unpack("<i", bytes(c_float(number)))[0]
    return bits


def _numbers_of(layout: MessageLayout, clip: float) -> Layout:
    named = {name: getattr(layout, name) for name in Layout._fields if name != "step"}
    return Layout(**named, step=float_bits(clip / (layout.format.largest or 1)))


# With the type of the class, whose arguments are checked, unlike those of a cache.
program_of = cast(type[Program], lru_cache(maxsize=4096)(Program))
