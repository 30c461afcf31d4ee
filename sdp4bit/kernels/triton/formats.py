"""The formats of the Triton kernels: device functions that convert codes, by the name of the format.

A format needs one pair of functions, which work on chunks of 16 values:

* `load(codes, chunk, mask, dither)` returns fp32 [..., 16] of the codes of chunks, in units of their scale,
  with `dither`, unless it is None, subtracted.
* `store(codes, chunk, values, reciprocal, low_random, high_random, mask, FORMAT, ROUNDING, CLIP)` rounds and
  writes both chunks of blocks; `chunk` is the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdp4bit.kernels.triton.chunks import CHUNK, Coding, of, offsets
from sdp4bit.kernels.triton.codes import CODE_SHIFT, DITHER, DITHER_BIAS, fixed_point, round_codes
from sdp4bit.quantization.formats import ELEVEN, FP32, INT2, INT3, INT4, INT8

_SIGN_8 = tl.constexpr(0x80 << 9)


@triton.jit
def _load_fp32(codes, chunk, mask, dither):
    """Return fp32 values as they are."""
    floats = codes.to(tl.pointer_type(tl.float32))
    return tl.load(floats + offsets(chunk), mask=tl.expand_dims(mask, -1), other=0.0)


@triton.jit
def _store_fp32(
    codes, chunk, values, reciprocal, low_random, high_random, mask,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Write fp32 values as they are."""
    floats, each = codes.to(tl.pointer_type(tl.float32)), tl.expand_dims(mask, -1)
    tl.store(floats + offsets(chunk), values[0], mask=each)
    tl.store(floats + offsets(chunk + 1), values[1], mask=each)


@triton.jit
def take_off(byte, dither):
    """Decode dithered int8 codes, in units of their scale.

    A code c with 8 bits of dither t represents c + 1/2 - (t + 1/2) / 256 = (512 * c + 2 * ~t - 255) / 512.
    The unsigned code from bit 9 on and ~t in bits 1 to 8 are one number, which is put into the mantissa of a
    float from 2**14 on, whose lowest bit is worth 1/512. The lowest code represents zero.

    Args:
        dither: int32, XORed with the mask of the sender.
    """
    code = byte.to(tl.int32) << CODE_SHIFT
    # Flipping the sign bit makes int8 codes unsigned.
    bits = code ^ (dither ^ _SIGN_8)
    bias = DITHER_BIAS + 128.0
    return tl.where(code == _SIGN_8, 0.0, bits.to(tl.float32, bitcast=True) - bias)


@triton.jit
def _load_int8(codes, chunk, mask, dither):
    """Return fp32 of chunks of int8 codes."""
    byte = tl.load(codes + offsets(chunk), mask=tl.expand_dims(mask, -1), other=0)
    if dither is None:
        return byte.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        return take_off(byte, dither)


@triton.jit
def _store_int8(
    codes, chunk, values, reciprocal, low_random, high_random, mask,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Round both chunks of blocks to int8 and write them."""
    low = round_codes(values[0], reciprocal, low_random, FORMAT, ROUNDING, CLIP)
    high = round_codes(values[1], reciprocal, high_random, FORMAT, ROUNDING, CLIP)
    each = tl.expand_dims(mask, -1)
    tl.store(codes + offsets(chunk), (low >> 16).to(tl.uint8), mask=each)
    tl.store(codes + offsets(chunk + 1), (high >> 16).to(tl.uint8), mask=each)


@triton.jit
def dither_units(dither):
    """Return the number that dither adds to codes, in units of the scale."""
    return dither.to(tl.float32, bitcast=True) - DITHER_BIAS


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
        return tl.where(second == 11, 0.0, code + dither_units(dither))


@triton.jit
def _store_paired(
    codes, chunk, values, reciprocal, low_random, high_random, mask,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Round both chunks of blocks to 3.5 bits and write them; `chunk` is the first."""
    low = fixed_point(values[0], reciprocal, FORMAT, CLIP)
    high = fixed_point(values[1], reciprocal, FORMAT, CLIP)
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
    """Return fp32 of the codes at position LANE of each byte; see `codes.decode_int4`."""
    # In a number from 2**(23 - 2 * LANE) on, bit 2 * LANE is worth 1.
    EXPONENT: tl.constexpr = (127 + 23 - 2 * LANE) << 23
    bits = (byte & (3 << (2 * LANE))) | EXPONENT
    if BITS == 3:
        bits = bits | ((third << (2 + LANE)) & (4 << (2 * LANE)))
    return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - 2 * LANE) + 2 ** (BITS - 1))


@triton.jit
def _load_in_order(codes, chunk, mask, BITS: tl.constexpr):
    """Return fp32 of chunks of 2-bit or 3-bit codes, [..., 16]."""
    words, thirds = _small_words(codes, chunk, BITS)
    # Read as four bytes, so that a chunk is in one thread; see `chunks._load_whole`.
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
def mark_dithered(value, dither, OFFSET: tl.constexpr):
    """Return codes without their dither, and 0 for the lowest code."""
    if dither is None:
        return value
    else:
        return tl.where(value == -OFFSET, 0.0, value + dither_units(dither))


@triton.jit
def _load_int2(codes, chunk, mask, dither):
    return mark_dithered(_load_in_order(codes, chunk, mask, 2), dither, 2.0)


@triton.jit
def _load_int3(codes, chunk, mask, dither):
    return mark_dithered(_load_in_order(codes, chunk, mask, 3), dither, 4.0)


@triton.jit
def _store_in_order(
    codes, chunk, values, reciprocal, low_random, high_random, mask,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Round both chunks of blocks to 2 or 3 bits and write them."""
    low = round_codes(values[0], reciprocal, low_random, FORMAT, ROUNDING, CLIP)
    high = round_codes(values[1], reciprocal, high_random, FORMAT, ROUNDING, CLIP)
    BITS: tl.constexpr = of(FORMAT, "block_bytes") // 4
    _store_small(codes, chunk, (low >> 16) + of(FORMAT, "offset"), mask, BITS)
    _store_small(codes, chunk + 1, (high >> 16) + of(FORMAT, "offset"), mask, BITS)


FORMATS = {
    "int2": Coding(INT2, load=_load_int2, store=_store_in_order, in_words=True),
    "int3": Coding(INT3, load=_load_int3, store=_store_in_order, in_words=True),
    "int3.5": Coding(ELEVEN, load=_load_paired, store=_store_paired, in_words=True),
    "int4": Coding(INT4, load=None, store=None, in_halves=True),
    "int8": Coding(INT8, load=_load_int8, store=_store_int8),
    "fp32": Coding(FP32, load=_load_fp32, store=_store_fp32),
}
