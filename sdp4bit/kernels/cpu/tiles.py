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
    join,
    load_2_bits,
    load_3_bits,
    load_bf16,
    load_f32,
    load_f32x16,
    load_i8,
    load_pairs,
    load_scalar_u16,
    load_scalar_u32,
    load_u8,
    load_u8x16,
    maximum,
    minimum,
    prefetch,
    random_bits16,
    second_halves,
    shift_left,
    shift_right,
    shift_right_signed,
    splat,
    splat16,
    store_2_bits,
    store_bf16,
    store_f32,
    store_pairs,
    store_third_bits,
    store_u8,
    store_u16,
    store_u32,
    swap_halves,
    to_float,
    to_int,
    where_equal,
)

_ABS = 0x7FFFFFFF
_INFINITY = 0x7F800000
_TINY = 0x0D800000  # 2**-100
_NAN_SCALE = 0x7FC0
_FIXED_POINT = np.float32(65536)
_HALF = 0x8000
_ZERO = np.float32(0)

# A nibble becomes a float without a shift or a conversion. In an fp32 number from 2**23 on, the lowest bit of
# the mantissa counts ones: 0x4B000000 | n is the number 2**23 + n. From 2**19 on bit 4 counts ones, so the
# high nibble is put there as it lies, unshifted. Subtracting 2**23 + 8 or 2**19 + 8 leaves the code exactly.
_LOW_BASE, _HIGH_BASE = 0x4B000000, 0x49000000
_LOW_OFFSET, _HIGH_OFFSET = np.float32(2**23 + 8), np.float32(2**19 + 8)

# Of an element's 16 random bits the receiver takes off the upper 8, t: a code c stands for
# c + 1/2 - (t + 1/2) / 256, which is (512 * c + 2 * ~t - 255) / 512. With the unsigned code from bit 9 on and
# ~t in bits 1 to 8 that is one number, which needs no conversion in the mantissa of a float from 2**14 on,
# whose lowest bit counts 1/512.
_DITHER_BASE, _DITHER_BITS = 0x46800000, 0x1FE
_CODE_SHIFT, _CODE_BITS_4 = 9, 0x1E00
_DITHER_OFFSET = np.float32(2**14 + 255 / 512)
"""To be subtracted, and what makes codes unsigned."""
_SIGN_8 = 0x80 << _CODE_SHIFT

NEAREST, STOCHASTIC, DITHER = 0, 1, 2
"""How values are rounded."""

TWO, THREE, PAIRS, FOUR, EIGHT, FLOATS = 8, 12, 14, 16, 32, 128
"""Widths of codes, in bytes per block of 32: an integer with 3.5 bits, too."""

inline = njit(
    forceinline=True, error_model="numpy", no_rewrites=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
)


@inline
def offset_of(width):
    """Return what makes codes unsigned: the largest one, or, except in pairs, one more."""
    return 5 if width == PAIRS else 1 << ((width >> 2) - 1)


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
def fixed_point(values, factor, width, is_clipped, rounding, element, k0, k1, mask):
    """Return codes times 65536, ready to be cut off; none beyond the largest, if some would be."""
    # Cut towards zero to 16 fractional bits first: random bits are integers, so the rounding that follows is
    # integer arithmetic, the same everywhere.
    fixed = to_int(load_f32(values) * factor)
    if is_clipped:
        limit = offset_of(width) - (width != PAIRS) << 16
        fixed = maximum(minimum(fixed, splat(limit)), splat(-limit))
    if rounding == NEAREST:
        return fixed + splat(_HALF)
    rounded = fixed + random_bits16(element, k0, k1, mask)
    if rounding == DITHER:
        if width == PAIRS:  # (0, 11) makes 121, if both are zero
            zeros = join(splat16(-5 << 16), splat16(6 << 16))
            return where_equal(fixed | swap_halves(fixed), splat(0), zeros, rounded)
        return where_equal(fixed, splat(0), splat(-offset_of(width) << 16), rounded)
    return rounded


@inline
def dither_of(is_dither, width, element, k0, k1):
    """Return the dither of a block before a sender's mask, as take_off expects it."""
    if is_dither:
        # int8 codes become unsigned by their sign bit, which is changed here once for all messages.
        base = _DITHER_BASE | _DITHER_BITS | (_SIGN_8 if width == EIGHT else 0)
        random = random_bits16(element, k0, k1, 0)
        return shift_right(random, 7) & splat(_DITHER_BITS) ^ splat(base)
    return splat(0)


@inline
def take_off(codes, width, dither, masks, term):
    """Decode dithered codes, in units of their scale.

    Args:
        codes: as they lie in a message, without signs unless they have 8 bits, shifted by _CODE_SHIFT.
        masks: address of the terms' masks.
    """
    mask = splat(load_scalar_u32(masks + 4 * term))
    units = float_of_bits(codes ^ (dither ^ mask))
    units = units - splat(_DITHER_OFFSET + np.float32(offset_of(width)))
    if width == PAIRS:
        return where_equal(second_halves(codes), splat(11 << _CODE_SHIFT), splat(_ZERO), units)
    return where_equal(codes, splat(_SIGN_8 if width == EIGHT else 0), splat(_ZERO), units)


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
def store_block(address, numbers, width):
    """Store 32 codes of 2, 3 or 3.5 bits, without signs."""
    if width == PAIRS:
        store_pairs(address, numbers)
        return
    if width == TWO:
        store_2_bits(address, numbers)
        return
    store_2_bits(address, numbers & splat(3))
    store_third_bits(address + 8, numbers)


@inline
def load_numbers(address, width):
    """Return 32 codes of other than 4 bits as they lie in a message; only those of 8 bits have signs."""
    if width == EIGHT:
        return load_u8(address)
    if width == PAIRS:
        return load_pairs(address)
    numbers = load_2_bits(address)
    if width == THREE:
        numbers = load_3_bits(address + 8, numbers)
    return numbers


@inline
def load_units(address, width, is_dither, dither, masks, term):
    """Decode 32 codes of other than 4 bits, in units of their scale."""
    if is_dither:
        return take_off(shift_left(load_numbers(address, width), _CODE_SHIFT), width, dither, masks, term)
    if width == EIGHT:
        return to_float(load_i8(address))
    return to_float(load_numbers(address, width) - splat(offset_of(width)))


@inline
def encode_group(
    values, size, factor, codes, width, is_clipped, rounding, element, k0, k1, mask, spare,
    upcoming, shift, upcoming_replica, replica_shift,
):  # fmt: skip
    """Write the codes of one group; meanwhile, as many upcoming values and their replica are prefetched."""
    if width == EIGHT:
        for i in range(0, size, 32):
            prefetch_upcoming(i, upcoming, shift, upcoming_replica, replica_shift)
            fixed = fixed_point(
                values + 4 * i, factor, EIGHT, is_clipped, rounding, element + i, k0, k1, mask
            )
            store_u8(codes + i, shift_right_signed(fixed, 16))
        return
    if width < FOUR:
        # The offset that makes codes unsigned is added before the cut.
        offset = splat(offset_of(width) << 16)
        for i in range(0, size, 32):
            prefetch_upcoming(i, upcoming, shift, upcoming_replica, replica_shift)
            fixed = fixed_point(
                values + 4 * i, factor, width, is_clipped, rounding, element + i, k0, k1, mask
            )
            store_block(codes + (i >> 5) * width, shift_right(fixed + offset, 16), width)
        return
    half = size >> 1
    if size & 32 == 0:
        # The 8 that makes codes unsigned is added before the cut. Shifted by 12 the high code lies where its
        # nibble belongs, with four fractional bits below it that the mask removes.
        offset, high_nibble = splat(8 << 16), splat(0xF0)
        for i in range(0, half, 32):
            j = i + half
            prefetch_upcoming(2 * i, upcoming, shift, upcoming_replica, replica_shift)
            prefetch_upcoming(2 * i + 32, upcoming, shift, upcoming_replica, replica_shift)
            low = fixed_point(values + 4 * i, factor, FOUR, is_clipped, rounding, element + i, k0, k1, mask)
            high = fixed_point(values + 4 * j, factor, FOUR, is_clipped, rounding, element + j, k0, k1, mask)
            low, high = low + offset, high + offset
            store_u8(codes + i, shift_right(low, 16) | shift_right(high, 12) & high_nibble)
        return
    # Halves begin within a block: their codes take their places by way of memory.
    for i in range(0, size, 32):
        fixed = fixed_point(values + 4 * i, factor, FOUR, is_clipped, rounding, element + i, k0, k1, mask)
        store_u8(spare + i, shift_right_signed(fixed, 16) + splat(8))
    sixteen = splat16(16)
    for i in range(0, half, 16):
        store_u8(codes + i, load_u8x16(spare + i) | load_u8x16(spare + half + i) * sixteen)


@inline
def encode_tile(
    values, count, largest, codes, scales, width, group_size, step, is_clipped,
    rounding, element, k0, k1, mask, spare,
    upcoming, shift, upcoming_replica, replica_shift,
):  # fmt: skip
    """Write codes and scales of `count` values; `largest` points to the bits of each group's largest |x|.

    The table is overwritten with the reciprocals, and groups that are not finite with zeros.

    Args:
        step: bits of the part of the largest |x| that a unit of the codes is.
        is_clipped: whether values may be beyond the largest code, which then replaces theirs.
        upcoming, upcoming_replica: addresses to prefetch from meanwhile, 0 for none.
        shift, replica_shift: 2 if they are fp32, 1 if bf16.
    """
    if width == FLOATS:
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
            values + 4 * first, min(group_size, count - first), factor, codes + (first >> 5) * width,
            width, is_clipped, rounding, element + first, k0, k1, mask, spare,
            upcoming + (first << shift) if upcoming else 0, shift,
            upcoming_replica + (first << replica_shift) if upcoming_replica else 0, replica_shift,
        )  # fmt: skip


@inline
def record(target, values, peak):
    """Store a block; return the largest |x| of each lane so far, as bits."""
    store_f32(target, values)
    return maximum(peak, bits_of(values) & splat(_ABS))


@inline
def sum_blocks(
    total, codes, count, width, table, masks, terms, stride, start, peak, is_dither, element, k0, k1
):
    """Write start + code * scale + ..., in the order of the terms, and return the peaks so far.

    Args:
        codes: of other than 4 bits: their blocks of 32 lie one behind the other.
        table, masks: addresses of the terms' fp32 scales and of the masks of their dither.
        is_dither: whether the codes are dithered, the first by the random bits of `element`.
    """
    # Two blocks at a time: one sum has to wait for its addition before the next term, two can take turns.
    paired = count & ~63
    for i in range(0, paired, 64):
        low = high = start
        low_dither = dither_of(is_dither, width, element + i, k0, k1)
        high_dither = dither_of(is_dither, width, element + i + 32, k0, k1)
        for term in range(terms):
            scale = splat(float_from_bits(load_scalar_u32(table + 4 * term)))
            source = codes + term * stride + (i >> 5) * width
            # Not fused: the product is exact unless it overflows or underflows, and then rounds by itself.
            low = low + load_units(source, width, is_dither, low_dither, masks, term) * scale
            high = high + load_units(source + width, width, is_dither, high_dither, masks, term) * scale
        peak = record(total + 4 * i, low, peak)
        peak = record(total + 4 * i + 128, high, peak)
    if paired < count:
        value = start
        dither = dither_of(is_dither, width, element + paired, k0, k1)
        for term in range(terms):
            scale = splat(float_from_bits(load_scalar_u32(table + 4 * term)))
            source = codes + term * stride + (paired >> 5) * width
            value = value + load_units(source, width, is_dither, dither, masks, term) * scale
        peak = record(total + 4 * paired, value, peak)
    return peak


@inline
def sum_int4(total, codes, half, table, masks, terms, stride, start, peak, is_dither, element, k0, k1):
    """Sum as sum_blocks does, a whole group whose halves are multiples of 32."""
    low_mask, low_base, low_offset = splat(0x0F), splat(_LOW_BASE), splat(_LOW_OFFSET)
    high_mask, high_base, high_offset = splat(0xF0), splat(_HIGH_BASE), splat(_HIGH_OFFSET)
    code_bits = splat(_CODE_BITS_4)
    for i in range(0, half, 32):
        low = high = start
        low_dither = dither_of(is_dither, FOUR, element + i, k0, k1)
        high_dither = dither_of(is_dither, FOUR, element + i + half, k0, k1)
        for term in range(terms):
            scale = splat(float_from_bits(load_scalar_u32(table + 4 * term)))
            both = load_u8(codes + term * stride + i)
            if is_dither:
                low_code, high_code = (
                    shift_left(both, _CODE_SHIFT) & code_bits,
                    shift_left(both, _CODE_SHIFT - 4) & code_bits,
                )
                low_units = take_off(low_code, FOUR, low_dither, masks, term)
                high_units = take_off(high_code, FOUR, high_dither, masks, term)
            else:
                low_units = float_of_bits(both & low_mask | low_base) - low_offset
                high_units = float_of_bits(both & high_mask | high_base) - high_offset
            low = low + low_units * scale
            high = high + high_units * scale
        peak = record(total + 4 * i, low, peak)
        peak = record(total + 4 * (i + half), high, peak)
    return peak


@inline
def sum_nibbles(total, codes, count, shift, table, masks, terms, stride, start, dither, spare):
    """Sum as sum_blocks does, a part of one half of an int4 group; `count` is a multiple of 16.

    Args:
        dither: (is_dither, element, k0, k1); the element may be in the middle of a block.
        spare: room for a block.
    """
    is_dither, element, k0, k1 = dither
    for i in range(0, count, 16):
        value = splat16(start)
        # Half a block: the bits of all of it, of which one half is read back.
        number = element + i
        store_f32(spare, float_of_bits(dither_of(is_dither, FOUR, number & ~31, k0, k1)))
        drawn = bits_of(load_f32x16(spare + 4 * (number & 16)))
        for term in range(terms):
            scale = splat16(float_from_bits(load_scalar_u32(table + 4 * term)))
            code = shift_right(load_u8x16(codes + term * stride + i), shift) & splat16(15)
            units = to_float(code - splat16(8))
            if is_dither:
                mask = splat16(load_scalar_u32(masks + 4 * term))
                units = float_of_bits(shift_left(code, _CODE_SHIFT) ^ (drawn ^ mask)) - splat16(
                    _DITHER_OFFSET + np.float32(8)
                )
                units = where_equal(code, splat16(0), splat16(_ZERO), units)
            value = value + units * scale
        store_f32(total + 4 * i, value)


@inline
def write_masks(masks, terms, is_dither):
    """Write the mask of each term's dither, as take_off needs it; terms are numbered like senders."""
    for term in range(terms if is_dither else 0):
        mask = 0
        for bit in range(8):
            mask |= (term >> bit & 1) << (8 - bit)
        store_u32(masks + 4 * term, mask)


@inline
def sum_messages(
    total, first, count, group, codes, scales, terms, stride, width, group_size, padded, table, masks, start,
    is_dither, element, k0, k1, spare,
):  # fmt: skip
    """Write the sums over the messages of values first .. first + count of a row; return their peaks.

    Args:
        group: the group of the first value.
        codes, scales: addresses of the row in the first message; `stride` bytes further in each next one.
        table: room for one fp32 number per message.
        masks: as write_masks left them.
        start: what the sums start from.
        is_dither, element, k0, k1: whether codes are dithered, the number of value 0 of the row, its keys.
    """
    peak = splat(0)
    if width == FLOATS:  # no groups, no scales
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
        number = element + begin
        if width != FOUR:
            # Called with constants, so that the loops inside are compiled for each width.
            block, size_here = codes + (begin >> 5) * width, end - begin
            if width == EIGHT:
                peak = sum_blocks(
                    target, block, size_here, EIGHT, table, masks, terms, stride, splat(start), peak,
                    is_dither, number, k0, k1,
                )  # fmt: skip
            elif width == PAIRS:
                peak = sum_blocks(
                    target, block, size_here, PAIRS, table, masks, terms, stride, splat(start), peak,
                    is_dither, number, k0, k1,
                )  # fmt: skip
            elif width == THREE:
                peak = sum_blocks(
                    target, block, size_here, THREE, table, masks, terms, stride, splat(start), peak,
                    is_dither, number, k0, k1,
                )  # fmt: skip
            else:
                peak = sum_blocks(
                    target, block, size_here, TWO, table, masks, terms, stride, splat(start), peak,
                    is_dither, number, k0, k1,
                )  # fmt: skip
        elif end - begin == size and size & 32 == 0:
            peak = sum_int4(
                target, packed, size >> 1, table, masks, terms, stride, splat(start), peak,
                is_dither, number, k0, k1,
            )  # fmt: skip
        else:
            # A part of an int4 group, or one whose halves meet within a block of 32: what lies in the lower
            # half is in the low nibbles of its bytes, what lies in the upper one in the high nibbles.
            middle = origin + (size >> 1)
            lower = min(end, middle) - begin
            dither = (is_dither, number, k0, k1)
            sum_nibbles(
                target, packed + begin - origin, lower, 0, table, masks, terms, stride, start, dither, spare
            )
            upper = max(begin, middle)
            target = total + 4 * (upper - first)
            dither = (is_dither, element + upper, k0, k1)
            sum_nibbles(
                target, packed + upper - middle, end - upper, 4, table, masks, terms, stride, start,
                dither, spare,
            )  # fmt: skip
            for i in range(begin - first, end - first, 32):
                peak = record(total + 4 * i, load_f32(total + 4 * i), peak)
        origin += size
        group += 1
    return peak
