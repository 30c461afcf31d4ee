"""Random bits for stochastic rounding that depend on names, not on history.

A bit is a pure function of (seed, step, bucket, stage, rank, element). Nothing is drawn from a generator,
so activation checkpointing, dropout and the user's own random state are untouched, a resumed run repeats
the same bits, and every back end computes them where it needs them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF

# The mixing constants of two public-domain functions: splitmix64 (S. Vigna), lowbias32 (C. Wellons).
_GOLDEN = 0x9E3779B97F4A7C15
_STREAM = 0xD1B54A32D192ED03
_SPLITMIX_1 = 0xBF58476D1CE4E5B9
_SPLITMIX_2 = 0x94D049BB133111EB
LOWBIAS_1 = 0x7FEB352D
LOWBIAS_2 = 0x846CA68B

STEP_BITS, BUCKET_BITS, STAGE_BITS, RANK_BITS = 32, 12, 2, 18
MAX_BUCKETS, MAX_RANKS = 1 << 20, 1 << RANK_BITS
"""How many parameter groups, and how many ranks of one of them, streams can be told apart for."""
MAX_ELEMENTS = 1 << 33
"""Elements that one key can number: counters have 32 bits and serve two elements each."""


class Stage(IntEnum):
    """Quantization of a step that random bits are for."""

    INTRA = 0
    INTER = 1
    GATHER = 2


class RoundingKey(NamedTuple):
    """Key of a random rounding: what its random bits are computed from besides an element's number."""

    k0: int
    k1: int
    """Unsigned 32-bit keys of the stream, as :func:`derive_keys` returns them."""
    first: int = 0
    """Number of the first value of row 0, a multiple of 32."""
    row_stride: int = 0
    """How far apart in numbers consecutive rows begin, a multiple of 32."""
    dither: bool = False
    """Subtractive dither: receivers who know the key take the upper 8 of an element's 16 bits off again."""
    sender: int = 0
    """Number of the sender among those whose values are summed and who share the key, for dither."""

    def at_row(self, row: int) -> RoundingKey:
        """Return the key for rows from this one on."""
        return self._replace(first=self.first + row * self.row_stride)

    @property
    def mask(self) -> int:
        """The 8 bits by which the sender changes the upper ones of every element; see dither_mask."""
        return dither_mask(self.sender)


def pack_stream(*, step: int, bucket: int, stage: Stage, rank: int) -> int:
    """Return the 64-bit stream number of a quantization; distinct arguments give distinct streams.

    Fields of 32, 12, 2 and 18 bits. Buckets from 4096 on take bits from the top of the step's field: up to
    4096 * 2**k of them have streams of their own for the first 2**(32 - k) steps, the last that the highest
    buckets are given any for.

    Raises:
        ValueError: an argument does not fit its field.
    """
    # Page k begins where bit-reversed k does. That keeps the steps of n pages as far apart as n pages can be,
    # whatever n is, and leaves page 0, all there was before, where it is.
    page, in_page = bucket >> BUCKET_BITS, bucket % (1 << BUCKET_BITS)
    step_bits = STEP_BITS - page.bit_length()
    fields = (
        ("step", step, step_bits),
        ("bucket", bucket, MAX_BUCKETS.bit_length() - 1),
        ("stage", int(stage), STAGE_BITS),
        ("rank", rank, RANK_BITS),
    )
    for name, value, bits in fields:
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name}={value} does not fit the {bits} bits of the random stream number")
    first_step = int(f"{page:0{STEP_BITS}b}"[::-1], 2)
    stream = first_step + step
    for value, bits in ((in_page, BUCKET_BITS), (int(stage), STAGE_BITS), (rank, RANK_BITS)):
        stream = stream << bits | value
    return stream


def check_numbers(*, buckets: int, ranks: int) -> None:
    """Raise ValueError if there are more parameter groups, or ranks of one, than streams can tell apart."""
    if buckets > MAX_BUCKETS:
        raise ValueError(
            f"{buckets:,} parameter groups are more than the {MAX_BUCKETS:,} that random bits tell apart: "
            "shard larger modules, each as one group"
        )
    if ranks > MAX_RANKS:
        raise ValueError(
            f"{ranks:,} data-parallel ranks are more than the {MAX_RANKS:,} that random bits can tell apart"
        )


def derive_keys(seed: int, stream: int) -> tuple[int, int]:
    """Return the two unsigned 32-bit keys of a stream (a splitmix64 finalizer, a bijection in `stream`)."""
    z = (seed * _GOLDEN + stream * _STREAM + _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * _SPLITMIX_1) & _MASK64
    z = ((z ^ (z >> 27)) * _SPLITMIX_2) & _MASK64
    z ^= z >> 31
    return z & _MASK32, z >> 32


def dither_mask(sender: int) -> int:
    """Return the offset of a sender's dither: the low 8 bits of its number, in reverse order.

    Every sender's dither is uniform, as any bits are after an exclusive or. Together those of 2**k senders
    lie in different of 2**k equal intervals (a digital shift by the van der Corput sequence): where senders
    have nearly equal values, their errors cancel; where they have not, their errors are uncorrelated. And
    the receiver draws bits once for all of them. The idea that senders' dithers should depend on each other
    is that of correlated quantization (A. T. Suresh et al., ICML 2022, arXiv 2203.04925).
    """
    return int(f"{sender & 0xFF:08b}"[::-1], 2)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift as if unsigned: torch copies the sign bit of int32, so the copies are masked off."""
    return (x >> bits) & (_MASK32 >> bits)


def hash32(counter: Tensor, k0: int, k1: int) -> Tensor:
    """Return 32 mixed bits per counter; int32 in and out, wrapping like uint32."""
    x = counter ^ _signed(k0)
    x = x ^ _shift_right(x, 16)
    x = x * LOWBIAS_1
    x = x ^ _signed(k1)
    x = x ^ _shift_right(x, 15)
    x = x * _signed(LOWBIAS_2)
    return x ^ _shift_right(x, 16)


def random_bits16(first: int, numel: int, k0: int, k1: int, *, device: torch.device | None = None) -> Tensor:
    """Return 16 random bits, int32 in [0, 65536), for each element first .. first + numel - 1.

    Element e of a block of 32 reads counter (e // 32) * 16 + e % 16; lanes 0 to 15 take the low half of
    its hash and lanes 16 to 31 the high half, so that one hash serves two elements.

    Args:
        first: number of the first element, a multiple of 32, not negative.
        numel: how many elements, a multiple of 32.

    Raises:
        ValueError: a number that is negative or no multiple of 32, or an element beyond 2**33.
    """
    if first < 0 or numel < 0 or first % 32 or numel % 32:
        raise ValueError(f"first={first} and numel={numel} must be multiples of 32, at least 0")
    if first + numel > MAX_ELEMENTS:
        raise ValueError(f"element {first + numel} is beyond {MAX_ELEMENTS}, the most one key can number")
    counter = torch.arange(first // 2, (first + numel) // 2, dtype=torch.int64, device=device)
    counter = counter.to(torch.int32).view(-1, 1, 16)
    mixed = hash32(counter, k0, k1)
    return torch.cat([mixed & 0xFFFF, _shift_right(mixed, 16)], dim=1).view(-1)
