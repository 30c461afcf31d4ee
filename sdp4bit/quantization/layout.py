"""Byte layout of messages, shared by all back ends, the collectives and the planner.

A message carries `parts` rows of `numel` values. Codes and scales travel together in one uint8 buffer:

    [codes of part 0][codes of part 1]...[scales of part 0][scales of part 1]...[padding]

A row is padded with zeros to a multiple of 32, the Hadamard block. Its groups have `group_size` values; the
last may be shorter (still a multiple of 32), so a row has at most 31 padded values. Scales are bf16. Codes of
8 bits are signed; smaller ones are offset by 2^(bits - 1), or by 5 with 3.5 bits. Codes are symmetric, so a
stored 0 never occurs with 2, 3 or 4 bits.

* 4 bits, by halves of a group: byte i holds value i in its low and value i + size / 2 in its high nibble.
* 2 bits, in order: byte i holds values 4i to 4i + 3, the first in its lowest bits.
* 3 bits, 12 bytes per block of 32 values. 8 bytes have the lower two bits of the codes, as with 2 bits. Then
  4 bytes have the third bits, of values 8i to 8i + 7 in byte i, the first in its lowest bit.
* 3.5 bits, 11 codes, 14 bytes per block of 32 values. Values i and i + 16 are a pair, the number
  c[i] + 11 c[i + 16] of 7 bits. The 16 pairs lie in order, the first in the lowest bits.
* 32 bits: the fp32 values themselves, without scales.

With 2 and 3 bits, 16 values are thus a 32-bit word and half a word, independent of groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

BLOCK = 32
"""Rows are padded to multiples of this, the Hadamard block."""
SCALE_BYTES = 2
MESSAGE_ALIGNMENT = 16
"""Message sizes are multiples of this many bytes, so that all messages of a buffer are aligned."""
FULL_PRECISION = 32
SUPPORTED_BITS = (2, 3, 3.5, 4, 8, FULL_PRECISION)


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


def largest_code(bits: float) -> int:
    """Return the largest code: 1, 3, 5, 7, 127 for 2, 3, 3.5, 4, 8 bits."""
    return 5 if bits == 3.5 else (1 << int(bits) - 1) - 1


@dataclass(frozen=True, kw_only=True)
class MessageLayout:
    """Layout of one message.

    Raises:
        ValueError: bits are not 2, 3, 3.5, 4, 8 or 32, the group size is no multiple of 32, or a count is
            negative.
    """

    numel: int
    """Values in each row, without padding."""
    bits: float
    """2, 3, 3.5, 4, 8, or 32 for unquantized fp32."""
    group_size: int
    """Values per scale, a multiple of 32."""
    parts: int = 1
    """Rows in one message."""

    def __post_init__(self) -> None:
        if self.bits not in SUPPORTED_BITS:
            raise ValueError(f"bits={self.bits} is not one of {SUPPORTED_BITS}")
        if self.group_size < BLOCK or self.group_size % BLOCK:
            raise ValueError(f"group_size={self.group_size} is not a positive multiple of {BLOCK}")
        if self.numel < 0 or self.parts < 1:
            raise ValueError(f"numel={self.numel} and parts={self.parts} must be at least 0 and 1")

    @cached_property
    def padded_numel(self) -> int:
        """Values in each row with padding, a multiple of 32."""
        return round_up(self.numel, BLOCK)

    @cached_property
    def groups(self) -> int:
        """Scales per row; 0 for full precision."""
        return 0 if self.bits == FULL_PRECISION else -(-self.padded_numel // self.group_size)

    @cached_property
    def tail(self) -> int:
        """Size of the last, shorter group; 0 if all groups are full."""
        return self.padded_numel % self.group_size

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of the codes of 32 values."""
        return int(BLOCK * self.bits) // 8

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of the codes of one row."""
        return self.padded_numel // BLOCK * self.block_bytes

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
        """Bytes beyond bits / 8 per value and 2 per group_size values."""
        scales = 0.0 if self.bits == FULL_PRECISION else SCALE_BYTES / self.group_size
        return self.nbytes - self.parts * self.numel * (self.bits / 8 + scales)


@dataclass(frozen=True)
class JointLayout:
    """Layout of a message of several consecutive parts, each aligned."""

    layouts: tuple[MessageLayout, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.layouts)

    @cached_property
    def padding_bytes(self) -> float:
        """See MessageLayout."""
        return math.fsum(layout.padding_bytes for layout in self.layouts)

    @cached_property
    def places(self) -> tuple[slice, ...]:
        """Byte ranges of the parts."""
        ends = tuple(accumulate(layout.nbytes for layout in self.layouts))
        return tuple(slice(start, end) for start, end in pairwise((0, *ends)))


@lru_cache(maxsize=4096, typed=True)
def message_layout(*, numel: int, bits: float, group_size: int, parts: int = 1) -> MessageLayout:
    """Return a cached layout, whose sizes are computed once; see :class:`MessageLayout`."""
    return MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=parts)
