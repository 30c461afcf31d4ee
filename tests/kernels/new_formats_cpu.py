"""The entries of the numba kernels for the formats of tests/quantization/new_formats.py."""

from __future__ import annotations

from sdp4bit.kernels.cpu.formats import Functions
from sdp4bit.kernels.cpu.tiles import inline
from sdp4bit.kernels.cpu.vectors import load_2_bits, shift_left, shift_right, splat, store_2_bits


@inline
def _load_4(address):
    return load_2_bits(address) | shift_left(load_2_bits(address + 8), 2)


@inline
def _store_4(address, numbers):
    store_2_bits(address, numbers & splat(3))
    store_2_bits(address + 8, shift_right(numbers, 2) & splat(3))


@inline
def _load_6(address):
    return _load_4(address) | shift_left(load_2_bits(address + 16), 4)


@inline
def _store_6(address, numbers):
    _store_4(address, numbers)
    store_2_bits(address + 16, shift_right(numbers, 4) & splat(3))


FUNCTIONS = {"int6": Functions(_load_6, _store_6), "int4 in order": Functions(_load_4, _store_4)}
