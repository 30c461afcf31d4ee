"""Device functions of the Triton kernels that read, sum and write codes and scales."""

from __future__ import annotations

import triton
import triton.language as tl

from sdp4bit.kernels.triton.chunks import (
    ABS_MASK,
    INFINITY_BITS,
    IS_INTERPRETED,
    NAN_SCALE,
    chunks_of,
    float_from_bf16,
    offsets,
)
from sdp4bit.kernels.triton.coding import of
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
_SCALE_LIMIT = tl.constexpr(0x7B800000)  # 2**120
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
# A dithered code and its dither in the mantissa of a float, see `formats._take_off_int8`.
DITHER_BIAS = tl.constexpr(2.0**14 + 255 / 512)
CODE_SHIFT = tl.constexpr(9)
_CODE_BITS_4 = tl.constexpr(0x1E00)
_SMALLEST = tl.constexpr(-(2**31))


@triton.jit
def add_product(units, scale, value):
    """Return units * scale + value. The product is exact and finite, so a fused one changes no bit."""
    return tl.fma(units, tl.broadcast_to(scale, units.shape), value)


@triton.jit
def decode_int4(byte, nibble, exponent, bias):
    """Return fp32 of one nibble of bytes, put into the mantissa of 2**23 (low) or 2**19 (high, unshifted).

    Subtracting that number and the code's offset of 8 is exact. One addition replaces a shift, a subtraction
    and a conversion, which is much slower than an addition.
    """
    bits = (byte.to(tl.int32) & nibble) | exponent
    return bits.to(tl.float32, bitcast=True) - bias


@triton.jit
def _take_off_int4(byte, is_high, dither):
    """Decode dithered codes, in units of their scale; see `formats._take_off_int8`.

    Args:
        is_high: whether the code is the high nibble of its byte.
    """
    code = (byte.to(tl.int32) << tl.where(is_high, CODE_SHIFT - 4, CODE_SHIFT)) & _CODE_BITS_4
    bits = code ^ dither
    bias = DITHER_BIAS + 8.0
    return tl.where(code == 0, 0.0, bits.to(tl.float32, bitcast=True) - bias)


@triton.jit
def _add_codes(
    codes, scales, chunk, place, group, is_high, mask, dither, total, FORMAT: tl.constexpr
):  # fmt: skip
    """Return total, or +0.0 if it is None, plus fp32 of chunks of a message.

    `is_high` selects the nibble of the bytes at `place`.
    """
    if not of(FORMAT, "has_scales"):
        value = of(FORMAT, "load")(codes, chunk, mask, None, FORMAT)
        return value if total is None else total + value
    else:
        scale = float_from_bf16(tl.load(scales + group, mask=mask, other=0))
        if not of(FORMAT, "in_halves"):
            value = of(FORMAT, "load")(codes, chunk, mask, dither, FORMAT)
        else:
            byte = tl.load(codes + place, mask=tl.expand_dims(mask, -1), other=0)
            high = tl.expand_dims(is_high, -1)
            if dither is not None:
                value = _take_off_int4(byte, high, dither)
            else:
                nibble = tl.where(high, HIGH_NIBBLE, LOW_NIBBLE)
                exponent = tl.where(high, HIGH_EXPONENT, LOW_EXPONENT)
                value = decode_int4(byte, nibble, exponent, tl.where(high, HIGH_BIAS, LOW_BIAS))
        if total is None:
            return value * tl.expand_dims(scale, -1)
        else:
            return add_product(value, tl.expand_dims(scale, -1), total)


@triton.jit
def sum_messages(
    codes, scales, stride, count, chunk, blocks, mask, dither,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr, SIGNED_ZERO: tl.constexpr, skip=None,
):  # fmt: skip
    """Return the fp32 sum of chunks over messages, in order, from +0.0.

    Without SIGNED_ZERO a zero may have either sign, which saves one addition per value.

    Every chunk computes its own group, independent of the caller's groups. `stride` is the even distance of
    messages in bytes. COUNT unrolls the loop; -1 takes the number of messages from count. `dither` is that of
    the chunks, or None. The message `skip` is neither read nor counted.
    """
    group = chunk // (2 * GROUP)
    position = chunk  # of the chunk's codes, in units of 16 bytes
    is_high = mask
    if of(FORMAT, "in_halves"):
        slot = chunk - group * (2 * GROUP)
        size = tl.minimum(blocks - group * GROUP, GROUP)
        is_high = slot >= size
        position = group * GROUP + tl.where(is_high, slot - size, slot)
    place = offsets(position)
    total = None if COUNT > 0 and not SIGNED_ZERO else tl.zeros(place.shape, tl.float32)
    if COUNT >= 0:
        for i in tl.static_range(COUNT):
            number = i if skip is None else i + (i >= skip)
            step = number * stride
            mine = None if dither is None else dither ^ reverse8(number)
            total = _add_codes(
                codes + step, scales + (step >> 1), chunk, place, group, is_high, mask, mine, total, FORMAT
            )
    else:
        for i in range(count):
            number = i if skip is None else i + (i >= skip)
            step = number * stride
            mine = None if dither is None else dither ^ reverse8(number)
            total = _add_codes(
                codes + step, scales + (step >> 1), chunk, place, group, is_high, mask, mine, total, FORMAT
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
def compute_scale(largest, FORMAT: tl.constexpr, CLIP: tl.constexpr = 1.0):
    """Return the scale as bf16 bits in int32, and 65536 / scale, or 0 if all codes are zero."""
    not_finite = largest >= INFINITY_BITS
    step = largest.to(tl.float32, bitcast=True) * (CLIP / of(FORMAT, "largest"))
    bits = (step.to(tl.int32, bitcast=True) + _SCALE_ROUND_UP) & _HIGH_HALF
    not_finite = not_finite | (bits >= _SCALE_LIMIT)
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
def fixed_point(value, reciprocal, FORMAT: tl.constexpr, CLIP: tl.constexpr = 1.0):
    """Return value * reciprocal in units of 2**-16, int32, truncated and, with CLIP, clamped."""
    # If the reciprocal is 0, the product is zero, or NaN for NaN and infinity. GPUs of both vendors convert
    # NaN to 0.
    each = tl.expand_dims(reciprocal, -1)
    fixed = (value * each).to(tl.int32)
    if IS_INTERPRETED:
        fixed = tl.where(fixed == _SMALLEST, 0, fixed)  # NaN, which GPUs convert to 0
    if CLIP < 1:
        LIMIT: tl.constexpr = of(FORMAT, "largest") * 65536
        fixed = tl.where(each == 0, 0, tl.minimum(tl.maximum(fixed, -LIMIT), LIMIT))
    return fixed


@triton.jit
def round_codes(
    value, reciprocal, random, FORMAT: tl.constexpr, ROUNDING: tl.constexpr, CLIP: tl.constexpr = 1.0
):  # fmt: skip
    """Return codes in units of 2**-16, rounded except for the truncation."""
    fixed = fixed_point(value, reciprocal, FORMAT, CLIP)
    if ROUNDING == DITHER:
        return tl.where(fixed == 0, of(FORMAT, "offset") * -65536, fixed + random)
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
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Write the int4 codes of a tile of pairs of slots; none is clipped."""
    low_chunk, high_chunk, exists = chunks_of(group, slot, blocks, FORMAT, GROUP)
    _, _, next_exists = chunks_of(group, slot + 1, blocks, FORMAT, GROUP)
    if ROUNDING == NEAREST:
        low = round_codes(values[0], reciprocal, _HALF, FORMAT, ROUNDING)
        high = round_codes(values[1], reciprocal, _HALF, FORMAT, ROUNDING)
        next_low = round_codes(values[2], reciprocal, _HALF, FORMAT, ROUNDING)
        next_high = round_codes(values[3], reciprocal, _HALF, FORMAT, ROUNDING)
    else:
        # Round immediately in each branch, so that only one of bits and values stays in registers.
        if is_odd:
            random = random16(first_block, high_chunk, k0, k1, mask)
            next_random = random16(first_block, high_chunk + 1, k0, k1, mask)
            high = round_codes(values[1], reciprocal, random, FORMAT, ROUNDING)
            next_high = round_codes(values[3], reciprocal, next_random, FORMAT, ROUNDING)
        else:
            mixed = hash32(first_block + (high_chunk >> 1), k0, k1, mask)
            high = round_codes(values[1], reciprocal, low16(mixed), FORMAT, ROUNDING)
            next_high = round_codes(values[3], reciprocal, high16(mixed), FORMAT, ROUNDING)
        mixed = hash32(first_block + (low_chunk >> 1), k0, k1, mask)
        low = round_codes(values[0], reciprocal, low16(mixed), FORMAT, ROUNDING)
        next_low = round_codes(values[2], reciprocal, high16(mixed), FORMAT, ROUNDING)
    position = group * GROUP + slot
    tl.store(codes + offsets(position), _pack(low, high), mask=tl.expand_dims(exists, -1))
    next_exists = tl.expand_dims(next_exists, -1)
    tl.store(codes + offsets(position + 1), _pack(next_low, next_high), mask=next_exists)


@triton.jit
def store_codes(
    codes, values, reciprocal, group, slot, blocks, is_odd, first_block, k0, k1, mask,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ROUNDING: tl.constexpr, CLIP: tl.constexpr = 1.0,
):  # fmt: skip
    """Write the codes of a tile to a row of a message; `first_block` numbers the row for its random bits."""
    low_chunk, high_chunk, exists = chunks_of(group, slot, blocks, FORMAT, GROUP)
    if len(values) == 4:
        _store_pairs(
            codes, values, reciprocal, group, slot, blocks, is_odd, first_block, k0, k1, mask,
            FORMAT, GROUP, ROUNDING,
        )  # fmt: skip
    else:
        if ROUNDING == NEAREST:
            low_random = _HALF
            high_random = _HALF
        elif not of(FORMAT, "in_halves"):
            # The two chunks of a block are in one thread, and share their hashes.
            mixed = hash32(first_block + (low_chunk >> 1), k0, k1, mask)
            low_random = low16(mixed)
            high_random = high16(mixed)
        else:
            low_random = random16(first_block, low_chunk, k0, k1, mask)
            high_random = random16(first_block, high_chunk, k0, k1, mask)
        if of(FORMAT, "in_halves"):
            low = round_codes(values[0], reciprocal, low_random, FORMAT, ROUNDING, CLIP)
            high = round_codes(values[1], reciprocal, high_random, FORMAT, ROUNDING, CLIP)
            position = offsets(group * GROUP + slot)
            tl.store(codes + position, _pack(low, high), mask=tl.expand_dims(exists, -1))
        else:
            of(FORMAT, "store")(
                codes, low_chunk, values, reciprocal, low_random, high_random, exists, FORMAT, ROUNDING, CLIP
            )
