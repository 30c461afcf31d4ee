"""The entries of the Triton kernels for the formats of tests/quantization/new_formats.py."""

from __future__ import annotations

import triton
import triton.language as tl

from sdp4bit.kernels.triton.chunks import CHUNK, offsets
from sdp4bit.kernels.triton.codes import round_codes
from sdp4bit.kernels.triton.coding import Coding, of
from sdp4bit.kernels.triton.formats import without_dither
from tests.quantization.new_formats import FOUR, SIX


@triton.jit
def _load(codes, chunk, mask, dither, FORMAT: tl.constexpr):
    lane = tl.arange(0, CHUNK)
    first = codes + (chunk >> 1).to(tl.int64) * of(FORMAT, "block_bytes") + (chunk & 1) * 4
    number = tl.zeros(offsets(chunk).shape, tl.int32)
    for plane in tl.static_range(of(FORMAT, "block_bytes") // 8):
        place = tl.expand_dims(first + 8 * plane, -1) + lane // 4
        byte = tl.load(place, mask=tl.expand_dims(mask, -1), other=0).to(tl.int32)
        number = number | (((byte >> (lane % 4 * 2)) & 3) << (2 * plane))
    return without_dither((number - of(FORMAT, "offset")).to(tl.float32), number == 0, dither)


@triton.jit
def _store(
    codes, chunk, values, reciprocal, low_random, high_random, mask,
    FORMAT: tl.constexpr, ROUNDING: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    for half in tl.static_range(2):
        random = low_random if half == 0 else high_random
        rounded = round_codes(values[half], reciprocal, random, FORMAT, ROUNDING, CLIP)
        number = (rounded >> 16) + of(FORMAT, "offset")
        first = codes + (chunk >> 1).to(tl.int64) * of(FORMAT, "block_bytes") + half * 4
        for plane in tl.static_range(of(FORMAT, "block_bytes") // 8):
            pairs = ((number >> (2 * plane)) & 3).to(tl.uint32)
            word = tl.sum(pairs << (tl.arange(0, CHUNK) * 2), -1).to(tl.int32, bitcast=True)
            tl.store((first + 8 * plane).to(tl.pointer_type(tl.int32)), word, mask=mask)


CODINGS = {
    "int6": Coding(SIX, load=_load, store=_store, in_words=True),
    "int4 in order": Coding(FOUR, load=_load, store=_store, in_words=True),
}
