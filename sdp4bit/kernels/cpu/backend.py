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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import c_float
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple, cast

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
from sdp4bit.quantization.random import KeySeries, KeySource, RoundingKey
from sdp4bit.quantization.tables import Call, View

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


class _Recorded(NamedTuple):
    """A call of a kernel."""

    program: _Program
    work: int  # values
    groups: tuple[Group, ...]


class _Recording(threading.local):
    """The calls that the calling thread records instead of running them; None if it runs them."""

    calls: list[_Recorded] | None = None


_recording = _Recording()
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
            self.address = _compiled.kernel(self.kernel, self.flags, (*map(type, groups), *self.groups))
        return self.address

    def launch(self, groups: tuple[Group, ...], threads: int) -> None:
        """Run the kernel with these groups of parameters and its own."""
        memory, kernel = _working_memory(_PARAMETER_BYTES + threads * self.memory), self.compile(groups)
        struct.pack_into(self.format, _workspace.view, 0, *chain.from_iterable(groups), self.packed)
        _runner(kernels.run_here, kernels.run_parallel, threads)(kernel, threads, memory)


def _working_memory(size: int) -> int:
    """Return the address of the calling thread's working memory, of at least this size."""
    if _workspace.size < size:
        _workspace.grow(size)
    return _workspace.address


def _runner(here: Callable[..., None], parallel: Callable[..., None], threads: int) -> Callable[..., None]:
    function = here if threads < 2 else parallel
    return _compiled.runners.get(function) or _compiled.runner(function)


def _run(program: _Program, work: int, *groups: Group) -> None:
    """Run a program on enough threads for `work` values, or record it."""
    if not work:
        return
    if _recording.calls is not None:
        _recording.calls.append(_Recorded(program, work, groups))
        return
    _divide(work, partial(program.launch, groups))


def _divide(work: int, launch: Callable[[int], None]) -> None:
    """Launch on enough threads for `work` values."""
    threads = work // _VALUES_PER_THREAD
    if threads > 1:
        threads = min(threads, torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    if threads < 2 or not _parallel.enter():
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

_MOVED: dict[str, dict[str, tuple[str, ...]]] = {
    "subtract_quantize": {"main": ("values",), "replica": ("replica",), "nonfinite": ("nonfinite",)},
    "dequantize_add": {"replica": ("out", "own")},
    "hadamard_quantize": {"values": ("values",)},
    "dequantize_reduce_quantize": {"own": ("out",)},
    "dequantize_reduce_hadamard": {"out": ("out",), "own": ("own",)},
    "dequantize_reduce_pieces": {"out": ("out",)},
}
"""By operator, the parameters that are addresses of its arguments."""


class PackedTable:
    """The parameters of a table's calls in one block of memory, which one call of the host runs.

    It holds the addresses of the tensors that move, then a row per call of a kernel: a head from which its
    parameters follow for these addresses and the number of the call, and the parameters.
    """

    def __init__(self, calls: Sequence[Call], tensors: Sequence[Tensor]) -> None:
        self._calls = calls
        self._keys = {
            i: torch.empty(each.arguments["pieces"], 2, dtype=torch.int64)
            for i, each in enumerate(calls)
            if isinstance(each.arguments.get("dither"), KeySeries)
        }
        """Memory for the keys of pieces, by the index of their call."""
        recorded = [(i, one) for i, each in enumerate(calls) for one in _record(each, each.bind(0, tensors))]
        self._work = sum(one.work for _, one in recorded)
        self._memory = max(one.program.memory for _, one in recorded)
        rows = [[*self._head(i, one, tensors), *self._parameters(i, one)] for i, one in recorded]
        self._width, self._count = max(map(len, rows)), len(rows)
        numbers = [0] * kernels.MOST_MOVING
        for row in rows:
            numbers += row + [0] * (self._width - len(row))
        self._table = torch.tensor(numbers, dtype=torch.int64)
        self._address = self._table.data_ptr()
        self._view: Any = self._table.numpy()  # see `_Workspace`
        self._addresses = struct.Struct(f"{len(tensors)}q")

    def run(self, call: int, tensors: Sequence[Tensor]) -> None:
        """See :class:`sdp4bit.quantization.tables.Packed`."""
        self._addresses.pack_into(self._view, 0, *[each.data_ptr() for each in tensors])
        _divide(self._work, partial(self._launch, call))

    def _launch(self, call: int, threads: int) -> None:
        memory = _working_memory(threads * self._memory)
        runner = _runner(kernels.run_table, kernels.run_table_parallel, threads)
        runner(self._address, self._width, self._count, threads, memory, call)

    def _head(self, index: int, recorded: _Recorded, tensors: Sequence[Tensor]) -> list[int]:
        call, (first, *keys), flags = self._calls[index], recorded.groups, recorded.program.flags
        moved: list[int] = []
        for name, view in call.arguments.items():
            if isinstance(view, View):
                base = tensors[view.tensor]
                address = view.of(tensors).data_ptr()
                for field in _MOVED[call.operator][name]:
                    if getattr(first, field) == address:
                        moved += (first._fields.index(field), view.tensor, address - base.data_ptr())
        # The last key is that of received messages, the one before it that of sent ones.
        sources: list[int] = []
        if flags.rounding != tiles.NEAREST:
            sources += (len(first), *_signed(call.sources["rounding"]), 0, 0)
        if index in self._keys:
            series, place = call.arguments["dither"], self._keys[index]
            sources += (place.data_ptr(), *_signed(call.sources["dither"]), len(place), signed64(series.step))
        elif flags.is_dither:
            column = len(first) + (len(keys) - 1) * len(RoundingKey._fields)
            sources += (column, *_signed(call.sources["dither"]), 0, 0)
        moved += [-1, 0, 0] * (kernels.MOST_MOVED - len(moved) // 3)
        sources += [-1, *[0] * 6] * (2 - len(sources) // 7)
        offset = sum(map(len, recorded.groups)) + len(recorded.program.numbers) - 2
        return [recorded.program.compile(recorded.groups), offset, *moved, *sources]

    def _parameters(self, index: int, recorded: _Recorded) -> list[int]:
        first, *others = recorded.groups
        if index in self._keys:
            assert isinstance(first, DequantizeRows)
            first = first._replace(keys=self._keys[index].data_ptr())
        *numbers, _, _ = map(int, (*chain(first, *others), *recorded.program.numbers))
        return [*numbers, 0, self._memory]

    def check(self, call: int, tensors: Sequence[Tensor]) -> None:
        """See :class:`sdp4bit.quantization.tables.Packed`."""
        rows = iter(self._table[kernels.MOST_MOVING :].view(-1, self._width).tolist())
        for index, each in enumerate(self._calls):
            arguments = each.bind(call, tensors)
            for one in _record(each, arguments):
                row, expected = next(rows), self._parameters(index, one)
                found = row[kernels.HEAD_WORDS :][: len(expected)]
                found[-2] = 0  # the offset of the working memory
                if found != expected:
                    raise AssertionError(f"{each.operator}: packed {found}, but {expected} are due")
            if index in self._keys:
                due = _keys_of(arguments["dither"], arguments["pieces"])
                if not torch.equal(self._keys[index], due):
                    raise AssertionError(f"{each.operator}: keys {self._keys[index]}, but {due} are due")


def _signed(source: KeySource) -> Iterator[int]:
    return map(signed64, source)


def _record(call: Call, arguments: dict[str, Any]) -> list[_Recorded]:
    """Return the calls of kernels that an operator of this module would make."""
    first, *others = arguments.items()
    _recording.calls = calls = list[_Recorded]()
    try:
        globals()[call.operator](first[1], **dict(others))
    finally:
        _recording.calls = None
    return calls


def pack(calls: Sequence[Call], tensors: Sequence[Tensor]) -> PackedTable | None:
    """Return the calls of a table as one call; None if kernels work on copies of the values.

    Args:
        tensors: tensors to move that have the dtypes and strides of all later ones.
    """
    named = [argument for each in calls for argument in each.bind(0, tensors).values()]
    is_copied = any(isinstance(each, Tensor) and each.dtype is torch.float16 for each in named)
    if is_copied or len(tensors) > kernels.MOST_MOVING:
        return None
    return PackedTable(calls, tensors)


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
    blocks: Tensor | None = None,
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
            blocks=blocks,
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
    own_multiplier: float = 1.0,
    blocks: Tensor | None = None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_hadamard`."""
    if own is not None and own.dtype not in _READ_IN_PLACE:
        own = own.float()
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
            own_is_bf16=own is not None and own.dtype is torch.bfloat16,
            own_multiplier=_float_bits(own_multiplier),
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
    keys = None if dither is None else _keys_of(dither, pieces)
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


def _keys_of(series: KeySeries, pieces: int) -> Tensor:
    return torch.tensor([series.key(piece)[:2] for piece in range(pieces)])


def add_checksum(values: Tensor, *, out: Tensor) -> None:
    """See :func:`sdp4bit.quantization.ops.add_checksum`."""
    words, factors = words_of(values), stripe_factors(values.device)
    out += _compiled.sum_words(words.numpy(), factors.numpy(), STRIPE_WORDS, signed64(GOLDEN))
