"""The formats of the Triton kernels: device functions that convert codes, by the name of the format.

A format needs one pair of functions, which work on chunks of 16 values:

* `load(codes, chunk, mask, dither, FORMAT)` returns fp32 [..., 16] of chunks, in units of their scale and
  without the dither if it is not None.
* `store(codes, chunk, values, reciprocal, low_random, high_random, mask, FORMAT, ROUNDING, CLIP)` rounds and
  writes both chunks of blocks; `chunk` is the first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from sdp4bit.kernels.triton.chunks import CHUNK, IS_INTERPRETED, bf16_bits, float_from_bf16, offsets
from sdp4bit.kernels.triton.codes import CODE_SHIFT, DITHER, DITHER_BIAS, fixed_point, round_codes
from sdp4bit.kernels.triton.coding import Coding, of
from sdp4bit.quantization.formats import BF16, ELEVEN, FP32, INT2, INT3, INT4, INT8

_SIGN_8 = tl.constexpr(0x80 << 9)
INT8_TO_FLOAT = tl.constexpr(
    """{
    .reg .b32 unsigned;
    xor.b32 unsigned, $4, 0x80808080;
    prmt.b32 $0, unsigned, 0x4B000000, 0x7440;
    prmt.b32 $1, unsigned, 0x4B000000, 0x7441;
    prmt.b32 $2, unsigned, 0x4B000000, 0x7442;
    prmt.b32 $3, unsigned, 0x4B000000, 0x7443;
    }"""
)
"""PTX that makes each of four bytes, with its sign flipped, the lowest one of a float from 2**23 on."""
_INT8_BIAS = tl.constexpr(2.0**23 + 128)


@triton.jit
def _load_fp32(codes, chunk, mask, dither, FORMAT: tl.constexpr):
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
def _load_bf16(codes, chunk, mask, dither, FORMAT: tl.constexpr):
    """Return fp32 of bf16 values."""
    bits = codes.to(tl.pointer_type(tl.int16))
    return float_from_bf16(tl.load(bits + offsets(chunk), mask=tl.expand_dims(mask, -1), other=0))


@triton.jit
def _store_bf16(
    codes, chunk, values, reciprocal, low_random, high_random, mask,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Round both chunks of blocks to bf16 and write them."""
    place, each = codes.to(tl.pointer_type(tl.int16)) + offsets(chunk), tl.expand_dims(mask, -1)
    tl.store(place, bf16_bits(values[0]), mask=each)
    tl.store(place + CHUNK, bf16_bits(values[1]), mask=each)


@triton.jit
def _decode_int8(byte):
    """Return fp32 of int8 codes.

    An NVIDIA GPU converts an eighth as many integers per clock as it adds floats. So four codes are put into
    the mantissas of floats at a time, and the subtraction of the bias is exact.
    """
    if IS_INTERPRETED or not is_cuda():
        return byte.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        bits = tl.inline_asm_elementwise(
            INT8_TO_FLOAT, "=r,=r,=r,=r,r", [byte], dtype=tl.int32, is_pure=True, pack=4
        )
        return bits.to(tl.float32, bitcast=True) - _INT8_BIAS


@triton.jit
def _take_off_int8(byte, dither):
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
def _load_int8(codes, chunk, mask, dither, FORMAT: tl.constexpr):
    """Return fp32 of chunks of int8 codes."""
    byte = tl.load(codes + offsets(chunk), mask=tl.expand_dims(mask, -1), other=0)
    if dither is None:
        return _decode_int8(byte)
    else:
        return _take_off_int8(byte, dither)


@triton.jit
def _store_int8(
    codes, chunk, values, reciprocal, low_random, high_random, mask,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Round both chunks of blocks to int8 and write them."""
    for half in tl.static_range(2):
        random = low_random if half == 0 else high_random
        rounded = round_codes(values[half], reciprocal, random, FORMAT, ROUNDING, CLIP)
        place = codes + offsets(chunk + half)
        tl.store(place, (rounded >> 16).to(tl.uint8), mask=tl.expand_dims(mask, -1))


@triton.jit
def without_dither(code, is_zero, dither):
    """Return the units of fp32 codes, with 0 for marked zeros."""
    if dither is None:
        return code
    else:
        return tl.where(is_zero, 0.0, code + (dither.to(tl.float32, bitcast=True) - DITHER_BIAS))


@triton.jit
def _load_paired(codes, chunk, mask, dither, FORMAT: tl.constexpr):
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
    return without_dither(code, second == 11, dither)


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
def _small_words(codes, chunk, FORMAT: tl.constexpr):
    """Return pointers to the lower two bits of chunks, a word each, and to their third bits, half a word."""
    half = chunk & 1
    block = codes + (chunk >> 1).to(tl.int64) * of(FORMAT, "block_bytes")
    return block + half * 4, (block + (8 + half * 2)).to(tl.pointer_type(tl.int16))


@triton.jit
def _decode_small(byte, third, LANE: tl.constexpr, FORMAT: tl.constexpr):
    """Return fp32 of the codes at position LANE of each byte; see `codes.decode_int4`."""
    # In a number from 2**(23 - 2 * LANE) on, bit 2 * LANE is worth 1.
    EXPONENT: tl.constexpr = (127 + 23 - 2 * LANE) << 23
    bits = (byte & (3 << (2 * LANE))) | EXPONENT
    if third is not None:
        bits = bits | ((third << (2 + LANE)) & (4 << (2 * LANE)))
    return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - 2 * LANE) + of(FORMAT, "offset"))


@triton.jit
def _load_in_order(codes, chunk, mask, dither, FORMAT: tl.constexpr):
    """Return fp32 of chunks of 2-bit or 3-bit codes."""
    words, thirds = _small_words(codes, chunk, FORMAT)
    # Read as four bytes, so that a chunk is in one thread; see `chunks._load_whole`.
    lane = tl.arange(0, 4)
    byte = tl.load(tl.expand_dims(words, -1) + lane, mask=tl.expand_dims(mask, -1), other=0).to(tl.int32)
    third = None
    if of(FORMAT, "largest") == 3:
        third = tl.expand_dims(tl.load(thirds, mask=mask, other=0).to(tl.int32), -1) >> (lane * 4)
    even = tl.join(_decode_small(byte, third, 0, FORMAT), _decode_small(byte, third, 2, FORMAT))
    odd = tl.join(_decode_small(byte, third, 1, FORMAT), _decode_small(byte, third, 3, FORMAT))
    # [..., byte, value / 2, value % 2]
    code = tl.reshape(tl.join(even, odd), offsets(chunk).shape)
    return without_dither(code, code == of(FORMAT, "offset") * -1.0, dither)


@triton.jit
def _store_in_order(
    codes, chunk, values, reciprocal, low_random, high_random, mask,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Round both chunks of blocks to 2 or 3 bits and write them."""
    lane = tl.arange(0, CHUNK)
    for half in tl.static_range(2):
        random = low_random if half == 0 else high_random
        rounded = round_codes(values[half], reciprocal, random, FORMAT, ROUNDING, CLIP)
        number = ((rounded >> 16) + of(FORMAT, "offset")).to(tl.uint32)
        words, thirds = _small_words(codes, chunk + half, FORMAT)
        # No two terms share a bit, so the sum is an OR.
        word = tl.sum((number & 3) << (lane * 2), -1).to(tl.int32, bitcast=True)
        tl.store(words.to(tl.pointer_type(tl.int32)), word, mask=mask)
        if of(FORMAT, "largest") == 3:
            third = tl.sum(((number >> 2) & 1) << lane, -1)
            tl.store(thirds, third.to(tl.int16), mask=mask)


FORMATS = {
    "int2": Coding(INT2, load=_load_in_order, store=_store_in_order, in_words=True),
    "int3": Coding(INT3, load=_load_in_order, store=_store_in_order, in_words=True),
    "int3.5": Coding(ELEVEN, load=_load_paired, store=_store_paired, in_words=True),
    "int4": Coding(INT4, load=None, store=None, in_halves=True),
    "int8": Coding(INT8, load=_load_int8, store=_store_int8),
    "bf16": Coding(BF16, load=_load_bf16, store=_store_bf16),
    "fp32": Coding(FP32, load=_load_fp32, store=_store_fp32),
}
