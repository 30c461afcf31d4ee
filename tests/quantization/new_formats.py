"""Formats that the library does not have: 6 bits, and a second one of 4 bits."""

from __future__ import annotations

from sdp4bit.quantization.formats import InOrder

SIX = InOrder(name="int6", largest=31, block_bytes=24, widths=(2, 2, 2))
FOUR = InOrder(name="int4 in order", largest=7, block_bytes=16, widths=(2, 2))
NEW_FORMATS = (SIX, FOUR)
