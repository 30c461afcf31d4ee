"""What the Triton kernels need for the formats of tests/quantization/new_formats.py."""

from __future__ import annotations

import triton
import triton.language as tl

from sdp4bit.kernels.triton.chunks import CHUNK, Coding, of, offsets
from sdp4bit.kernels.triton.codes import round_codes
from sdp4bit.kernels.triton.formats import mark_dithered
from tests.quantization.new_formats import FOUR, SIX


@triton.jit
def _load(codes, chunk, mask, PLANES: tl.constexpr):
    lane = tl.arange(0, CHUNK)
    first = codes + (chunk >> 1).to(tl.int64) * (8 * PLANES) + (chunk & 1) * 4
    number = tl.zeros(offsets(chunk).shape, tl.int32)
    for plane in tl.static_range(PLANES):
        place = tl.expand_dims(first + 8 * plane, -1) + lane // 4
        byte = tl.load(place, mask=tl.expand_dims(mask, -1), other=0).to(tl.int32)
        number = number | (((byte >> (lane % 4 * 2)) & 3) << (2 * plane))
    return number


@triton.jit
def _load_4(codes, chunk, mask, dither):
    return mark_dithered(_load(codes, chunk, mask, 2).to(tl.float32) - 8.0, dither, 8.0)


@triton.jit
def _load_6(codes, chunk, mask, dither):
    return mark_dithered(_load(codes, chunk, mask, 3).to(tl.float32) - 32.0, dither, 32.0)


@triton.jit
def _store_chunk(codes, chunk, number, mask, PLANES: tl.constexpr):
    first = codes + (chunk >> 1).to(tl.int64) * (8 * PLANES) + (chunk & 1) * 4
    for plane in tl.static_range(PLANES):
        pairs = ((number >> (2 * plane)) & 3).to(tl.uint32)
        word = tl.sum(pairs << (tl.arange(0, CHUNK) * 2), -1).to(tl.int32, bitcast=True)
        tl.store((first + 8 * plane).to(tl.pointer_type(tl.int32)), word, mask=mask)


@triton.jit
def _store(
    codes, chunk, values, reciprocal, low_random, high_random, mask,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = of(FORMAT, "block_bytes") // 8
    low = round_codes(values[0], reciprocal, low_random, FORMAT, ROUNDING, CLIP)
    high = round_codes(values[1], reciprocal, high_random, FORMAT, ROUNDING, CLIP)
    _store_chunk(codes, chunk, (low >> 16) + of(FORMAT, "offset"), mask, PLANES)
    _store_chunk(codes, chunk + 1, (high >> 16) + of(FORMAT, "offset"), mask, PLANES)


CODINGS = {
    "int6": Coding(SIX, load=_load_6, store=_store, in_words=True),
    "int4 in order": Coding(FOUR, load=_load_4, store=_store, in_words=True),
}
