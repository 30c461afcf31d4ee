"""Counter-based random bits for stochastic rounding.

A bit is a pure function of (seed, step, bucket, stage, rank, element). No generator is used, so the user's
random state is unchanged, a resumed run repeats the same bits, and kernels compute them in place.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF

# Mixing constants of two public-domain functions: splitmix64 (S. Vigna) and lowbias32 (C. Wellons).
_GOLDEN = 0x9E3779B97F4A7C15
_STREAM = 0xD1B54A32D192ED03
SPLITMIX_1 = 0xBF58476D1CE4E5B9
SPLITMIX_2 = 0x94D049BB133111EB
LOWBIAS_1 = 0x7FEB352D
LOWBIAS_2 = 0x846CA68B

STEP_BITS, BUCKET_BITS, STAGE_BITS, RANK_BITS = 32, 12, 2, 18
STEP_OF_STREAM = (_STREAM << BUCKET_BITS + STAGE_BITS + RANK_BITS) & _MASK64
"""The difference between the counters of successive steps of a stream, modulo 2**64."""
MAX_BUCKETS, MAX_RANKS = 1 << 20, 1 << RANK_BITS
"""Maximum numbers of parameter groups and of ranks with distinct streams."""
MAX_ELEMENTS = 1 << 33
"""Maximum number of elements of one key: a 32-bit counter serves two elements."""


class Stage(IntEnum):
    """A quantization within a step."""

    INTRA = 0
    INTER = 1
    GATHER = 2
    OUTER = 3


class RoundingKey(NamedTuple):
    """Key of a random rounding, from which the bits of an element's number are computed."""

    k0: int
    k1: int
    """Unsigned 32-bit keys of the stream from :func:`derive_keys`."""
    first: int = 0
    """Number of the first value of row 0, a multiple of 32."""
    row_stride: int = 0
    """Difference between the numbers of consecutive rows, a multiple of 32."""
    dither: bool = False
    """Subtractive dither: receivers with the key subtract the upper 8 of an element's 16 bits."""
    sender: int = 0
    """For dither: index among the senders that share the key and whose values are summed."""
    source: KeySource | None = None
    """In a recorded call, the source of both keys in each run."""

    def of_call(self, call: int) -> RoundingKey:
        """Return the key with the bits of a call; this one if it has no source."""
        if self.source is None:
            return self
        k0, k1 = self.source.keys(call)
        return self._replace(k0=k0, k1=k1, source=None)

    def at_row(self, row: int) -> RoundingKey:
        """Return the key for rows from this one on."""
        return self._replace(first=self.first + row * self.row_stride)

    @property
    def mask(self) -> int:
        """The sender's 8 bits that are XORed with the upper bits of every element; see dither_mask."""
        return dither_mask(self.sender)


class KeySeries(NamedTuple):
    """Keys of subtractive dither of pieces whose senders have evenly spaced ranks."""

    start: int
    step: int
    """Unsigned 64-bit numbers: piece i has the keys of start + i * step, modulo 2**64."""
    source: KeySource | None = None
    """In a recorded call, the source of `start` in each run."""

    def of_call(self, call: int) -> KeySeries:
        """Return the series of a call; this one if it has no source."""
        return self if self.source is None else KeySeries(self.source.counter(call), self.step)

    def key(self, piece: int) -> RoundingKey:
        """Return the key of a piece, as its receivers need it."""
        return RoundingKey(*_mixed(self.start + piece * self.step & _MASK64), dither=True)


class KeySource(NamedTuple):
    """A section's keys in all calls: those of step (call * count + number) & mask of one stream."""

    start: int
    """Unsigned 64-bit counter of step 0."""
    count: int  # type: ignore[assignment]  # a method of tuples, which nobody needs here
    number: int
    mask: int

    def counter(self, call: int) -> int:
        """Return the unsigned 64-bit number whose mixed bits are the keys of a call."""
        step = (call * self.count + self.number) & self.mask
        return (self.start + step * STEP_OF_STREAM) & _MASK64

    def keys(self, call: int) -> tuple[int, int]:
        """Return the two unsigned 32-bit keys of a call, as :func:`derive_keys` returns them."""
        return _mixed(self.counter(call))


def pack_stream(*, step: int, bucket: int, stage: Stage, rank: int) -> int:
    """Return the 64-bit stream number of a quantization; distinct arguments give distinct streams.

    Fields have 32, 12, 2 and 18 bits. Buckets from 4096 on use the top bits of the step's field. Up to
    4096 * 2**k buckets therefore have distinct streams for 2**(32 - k) steps, and repeat them afterwards.

    Raises:
        ValueError: `step` is negative, or another argument does not fit its field.
    """
    # Page k begins at bit-reversed k, so the steps of any number of pages are as far apart as possible.
    page, in_page = bucket >> BUCKET_BITS, bucket % (1 << BUCKET_BITS)
    if step < 0:
        raise ValueError(f"step={step} must be at least 0")
    step &= _step_mask(bucket)
    fields = (
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
    """Raise ValueError if there are more parameter groups or ranks than distinct streams."""
    if buckets > MAX_BUCKETS:
        raise ValueError(
            f"{buckets:,} parameter groups are more than the {MAX_BUCKETS:,} with distinct random bits: "
            "shard larger modules, each as one group"
        )
    if ranks > MAX_RANKS:
        raise ValueError(
            f"{ranks:,} data-parallel ranks are more than the {MAX_RANKS:,} with distinct random bits"
        )


def _step_mask(bucket: int) -> int:
    # A long job has more steps than the field: a row of 768 sections ends it after 5.6 million reductions.
    return (1 << STEP_BITS - (bucket >> BUCKET_BITS).bit_length()) - 1


def key_source(seed: int, *, count: int, number: int, bucket: int, stage: Stage, rank: int) -> KeySource:
    """Return the source of the keys of section `number` of `count`; see :func:`pack_stream`."""
    start = _counter(seed, pack_stream(step=0, bucket=bucket, stage=stage, rank=rank))
    return KeySource(start, count, number, _step_mask(bucket))


def derive_keys(seed: int, stream: int) -> tuple[int, int]:
    """Return the two unsigned 32-bit keys of a stream (a splitmix64 finalizer, a bijection in `stream`)."""
    return _mixed(_counter(seed, stream))


def derive_series(seed: int, stream: int, *, rank_step: int) -> KeySeries:
    """Return the keys of this stream and of those whose ranks follow at this distance."""
    return KeySeries(_counter(seed, stream), rank_step * _STREAM & _MASK64)


def _counter(seed: int, stream: int) -> int:
    return (seed * _GOLDEN + stream * _STREAM + _GOLDEN) & _MASK64


def _mixed(z: int) -> tuple[int, int]:
    z = ((z ^ (z >> 30)) * SPLITMIX_1) & _MASK64
    z = ((z ^ (z >> 27)) * SPLITMIX_2) & _MASK64
    z ^= z >> 31
    return z & _MASK32, z >> 32


def dither_mask(sender: int) -> int:
    """Return the offset of a sender's dither: the low 8 bits of its number in reverse order.

    Each sender's dither stays uniform after the XOR. The dithers of 2**k senders lie in distinct intervals of
    length 2**-k, which is a digital shift by the van der Corput sequence. So the errors of nearly equal
    values cancel, those of other values are uncorrelated, and the receiver draws bits once for all senders.
    The idea of dependent dithers is that of correlated quantization (A. T. Suresh et al., ICML 2022,
    arXiv 2203.04925).
    """
    return int(f"{sender & 0xFF:08b}"[::-1], 2)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int32 as if unsigned; the mask removes the copies of the sign bit."""
    return (x >> bits) & (_MASK32 >> bits)


def hash32(counter: Tensor, k0: int, k1: int) -> Tensor:
    """Return 32 mixed bits per counter; int32 that wraps like uint32."""
    x = counter ^ _signed(k0)
    x = x ^ _shift_right(x, 16)
    x = x * LOWBIAS_1
    x = x ^ _signed(k1)
    x = x ^ _shift_right(x, 15)
    x = x * _signed(LOWBIAS_2)
    return x ^ _shift_right(x, 16)


def random_bits16(
    first: int,
    numel: int,
    k0: int,
    k1: int,
    *,
    rows: int = 1,
    row_stride: int = 0,
    device: torch.device | None = None,
) -> Tensor:
    """Return 16 random bits per element of rows, int32 [rows * numel], in [0, 65536).

    Element e hashes counter (e // 32) * 16 + e % 16. Lanes 0 to 15 of a block of 32 use the low half of the
    hash, and lanes 16 to 31 use the high half, so that one hash serves two elements.

    Args:
        first: number of the first element of the first row, a multiple of 32, not negative.
        numel: number of elements of a row, a multiple of 32.
        row_stride: difference between the numbers of consecutive rows, a multiple of 32, not negative.

    Raises:
        ValueError: a number is negative or no multiple of 32, or an element is beyond 2**33.
    """
    if min(first, numel, row_stride) < 0 or first % 32 or numel % 32 or row_stride % 32:
        raise ValueError(f"{first=}, {numel=} and {row_stride=} must be multiples of 32, at least 0")
    end = first + (rows - 1) * row_stride + numel
    if end > MAX_ELEMENTS:
        raise ValueError(f"element {end} is beyond {MAX_ELEMENTS}, the maximum for one key")
    starts = torch.arange(rows, device=device).unsqueeze(1) * (row_stride // 2) + first // 2
    counter = starts + torch.arange(numel // 2, device=device)
    mixed = hash32(counter.to(torch.int32).view(-1, 1, 16), k0, k1)
    return torch.cat([mixed & 0xFFFF, _shift_right(mixed, 16)], dim=1).view(-1)
