"""Sizes of the messages of lossless weights: integers only, for coders, collectives and the planner."""

from __future__ import annotations

from sdp4bit.quantization.layout import round_up

HEADER_BYTES = 48
ENTRY_BYTES = 8
"""Of a block in the directory: its code and the number of its words."""
ALIGNMENT = 16

LANES = 32
STEPS = 512
BLOCK = LANES * STEPS
"""Values of a block. Each costs 64 bytes for the states of its lanes, 1/32 of a bit per value."""


def block_count(numel: int) -> int:
    """Return how many blocks a row of so many values has."""
    return -(-numel // BLOCK)


def message_parts(numel: int) -> int:
    """Return where the words of the first block begin in a message of so many values."""
    return HEADER_BYTES + ENTRY_BYTES * block_count(numel)


def largest_message(numel: int) -> int:
    """Return the bytes of a message with room for whatever happens: no block is longer than its values."""
    return round_up(message_parts(numel) + 2 * numel, ALIGNMENT)


def smallest_message(numel: int) -> int:
    """Return the bytes of a message that has room for nothing but saying so."""
    return round_up(message_parts(numel), ALIGNMENT)
