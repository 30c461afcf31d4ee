"""The Triton kernel of checksums."""

from __future__ import annotations

import triton
import triton.language as tl

from sdp4bit.kernels.triton.sections import mixed64
from sdp4bit.quantization.checksum import GOLDEN, STRIPE_WORDS, signed64

_GOLDEN, _STRIPE_WORDS = tl.constexpr(signed64(GOLDEN)), tl.constexpr(STRIPE_WORDS)


@triton.jit
def _odd_factors(number):
    """Return odd pseudo-random int64 factors of int64 numbers, as `checksum.stripe_factors`."""
    x = (number + 1) * _GOLDEN
    return mixed64(x) | 1


@triton.jit(do_not_specialize=["units"])
def checksum_kernel(
    values,
    out,
    units: tl.int64,  # of UNIT bytes
    UNIT: tl.constexpr,  # bytes: 8, or less if values are not aligned
    WORDS: tl.constexpr,
):
    """Add the checksum of values to `out`, see `quantization/checksum.py`.

    A program has the same WORDS words of several pieces, whose factors it computes once.
    """
    place = (tl.program_id(1) * WORDS + tl.arange(0, WORDS)).to(tl.int64)
    low, high = _odd_factors(place), _odd_factors(place + _STRIPE_WORDS)
    PER_WORD: tl.constexpr = 8 // UNIT
    source = values.to(tl.pointer_type(tl.core.get_int_dtype(8 * UNIT, True)))
    total = tl.zeros([WORDS], tl.int64)
    pieces = tl.cdiv(units.to(tl.int64), _STRIPE_WORDS * PER_WORD)
    for piece in range(tl.program_id(0).to(tl.int64), pieces, tl.num_programs(0)):
        first = (place + piece * _STRIPE_WORDS) * PER_WORD
        word = tl.load(source + first, mask=first < units, other=0).to(tl.int64)
        if UNIT < 8:
            word = word & ((1 << (8 * UNIT)) - 1)
            for i in tl.static_range(1, PER_WORD):
                more = tl.load(source + first + i, mask=first + i < units, other=0).to(tl.int64)
                word = word | ((more & ((1 << (8 * UNIT)) - 1)) << (8 * UNIT * i))
        total += (word * low + (word >> 32) * high) * (2 * piece + 1)
    tl.atomic_add(out, tl.sum(total * _GOLDEN), sem="relaxed")
