"""Device tables: where the sections of a row lie, for launches that work on all of them.

A row of a table describes a section in int64 words. Tables of blocks follow the rows. Places count from the
tensors that the kernel gets: of values in units of UNIT, of messages in units of 16 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdp4bit.quantization.checksum import ROUNDS, signed64
from sdp4bit.quantization.random import STEP_OF_STREAM

FIRST_PROGRAM, PROGRAMS = 0, 1
NUMEL = tl.constexpr(2)  # in units of UNIT values, or the place of the section's blocks in the table
BLOCKS = tl.constexpr(3)  # of 32 values, with padding
VALUES, OTHER_VALUES = tl.constexpr(4), tl.constexpr(5)
RECEIVED, SENT = tl.constexpr(6), tl.constexpr(7)
ROUNDING_KEY, DITHER_KEY = tl.constexpr(8), tl.constexpr(14)
"""The first block and the stride between rows in blocks, then the numbers of a `KeySource`."""
STRIDE, OTHER_STRIDE = tl.constexpr(20), tl.constexpr(21)  # between rows, in units of UNIT values
WIDTH = tl.constexpr(22)
"""Words of a row."""

_FIRST_ROUND, _SECOND_ROUND, _THIRD_ROUND = (tl.constexpr((bits, signed64(f))) for bits, f in ROUNDS)
_STEP_OF_STREAM = tl.constexpr(signed64(STEP_OF_STREAM))


@triton.jit
def _mix(x, ROUND: tl.constexpr):
    shifted = x.to(tl.uint64, bitcast=True) >> ROUND[0]
    return (x ^ shifted.to(tl.int64, bitcast=True)) * ROUND[1]


@triton.jit
def mixed64(x):
    """Return the splitmix64 finalizer of int64 numbers."""
    return _mix(_mix(_mix(x, _FIRST_ROUND), _SECOND_ROUND), _THIRD_ROUND)


@triton.jit
def keys_of(counter):
    """Return both keys of a counter; see `random.KeySource`."""
    key = mixed64(counter)
    return key.to(tl.int32), (key >> 32).to(tl.int32)


@triton.jit
def find_section(table, sections):
    """Return the row of this program's section; None without a table."""
    if table is None:
        return None
    else:
        index = 0
        for i in range(1, sections):
            index += (tl.load(table + i * WIDTH) <= tl.program_id(0)).to(tl.int32)
        return table + index * WIDTH


@triton.jit
def share_of(section):
    """Return this program's number among those that share the tiles of a section, and how many they are.

    Without a section these are all programs. Loops call this last, because numbers that are
    read early take registers.
    """
    if section is None:
        return tl.program_id(0), tl.num_programs(0)
    else:
        return tl.program_id(0) - tl.load(section).to(tl.int32), tl.load(section + 1).to(tl.int32)


@triton.jit
def lengths_of(section, table, numel):
    """Return the length of a section, or its blocks if `numel` is a pointer, and its number of blocks."""
    blocks = tl.load(section + BLOCKS).to(tl.int32)
    if numel.dtype.is_ptr():
        return table + tl.load(section + NUMEL), blocks
    else:
        return tl.load(section + NUMEL).to(numel.dtype), blocks


@triton.jit
def counter_of(section, call, KEY: tl.constexpr):
    """Return the counter of a call; see `random.KeySource`."""
    source = section + KEY + 2
    step = (call.to(tl.int64) * tl.load(source + 1) + tl.load(source + 2)) & tl.load(source + 3)
    return tl.load(source) + step * _STEP_OF_STREAM


@triton.jit
def random_of(section, call, KEY: tl.constexpr):
    """Return the first block, the stride between rows in blocks, and both keys of a section in a call."""
    k0, k1 = keys_of(counter_of(section, call, KEY))
    return tl.load(section + KEY).to(tl.int32), tl.load(section + KEY + 1).to(tl.int32), k0, k1
