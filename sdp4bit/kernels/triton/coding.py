"""Formats as constants of the Triton kernels."""

from __future__ import annotations

from typing import Any

import triton

from sdp4bit.quantization.formats import BF16, Format


class Coding:
    """A format as a constant of kernels: its numbers, and its pair of functions (see `formats.py`).

    With `in_words`, 16 codes are words and no vector of bytes. With `in_halves`, the two chunks of a slot
    share their bytes, as with int4, which needs no functions.
    """

    def __init__(
        self, format: Format, *, load: Any, store: Any, in_halves: bool = False, in_words: bool = False
    ) -> None:
        self.name, self.block_bytes, self.has_scales = format.name, format.block_bytes, format.has_scales
        self.largest, self.offset = format.largest or 1, format.offset
        # The least magnitude that is infinite in the format, as bits of fp32: bf16 rounds up.
        self.infinite = 0x7F7F8000 if format is BF16 else 0x7F800000
        self.load, self.store, self.in_halves, self.in_words = load, store, in_halves, in_words

    def __repr__(self) -> str:
        return self.name

    @property
    def cache_key(self) -> str:
        """Text that changes with the functions, for Triton's cache of compiled kernels."""
        functions = [getattr(each, "cache_key", "") for each in (self.load, self.store)]
        return f"{self.name} {self.block_bytes} {self.largest} {self.in_halves} {self.in_words} {functions}"


@triton.constexpr_function
def of(format: Coding, name: str) -> object:  # not Any: Triton cannot hash it on Python 3.10
    """Return an attribute of a format, in a kernel."""
    return getattr(format, name)
