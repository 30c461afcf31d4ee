"""Runs compiled kernels: their parameters, working memory and threads.

Work is divided among torch.get_num_threads() threads. Calls from several Python threads are safe: one at a
time runs in parallel, the others on their own thread.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import c_float
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple, cast

import numba
import torch

from sdp4bit.kernels.cpu import compilation, kernels, tiles
from sdp4bit.kernels.cpu.parameters import Flags, Group, Layout, Work
from sdp4bit.quantization.layout import MessageLayout, round_up

_TILE = 1024
"""Values per tile, unless a group is larger."""
_VALUES_PER_THREAD = 1 << 15
_PARAMETER_BYTES = 512
_MODES = {None: tiles.NEAREST, False: tiles.STOCHASTIC, True: tiles.DITHER}
"""Rounding modes by `rounding and rounding.dither`."""


class Workspace(threading.local):
    """Parameters and working memory of the calling thread, reused so that their pages stay mapped."""

    size = 0
    view: Any  # an array of numpy, whose type is a `Buffer` only from Python 3.12 on
    address: int

    def grow(self, size: int) -> None:
        buffer = torch.empty(size, dtype=torch.uint8)
        self.view, self.address, self.size = buffer.numpy(), buffer.data_ptr(), size


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
        self._addresses: dict[tuple[object, ...], int] = {}
        self._sum_words: Callable[..., int] | None = None
        self.runners: dict[Callable[..., None], Callable[..., None]] = {}
        self.seconds = 0.0
        """Time in which this process has compiled or loaded kernels, or has waited for them."""

    def kernel(self, *key: Any) -> int:
        """Return the address of a kernel, compiled for its flags and groups of parameters."""
        if key not in self._addresses:
            with self._compiling():
                if key not in self._addresses:
                    self._addresses[key] = compilation.compile_kernel(*key)
        return self._addresses[key]

    def runner(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a runner of :mod:`sdp4bit.kernels.cpu.kernels`, compiled."""
        if function not in self.runners:
            with self._compiling():
                if function not in self.runners:
                    self.runners[function] = compilation.compile_runner(function)
        return self.runners[function]

    def sum_words(self, *args: object) -> int:
        """Return `kernels.sum_words`, compiled, of the arguments."""
        if self._sum_words is None:
            with self._compiling():
                self._sum_words = self._sum_words or compilation.compile_sum_words()
        return self._sum_words(*args)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        with self._lock:
            start = time.perf_counter()
            try:
                yield
            finally:
                self.seconds += time.perf_counter() - start


class Recorded(NamedTuple):
    """A call of a kernel."""

    program: Program
    work: int  # values
    groups: tuple[Group, ...]


class Recording(threading.local):
    """The calls that the calling thread records instead of running them; None if it runs them."""

    calls: list[Recorded] | None = None


recording = Recording()
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
        work = Work(tile=tile, offset=_PARAMETER_BYTES, memory_stride=self.memory)
        numbers = *chain.from_iterable(_numbers_of(each, clip) for each in layouts), *work
        self.numbers, self.packed = numbers, struct.pack(f"{len(numbers)}q", *numbers)
        self.flags = Flags(
            received=None if received is None else received.format,
            sent=None if sent is None else sent.format,
            rounding=_MODES[rounding],
            is_clipped=clip < 1,
            **flags,
        )
        self.kernel, self.address = kernel, 0

    def compile(self, groups: tuple[Group, ...]) -> int:
        """Return the address of the kernel for these groups of parameters and its own."""
        if not self.address:
            self.format = f"{sum(map(len, groups))}q{len(self.packed)}s"
            self.address = compiled.kernel(self.kernel, self.flags, (*map(type, groups), *self.groups))
        return self.address

    def launch(self, groups: tuple[Group, ...], threads: int) -> None:
        """Run the kernel with these groups of parameters and its own."""
        memory, kernel = working_memory(_PARAMETER_BYTES + threads * self.memory), self.compile(groups)
        struct.pack_into(self.format, _workspace.view, 0, *chain.from_iterable(groups), self.packed)
        runner_of(kernels.run_here, kernels.run_parallel, threads)(kernel, threads, memory)


def working_memory(size: int) -> int:
    """Return the address of the calling thread's working memory, of at least this size."""
    if _workspace.size < size:
        _workspace.grow(size)
    return _workspace.address


def runner_of(here: Callable[..., None], parallel: Callable[..., None], threads: int) -> Callable[..., None]:
    """Return the one of two functions of `kernels` for this many threads, compiled."""
    function = here if threads < 2 else parallel
    return compiled.runners.get(function) or compiled.runner(function)


def run(program: Program, work: int, *groups: Group) -> None:
    """Run a program on enough threads for `work` values, or record it."""
    if not work:
        return
    if recording.calls is not None:
        recording.calls.append(Recorded(program, work, groups))
        return
    divide(work, partial(program.launch, groups))


def divide(work: int, launch: Callable[[int], None]) -> None:
    """Launch on enough threads for `work` values."""
    threads = work // _VALUES_PER_THREAD
    if threads > 1:
        threads = min(threads, torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    if threads < 2 or not parallel.enter():
        launch(1)
        return
    try:
        previous = numba.get_num_threads()
        if previous != threads:
            numba.set_num_threads(threads)
        try:
            launch(threads)
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
