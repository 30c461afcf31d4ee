"""The formats of the CPU kernels: functions that convert codes, by the name of the format.

A format needs one pair of functions: `load` returns the 32 unsigned codes of a block at an address, and
`store` writes them. Kernels are compiled for their formats, with these functions inlined.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sdp4bit.kernels.cpu import tiles
from sdp4bit.kernels.cpu.tiles import CODE_SHIFT, inline
from sdp4bit.kernels.cpu.vectors import (
    join,
    load_2_bits,
    load_3_bits,
    load_seven_bits,
    load_u8,
    second_halves,
    splat,
    splat16,
    store_2_bits,
    store_seven_bits,
    store_third_bits,
    store_u8,
    swap_halves,
    where_equal,
)
from sdp4bit.quantization.formats import Format


class Functions(NamedTuple):
    """Functions of one format. The last two process groups, for formats whose codes are not in blocks."""

    load: Any = None
    store: Any = None
    mark_zeros: Any = tiles.mark_lowest
    drop_zeros: Any = tiles.drop_lowest
    encode_group: Any = tiles.encode_blocks
    sum_group: Any = tiles.sum_blocks


class Coding(NamedTuple):
    """A format as kernels see it."""

    functions: Functions
    width: int  # bytes per block of 32
    offset: int
    largest: int
    has_scales: bool


def coding_of(format: Format) -> Coding:
    """Return a format for the compilation of a kernel."""
    functions = FORMATS[format.name]
    return Coding(functions, format.block_bytes, format.offset, format.largest, format.has_scales)


@inline
def _load_2(address):
    return load_2_bits(address)


@inline
def _store_2(address, numbers):
    store_2_bits(address, numbers)


@inline
def _load_3(address):
    return load_3_bits(address + 8, load_2_bits(address))


@inline
def _store_3(address, numbers):
    store_2_bits(address, numbers & splat(3))
    store_third_bits(address + 8, numbers)


@inline
def _load_8(address):
    # Codes have signs: flipping the highest bit makes them unsigned.
    return load_u8(address) ^ splat(0x80)


@inline
def _store_8(address, numbers):
    store_u8(address, numbers ^ splat(0x80))


@inline
def _load_pairs(address):
    return load_seven_bits(address)


@inline
def _store_pairs(address, numbers):
    store_seven_bits(address, numbers)


@inline
def _mark_pairs(fixed, rounded, offset):
    zeros = join(splat16(-5 << 16), splat16(6 << 16))  # (0, 11) makes 121, if both are zero
    return where_equal(fixed | swap_halves(fixed), splat(0), zeros, rounded)


@inline
def _drop_pairs(codes, units):
    return where_equal(second_halves(codes), splat(11 << CODE_SHIFT), splat(tiles.ZERO), units)


_IN_HALVES = Functions(encode_group=tiles.encode_halves, sum_group=tiles.sum_halves)
FORMATS: dict[str, Functions] = {
    "int2": Functions(_load_2, _store_2),
    "int3": Functions(_load_3, _store_3),
    "int3.5": Functions(_load_pairs, _store_pairs, _mark_pairs, _drop_pairs),
    "int4": _IN_HALVES,
    "int8": Functions(_load_8, _store_8),
    # Without scales there are no groups, and none of these is called.
    "bf16": _IN_HALVES,
    "fp32": _IN_HALVES,
}
