"""The operators on CPU tensors, compiled by numba.

Functions have the names, arguments and results of :mod:`sdp4bit.quantization.reference`.
:mod:`sdp4bit.quantization.ops` has checked the arguments. fp32 and bf16 tensors are read and written in
place, other dtypes through an fp32 copy. Work is divided among torch.get_num_threads() threads. Calls from
several Python threads are safe: one at a time runs in parallel, the others on their own thread.
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
from functools import lru_cache
from itertools import chain
from typing import Any, cast

import numba
import torch
from torch import Tensor

from sdp4bit.kernels.cpu import compilation, formats, kernels, tiles
from sdp4bit.kernels.cpu.parameters import (
    NO_INDEX,
    DequantizeRows,
    Flags,
    Group,
    Layout,
    QuantizeRows,
    ReduceQuantize,
    Work,
)
from sdp4bit.quantization.checksum import GOLDEN, STRIPE_WORDS, signed64, stripe_factors, words_of
from sdp4bit.quantization.layout import MessageLayout, round_up
from sdp4bit.quantization.random import KeySeries, RoundingKey

FORMATS = formats.FORMATS
_TILE = 1024
"""Values per tile, unless a group is larger."""
_VALUES_PER_THREAD = 1 << 15
_PARAMETER_BYTES = 512
_NEGATIVE_ZERO_BITS = 0x80000000
_NO_KEY = RoundingKey(0, 0)
_MODES = {None: tiles.NEAREST, False: tiles.STOCHASTIC, True: tiles.DITHER}
"""Rounding modes by `rounding and rounding.dither`."""
_READ_IN_PLACE = (torch.float32, torch.bfloat16)


class _Workspace(threading.local):
    """Parameters and working memory of the calling thread, reused so that their pages stay mapped."""

    size = 0
    view: Any  # an array of numpy, whose type is a `Buffer` only from Python 3.12 on
    address: int

    def grow(self, size: int) -> None:
        buffer = torch.empty(size, dtype=torch.uint8)
        self.view, self.address, self.size = buffer.numpy(), buffer.data_ptr(), size


class _ParallelRegion:
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


class _Compiled:
    """Kernels and the functions that run them, compiled when they are first needed, by one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._addresses: dict[tuple[object, ...], int] = {}
        self._sum_words: Callable[..., int] | None = None
        self.runners: dict[Callable[..., None], Callable[[int, int, int], None]] = {}
        self.seconds = 0.0
        """Time in which this process has compiled or loaded kernels, or has waited for them."""

    def kernel(self, *key: Any) -> int:
        """Return the address of a kernel, compiled for its flags and groups of parameters."""
        if key not in self._addresses:
            with self._compiling():
                if key not in self._addresses:
                    self._addresses[key] = compilation.compile_kernel(*key)
        return self._addresses[key]

    def runner(self, function: Callable[..., None]) -> Callable[[int, int, int], None]:
        """Return `kernels.run_here` or `run_parallel`, compiled."""
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


_workspace = _Workspace()
_parallel = _ParallelRegion()
_compiled = _Compiled()
os.register_at_fork(after_in_child=_parallel.forbid)


class _Program:
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
        self.packed = struct.pack(f"{len(numbers)}q", *numbers)
        self.flags = Flags(
            received=None if received is None else received.format,
            sent=None if sent is None else sent.format,
            rounding=_MODES[rounding],
            is_clipped=clip < 1,
            **flags,
        )
        self.kernel, self.address = kernel, 0

    def launch(self, runner: Callable[..., None], threads: int, groups: tuple[Group, ...]) -> None:
        """Run the kernel with these groups of parameters and its own."""
        size = _PARAMETER_BYTES + threads * self.memory
        if _workspace.size < size:
            _workspace.grow(size)
        address = _workspace.address
        if not self.address:
            self.format = f"{sum(map(len, groups))}q{len(self.packed)}s"
            self.address = _compiled.kernel(self.kernel, self.flags, (*map(type, groups), *self.groups))
        struct.pack_into(self.format, _workspace.view, 0, *chain.from_iterable(groups), self.packed)
        (_compiled.runners.get(runner) or _compiled.runner(runner))(self.address, threads, address)


def _run(program: _Program, work: int, *groups: Group) -> None:
    """Run a program on enough threads for `work` values."""
    if not work:
        return
    threads = min(work // _VALUES_PER_THREAD, torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    if threads < 2 or not _parallel.enter():
        program.launch(kernels.run_here, 1, groups)
        return
    try:
        previous = numba.get_num_threads()
        if previous != threads:
            numba.set_num_threads(threads)
        try:
            program.launch(kernels.run_parallel, threads, groups)
        finally:
            if previous != threads:
                numba.set_num_threads(previous)
    finally:
        _parallel.leave()


def compile_seconds() -> float:
    """See :func:`sdp4bit.quantization.ops.compile_seconds`."""
    return _compiled.seconds


def _float_bits(number: float) -> int:
    """Return the bits of a number rounded to fp32, or to infinity."""
    bits: int = struct.unpack("<i", bytes(c_float(number)))[0]
    return bits


def _numbers_of(layout: MessageLayout, clip: float) -> Layout:
    named = {name: getattr(layout, name) for name in Layout._fields if name != "step"}
    return Layout(**named, step=_float_bits(clip / (layout.format.largest or 1)))


# With the type of the class, whose arguments are checked, unlike those of a cache.
_program = cast(type[_Program], lru_cache(maxsize=4096)(_Program))


def subtract_quantize(
    main: Tensor,
    *,
    replica: Tensor | None,
    out: Tensor,
    layout: MessageLayout,
    clip: float = 1.0,
    blocks: Tensor | None = None,
    nonfinite: Tensor | None = None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.subtract_quantize`."""
    main = main if main.dtype in _READ_IN_PLACE else main.float()
    if replica is not None and replica.dtype not in _READ_IN_PLACE:
        replica = replica.float()
    _run(
        _program(
            kernels.quantize_rows,
            sent=layout,
            clip=clip,
            has_replica=replica is not None,
            has_blocks=blocks is not None,
        ),
        layout.numel,
        QuantizeRows(
            values=main.data_ptr(),
            is_bf16=main.dtype is torch.bfloat16,
            replica=0 if replica is None else replica.data_ptr(),
            replica_is_bf16=replica is not None and replica.dtype is torch.bfloat16,
            out=out.data_ptr(),
            blocks=0 if blocks is None else blocks.data_ptr(),
            nonfinite=0 if nonfinite is None else nonfinite.data_ptr(),
        ),
        _NO_KEY,
    )


def dequantize_add(
    messages: Tensor,
    *,
    replica: Tensor,
    layout: MessageLayout,
    accumulate: bool,
    blocks: Tensor | None = None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_add`."""
    rows, target = replica.shape[0], replica if replica.dtype in _READ_IN_PLACE else replica.float()
    size, is_bf16 = target.element_size(), target.dtype is torch.bfloat16
    _run(
        _program(kernels.dequantize_rows, received=layout, terms=1, has_blocks=blocks is not None),
        rows * layout.numel,
        DequantizeRows(
            messages=messages.data_ptr(),
            row_step=messages.stride(0),
            terms=1,
            rows=rows,
            short=layout.numel,
            out=target.data_ptr(),
            out_stride=target.stride(0) * size,
            is_bf16=is_bf16,
            own=target.data_ptr() if accumulate else 0,
            own_is_bf16=is_bf16,
            # The sum of the single message starts from -0.0, so that -0.0 is preserved.
            initial=_NEGATIVE_ZERO_BITS,
            blocks=0 if blocks is None else blocks.data_ptr(),
        ),
        _NO_KEY,
    )
    if target is not replica:
        replica.copy_(target)


def hadamard_quantize(
    values: Tensor,
    *,
    out: Tensor,
    layout: MessageLayout,
    hadamard: bool,
    rounding: RoundingKey | None,
    skip: int | None = None,
    blocks: Tensor | None = None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.hadamard_quantize`."""
    if values.dtype not in _READ_IN_PLACE:
        values = values.to(torch.float32, memory_format=torch.contiguous_format)
    destinations, size = values.shape[0] - (skip is not None), values.element_size()
    outer, inner, _ = values.stride()
    _run(
        _program(
            kernels.quantize_rows,
            sent=layout,
            rounding=rounding and rounding.dither,
            hadamard=hadamard,
            has_blocks=blocks is not None,
        ),
        destinations * layout.parts * layout.numel,
        QuantizeRows(
            values=values.data_ptr(),
            is_bf16=values.dtype is torch.bfloat16,
            outer_stride=outer * size,
            inner_stride=inner * size,
            destinations=destinations,
            skip=NO_INDEX if skip is None else skip,
            out=out.data_ptr(),
            out_stride=out.stride(0),
            blocks=0 if blocks is None else blocks.data_ptr(),
        ),
        rounding or _NO_KEY,
    )


def dequantize_reduce_quantize(
    messages: Tensor,
    *,
    received: MessageLayout,
    out: Tensor,
    sent: MessageLayout,
    rounding: RoundingKey | None,
    dither: RoundingKey | None,
    skip: int | None = None,
    own: Tensor | None = None,
    hadamard: bool = False,
    multiplier: float = 1.0,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_quantize`."""
    terms, destinations = messages.shape[0], out.shape[0] - (skip is not None)
    _run(
        _program(
            kernels.reduce_quantize,
            received=received,
            sent=sent,
            terms=terms,
            rounding=rounding and rounding.dither,
            is_dither=dither is not None,
        ),
        max(terms, 1) * destinations * sent.parts * sent.numel,
        ReduceQuantize(
            messages=messages.data_ptr(),
            stride=messages.stride(0),
            terms=terms,
            out=out.data_ptr(),
            out_stride=out.stride(0),
            apart=out.shape[0],
            destinations=destinations,
            skip=NO_INDEX if skip is None else skip,
        ),
        rounding or _NO_KEY,
        dither or _NO_KEY,
    )
    if own is not None:
        assert skip is not None
        dequantize_reduce_hadamard(
            messages,
            out=own,
            layout=received,
            hadamard=hadamard,
            multiplier=multiplier,
            dither=dither and dither.at_row(skip),
            part=skip,
        )


def dequantize_reduce_hadamard(
    messages: Tensor,
    *,
    out: Tensor,
    layout: MessageLayout,
    hadamard: bool,
    multiplier: float,
    dither: RoundingKey | None,
    part: int = 0,
    skip: int | None = None,
    own: Tensor | None = None,
    blocks: Tensor | None = None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_hadamard`."""
    terms, target = messages.shape[0], out if out.dtype in _READ_IN_PLACE else out.float()
    _run(
        _program(
            kernels.dequantize_rows,
            received=layout,
            terms=terms,
            hadamard=hadamard,
            is_dither=dither is not None,
            has_blocks=blocks is not None,
        ),
        max(terms, 1) * layout.numel,
        DequantizeRows(
            messages=messages.data_ptr(),
            stride=messages.stride(0),
            terms=terms,
            part=part,
            skip=NO_INDEX if skip is None else skip,
            out=target.data_ptr(),
            is_bf16=target.dtype is torch.bfloat16,
            own=0 if own is None else own.data_ptr(),
            multiplier=_float_bits(multiplier),
            blocks=0 if blocks is None else blocks.data_ptr(),
        ),
        dither or _NO_KEY,
    )
    if target is not out:
        out.copy_(target)


def dequantize_reduce_pieces(
    messages: Tensor,
    *,
    out: Tensor,
    layout: MessageLayout,
    pieces: int,
    stride: int,
    hadamard: bool,
    multiplier: float,
    dither: KeySeries | None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_pieces`."""
    terms, target = messages.shape[0] // pieces, out if out.dtype in _READ_IN_PLACE else out.float()
    keys = None if dither is None else torch.tensor([dither.key(piece)[:2] for piece in range(pieces)])
    _run(
        _program(
            kernels.dequantize_rows,
            received=layout,
            terms=terms,
            hadamard=hadamard,
            is_dither=dither is not None,
        ),
        max(messages.shape[0], 1) * layout.numel,
        DequantizeRows(
            messages=messages.data_ptr(),
            row_step=messages.stride(0),
            stride=messages.stride(0) * pieces,
            terms=terms,
            rows=pieces,
            short=stride,
            out=target.data_ptr(),
            out_stride=stride * target.element_size(),
            is_bf16=target.dtype is torch.bfloat16,
            multiplier=_float_bits(multiplier),
            keys=0 if keys is None else keys.data_ptr(),
        ),
        _NO_KEY,
    )
    if target is not out:
        out.copy_(target)


def add_checksum(values: Tensor, *, out: Tensor) -> None:
    """See :func:`sdp4bit.quantization.ops.add_checksum`."""
    words, factors = words_of(values), stripe_factors(values.device)
    out += _compiled.sum_words(words.numpy(), factors.numpy(), STRIPE_WORDS, signed64(GOLDEN))
