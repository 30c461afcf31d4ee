"""The steps of the CPU kernels on one tile: load, store, encode codes and scales, decode and sum messages.

All functions are inlined into the kernels. They work on addresses; values between the steps are fp32 in the
working memory of a thread. Numbers and order of operations: :mod:`sdp4bit.quantization.reference`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from sdp4bit.kernels.cpu.vectors import (
    bits_from_float,
    bits_of,
    float_from_bits,
    float_of_bits,
    load_2_bits,
    load_3_bits,
    load_bf16,
    load_f32,
    load_i8,
    load_scalar_u16,
    load_scalar_u32,
    load_u8,
    load_u8x16,
    maximum,
    minimum,
    prefetch,
    random_bits16,
    shift_right,
    shift_right_signed,
    splat,
    splat16,
    store_2_bits,
    store_bf16,
    store_f32,
    store_third_bits,
    store_u8,
    store_u16,
    store_u32,
    to_float,
    to_int,
)

_ABS = 0x7FFFFFFF
_INFINITY = 0x7F800000
_TINY = 0x0D800000  # 2**-100
_NAN_SCALE = 0x7FC0
_FIXED_POINT = np.float32(65536)
_HALF = 0x8000
_AHEAD = 512
"""Bytes by which reading int8 codes of several messages runs ahead; int4 codes gain nothing by it."""
_ZERO = np.float32(0)

# A nibble becomes a float without a shift or a conversion. In an fp32 number from 2**23 on, the lowest bit of
# the mantissa counts ones: 0x4B000000 | n is the number 2**23 + n. From 2**19 on bit 4 counts ones, so the
# high nibble is put there as it lies, unshifted. Subtracting 2**23 + 8 or 2**19 + 8 leaves the code exactly.
_LOW_BASE, _HIGH_BASE = 0x4B000000, 0x49000000
_LOW_OFFSET, _HIGH_OFFSET = np.float32(2**23 + 8), np.float32(2**19 + 8)

inline = njit(
    forceinline=True, error_model="numpy", no_rewrites=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
)


@inline
def load_values(address, is_bf16, count, spare):
    """Return 32 values as fp32, zeros after the first `count`."""
    if count < 32:
        # The end of a row: a whole load might cross into memory that is not there, so values come one by one.
        store_f32(spare, splat(_ZERO))
        for i in range(count):
            if is_bf16:
                store_u32(spare + 4 * i, load_scalar_u16(address + 2 * i) << 16)
            else:
                store_u32(spare + 4 * i, load_scalar_u32(address + 4 * i))
        return load_f32(spare)
    if is_bf16:
        return load_bf16(address)
    return load_f32(address)


@inline
def store_values(address, is_bf16, count, values, spare):
    """Store the first `count` of 32 values as fp32 or bf16."""
    if count < 32:
        if is_bf16:
            store_bf16(spare, values)
            for i in range(count):
                store_u16(address + 2 * i, load_scalar_u16(spare + 2 * i))
        else:
            store_f32(spare, values)
            for i in range(count):
                store_u32(address + 4 * i, load_scalar_u32(spare + 4 * i))
    elif is_bf16:
        store_bf16(address, values)
    else:
        store_f32(address, values)


@inline
def compute_scale(largest, step):
    """Return the bits of the bf16 scale and the fixed-point reciprocal of a group's largest |x|, as bits.

    Args:
        step: bits of the part of the largest |x| that a unit of the codes is.
    """
    if largest < _TINY:
        return 0, _ZERO
    if largest >= _INFINITY:
        return _NAN_SCALE, _ZERO
    # Adding 0x10003 and cutting 16 bits off rounds up what is 4 units more: |x / scale| never exceeds the
    # largest code, not even after the rounding of the two multiplications, and codes need no clamp.
    unit = float_from_bits(largest) * float_from_bits(step)
    scale = (bits_from_float(unit) + 0x10003) & 0xFFFF0000
    if scale >= _INFINITY:
        return _NAN_SCALE, _ZERO
    return scale >> 16, _FIXED_POINT / float_from_bits(scale)


@inline
def fixed_point(values, factor, limit, stochastic, element, k0, k1):
    """Return codes times 65536, ready to be cut off; none beyond `limit`, unless that is 0."""
    # Cut towards zero to 16 fractional bits first: random bits are integers, so the rounding that follows is
    # integer arithmetic, the same everywhere.
    fixed = to_int(load_f32(values) * factor)
    if limit:
        fixed = maximum(minimum(fixed, splat(limit)), splat(-limit))
    if stochastic:
        return fixed + random_bits16(element, k0, k1)
    return fixed + splat(_HALF)


@inline
def prefetch_block(address, shift):
    """Start reading the 32 values at an address, fp32 or bf16, which may be past the end of a tensor."""
    # 32 values are one cache line of 64 bytes in bf16, two in fp32.
    prefetch(address)
    if shift == 2:
        prefetch(address + 64)


@inline
def prefetch_upcoming(i, upcoming, shift, upcoming_replica, replica_shift):
    """Start reading 32 upcoming values and their replica; an address of 0 stands for none."""
    if upcoming:
        prefetch_block(upcoming + (i << shift), shift)
    if upcoming_replica:
        prefetch_block(upcoming_replica + (i << replica_shift), replica_shift)


@inline
def store_block(address, numbers, bits):
    """Store 32 codes of 2 or 3 bits, without signs."""
    if bits == 2:
        store_2_bits(address, numbers)
        return
    store_2_bits(address, numbers & splat(3))
    store_third_bits(address + 8, numbers)


@inline
def load_block(address, bits):
    """Return 32 codes of 2, 3 or 8 bits as fp32."""
    if bits == 8:
        return to_float(load_i8(address))
    numbers = load_2_bits(address)
    if bits == 3:
        numbers = load_3_bits(address + 8, numbers)
    return to_float(numbers - splat(1 << (bits - 1)))


@inline
def encode_group(
    values, size, factor, codes, bits, limit, stochastic, element, k0, k1, spare,
    upcoming, shift, upcoming_replica, replica_shift,
):  # fmt: skip
    """Write the codes of one group; meanwhile, as many upcoming values and their replica are prefetched."""
    if bits == 8:
        for i in range(0, size, 32):
            prefetch_upcoming(i, upcoming, shift, upcoming_replica, replica_shift)
            fixed = fixed_point(values + 4 * i, factor, limit, stochastic, element + i, k0, k1)
            store_u8(codes + i, shift_right_signed(fixed, 16))
        return
    if bits < 4:
        # The offset that makes codes unsigned is added before the cut.
        offset = splat(1 << (bits + 15))
        for i in range(0, size, 32):
            prefetch_upcoming(i, upcoming, shift, upcoming_replica, replica_shift)
            fixed = fixed_point(values + 4 * i, factor, limit, stochastic, element + i, k0, k1)
            store_block(codes + (i * bits >> 3), shift_right(fixed + offset, 16), bits)
        return
    half = size >> 1
    if size & 32 == 0:
        # The 8 that makes codes unsigned is added before the cut. Shifted by 12 the high code lies where its
        # nibble belongs, with four fractional bits below it that the mask removes.
        offset, mask = splat(8 << 16), splat(0xF0)
        for i in range(0, half, 32):
            j = i + half
            prefetch_upcoming(2 * i, upcoming, shift, upcoming_replica, replica_shift)
            prefetch_upcoming(2 * i + 32, upcoming, shift, upcoming_replica, replica_shift)
            low = fixed_point(values + 4 * i, factor, limit, stochastic, element + i, k0, k1) + offset
            high = fixed_point(values + 4 * j, factor, limit, stochastic, element + j, k0, k1) + offset
            store_u8(codes + i, shift_right(low, 16) | shift_right(high, 12) & mask)
        return
    # Halves begin within a block: their codes take their places by way of memory.
    for i in range(0, size, 32):
        fixed = fixed_point(values + 4 * i, factor, limit, stochastic, element + i, k0, k1)
        store_u8(spare + i, shift_right_signed(fixed, 16) + splat(8))
    sixteen = splat16(16)
    for i in range(0, half, 16):
        store_u8(codes + i, load_u8x16(spare + i) | load_u8x16(spare + half + i) * sixteen)


@inline
def encode_tile(
    values, count, largest, codes, scales, bits, group_size, step, limit, stochastic, element, k0, k1, spare,
    upcoming, shift, upcoming_replica, replica_shift,
):  # fmt: skip
    """Write codes and scales of `count` values; `largest` points to the bits of each group's largest |x|.

    The table is overwritten with the reciprocals, and groups that are not finite with zeros.

    Args:
        step: bits of the part of the largest |x| that a unit of the codes is.
        limit: the largest code times 65536, if values may be beyond it; 0 if none is.
        upcoming, upcoming_replica: addresses to prefetch from meanwhile, 0 for none.
        shift, replica_shift: 2 if they are fp32, 1 if bf16.
    """
    if bits == 32:
        for i in range(0, count, 32):
            store_f32(codes + 4 * i, load_f32(values + 4 * i))
        return
    groups = (count + group_size - 1) // group_size
    # All scales first: the divisions of different groups overlap, where each group would wait for its own.
    for group in range(groups):
        peak = load_scalar_u32(largest + 4 * group)
        scale, reciprocal = compute_scale(peak, step)
        store_u16(scales + 2 * group, scale)
        store_u32(largest + 4 * group, bits_from_float(reciprocal))
        if peak >= _INFINITY:
            # The conversion of NaN to an integer is undefined: the codes of such a group are those of zeros.
            first = group * group_size
            for i in range(first, min(first + group_size, count), 32):
                store_f32(values + 4 * i, splat(_ZERO))
    for group in range(groups):
        first = group * group_size
        factor = splat(float_from_bits(load_scalar_u32(largest + 4 * group)))
        encode_group(
            values + 4 * first, min(group_size, count - first), factor, codes + (first * bits >> 3),
            bits, limit, stochastic, element + first, k0, k1, spare,
            upcoming + (first << shift) if upcoming else 0, shift,
            upcoming_replica + (first << replica_shift) if upcoming_replica else 0, replica_shift,
        )  # fmt: skip


@inline
def record(target, values, peak):
    """Store a block; return the largest |x| of each lane so far, as bits."""
    store_f32(target, values)
    return maximum(peak, bits_of(values) & splat(_ABS))


@inline
def sum_blocks(total, codes, count, bits, table, terms, stride, start, peak):
    """Write start + code * scale + ..., in the order of the terms, and return the peaks so far.

    Args:
        codes: of 2, 3 or 8 bits, whose blocks of 32 lie one behind the other.
        table: address of the terms' fp32 scales.
    """
    # Two blocks at a time: one sum has to wait for its addition before the next term, two can take turns.
    paired = count & ~63
    for i in range(0, paired, 64):
        low = high = start
        for term in range(terms):
            scale = splat(float_from_bits(load_scalar_u32(table + 4 * term)))
            source = codes + term * stride + (i * bits >> 3)
            if bits == 8:
                prefetch(source + _AHEAD)
            # The product is exact, 7 bits times 8: only the addition rounds, as in the definition.
            low = low + load_block(source, bits) * scale
            high = high + load_block(source + 4 * bits, bits) * scale
        peak = record(total + 4 * i, low, peak)
        peak = record(total + 4 * i + 128, high, peak)
    if paired < count:
        value = start
        for term in range(terms):
            scale = splat(float_from_bits(load_scalar_u32(table + 4 * term)))
            value = value + load_block(codes + term * stride + (paired * bits >> 3), bits) * scale
        peak = record(total + 4 * paired, value, peak)
    return peak


@inline
def sum_int4(total, codes, half, table, terms, stride, start, peak):
    """Sum as sum_blocks does, a whole group whose halves are multiples of 32."""
    low_mask, low_base, low_offset = splat(0x0F), splat(_LOW_BASE), splat(_LOW_OFFSET)
    high_mask, high_base, high_offset = splat(0xF0), splat(_HIGH_BASE), splat(_HIGH_OFFSET)
    for i in range(0, half, 32):
        low = high = start
        for term in range(terms):
            scale = splat(float_from_bits(load_scalar_u32(table + 4 * term)))
            both = load_u8(codes + term * stride + i)
            low = low + (float_of_bits(both & low_mask | low_base) - low_offset) * scale
            high = high + (float_of_bits(both & high_mask | high_base) - high_offset) * scale
        peak = record(total + 4 * i, low, peak)
        peak = record(total + 4 * (i + half), high, peak)
    return peak


@inline
def sum_nibbles(total, codes, count, shift, table, terms, stride, start):
    """Sum as sum_blocks does, a part of one half of an int4 group; `count` is a multiple of 16."""
    for i in range(0, count, 16):
        value = splat16(start)
        for term in range(terms):
            scale = splat16(float_from_bits(load_scalar_u32(table + 4 * term)))
            code = shift_right(load_u8x16(codes + term * stride + i), shift) & splat16(15)
            value = value + to_float(code - splat16(8)) * scale
        store_f32(total + 4 * i, value)


@inline
def sum_messages(
    total, first, count, group, codes, scales, terms, stride, bits, group_size, padded, table, start
):
    """Write the sums over the messages of values first .. first + count of a row; return their peaks.

    Args:
        group: the group of the first value.
        codes, scales: addresses of the row in the first message; `stride` bytes further in each next one.
        table: room for one fp32 number per message.
        start: what the sums start from.
    """
    peak = splat(0)
    if bits == 32:  # no groups, no scales
        for i in range(0, count, 32):
            value = splat(start)
            for term in range(terms):
                value = value + load_f32(codes + term * stride + 4 * (first + i))
            peak = record(total + 4 * i, value, peak)
        return peak
    # The groups received and the groups sent need not fit: the range is cut at the bounds of those received.
    stop = first + count
    origin = group * group_size
    while origin < stop:
        size = min(group_size, padded - origin)
        begin, end = max(origin, first), min(origin + size, stop)
        for term in range(terms):
            store_u32(table + 4 * term, load_scalar_u16(scales + term * stride + 2 * group) << 16)
        target = total + 4 * (begin - first)
        packed = codes + (origin >> 1)
        if bits != 4:
            # Called with constants, so that the loops inside are compiled for each width.
            block, size_here = codes + (begin * bits >> 3), end - begin
            if bits == 8:
                peak = sum_blocks(target, block, size_here, 8, table, terms, stride, splat(start), peak)
            elif bits == 3:
                peak = sum_blocks(target, block, size_here, 3, table, terms, stride, splat(start), peak)
            else:
                peak = sum_blocks(target, block, size_here, 2, table, terms, stride, splat(start), peak)
        elif end - begin == size and size & 32 == 0:
            peak = sum_int4(target, packed, size >> 1, table, terms, stride, splat(start), peak)
        else:
            # A part of an int4 group, or one whose halves meet within a block of 32: what lies in the lower
            # half is in the low nibbles of its bytes, what lies in the upper one in the high nibbles.
            middle = origin + (size >> 1)
            lower = min(end, middle) - begin
            sum_nibbles(target, packed + begin - origin, lower, 0, table, terms, stride, start)
            upper = max(begin, middle)
            target = total + 4 * (upper - first)
            sum_nibbles(target, packed + upper - middle, end - upper, 4, table, terms, stride, start)
            for i in range(begin - first, end - first, 32):
                peak = record(total + 4 * i, load_f32(total + 4 * i), peak)
        origin += size
        group += 1
    return peak
