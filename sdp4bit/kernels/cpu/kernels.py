"""The kernels of the CPU back end, compiled on first use by one process of a machine, into numba's cache.

A kernel does the share of thread `thread` of `threads`. Rows are cut into tiles of complete groups that fit
the L1 cache with their codes. All steps of an operator run on one tile before the next, which is prefetched
meanwhile. The arguments are one block of int64 numbers and addresses, so a call costs the same few hundred
nanoseconds for every kernel and one function runs all of them in parallel. Kernels are compiled for each set
of flags, so that innermost loops do not branch on them.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, prange, typeof, types
from numba.core.compiler import Compiler
from numba.extending import intrinsic, models, register_model

from sdp4bit.kernels.cpu import formats, tiles, vectors
from sdp4bit.kernels.cpu.formats import coding_of
from sdp4bit.kernels.cpu.tiles import (
    encode_tile,
    inline,
    load_values,
    record,
    store_values,
    sum_messages,
    write_masks,
)
from sdp4bit.kernels.cpu.vectors import (
    INT64,
    float_from_bits,
    hadamard32,
    largest_lane,
    load_f32,
    load_scalar_i64,
    point,
    splat,
    store_u8,
    store_u32,
)
from sdp4bit.log import logger
from sdp4bit.quantization.formats import Format

Flags = tuple[int | Format, ...]
_TYPICAL_SECONDS = 3, 30
"""Time to compile the kernels of a training run."""
_RECENT_SECONDS = 600.0
"""Time in which the ranks of one launcher announce compilation only once."""
ONE_BITS = 0x3F800000
_ZERO = np.float32(0)


class Parameters(types.Type):
    """Address of a block of int64 parameters, with the flags and formats that the kernel is compiled for.

    The name has a checksum of the inlined sources, because numba's cache checks only the file of the kernel
    and its argument types.
    """

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        files = {module.__file__ for module in (formats, tiles, vectors)}
        for format in (each for each in flags if isinstance(each, Format)):
            files |= {each.py_func.__code__.co_filename for each in formats.FORMATS[format.name] if each}
        sources = b"".join(Path(file).read_bytes() for file in sorted(files))
        super().__init__(name=f"Parameters({zlib.crc32(sources)}, {flags})")


@register_model(Parameters)
class _ParametersModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, INT64)


@intrinsic(prefer_literal=True)
def _unpack(typing_context, parameters, count):
    """Return flags and parameters, `count` in total."""
    flags = [coding_of(each) if isinstance(each, Format) else int(each) for each in parameters.flags]
    kinds = [typeof(flag) for flag in flags]
    result = types.Tuple([*kinds, *[types.int64] * (count.literal_value - len(flags))])

    def codegen(context, builder, sig, args):
        block = point(builder, args[0], INT64)
        constants = [context.get_constant_generic(builder, *each) for each in zip(kinds, flags, strict=True)]
        values = [builder.load(builder.gep(block, [INT64(i)])) for i in range(len(result) - len(flags))]
        return context.make_tuple(builder, result, constants + values)

    return result(parameters, count), codegen


@inline
def _locate(thread, tile, scratch, scratch_stride):
    """Return the addresses of a thread's working memory.

    It holds the fp32 values of a tile, their codes or one block, the largest |x| of each group, and a table
    of two 4-byte numbers per message, its scale and its mask.
    """
    # A code takes one byte and a block of fp32 takes 128.
    total = scratch + thread * scratch_stride
    spare = total + 4 * tile
    largest = spare + tile + 128
    return total, spare, largest, largest + (tile >> 3)


@inline
def _share(rows, padded, tile, thread, threads):
    """Return a thread's number of tiles, and the row and the position where they begin."""
    # Tiles of all rows are divided evenly, so that one long row or many short ones use all threads. No group
    # crosses tiles, so the bytes do not depend on the number of threads.
    per_row = (padded + tile - 1) // tile
    begin, end = rows * per_row * thread // threads, rows * per_row * (thread + 1) // threads
    row = begin // per_row
    return end - begin, row, (begin - row * per_row) * tile


@inline
def _load_block(source, is_bf16, replica, replica_is_bf16, hadamard, count, spare):
    """Return up to 32 values, minus those of the replica, transformed."""
    block = load_values(source, is_bf16, count, spare)
    if replica:
        block = block - load_values(replica, replica_is_bf16, count, spare)
    if hadamard:
        block = hadamard32(block)
    return block


@inline
def _block_of(row, blocks, number, shift):
    """Return the address and the number of values of a block; see `ops.hadamard_quantize`."""
    entry = load_scalar_i64(blocks + 8 * number)
    return row + (entry >> 6 << shift), entry & 63


@inline
def _finish_block(block, target, is_bf16, own, own_is_bf16, hadamard, multiplier, count, spare):
    """Transform and scale a block of sums, add it to `own` unless that is 0, and write it to the target."""
    if hadamard:
        block = hadamard32(block)
    if multiplier != ONE_BITS:
        block = block * splat(float_from_bits(multiplier))
    if own:
        block = block + load_values(own, own_is_bf16, count, spare)
    store_values(target, is_bf16, count, block, spare)


@inline
def _clear_padding(out, messages, skip, stride, payload_bytes, nbytes):
    """Write zeros after the scales of each message, so that equal values yield equal messages."""
    for number in range(messages):
        message = number + (number >= skip)
        for i in range(payload_bytes, nbytes):
            store_u8(out + message * stride + i, 0)


def quantize_rows(thread, threads, parameters):
    """Quantize the rows of a tensor, minus a replica if there is one, transformed if `hadamard`.

    `destinations` does not count the one that is left out, `skip`. `nonfinite` is the address of a flag or 0.
    """
    (
        has_replica, hadamard, is_clipped, rounding, has_blocks, coding,
        values, is_bf16, outer_stride, inner_stride, replica, replica_is_bf16,
        numel, padded, destinations, parts, skip, blocks,
        out, out_stride, code_bytes, scales_offset, payload_bytes, nbytes, groups, group_size,
        step, k0, k1, first, row_stride, mask, nonfinite,
        tile, scratch, scratch_stride,
    ) = _unpack(parameters, 36)  # fmt: skip
    total, spare, largest, _ = _locate(thread, tile, scratch, scratch_stride)
    shift, replica_shift = 2 - is_bf16, 2 - replica_is_bf16
    tiles, row, start = _share(destinations * parts, padded, tile, thread, threads)
    for _ in range(tiles):
        destination = row // parts
        part = row - destination * parts
        destination += destination >= skip
        source = values + destination * outer_stride + part * inner_stride
        if not has_blocks:
            source += start << shift
        other = replica + (0 if has_blocks else start << replica_shift) if has_replica else 0
        count = min(tile, padded - start)
        # Values in complete blocks; at the end of a row one padded block may remain.
        whole = 0 if has_blocks else min(count, (numel - start) & ~31)
        for group in range((count + group_size - 1) // group_size):
            origin = group * group_size
            stop = min(origin + group_size, count)
            peak = splat(0)
            for i in range(origin, min(stop, whole), 32):
                block = _load_block(
                    source + (i << shift), is_bf16, other + (i << replica_shift) if has_replica else 0,
                    replica_is_bf16, hadamard, 32, spare,
                )  # fmt: skip
                peak = record(total + 4 * i, block, peak)
            if has_blocks:
                for i in range(origin, stop, 32):
                    number = (start + i) >> 5
                    place, size = _block_of(source, blocks, number, shift)
                    held = _block_of(other, blocks, number, replica_shift)[0] if has_replica else 0
                    block = _load_block(place, is_bf16, held, replica_is_bf16, hadamard, size, spare)
                    peak = record(total + 4 * i, block, peak)
            elif whole < stop:
                block = _load_block(
                    source + (whole << shift), is_bf16,
                    other + (whole << replica_shift) if has_replica else 0, replica_is_bf16,
                    hadamard, numel - start - whole, spare,
                )  # fmt: skip
                peak = record(total + 4 * whole, block, peak)
            store_u32(largest + 4 * group, largest_lane(peak))
        message = out + destination * out_stride
        # After the loop over groups, because an int4 byte combines values that are half a group apart.
        encode_tile(
            total, count, largest, message + part * code_bytes + (start >> 5) * coding.width,
            message + scales_offset + 2 * (part * groups + start // group_size),
            coding, group_size, step, is_clipped, nonfinite,
            rounding, (destination * parts + part) * row_stride + first + start, k0, k1, mask, spare,
            0 if has_blocks else source + (count << shift), shift,
            other + (count << replica_shift) if has_replica and not has_blocks else 0, replica_shift,
        )  # fmt: skip
        start += tile
        if start >= padded:
            start = 0
            row += 1
    if thread == 0:
        _clear_padding(out, destinations, skip, out_stride, payload_bytes, nbytes)


def reduce_quantize(thread, threads, parameters):
    """Quantize the rows of the sum of all messages, each `apart`-th one into the same message.

    `destinations` does not count the message that is left out, `skip`.
    """
    (
        is_dither, rounding, received, sent,
        messages, stride, terms, code_bytes_in, scales_offset_in, groups_in, group_size_in,
        destinations, parts, apart, skip, padded,
        out, out_stride, code_bytes, scales_offset, payload_bytes, nbytes, groups, group_size,
        step, k0, k1, first, row_stride, mask,
        k0_in, k1_in, first_in, row_stride_in, tile, scratch, scratch_stride,
    ) = _unpack(parameters, 37)  # fmt: skip
    total, spare, largest, table = _locate(thread, tile, scratch, scratch_stride)
    masks = table + 4 * terms
    write_masks(masks, terms, is_dither)
    tiles, row, start = _share(destinations * parts, padded, tile, thread, threads)
    for _ in range(tiles):
        destination = row // parts
        place = row - destination * parts
        destination += destination >= skip
        part = place * apart + destination
        count = min(tile, padded - start)
        first_group = start // group_size
        for group in range((count + group_size - 1) // group_size):
            origin = group * group_size
            position = start + origin
            same = group_size == group_size_in
            peak = sum_messages(
                total + 4 * origin, position, min(group_size, count - origin),
                first_group + group if same else position // group_size_in,
                messages + part * code_bytes_in, messages + scales_offset_in + 2 * part * groups_in,
                terms, -1, stride, received, group_size_in, padded, table, masks, _ZERO,
                is_dither, part * row_stride_in + first_in, k0_in, k1_in, spare,
            )  # fmt: skip
            store_u32(largest + 4 * group, largest_lane(peak))
        message = out + destination * out_stride
        encode_tile(
            total, count, largest, message + place * code_bytes + (start >> 5) * sent.width,
            message + scales_offset + 2 * (place * groups + first_group),
            sent, group_size, step, 0, 0,
            rounding, (destination * parts + place) * row_stride + first + start, k0, k1, mask, spare,
            0, 0, 0, 0,
        )  # fmt: skip
        start += tile
        if start >= padded:
            start = 0
            row += 1
    if thread == 0:
        _clear_padding(out, destinations, skip, out_stride, payload_bytes, nbytes)


def dequantize_rows(thread, threads, parameters):
    """Write the sum of messages of row i, except the one `skip`, to row i.

    The first messages of rows are `row_step` bytes apart. The sum is transformed if `hadamard`, multiplied,
    and added to the row of `own`, unless that is 0; only an `own` that is `out` has its blocks. Rows but the
    last one end after `short` values. `initial`, from which sums start, and `multiplier` are the bits of fp32
    numbers. `keys` is the address of the keys of each row, or 0 if all have the same.
    """
    (
        is_dither, hadamard, has_blocks, coding,
        messages, row_step, stride, terms, scales_offset, group_size, rows, numel, short, padded,
        out, out_stride, is_bf16, own, own_is_bf16, initial, multiplier,
        keys, k0, k1, first, skip, blocks, tile, scratch, scratch_stride,
    ) = _unpack(parameters, 30)  # fmt: skip
    total, spare, _, table = _locate(thread, tile, scratch, scratch_stride)
    masks = table + 4 * terms
    write_masks(masks, terms, is_dither)
    shift, own_shift = 2 - is_bf16, 2 - own_is_bf16
    tiles, row, start = _share(rows, padded, tile, thread, threads)
    for _ in range(tiles):
        end = numel if row == rows - 1 else short
        # Of a row that ends before the messages do, no tile after its end.
        count = min(tile, padded - start) if start < end or row == rows - 1 else 0
        message = messages + row * row_step
        if keys:
            k0 = load_scalar_i64(keys + 16 * row)
            k1 = load_scalar_i64(keys + 16 * row + 8)
        if count:
            sum_messages(
                total, start, count, start // group_size, message, message + scales_offset,
                terms, skip, stride, coding, group_size, padded, table, masks, float_from_bits(initial),
                is_dither, first, k0, k1, spare,
            )  # fmt: skip
        target = out + row * out_stride
        added = own + row * out_stride + (start << own_shift) if own else 0
        if has_blocks:
            for i in range(0, count, 32):
                place, size = _block_of(target, blocks, (start + i) >> 5, shift)
                summand = place if own == out else added + (i << own_shift) if own else 0
                _finish_block(
                    load_f32(total + 4 * i), place, is_bf16, summand,
                    own_is_bf16, hadamard, multiplier, size, spare,
                )  # fmt: skip
        else:
            target += start << shift
            whole = min(count, (end - start) & ~31)
            for i in range(0, whole, 32):
                _finish_block(
                    load_f32(total + 4 * i), target + (i << shift), is_bf16,
                    added + (i << own_shift) if own else 0, own_is_bf16, hadamard, multiplier, 32, spare,
                )  # fmt: skip
            if whole < min(count, end - start):
                _finish_block(
                    load_f32(total + 4 * whole), target + (whole << shift), is_bf16,
                    added + (whole << own_shift) if own else 0, own_is_bf16, hadamard, multiplier,
                    end - start - whole, spare,
                )  # fmt: skip
        start += tile
        if start >= padded:
            start = 0
            row += 1


@intrinsic
def _call(typing_context, kernel, thread, threads, parameters):
    """Call a kernel by its address, so that one compiled runner serves all kernels."""

    def codegen(context, builder, sig, args):
        function = ir.FunctionType(ir.VoidType(), [INT64] * 3)
        builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])

    return types.void(*[types.int64] * 4), codegen


def run_here(kernel, threads, parameters):
    """Run a kernel on the calling thread; kernel and parameters are addresses."""
    for thread in range(threads):
        _call(kernel, thread, threads, parameters)


def run_parallel(kernel, threads, parameters):
    """Run a kernel on numba's threads; kernel and parameters are addresses."""
    for thread in prange(threads):
        _call(kernel, thread, threads, parameters)


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

    try:
        folder = Path(njit(cache=True)(function).stats.cache_path)
    except RuntimeError:  # numba has no writable cache directory
        _announce(None, "in every process, because numba cannot write its cache: set NUMBA_CACHE_DIR")
        return build()
    with suppress(_NotCachedError):
        return build(cache=True, pipeline_class=_CachedOnly)
    with _locked(folder / "sdp4bit-kernels.lock") as lock:
        # Another process may have compiled it meanwhile.
        with suppress(_NotCachedError):
            return build(cache=True, pipeline_class=_CachedOnly)
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
        logger.warning("compiling CPU kernels %s (%d to %d s)", where, *_TYPICAL_SECONDS)


def compile_kernel(kernel: Callable[..., None], flags: Flags) -> int:
    """Return the address of a kernel compiled for these flags."""
    kind = types.void(types.int64, types.int64, Parameters(flags))
    compiled: int = _compile(cfunc, kernel, kind, error_model="numpy").address
    return compiled


def compile_runner(runner: Callable[..., None]) -> Callable[[int, int, int], None]:
    """Return run_here or run_parallel, compiled."""
    kind = types.void(types.int64, types.int64, types.int64)
    compiled: Callable[[int, int, int], None] = _compile(
        njit, runner, kind, nogil=True, parallel=runner is run_parallel
    )
    return compiled


def sum_words(words, factors, stripe_words, golden):
    """Return the checksum of words, int64 [n]; see `quantization/checksum.py`."""
    total = np.int64(0)
    for piece in range((len(words) + stripe_words - 1) // stripe_words):
        start, subtotal = piece * stripe_words, np.int64(0)
        for i in range(min(stripe_words, len(words) - start)):
            word = words[start + i]
            subtotal += word * factors[0, i] + (word >> 32) * factors[1, i]
        total += subtotal * ((2 * piece + 1) * golden)
    return total


def compile_sum_words() -> Callable[..., int]:
    """Return `sum_words`, compiled."""
    kind = types.int64(types.int64[::1], types.int64[:, ::1], types.int64, types.int64)
    compiled: Callable[..., int] = _compile(njit, sum_words, kind, nogil=True)
    return compiled
