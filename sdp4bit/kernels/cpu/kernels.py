"""The kernels of the CPU back end, which numba compiles; see :mod:`sdp4bit.kernels.cpu.compilation`.

A kernel does the share of thread `thread` of `threads`. Rows are cut into tiles of complete groups that fit
the L1 cache with their codes. All steps of an operator run on one tile before the next, which is prefetched
meanwhile. The arguments are one block of int64 numbers and addresses, so a call costs the same few hundred
nanoseconds for every kernel and one function runs all of them in parallel. Kernels are compiled for each set
of flags, so that innermost loops do not branch on them.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from sdp4bit.kernels.cpu.parameters import ONE_BITS, address_of, unpack
from sdp4bit.kernels.cpu.tiles import (
    DITHER,
    Ahead,
    Encoding,
    Terms,
    encode_tile,
    inline,
    load_values,
    mask_of,
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
    splat,
    store_scalar_i64,
    store_u8,
    store_u32,
)
from sdp4bit.quantization import random

_ZERO = np.float32(0)
_NOTHING = Ahead(0, 0, 0, 0)
_STEP_OF_STREAM = np.uint64(random.STEP_OF_STREAM)
_SPLITMIX_1, _SPLITMIX_2 = np.uint64(random.SPLITMIX_1), np.uint64(random.SPLITMIX_2)
MOST_MOVING, MOST_MOVED = 8, 3
"""Tensors whose addresses begin a table, and addresses of a row that move with them."""
HEAD_WORDS = 2 + 3 * MOST_MOVED + 2 * 7
"""Words before the parameters of a row.

The first two are the kernel and the column of `Work.offset`. Three follow for each address that moves: its
column or -1, its tensor, and its offset in it. Seven follow for each key: its column or -1, the four numbers
of its `KeySource`, and two for the keys of pieces. These are the number of pieces and the difference between
their counters, and the first word is then the address of the keys.
"""


@inline
def _locate(thread, parameters, work):
    """Return the addresses of a thread's working memory.

    It holds the fp32 values of a tile, their codes or one block, the largest |x| of each group, and a table
    of two 4-byte numbers per message, its scale and its mask.
    """
    # A code takes one byte and a block of fp32 takes 128.
    total = address_of(parameters) + work.offset + thread * work.memory_stride
    spare = total + 4 * work.tile
    largest = spare + work.tile + 128
    return total, spare, largest, largest + (work.tile >> 3)


@inline
def _share(rows, layout, work, thread, threads):
    """Return a thread's number of tiles, and the row and the position where they begin."""
    # Tiles of all rows are divided evenly, so that one long row or many short ones use all threads. No group
    # crosses tiles, so the bytes do not depend on the number of threads.
    per_row = (layout.padded_numel + work.tile - 1) // work.tile
    begin, end = rows * per_row * thread // threads, rows * per_row * (thread + 1) // threads
    row = begin // per_row
    return end - begin, row, (begin - row * per_row) * work.tile


@inline
def _load_block(source, replica, flags, call, count, spare):
    """Return up to 32 values, minus those of the replica, transformed."""
    block = load_values(source, call.is_bf16, count, spare)
    if flags.has_replica:
        block = block - load_values(replica, call.replica_is_bf16, count, spare)
    if flags.hadamard:
        block = hadamard32(block)
    return block


@inline
def _block_of(row, blocks, number, shift):
    """Return the address and the number of values of a block; see `ops.hadamard_quantize`."""
    entry = load_scalar_i64(blocks + 8 * number)
    return row + (entry >> 6 << shift), entry & 63


@inline
def _finish_block(total, target, summand, flags, call, count, spare):
    """Transform and scale a block of sums, add it to the summand unless that is 0, and write it."""
    block = load_f32(total)
    if flags.hadamard:
        block = hadamard32(block)
    if call.multiplier != ONE_BITS:
        block = block * splat(float_from_bits(call.multiplier))
    if summand:
        own = load_values(summand, call.own_is_bf16, count, spare)
        if call.own_multiplier != ONE_BITS:
            own = own * splat(float_from_bits(call.own_multiplier))
        block = block + own
    store_values(target, call.is_bf16, count, block, spare)


@inline
def _encoding(flags, key):
    mask = mask_of(key.sender) if flags.rounding == DITHER else 0
    return Encoding(flags.sent, flags.is_clipped, flags.rounding, key.k0, key.k1, mask)


@inline
def _terms(flags, call, table, initial, k0, k1):
    masks = table + 4 * call.terms
    return Terms(flags.received, call.terms, call.stride, table, masks, initial, flags.is_dither, k0, k1)


@inline
def _clear_padding(call, layout):
    """Write zeros after the scales of each message, so that equal values yield equal messages."""
    for number in range(call.destinations):
        message = number + (number >= call.skip)
        for i in range(layout.payload_bytes, layout.nbytes):
            store_u8(call.out + message * call.out_stride + i, 0)


def quantize_rows(thread, threads, parameters):
    """Quantize the rows of a tensor, minus a replica if there is one, transformed if `hadamard`.

    `destinations` does not count the one that is left out, `skip`. `nonfinite` is the address of a flag or 0.
    """
    flags, call, key, layout, work = unpack(parameters)
    total, spare, largest, _ = _locate(thread, parameters, work)
    how = _encoding(flags, key)
    shift, replica_shift = 2 - call.is_bf16, 2 - call.replica_is_bf16
    tiles, row, start = _share(call.destinations * layout.parts, layout, work, thread, threads)
    for _ in range(tiles):
        destination = row // layout.parts
        part = row - destination * layout.parts
        destination += destination >= call.skip
        source = call.values + destination * call.outer_stride + part * call.inner_stride
        if not flags.has_blocks:
            source += start << shift
        other = call.replica + (0 if flags.has_blocks else start << replica_shift) if flags.has_replica else 0
        count = min(work.tile, layout.padded_numel - start)
        # Values in complete blocks; at the end of a row one padded block may remain.
        whole = 0 if flags.has_blocks else min(count, (layout.numel - start) & ~31)
        for group in range((count + layout.group_size - 1) // layout.group_size):
            origin = group * layout.group_size
            stop = min(origin + layout.group_size, count)
            peak = splat(0)
            for i in range(origin, min(stop, whole), 32):
                block = _load_block(
                    source + (i << shift), other + (i << replica_shift), flags, call, 32, spare
                )
                peak = record(total + 4 * i, block, peak)
            if flags.has_blocks:
                for i in range(origin, stop, 32):
                    number = (start + i) >> 5
                    place, size = _block_of(source, call.blocks, number, shift)
                    held = _block_of(other, call.blocks, number, replica_shift)[0] if flags.has_replica else 0
                    block = _load_block(place, held, flags, call, size, spare)
                    peak = record(total + 4 * i, block, peak)
            elif whole < stop:
                rest = layout.numel - start - whole
                block = _load_block(
                    source + (whole << shift), other + (whole << replica_shift), flags, call, rest, spare
                )
                peak = record(total + 4 * whole, block, peak)
            store_u32(largest + 4 * group, largest_lane(peak))
        message = call.out + destination * call.out_stride
        codes = message + part * layout.code_bytes + (start >> 5) * flags.sent.width
        scales = message + layout.scales_offset + 2 * (part * layout.groups + start // layout.group_size)
        element = key.first + (destination * layout.parts + part) * key.row_stride + start
        ahead = Ahead(
            0 if flags.has_blocks else source + (count << shift),
            shift,
            other + (count << replica_shift) if flags.has_replica and not flags.has_blocks else 0,
            replica_shift,
        )
        # After the loop over groups, because an int4 byte combines values that are half a group apart.
        encode_tile(total, count, largest, codes, scales, layout, how, element, call.nonfinite, ahead, spare)
        start += work.tile
        if start >= layout.padded_numel:
            start = 0
            row += 1
    if thread == 0:
        _clear_padding(call, layout)


def reduce_quantize(thread, threads, parameters):
    """Quantize the rows of the sum of all messages, each `apart`-th one into the same message.

    `destinations` does not count the message that is left out, `skip`.
    """
    flags, call, key, dither, received, layout, work = unpack(parameters)
    total, spare, largest, table = _locate(thread, parameters, work)
    how = _encoding(flags, key)
    terms = _terms(flags, call, table, _ZERO, dither.k0, dither.k1)
    write_masks(terms)
    tiles, row, start = _share(call.destinations * layout.parts, layout, work, thread, threads)
    for _ in range(tiles):
        destination = row // layout.parts
        place = row - destination * layout.parts
        destination += destination >= call.skip
        part = place * call.apart + destination
        codes_in = call.messages + part * received.code_bytes
        scales_in = call.messages + received.scales_offset + 2 * part * received.groups
        element = dither.first + part * dither.row_stride
        count = min(work.tile, layout.padded_numel - start)
        first_group = start // layout.group_size
        for group in range((count + layout.group_size - 1) // layout.group_size):
            origin = group * layout.group_size
            position = start + origin
            same = layout.group_size == received.group_size
            first = first_group + group if same else position // received.group_size
            size = min(layout.group_size, count - origin)
            target = total + 4 * origin
            peak = sum_messages(
                target, position, size, first, codes_in, scales_in, -1, received, terms, element, spare
            )
            store_u32(largest + 4 * group, largest_lane(peak))
        message = call.out + destination * call.out_stride
        codes = message + place * layout.code_bytes + (start >> 5) * flags.sent.width
        scales = message + layout.scales_offset + 2 * (place * layout.groups + first_group)
        element = key.first + (destination * layout.parts + place) * key.row_stride + start
        encode_tile(total, count, largest, codes, scales, layout, how, element, 0, _NOTHING, spare)
        start += work.tile
        if start >= layout.padded_numel:
            start = 0
            row += 1
    if thread == 0:
        _clear_padding(call, layout)


def dequantize_rows(thread, threads, parameters):
    """Write the sum of messages of row i, except the one `skip`, to row i.

    The first messages of rows are `row_step` bytes apart. The sum is transformed if `hadamard`, multiplied,
    and added to the row of `own` times `own_multiplier`, unless `own` is 0. Rows but the last one end after
    `short` values. `initial`, from which sums start, and the multipliers are the bits of fp32 numbers. `keys`
    is the address of the keys of each row, or 0 if all have the same.
    """
    flags, call, key, layout, work = unpack(parameters)
    total, spare, _, table = _locate(thread, parameters, work)
    initial = float_from_bits(call.initial)
    terms = _terms(flags, call, table, initial, key.k0, key.k1)
    write_masks(terms)
    shift, own_shift = 2 - call.is_bf16, 2 - call.own_is_bf16
    tiles, row, start = _share(call.rows, layout, work, thread, threads)
    for _ in range(tiles):
        end = layout.numel if row == call.rows - 1 else call.short
        # Of a row that ends before the messages do, no tile after its end.
        count = min(work.tile, layout.padded_numel - start) if start < end or row == call.rows - 1 else 0
        message = call.messages + row * call.row_step
        if call.keys:
            k0, k1 = load_scalar_i64(call.keys + 16 * row), load_scalar_i64(call.keys + 16 * row + 8)
            terms = _terms(flags, call, table, initial, k0, k1)
        if count:
            codes = message + call.part * layout.code_bytes
            scales = message + layout.scales_offset + 2 * call.part * layout.groups
            group = start // layout.group_size
            sum_messages(
                total, start, count, group, codes, scales, call.skip, layout, terms, key.first, spare
            )
        target = call.out + row * call.out_stride
        added = call.own + row * call.out_stride
        if flags.has_blocks:
            for i in range(0, count, 32):
                number = (start + i) >> 5
                place, size = _block_of(target, call.blocks, number, shift)
                summand = _block_of(added, call.blocks, number, own_shift)[0] if call.own else 0
                _finish_block(total + 4 * i, place, summand, flags, call, size, spare)
        else:
            target += start << shift
            added += start << own_shift
            whole = min(count, (end - start) & ~31)
            for i in range(0, whole, 32):
                summand = added + (i << own_shift) if call.own else 0
                _finish_block(total + 4 * i, target + (i << shift), summand, flags, call, 32, spare)
            if whole < min(count, end - start):
                place, summand = target + (whole << shift), added + (whole << own_shift) if call.own else 0
                _finish_block(total + 4 * whole, place, summand, flags, call, end - start - whole, spare)
        start += work.tile
        if start >= layout.padded_numel:
            start = 0
            row += 1


@intrinsic
def _call(typing_context, kernel, thread, threads, parameters):
    """Call a kernel by its address, so that one compiled runner serves all kernels."""

    def codegen(context, builder, sig, args):
        function = ir.FunctionType(ir.VoidType(), [INT64] * 3)
        builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])

    return types.void(*[types.int64] * 4), codegen


@inline
def _mixed(z):
    """Return both keys of a counter in one number; see `random.KeySource`."""
    z = (z ^ (z >> np.uint64(30))) * _SPLITMIX_1
    z = (z ^ (z >> np.uint64(27))) * _SPLITMIX_2
    return z ^ (z >> np.uint64(31))


@inline
def _write_keys(place, z):
    mixed = _mixed(z)
    store_scalar_i64(place, np.int64(mixed & np.uint64(0xFFFFFFFF)))
    store_scalar_i64(place + 8, np.int64(mixed >> np.uint64(32)))


@inline
def _move(table, width, rows, memory, call):
    """Write the parameters of a table's rows that differ between calls: addresses, and random keys."""
    for row in range(rows):
        entry = table + 8 * (MOST_MOVING + width * row)
        parameters = entry + 8 * HEAD_WORDS
        store_scalar_i64(parameters + 8 * load_scalar_i64(entry + 8), memory - parameters)
        for i in range(MOST_MOVED):
            column = load_scalar_i64(entry + 8 * (2 + 3 * i))
            if column >= 0:
                base = load_scalar_i64(table + 8 * load_scalar_i64(entry + 8 * (3 + 3 * i)))
                store_scalar_i64(parameters + 8 * column, base + load_scalar_i64(entry + 8 * (4 + 3 * i)))
        for i in range(2):
            key = entry + 8 * (2 + 3 * MOST_MOVED + 7 * i)
            column, pieces = load_scalar_i64(key), load_scalar_i64(key + 40)
            if column >= 0:
                step = call * load_scalar_i64(key + 16) + load_scalar_i64(key + 24)
                step &= load_scalar_i64(key + 32)
                z = np.uint64(load_scalar_i64(key + 8)) + np.uint64(step) * _STEP_OF_STREAM
                if pieces == 0:
                    _write_keys(parameters + 8 * column, z)
                for piece in range(pieces):
                    _write_keys(column + 16 * piece, z)
                    z += np.uint64(load_scalar_i64(key + 48))


def run_here(table, width, rows, threads, memory, call):
    """Run the kernels of a table's rows on the calling thread; see `HEAD_WORDS`."""
    _move(table, width, rows, memory, call)
    for row in range(rows):
        entry = table + 8 * (MOST_MOVING + width * row)
        for thread in range(threads):
            _call(load_scalar_i64(entry), thread, threads, entry + 8 * HEAD_WORDS)


def run_parallel(table, width, rows, threads, memory, call):
    """Run the kernels of a table's rows on numba's threads, each with its share of every row."""
    _move(table, width, rows, memory, call)
    for thread in prange(threads):
        for row in range(rows):
            entry = table + 8 * (MOST_MOVING + width * row)
            _call(load_scalar_i64(entry), thread, threads, entry + 8 * HEAD_WORDS)


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
