"""Steps of the CPU kernels on one tile: load, store, encode codes and scales, decode and sum messages.

All functions are inlined into the kernels and take addresses. Intermediate values are fp32 in the working
memory of a thread. Numbers and order of operations: :mod:`sdp4bit.quantization.reference`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from sdp4bit.kernels.cpu.vectors import (
    bits_from_float,
    bits_of,
    float_from_bits,
    float_of_bits,
    load_bf16,
    load_f32,
    load_f32x16,
    load_scalar_u16,
    load_scalar_u32,
    load_u8,
    load_u8x16,
    maximum,
    minimum,
    prefetch,
    random_bits16,
    shift_left,
    shift_right,
    shift_right_signed,
    splat,
    splat16,
    store_bf16,
    store_f32,
    store_u8,
    store_u16,
    store_u32,
    to_float,
    to_int,
    where_equal,
)
from sdp4bit.quantization.formats import BF16

_ABS = 0x7FFFFFFF
_INFINITY = 0x7F800000
_ROUNDS_TO_INFINITY = 0x7F7F8000  # the least number that is infinite in bf16
_BF16_BYTES = BF16.block_bytes
_TINY = 0x0D800000  # 2**-100
_NAN_SCALE = 0x7FC0
_SCALE_LIMIT = 0x7B800000  # 2**120
_FIXED_POINT = np.float32(65536)
_HALF = 0x8000
ZERO = np.float32(0)

# A nibble becomes a float without a shift or a conversion. In fp32, 0x4B000000 | n is 2**23 + n, because the
# lowest bit of the mantissa is worth 1 there. From 2**19 on bit 4 is worth 1, so a high nibble needs no
# shift. Subtracting 2**23 + 8 or 2**19 + 8 yields the code exactly.
_LOW_BASE, _HIGH_BASE = 0x4B000000, 0x49000000
_LOW_OFFSET, _HIGH_OFFSET = np.float32(2**23 + 8), np.float32(2**19 + 8)

# The receiver subtracts the upper 8 of an element's 16 random bits, t. A code c represents
# c + 1/2 - (t + 1/2) / 256 = (512 * c + 2 * ~t - 255) / 512. The unsigned code from bit 9 on and ~t in bits 1
# to 8 are one number, which is put into the mantissa of a float from 2**14 on, whose lowest bit is worth
# 1/512.
_DITHER_BASE, _DITHER_BITS = 0x46800000, 0x1FE
CODE_SHIFT, _CODE_BITS_4 = 9, 0x1E00
_DITHER_OFFSET = np.float32(2**14 + 255 / 512)
"""Offset to subtract, besides the one that makes codes unsigned."""

NEAREST, STOCHASTIC, DITHER = 0, 1, 2
"""Rounding modes."""


class Encoding(NamedTuple):
    """How values become codes."""

    coding: Any
    is_clipped: int  # whether values may be beyond the largest code
    rounding: int  # mode
    k0: int
    k1: int
    mask: int  # of the sender's dither


class Ahead(NamedTuple):
    """Addresses of upcoming values and their replica, which are prefetched, or 0."""

    values: int
    shift: int  # 2 for fp32, 1 for bf16
    replica: int
    replica_shift: int


class Terms(NamedTuple):
    """How messages are summed."""

    coding: Any
    count: int  # type: ignore[assignment]  # of messages; not the method of tuples
    stride: int  # bytes between them
    table: int  # address of their fp32 scales, which `sum_messages` writes
    masks: int  # address of the masks of their dither, written by `write_masks`
    initial: float
    is_dither: int
    k0: int
    k1: int


inline = njit(
    forceinline=True, error_model="numpy", no_rewrites=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
)


@inline
def load_values(address, is_bf16, count, spare):
    """Return 32 values as fp32, zeros after the first `count`."""
    if count < 32:
        # At the end of a row a full load might read unmapped memory.
        store_f32(spare, splat(ZERO))
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
    """Return the bits of the bf16 scale and the fixed-point reciprocal for the bits of a group's largest |x|.

    Args:
        step: fp32 bits of one code unit relative to the largest |x|.
    """
    if largest < _TINY:
        return 0, ZERO
    if largest >= _INFINITY:
        return _NAN_SCALE, ZERO
    # Adding 0x10003 and truncating 16 bits rounds up with a margin for the rounding of two multiplications,
    # so |x / scale| never exceeds the largest code and codes need no clamp.
    unit = float_from_bits(largest) * float_from_bits(step)
    scale = (bits_from_float(unit) + 0x10003) & 0xFFFF0000
    if scale >= _SCALE_LIMIT:
        return _NAN_SCALE, ZERO
    return scale >> 16, _FIXED_POINT / float_from_bits(scale)


@inline
def fixed_point(values, factor, how, element):
    """Return codes times 65536, rounded except for the truncation, and clamped if they are clipped."""
    # Truncate to 16 fractional bits first. Rounding is then integer arithmetic, which is the same everywhere.
    fixed = to_int(load_f32(values) * factor)
    if how.is_clipped:
        limit = how.coding.largest << 16
        fixed = maximum(minimum(fixed, splat(limit)), splat(-limit))
    if how.rounding == NEAREST:
        return fixed + splat(_HALF)
    rounded = fixed + random_bits16(element, how.k0, how.k1, how.mask)
    if how.rounding == DITHER:
        return how.coding.functions.mark_zeros(fixed, rounded, how.coding.offset)
    return rounded


@inline
def mark_lowest(fixed, rounded, offset):
    """Return the rounded codes times 65536, with the lowest code for zeros."""
    return where_equal(fixed, splat(0), splat(-offset << 16), rounded)


@inline
def drop_lowest(codes, units):
    """Return the units, with 0 for the lowest code."""
    return where_equal(codes, splat(0), splat(ZERO), units)


@inline
def dither_of(terms, element):
    """Return the dither of a block for take_off, without a sender's mask."""
    if terms.is_dither:
        random = random_bits16(element, terms.k0, terms.k1, 0)
        return shift_right(random, 7) & splat(_DITHER_BITS) ^ splat(_DITHER_BASE | _DITHER_BITS)
    return splat(0)


@inline
def take_off(codes, terms, dither, term):
    """Decode dithered codes, unsigned and shifted by CODE_SHIFT, in units of their scale."""
    mask = splat(load_scalar_u32(terms.masks + 4 * term))
    units = float_of_bits(codes ^ (dither ^ mask)) - splat(_DITHER_OFFSET + np.float32(terms.coding.offset))
    return terms.coding.functions.drop_zeros(codes, units)


@inline
def scale_of(terms, term):
    """Return the scale of a term in the group that is summed."""
    return float_from_bits(load_scalar_u32(terms.table + 4 * term))


@inline
def prefetch_block(address, shift):
    """Start reading the 32 values at an address, fp32 or bf16, which may be past the end of a tensor."""
    # 32 values are one cache line of 64 bytes in bf16, two in fp32.
    prefetch(address)
    if shift == 2:
        prefetch(address + 64)


@inline
def prefetch_upcoming(i, ahead):
    """Start reading 32 upcoming values and their replica."""
    if ahead.values:
        prefetch_block(ahead.values + (i << ahead.shift), ahead.shift)
    if ahead.replica:
        prefetch_block(ahead.replica + (i << ahead.replica_shift), ahead.replica_shift)


@inline
def load_units(address, terms, dither, term):
    """Decode a block of 32 codes, in units of their scale."""
    numbers = terms.coding.functions.load(address)
    if terms.is_dither:
        return take_off(shift_left(numbers, CODE_SHIFT), terms, dither, term)
    return to_float(numbers - splat(terms.coding.offset))


@inline
def encode_blocks(values, size, factor, codes, how, element, ahead, spare):
    """Write the codes of one group, and prefetch as many upcoming values and their replica."""
    # The offset that makes codes unsigned is added before the truncation.
    offset = splat(how.coding.offset << 16)
    for i in range(0, size, 32):
        prefetch_upcoming(i, ahead)
        fixed = fixed_point(values + 4 * i, factor, how, element + i)
        how.coding.functions.store(codes + (i >> 5) * how.coding.width, shift_right(fixed + offset, 16))


@inline
def encode_halves(values, size, factor, codes, how, element, ahead, spare):
    """Write the codes of one int4 group; see encode_blocks."""
    half = size >> 1
    if size & 32 == 0:
        # The offset of 8 is added before the truncation. A shift by 12 puts the high code into its nibble,
        # and the mask removes four fractional bits below.
        offset, high_nibble = splat(8 << 16), splat(0xF0)
        for i in range(0, half, 32):
            j = i + half
            prefetch_upcoming(2 * i, ahead)
            prefetch_upcoming(2 * i + 32, ahead)
            low = fixed_point(values + 4 * i, factor, how, element + i) + offset
            high = fixed_point(values + 4 * j, factor, how, element + j) + offset
            store_u8(codes + i, shift_right(low, 16) | shift_right(high, 12) & high_nibble)
        return
    # Halves begin within a block, so codes are combined in memory.
    for i in range(0, size, 32):
        fixed = fixed_point(values + 4 * i, factor, how, element + i)
        store_u8(spare + i, shift_right_signed(fixed, 16) + splat(8))
    sixteen = splat16(16)
    for i in range(0, half, 16):
        store_u8(codes + i, load_u8x16(spare + i) | load_u8x16(spare + half + i) * sixteen)


@inline
def encode_tile(values, count, largest, codes, scales, layout, how, element, nonfinite, ahead, spare):
    """Write codes and scales of `count` values; `largest` points to the bits of each group's largest |x|.

    Overwrites the table with the reciprocals, and non-finite groups with zeros.

    Args:
        nonfinite: address of a flag that is set if a group is not finite, or 0.
    """
    group_size = layout.group_size
    groups = (count + group_size - 1) // group_size
    if not how.coding.has_scales:
        is_bf16 = how.coding.width == _BF16_BYTES
        for i in range(0, count, 32):
            if is_bf16:
                store_bf16(codes + 2 * i, load_f32(values + 4 * i))
            else:
                store_f32(codes + 4 * i, load_f32(values + 4 * i))
        limit = _ROUNDS_TO_INFINITY if is_bf16 else _INFINITY
        for group in range(groups if nonfinite else 0):
            if load_scalar_u32(largest + 4 * group) >= limit:
                store_u8(nonfinite, 1)
        return
    # All scales first, so that the divisions of different groups overlap.
    for group in range(groups):
        peak = load_scalar_u32(largest + 4 * group)
        scale, reciprocal = compute_scale(peak, layout.step)
        store_u16(scales + 2 * group, scale)
        store_u32(largest + 4 * group, bits_from_float(reciprocal))
        if scale == _NAN_SCALE:
            if nonfinite:
                store_u8(nonfinite, 1)
            # The conversion of NaN to an integer is undefined, so such a group is encoded as zeros.
            first = group * group_size
            for i in range(first, min(first + group_size, count), 32):
                store_f32(values + 4 * i, splat(ZERO))
    for group in range(groups):
        first = group * group_size
        factor = splat(float_from_bits(load_scalar_u32(largest + 4 * group)))
        upcoming = Ahead(
            ahead.values + (first << ahead.shift) if ahead.values else 0,
            ahead.shift,
            ahead.replica + (first << ahead.replica_shift) if ahead.replica else 0,
            ahead.replica_shift,
        )
        size, target = min(group_size, count - first), codes + (first >> 5) * how.coding.width
        how.coding.functions.encode_group(
            values + 4 * first, size, factor, target, how, element + first, upcoming, spare
        )


@inline
def record(target, values, peak):
    """Store a block; return the bits of the largest |x| of each lane so far."""
    store_f32(target, values)
    return maximum(peak, bits_of(values) & splat(_ABS))


@inline
def sum_blocks(total, codes, origin, size, begin, end, terms, element, peak, spare):
    """Write initial + code * scale + ... of a part of a group, in the order of terms; return the peaks.

    Args:
        total: address of the result of value `begin`.
        codes: address of the row's codes in the first message.
        origin, size: first value of the group, and its values.
        begin, end: the part of the group.
        element: number of value `begin`, for its dither.
    """
    width = terms.coding.width
    packed, count = codes + (begin >> 5) * width, end - begin
    # Two blocks at a time, to hide the latency of the additions.
    paired = count & ~63
    for i in range(0, paired, 64):
        low = high = splat(terms.initial)
        low_dither, high_dither = dither_of(terms, element + i), dither_of(terms, element + i + 32)
        for term in range(terms.count):
            scale = splat(scale_of(terms, term))
            source = packed + term * terms.stride + (i >> 5) * width
            # Not fused. The product is exact unless it overflows or underflows, and then it must be rounded.
            low = low + load_units(source, terms, low_dither, term) * scale
            high = high + load_units(source + width, terms, high_dither, term) * scale
        peak = record(total + 4 * i, low, peak)
        peak = record(total + 4 * i + 128, high, peak)
    if paired < count:
        value = splat(terms.initial)
        dither = dither_of(terms, element + paired)
        for term in range(terms.count):
            source = packed + term * terms.stride + (paired >> 5) * width
            value = value + load_units(source, terms, dither, term) * splat(scale_of(terms, term))
        peak = record(total + 4 * paired, value, peak)
    return peak


@inline
def _sum_bytes(total, codes, half, terms, element, peak):
    """Sum a complete int4 group whose halves are multiples of 32; see sum_blocks."""
    low_mask, low_base, low_offset = splat(0x0F), splat(_LOW_BASE), splat(_LOW_OFFSET)
    high_mask, high_base, high_offset = splat(0xF0), splat(_HIGH_BASE), splat(_HIGH_OFFSET)
    code_bits = splat(_CODE_BITS_4)
    for i in range(0, half, 32):
        low = high = splat(terms.initial)
        low_dither, high_dither = dither_of(terms, element + i), dither_of(terms, element + i + half)
        for term in range(terms.count):
            scale = splat(scale_of(terms, term))
            both = load_u8(codes + term * terms.stride + i)
            if terms.is_dither:
                low_code, high_code = (
                    shift_left(both, CODE_SHIFT) & code_bits,
                    shift_left(both, CODE_SHIFT - 4) & code_bits,
                )
                low_units = take_off(low_code, terms, low_dither, term)
                high_units = take_off(high_code, terms, high_dither, term)
            else:
                low_units = float_of_bits(both & low_mask | low_base) - low_offset
                high_units = float_of_bits(both & high_mask | high_base) - high_offset
            low = low + low_units * scale
            high = high + high_units * scale
        peak = record(total + 4 * i, low, peak)
        peak = record(total + 4 * (i + half), high, peak)
    return peak


@inline
def _sum_nibbles(total, codes, count, shift, terms, element, spare):
    """Sum a part of one half of an int4 group; `count` is a multiple of 16. See sum_blocks.

    Args:
        element: number of the first value; it may be in the middle of a block.
        spare: memory for a block.
    """
    for i in range(0, count, 16):
        value = splat16(terms.initial)
        # Draw the bits of a full block, and read back one half.
        number = element + i
        store_f32(spare, float_of_bits(dither_of(terms, number & ~31)))
        drawn = bits_of(load_f32x16(spare + 4 * (number & 16)))
        for term in range(terms.count):
            code = shift_right(load_u8x16(codes + term * terms.stride + i), shift) & splat16(15)
            units = to_float(code - splat16(8))
            if terms.is_dither:
                mask = splat16(load_scalar_u32(terms.masks + 4 * term))
                units = float_of_bits(shift_left(code, CODE_SHIFT) ^ (drawn ^ mask)) - splat16(
                    _DITHER_OFFSET + np.float32(8)
                )
                units = where_equal(code, splat16(0), splat16(ZERO), units)
            value = value + units * splat16(scale_of(terms, term))
        store_f32(total + 4 * i, value)


@inline
def sum_halves(total, codes, origin, size, begin, end, terms, element, peak, spare):
    """Sum a part of an int4 group; see sum_blocks."""
    packed = codes + (origin >> 1)
    if end - begin == size and size & 32 == 0:
        return _sum_bytes(total, packed, size >> 1, terms, element, peak)
    # A part of a group, or a group whose halves meet within a block of 32. The lower half is in the low
    # nibbles, the upper half in the high nibbles.
    middle = origin + (size >> 1)
    upper = max(begin, middle)
    skipped = upper - begin
    _sum_nibbles(total, packed + begin - origin, min(end, middle) - begin, 0, terms, element, spare)
    _sum_nibbles(
        total + 4 * skipped, packed + upper - middle, end - upper, 4, terms, element + skipped, spare
    )
    for i in range(0, end - begin, 32):
        peak = record(total + 4 * i, load_f32(total + 4 * i), peak)
    return peak


@inline
def mask_of(sender):
    """Return the mask of a sender's dither; see `random.dither_mask`."""
    mask = 0
    for bit in range(8):
        mask |= (sender >> bit & 1) << (7 - bit)
    return mask


@inline
def write_masks(terms):
    """Write the mask of each term's dither for take_off; terms are numbered like senders."""
    for term in range(terms.count if terms.is_dither else 0):
        store_u32(terms.masks + 4 * term, mask_of(term) << 1)


@inline
def sum_messages(total, first, count, group, codes, scales, skip, layout, terms, element, spare):
    """Write the sums over the messages of values first .. first + count of a row; return their peaks.

    Args:
        group: the group of the first value.
        codes, scales: addresses of the row in the first message.
        skip: index of a message that does not count.
        element: number of value 0 of the row, for its dither.
    """
    peak = splat(0)
    if not terms.coding.has_scales:
        is_bf16 = terms.coding.width == _BF16_BYTES
        for i in range(0, count, 32):
            value = splat(terms.initial)
            for term in range(terms.count):
                message = codes + term * terms.stride
                if term == skip:
                    continue
                if is_bf16:
                    value = value + load_bf16(message + 2 * (first + i))
                else:
                    value = value + load_f32(message + 4 * (first + i))
            peak = record(total + 4 * i, value, peak)
        return peak
    # Received and sent groups may differ, so the range is split at the bounds of the received groups.
    stop = first + count
    origin = group * layout.group_size
    while origin < stop:
        size = min(layout.group_size, layout.padded_numel - origin)
        begin, end = max(origin, first), min(origin + size, stop)
        for term in range(terms.count):
            # Adding a zero of either sign does not change a sum that starts from +0.
            scale = load_scalar_u16(scales + term * terms.stride + 2 * group) << 16
            store_u32(terms.table + 4 * term, 0 if term == skip else scale)
        target = total + 4 * (begin - first)
        peak = terms.coding.functions.sum_group(
            target, codes, origin, size, begin, end, terms, element + begin, peak, spare
        )
        origin += size
        group += 1
    return peak
