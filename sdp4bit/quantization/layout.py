"""Byte layout of messages, shared by all back ends, the collectives and the planner.

A message carries `parts` rows of `numel` values. Codes and scales travel together in one uint8 buffer:

    [codes of part 0][codes of part 1]...[scales of part 0][scales of part 1]...[padding]

A row is padded with zeros to a multiple of 32, the Hadamard block. Its groups have `group_size` values; the
last may be shorter (still a multiple of 32), so a row has at most 31 padded values. Scales are bf16.
:mod:`sdp4bit.quantization.formats` defines the bytes of codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from sdp4bit.quantization.formats import BLOCK, Bits, Format, format_of

SCALE_BYTES = 2
MESSAGE_ALIGNMENT = 16
"""Message sizes are multiples of this many bytes, so that all messages of a buffer are aligned."""


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


def bytes_per_value(format: Format, *, group_size: int) -> float:
    """Return the bytes of a value and of its share of a scale, without padding."""
    return format.block_bytes / BLOCK + (SCALE_BYTES / group_size if format.has_scales else 0.0)


@dataclass(frozen=True, kw_only=True)
class MessageLayout:
    """Layout of one message.

    Raises:
        ValueError: bits name no format, the group size is no multiple of 32, or a count is negative.
    """

    numel: int
    """Values in each row, without padding."""
    bits: Bits
    """Names the format, as in the settings."""
    group_size: int
    """Values per scale, a multiple of 32."""
    parts: int = 1
    """Rows in one message."""

    def __post_init__(self) -> None:
        if self.group_size < BLOCK or self.group_size % BLOCK:
            raise ValueError(f"group_size={self.group_size} is not a positive multiple of {BLOCK}")
        if self.numel < 0 or self.parts < 1:
            raise ValueError(f"numel={self.numel} and parts={self.parts} must be at least 0 and 1")
        self.format  # noqa: B018 - known, or an error

    @cached_property
    def format(self) -> Format:
        return format_of(self.bits)

    @cached_property
    def padded_numel(self) -> int:
        """Values in each row with padding, a multiple of 32."""
        return round_up(self.numel, BLOCK)

    @cached_property
    def groups(self) -> int:
        """Scales per row; 0 for full precision."""
        return -(-self.padded_numel // self.group_size) if self.format.has_scales else 0

    @cached_property
    def tail(self) -> int:
        """Size of the last, shorter group; 0 if all groups are full."""
        return self.padded_numel % self.group_size

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of the codes of one row."""
        return self.padded_numel // BLOCK * self.format.block_bytes

    @cached_property
    def scales_offset(self) -> int:
        """Offset of the scales, in bytes from the start of the message."""
        return self.parts * self.code_bytes

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of codes and scales of all parts, without the final alignment."""
        return self.scales_offset + self.parts * self.groups * SCALE_BYTES

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return round_up(self.payload_bytes, MESSAGE_ALIGNMENT)

    @cached_property
    def padding_bytes(self) -> float:
        """Bytes beyond those of the values and their shares of scales."""
        values = self.parts * self.numel
        return self.nbytes - values * bytes_per_value(self.format, group_size=self.group_size)


@lru_cache(maxsize=4096, typed=True)
def message_layout(*, numel: int, bits: Bits, group_size: int, parts: int = 1) -> MessageLayout:
    """Return a cached layout, whose sizes are computed once; see :class:`MessageLayout`."""
    return MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=parts)
