"""Device functions of the Triton kernels that read, sum and write codes and scales."""

from __future__ import annotations

import triton
import triton.language as tl

from sdp4bit.kernels.triton.chunks import (
    ABS_MASK,
    CHUNK,
    FULL_PRECISION,
    INFINITY_BITS,
    IS_INTERPRETED,
    NAN_SCALE,
    chunks_of,
    float_from_bf16,
    offsets,
)
from sdp4bit.kernels.triton.random_bits import (
    hash32,
    high16,
    low16,
    random16,
    reverse8,
)

# Constants of the definition, see sdp4bit.quantization.reference.
_TINY_BITS = tl.constexpr(0x0D800000)
_SCALE_ROUND_UP = tl.constexpr(0x10003)
_HIGH_HALF = tl.constexpr(-65536)
_HALF = tl.constexpr(0x8000)
_INT4_OFFSETS = tl.constexpr(0x88 << 16)
_EXPONENT_MASK = tl.constexpr(0x7F800000)
# An int4 code in the mantissa of a float, see decode_int4.
LOW_NIBBLE = tl.constexpr(0x0F)
LOW_EXPONENT = tl.constexpr(0x4B000000)  # 2**23
LOW_BIAS = tl.constexpr(2.0**23 + 8)
HIGH_NIBBLE = tl.constexpr(0xF0)
HIGH_EXPONENT = tl.constexpr(0x49000000)  # 2**19
HIGH_BIAS = tl.constexpr(2.0**19 + 8)
# Rounding modes.
NEAREST = tl.constexpr(0)
STOCHASTIC = tl.constexpr(1)
DITHER = tl.constexpr(2)
# A dithered code and its dither in the mantissa of a float, see take_off.
_DITHER_BIAS = tl.constexpr(2.0**14 + 255 / 512)
_CODE_SHIFT = tl.constexpr(9)
_CODE_BITS_4 = tl.constexpr(0x1E00)
_SIGN_8 = tl.constexpr(0x80 << 9)
_SMALLEST = tl.constexpr(-(2**31))


@triton.jit
def decode_int4(byte, nibble, exponent, bias):
    """Return fp32 of one nibble of bytes, put into the mantissa of 2**23 (low) or 2**19 (high, unshifted).

    Subtracting that number and the code's offset of 8 is exact. One addition replaces a shift, a subtraction
    and a conversion, which is much slower than an addition.
    """
    bits = (byte.to(tl.int32) & nibble) | exponent
    return bits.to(tl.float32, bitcast=True) - bias


@triton.jit
def decode_int8(byte):
    """Return fp32 of int8 codes read as uint8."""
    return byte.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def take_off(byte, is_high, dither, BITS: tl.constexpr):
    """Decode dithered codes, in units of their scale.

    A code c with 8 bits of dither t represents c + 1/2 - (t + 1/2) / 256 = (512 * c + 2 * ~t - 255) / 512.
    The unsigned code from bit 9 on and ~t in bits 1 to 8 are one number, which is put into the mantissa of a
    float from 2**14 on, whose lowest bit is worth 1/512. The lowest code represents zero.

    Args:
        is_high: for int4, whether the code is the high nibble of its byte.
        dither: int32, XORed with the mask of the sender.
    """
    if BITS == 8:
        code = byte.to(tl.int32) << _CODE_SHIFT
        lowest = _SIGN_8
        # Flipping the sign bit makes int8 codes unsigned.
        bits = code ^ (dither ^ _SIGN_8)
        bias = _DITHER_BIAS + 128.0
    else:
        code = (byte.to(tl.int32) << tl.where(is_high, _CODE_SHIFT - 4, _CODE_SHIFT)) & _CODE_BITS_4
        lowest = 0
        bits = code ^ dither
        bias = _DITHER_BIAS + 8.0
    return tl.where(code == lowest, 0.0, bits.to(tl.float32, bitcast=True) - bias)


@triton.jit
def _dither_units(dither):
    """Return the number that take_off adds to codes of less than 4 bits."""
    return dither.to(tl.float32, bitcast=True) - _DITHER_BIAS


@triton.jit
def _load_paired(codes, chunk, mask, dither):
    """Return fp32 of chunks of 3.5-bit codes, [..., 16]: the first or the second of each pair of a block."""
    # 14 bytes are aligned for half words, of which each thread reads all seven.
    words = (codes + (chunk >> 1).to(tl.int64) * 14).to(tl.pointer_type(tl.int16))
    low = tl.zeros(chunk.shape, tl.int64)
    high = low
    for i in tl.static_range(7):
        word = tl.load(words + i, mask=mask, other=0).to(tl.int64) & 0xFFFF
        if i < 4:
            low = low | (word << (16 * i))
        if i >= 3:
            high = high | ((word << (16 * (i - 3))) >> 8)
    # Eight pairs in the lowest 56 bits of each.
    halves = tl.expand_dims(tl.join(low, high), -1)
    pair = ((halves >> (tl.arange(0, 8) * 7)) & 127).to(tl.int32)
    pair = tl.reshape(pair, offsets(chunk).shape)
    second = (pair * 187) >> 11  # pair // 11, for all below 230
    code = tl.where(tl.expand_dims(chunk & 1, -1) == 1, second, pair - second * 11).to(tl.float32) - 5.0
    if dither is None:
        return code
    else:
        return tl.where(second == 11, 0.0, code + _dither_units(dither))


@triton.jit
def _store_paired(
    codes, chunk, values, reciprocal, low_random, high_random, mask,
    ROUNDING: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Round both chunks of blocks to 3.5 bits and write them; `chunk` is the first."""
    low = _fixed(values[0], reciprocal, 3.5, CLIP)
    high = _fixed(values[1], reciprocal, 3.5, CLIP)
    pair = ((low + low_random) >> 16) + ((high + high_random) >> 16) * 11 + 60
    if ROUNDING == DITHER:
        pair = tl.where((low | high) == 0, 121, pair)
    # No two terms share a bit: the sum joins them, eight to 56 bits.
    eights = tl.reshape(pair.to(tl.int64), (pair.numel // 8, 8)) << (tl.arange(0, 8) * 7)
    halves = tl.reshape(tl.sum(eights, -1), (pair.numel // 16, 2))
    low, high = tl.split(halves)
    low = tl.reshape(low, chunk.shape)
    high = tl.reshape(high, chunk.shape)
    words = (codes + (chunk >> 1).to(tl.int64) * 14).to(tl.pointer_type(tl.int16))
    for i in tl.static_range(7):
        if i < 3:
            word = low >> (16 * i)
        elif i == 3:
            word = (low >> 48) | (high << 8)
        else:
            word = high >> (16 * i - 56)
        tl.store(words + i, word.to(tl.int16), mask=mask)


@triton.jit
def _small_words(codes, chunk, BITS: tl.constexpr):
    """Return pointers to the lower two bits of chunks, a word each, and to their third bits, half a word."""
    half = chunk & 1
    block = codes + (chunk >> 1).to(tl.int64) * (4 * BITS)
    return block + half * 4, (block + (8 + half * 2)).to(tl.pointer_type(tl.int16))


@triton.jit
def _decode_small(byte, third, LANE: tl.constexpr, BITS: tl.constexpr):
    """Return fp32 of the codes at position LANE of each byte; see decode_int4."""
    # In a number from 2**(23 - 2 * LANE) on, bit 2 * LANE is worth 1.
    EXPONENT: tl.constexpr = (127 + 23 - 2 * LANE) << 23
    bits = (byte & (3 << (2 * LANE))) | EXPONENT
    if BITS == 3:
        bits = bits | ((third << (2 + LANE)) & (4 << (2 * LANE)))
    return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - 2 * LANE) + 2 ** (BITS - 1))


@triton.jit
def load_small(codes, chunk, mask, dither, BITS: tl.constexpr):
    """Return fp32 of chunks of codes of less than 4 bits, [..., 16], dithered ones without their dither."""
    if BITS == 3.5:
        return _load_paired(codes, chunk, mask, dither)
    else:
        value = _load_in_order(codes, chunk, mask, BITS)
        if dither is None:
            return value
        else:
            return tl.where(value == -(2.0 ** (BITS - 1)), 0.0, value + _dither_units(dither))


@triton.jit
def _load_in_order(codes, chunk, mask, BITS: tl.constexpr):
    """Return fp32 of chunks of 2-bit or 3-bit codes, [..., 16]."""
    words, thirds = _small_words(codes, chunk, BITS)
    # Read as four bytes, so that a chunk is in one thread; see _load_whole.
    lane = tl.arange(0, 4)
    byte = tl.load(tl.expand_dims(words, -1) + lane, mask=tl.expand_dims(mask, -1), other=0).to(tl.int32)
    third = byte
    if BITS == 3:
        third = tl.expand_dims(tl.load(thirds, mask=mask, other=0).to(tl.int32), -1) >> (lane * 4)
    even = tl.join(_decode_small(byte, third, 0, BITS), _decode_small(byte, third, 2, BITS))
    odd = tl.join(_decode_small(byte, third, 1, BITS), _decode_small(byte, third, 3, BITS))
    # [..., byte, value / 2, value % 2]
    return tl.reshape(tl.join(even, odd), offsets(chunk).shape)


@triton.jit
def _store_small(codes, chunk, number, mask, BITS: tl.constexpr):
    """Write chunks of unsigned codes, int32 [..., 16]."""
    lane = tl.arange(0, CHUNK)
    words, thirds = _small_words(codes, chunk, BITS)
    # No two terms share a bit, so the sum is an OR.
    number = number.to(tl.uint32)
    word = tl.sum((number & 3) << (lane * 2), -1).to(tl.int32, bitcast=True)
    tl.store(words.to(tl.pointer_type(tl.int32)), word, mask=mask)
    if BITS == 3:
        third = tl.sum(((number >> 2) & 1) << lane, -1)
        tl.store(thirds, third.to(tl.int16), mask=mask)


@triton.jit
def _load_codes(codes, scales, chunk, place, group, is_high, mask, dither, BITS: tl.constexpr):
    """Return fp32 of chunks of a message; `is_high` selects the nibble of the bytes at `place`."""
    each = tl.expand_dims(mask, -1)
    if BITS == FULL_PRECISION:
        return tl.load(codes.to(tl.pointer_type(tl.float32)) + place, mask=each, other=0.0)
    else:
        scale = float_from_bf16(tl.load(scales + group, mask=mask, other=0))
        if BITS < 4:
            value = load_small(codes, chunk, mask, dither, BITS)
        else:
            byte = tl.load(codes + place, mask=each, other=0)
            high = tl.expand_dims(is_high, -1)
            if dither is not None:
                value = take_off(byte, high, dither, BITS)
            elif BITS == 8:
                value = decode_int8(byte)
            else:
                nibble = tl.where(high, HIGH_NIBBLE, LOW_NIBBLE)
                exponent = tl.where(high, HIGH_EXPONENT, LOW_EXPONENT)
                value = decode_int4(byte, nibble, exponent, tl.where(high, HIGH_BIAS, LOW_BIAS))
        return value * tl.expand_dims(scale, -1)


@triton.jit
def sum_messages(
    codes, scales, stride, count, chunk, blocks, mask, dither,
    BITS: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr, SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    """Return the fp32 sum of chunks over messages, in order, from +0.0.

    Without SIGNED_ZERO a zero may have either sign, which saves one addition per value.

    Every chunk computes its own group, independent of the caller's groups. `stride` is the even distance of
    messages in bytes. COUNT unrolls the loop; -1 takes the number of messages from count. `dither` is that of
    the chunks, or None.
    """
    group = chunk // (2 * GROUP)
    position = chunk  # of the chunk's codes, in units of 16 bytes
    is_high = mask
    if BITS == 4:
        slot = chunk - group * (2 * GROUP)
        size = tl.minimum(blocks - group * GROUP, GROUP)
        is_high = slot >= size
        position = group * GROUP + tl.where(is_high, slot - size, slot)
    place = offsets(position)
    total = tl.zeros(place.shape, tl.float32)
    if COUNT >= 0:
        for i in tl.static_range(COUNT):
            step = i * stride
            mine = None if dither is None else dither ^ reverse8(i)
            value = _load_codes(
                codes + step, scales + (step >> 1), chunk, place, group, is_high, mask, mine, BITS
            )
            if i == 0 and not SIGNED_ZERO:
                total = value
            else:
                total += value
    else:
        for i in range(count):
            step = i * stride
            mine = None if dither is None else dither ^ reverse8(i)
            total += _load_codes(
                codes + step, scales + (step >> 1), chunk, place, group, is_high, mask, mine, BITS
            )
    return total


@triton.jit
def largest_bits(values):
    """Return the bits of the largest magnitude of each group, int32 [groups, 1]; NaN > Inf > finite."""
    # The signed maximum finds positive floats, the unsigned one negative floats. GPUs take two maxima at a
    # time, which is faster than a mask and a maximum.
    signed = values[0].to(tl.int32, bitcast=True)
    unsigned = values[0].to(tl.uint32, bitcast=True)
    for i in tl.static_range(1, len(values)):
        signed = tl.maximum(signed, values[i].to(tl.int32, bitcast=True))
        unsigned = tl.maximum(unsigned, values[i].to(tl.uint32, bitcast=True))
    largest = tl.maximum(tl.max(signed, 2), tl.max(unsigned, 2).to(tl.int32, bitcast=True) & ABS_MASK)
    return tl.max(largest, 1, keep_dims=True)


@triton.jit
def compute_scale(largest, BITS: tl.constexpr, CLIP: tl.constexpr = 1.0):
    """Return the scale as bf16 bits in int32, and 65536 / scale, or 0 if all codes are zero."""
    not_finite = largest >= INFINITY_BITS
    LARGEST: tl.constexpr = 5 if BITS == 3.5 else 2 ** (BITS - 1) - 1
    step = largest.to(tl.float32, bitcast=True) * (CLIP / LARGEST)
    bits = (step.to(tl.int32, bitcast=True) + _SCALE_ROUND_UP) & _HIGH_HALF
    if BITS == 2:  # with more bits no scale is rounded up to infinity
        not_finite = not_finite | (bits >= INFINITY_BITS)
    unused = not_finite | (largest < _TINY_BITS)
    # 65536 / scale, rounded to nearest. NVIDIA's float division calls a function for subnormals, which spills
    # registers. A scale is M * 2**(e - 134), with M from 128 to 255 and e its exponent field, so 65536 /
    # scale is 2**31 / M * 2**(119 - e). 2**31 / M, rounded to an integer without ties, has the quotient's 24
    # bits, which fit fp32. Then the exponent is corrected.
    mantissa = ((bits >> 16) & 0x7F | 0x80).to(tl.uint32)
    digits = ((mantissa >> 1) + 0x80000000) // mantissa
    exponent = (119 << 23) - (bits & _EXPONENT_MASK)
    quotient = (digits.to(tl.float32).to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True)
    bits = tl.where(unused, 0, bits >> 16)
    return tl.where(not_finite, NAN_SCALE, bits), tl.where(unused, 0.0, quotient)


@triton.jit
def _fixed(value, reciprocal, BITS: tl.constexpr = 0, CLIP: tl.constexpr = 1.0):
    """Return value * reciprocal in units of 2**-16, int32, truncated and, with CLIP, clamped."""
    # If the reciprocal is 0, the product is zero, or NaN for NaN and infinity. GPUs of both vendors convert
    # NaN to 0.
    each = tl.expand_dims(reciprocal, -1)
    fixed = (value * each).to(tl.int32)
    if IS_INTERPRETED:
        fixed = tl.where(fixed == _SMALLEST, 0, fixed)  # NaN, which GPUs convert to 0
    if CLIP < 1:
        LIMIT: tl.constexpr = (5 if BITS == 3.5 else 2 ** (BITS - 1) - 1) * 65536
        fixed = tl.where(each == 0, 0, tl.minimum(tl.maximum(fixed, -LIMIT), LIMIT))
    return fixed


@triton.jit
def _round(
    value, reciprocal, random, BITS: tl.constexpr, ROUNDING: tl.constexpr, CLIP: tl.constexpr = 1.0
):  # fmt: skip
    """Return codes in units of 2**-16, rounded except for the truncation."""
    fixed = _fixed(value, reciprocal, BITS, CLIP)
    if ROUNDING == DITHER:
        return tl.where(fixed == 0, -(1 << (BITS + 15)), fixed + random)
    else:
        return fixed + random


@triton.jit
def _pack(low, high):
    """Return the bytes of int4 codes in units of 2**-16, rounded except for the truncation."""
    # Add the low code, 16 times the high code and both offsets of 8 before the 16-bit fraction is removed.
    return (((high & _HIGH_HALF) * 16 + low + _INT4_OFFSETS) >> 16).to(tl.uint8)


@triton.jit
def _store_pairs(
    codes, values, reciprocal, group, slot, blocks, is_odd, first_block, k0, k1, mask,
    GROUP: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Write the int4 codes of a tile of pairs of slots; none is clipped."""
    low_chunk, high_chunk, exists = chunks_of(group, slot, blocks, 4, GROUP)
    _, _, next_exists = chunks_of(group, slot + 1, blocks, 4, GROUP)
    if ROUNDING == NEAREST:
        low = _round(values[0], reciprocal, _HALF, 4, ROUNDING)
        high = _round(values[1], reciprocal, _HALF, 4, ROUNDING)
        next_low = _round(values[2], reciprocal, _HALF, 4, ROUNDING)
        next_high = _round(values[3], reciprocal, _HALF, 4, ROUNDING)
    else:
        # Round immediately in each branch, so that only one of bits and values stays in registers.
        if is_odd:
            random = random16(first_block, high_chunk, k0, k1, mask)
            next_random = random16(first_block, high_chunk + 1, k0, k1, mask)
            high = _round(values[1], reciprocal, random, 4, ROUNDING)
            next_high = _round(values[3], reciprocal, next_random, 4, ROUNDING)
        else:
            mixed = hash32(first_block + (high_chunk >> 1), k0, k1, mask)
            high = _round(values[1], reciprocal, low16(mixed), 4, ROUNDING)
            next_high = _round(values[3], reciprocal, high16(mixed), 4, ROUNDING)
        mixed = hash32(first_block + (low_chunk >> 1), k0, k1, mask)
        low = _round(values[0], reciprocal, low16(mixed), 4, ROUNDING)
        next_low = _round(values[2], reciprocal, high16(mixed), 4, ROUNDING)
    position = group * GROUP + slot
    tl.store(codes + offsets(position), _pack(low, high), mask=tl.expand_dims(exists, -1))
    next_exists = tl.expand_dims(next_exists, -1)
    tl.store(codes + offsets(position + 1), _pack(next_low, next_high), mask=next_exists)


@triton.jit
def store_codes(
    codes, values, reciprocal, group, slot, blocks, is_odd, first_block, k0, k1, mask,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROUNDING: tl.constexpr, CLIP: tl.constexpr = 1.0,
):  # fmt: skip
    """Write the codes of a tile to a row of a message; `first_block` numbers the row for its random bits."""
    low_chunk, high_chunk, exists = chunks_of(group, slot, blocks, BITS, GROUP)
    each = tl.expand_dims(exists, -1)
    if BITS == FULL_PRECISION:
        floats = codes.to(tl.pointer_type(tl.float32))
        tl.store(floats + offsets(low_chunk), values[0], mask=each)
        tl.store(floats + offsets(high_chunk), values[1], mask=each)
    elif BITS == 4 and len(values) == 4:
        _store_pairs(
            codes, values, reciprocal, group, slot, blocks, is_odd, first_block, k0, k1, mask, GROUP, ROUNDING
        )
    else:
        if ROUNDING == NEAREST:
            low_random = _HALF
            high_random = _HALF
        elif BITS != 4:
            # The two chunks of a block are in one thread, and share their hashes.
            mixed = hash32(first_block + (low_chunk >> 1), k0, k1, mask)
            low_random = low16(mixed)
            high_random = high16(mixed)
        else:
            low_random = random16(first_block, low_chunk, k0, k1, mask)
            high_random = random16(first_block, high_chunk, k0, k1, mask)
        if BITS == 3.5:
            _store_paired(
                codes, low_chunk, values, reciprocal, low_random, high_random, exists, ROUNDING, CLIP
            )
        else:
            low = _round(values[0], reciprocal, low_random, BITS, ROUNDING, CLIP)
            high = _round(values[1], reciprocal, high_random, BITS, ROUNDING, CLIP)
            if BITS == 4:
                tl.store(codes + offsets(group * GROUP + slot), _pack(low, high), mask=each)
            elif BITS == 8:
                tl.store(codes + offsets(low_chunk), (low >> 16).to(tl.uint8), mask=each)
                tl.store(codes + offsets(high_chunk), (high >> 16).to(tl.uint8), mask=each)
            else:
                OFFSET: tl.constexpr = 2 ** (BITS - 1)
                _store_small(codes, low_chunk, (low >> 16) + OFFSET, exists, BITS)
                _store_small(codes, high_chunk, (high >> 16) + OFFSET, exists, BITS)
