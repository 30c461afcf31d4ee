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

import numba
import torch
from torch import Tensor

from sdp4bit.kernels.cpu import formats, kernels, tiles
from sdp4bit.quantization.checksum import GOLDEN, STRIPE_WORDS, signed64, stripe_factors, words_of
from sdp4bit.quantization.layout import SCALE_BYTES, MessageLayout, round_up
from sdp4bit.quantization.random import KeySeries, RoundingKey

FORMATS = formats.FORMATS
_TILE = 1024
"""Values per tile, unless a group is larger."""
_VALUES_PER_THREAD = 1 << 15
_PARAMETER_BYTES = 512
_NEGATIVE_ZERO_BITS = 0x80000000
_NO_INDEX = 1 << 62
_READ_IN_PLACE = (torch.float32, torch.bfloat16)


class _Workspace(threading.local):
    """Parameters and working memory of the calling thread, reused so that their pages stay mapped."""

    size = 0

    def fill(self, parameters: tuple[int, ...], threads: int, memory: int) -> int:
        """Return the address of the parameters, followed by address and size of each thread's memory."""
        size = _PARAMETER_BYTES + threads * memory
        if self.size < size:
            buffer = torch.empty(size, dtype=torch.uint8)
            self.view, self.address, self.size = buffer.numpy(), buffer.data_ptr(), size
        scratch = self.address + _PARAMETER_BYTES
        struct.pack_into(f"{len(parameters) + 2}q", self.view, 0, *parameters, scratch, memory)
        return self.address


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
        self._addresses: dict[tuple[Callable[..., None], kernels.Flags], int] = {}
        self._runners: dict[Callable[..., None], Callable[[int, int, int], None]] = {}
        self._sum_words: Callable[..., int] | None = None
        self.seconds = 0.0
        """Time in which this process has compiled or loaded kernels, or has waited for them."""

    def run(
        self,
        runner: Callable[..., None],
        kernel: tuple[Callable[..., None], kernels.Flags],
        threads: int,
        block: int,
    ) -> None:
        """Run a kernel, compiled for its flags, with the parameters in a block of memory."""
        if runner not in self._runners or kernel not in self._addresses:
            with self._compiling():
                if runner not in self._runners:
                    self._runners[runner] = kernels.compile_runner(runner)
                if kernel not in self._addresses:
                    self._addresses[kernel] = kernels.compile_kernel(*kernel)
        self._runners[runner](self._addresses[kernel], threads, block)

    def sum_words(self, *args: object) -> int:
        """Return `kernels.sum_words`, compiled, of the arguments."""
        if self._sum_words is None:
            with self._compiling():
                self._sum_words = self._sum_words or kernels.compile_sum_words()
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


@lru_cache(maxsize=1024)
def _tile(padded: int, group_size: int, terms: int) -> tuple[int, int]:
    """Return the values of a tile (complete groups or a row) and a thread's bytes for it."""
    tile = min(max(1, _TILE // group_size) * group_size, padded)
    return tile, round_up(4 * tile + 128 + tile + tile // 8 + 8 * terms, 64)


def _run(
    kernel: Callable[..., None],
    flags: kernels.Flags,
    *parameters: int,
    work: int,
    layout: MessageLayout,
    terms: int = 0,
) -> None:
    """Run a kernel on enough threads for `work` values, in tiles that fit the layout.

    Args:
        flags: numbers and formats that the kernel is compiled for.
        terms: number of messages to sum.
    """
    if not work:
        return
    tile, memory = _tile(layout.padded_numel, layout.group_size, terms)
    parameters += (tile,)
    threads = min(work // _VALUES_PER_THREAD, torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    if threads < 2 or not _parallel.enter():
        block = _workspace.fill(parameters, 1, memory)
        _compiled.run(kernels.run_here, (kernel, flags), 1, block)
        return
    try:
        block = _workspace.fill(parameters, threads, memory)
        previous = numba.get_num_threads()
        if previous != threads:
            numba.set_num_threads(threads)
        try:
            _compiled.run(kernels.run_parallel, (kernel, flags), threads, block)
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


def _readable(tensor: Tensor) -> Tensor:
    """Return the tensor with a dtype and rows that kernels can read, itself if possible."""
    if tensor.dtype not in _READ_IN_PLACE:
        tensor = tensor.float()
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] < 2 else tensor.contiguous()


def _rounding_flag(rounding: RoundingKey | None) -> int:
    if rounding is None:
        return tiles.NEAREST
    return tiles.DITHER if rounding.dither else tiles.STOCHASTIC


def _rounding_numbers(rounding: RoundingKey | None) -> tuple[int, ...]:
    """Return the keys, the numbering of values, and the mask of the sender's dither."""
    if rounding is None:
        return 0, 0, 0, 0, 0
    return *rounding[:4], rounding.mask if rounding.dither else 0


def _dither_numbers(dither: RoundingKey | None) -> tuple[int, ...]:
    """Return the keys of the dither, the number of row 0's first value and the row stride."""
    return (0, 0, 0, 0) if dither is None else dither[:4]


def _place_of(part: int, messages: Tensor, layout: MessageLayout) -> tuple[int, int]:
    """Return the address of a part's codes in the first message, and the offset of its scales from there."""
    skipped = part * layout.code_bytes
    return messages.data_ptr() + skipped, layout.scales_offset - skipped + part * layout.groups * SCALE_BYTES


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _index(index: int | None) -> int:
    return _NO_INDEX if index is None else index


def _step(layout: MessageLayout, clip: float = 1.0) -> int:
    """Return the fp32 bits of one code unit relative to a group's largest magnitude."""
    return _float_bits(clip / (layout.format.largest or 1))


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
    main = _readable(main)
    replica = replica if replica is None else _readable(replica)
    _run(
        kernels.quantize_rows,
        (replica is not None, False, clip < 1, tiles.NEAREST, blocks is not None, layout.format),
        main.data_ptr(), main.dtype is torch.bfloat16, 0, 0,
        _address(replica), replica is not None and replica.dtype is torch.bfloat16,
        layout.numel, layout.padded_numel, 1, 1, _NO_INDEX, _address(blocks),
        out.data_ptr(), 0, layout.code_bytes, layout.scales_offset, layout.payload_bytes, layout.nbytes,
        layout.groups, layout.group_size, _step(layout, clip),
        *_rounding_numbers(None), _address(nonfinite),
        work=layout.numel, layout=layout,
    )  # fmt: skip


def dequantize_add(
    messages: Tensor,
    *,
    replica: Tensor,
    layout: MessageLayout,
    accumulate: bool,
    blocks: Tensor | None = None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_add`."""
    rows = replica.shape[0]
    target = _readable(replica)
    size = target.element_size()
    # The sum of the single message starts from -0.0, so that -0.0 is preserved.
    _run(
        kernels.dequantize_rows,
        (False, False, blocks is not None, layout.format),
        messages.data_ptr(), messages.stride(0), messages.stride(0), 1, layout.scales_offset,
        layout.group_size, rows, layout.numel, layout.numel, layout.padded_numel, target.data_ptr(),
        target.stride(0) * size, size == 2, target.data_ptr() * accumulate, size == 2, _NEGATIVE_ZERO_BITS,
        kernels.ONE_BITS, 0, *_dither_numbers(None)[:3], _NO_INDEX, _address(blocks),
        work=rows * layout.numel, layout=layout, terms=1,
    )  # fmt: skip
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
    values = _readable(values)
    destinations, size = values.shape[0] - (skip is not None), values.element_size()
    outer, inner, _ = values.stride()
    _run(
        kernels.quantize_rows,
        (False, hadamard, False, _rounding_flag(rounding), blocks is not None, layout.format),
        values.data_ptr(), size == 2, outer * size, inner * size, 0, False,
        layout.numel, layout.padded_numel, destinations, layout.parts, _index(skip), _address(blocks),
        out.data_ptr(), out.stride(0), layout.code_bytes, layout.scales_offset, layout.payload_bytes,
        layout.nbytes, layout.groups, layout.group_size, _step(layout),
        *_rounding_numbers(rounding), 0,
        work=destinations * layout.parts * layout.numel, layout=layout,
    )  # fmt: skip


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
        kernels.reduce_quantize,
        (dither is not None, _rounding_flag(rounding), received.format, sent.format),
        messages.data_ptr(), messages.stride(0), terms, received.code_bytes, received.scales_offset,
        received.groups, received.group_size, destinations, sent.parts, out.shape[0], _index(skip),
        sent.padded_numel, out.data_ptr(), out.stride(0), sent.code_bytes, sent.scales_offset,
        sent.payload_bytes, sent.nbytes, sent.groups, sent.group_size, _step(sent),
        *_rounding_numbers(rounding), *_dither_numbers(dither),
        work=max(terms, 1) * destinations * sent.parts * sent.numel, layout=sent, terms=terms,
    )  # fmt: skip
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
    terms = messages.shape[0]
    target = _readable(out)
    codes, scales_offset = _place_of(part, messages, layout)
    _run(
        kernels.dequantize_rows,
        (dither is not None, hadamard, blocks is not None, layout.format),
        codes, 0, messages.stride(0), terms, scales_offset, layout.group_size,
        1, layout.numel, layout.numel, layout.padded_numel, target.data_ptr(), 0,
        target.dtype is torch.bfloat16, _address(own), False, 0, _float_bits(multiplier),
        0, *_dither_numbers(dither)[:3],
        _index(skip), _address(blocks),
        work=max(terms, 1) * layout.numel, layout=layout, terms=terms,
    )  # fmt: skip
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
    terms, message_stride = len(messages) // pieces, messages.stride(0)
    target = _readable(out)
    keys = None if dither is None else torch.tensor([dither.key(piece)[:2] for piece in range(pieces)])
    _run(
        kernels.dequantize_rows,
        (dither is not None, hadamard, False, layout.format),
        messages.data_ptr(), message_stride, message_stride * pieces, terms, layout.scales_offset,
        layout.group_size, pieces, layout.numel, stride, layout.padded_numel, target.data_ptr(),
        stride * target.element_size(), target.dtype is torch.bfloat16, 0, False, 0, _float_bits(multiplier),
        _address(keys), *_dither_numbers(None)[:3], _NO_INDEX, 0,
        work=max(len(messages), 1) * layout.numel, layout=layout, terms=terms,
    )  # fmt: skip
    if target is not out:
        out.copy_(target)


def add_checksum(values: Tensor, *, out: Tensor) -> None:
    """See :func:`sdp4bit.quantization.ops.add_checksum`."""
    words, factors = words_of(values), stripe_factors(values.device)
    out += _compiled.sum_words(words.numpy(), factors.numpy(), STRIPE_WORDS, signed64(GOLDEN))
