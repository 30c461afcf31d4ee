"""Byte layout of a message: integers only, shared by every back end, the collectives and the planner.

A message carries `parts` rows of `numel` values. Codes and scales travel together in one uint8 buffer:

    [codes of part 0][codes of part 1]...[scales of part 0][scales of part 1]...[padding]

A row is padded with zeros to a multiple of 32, the Hadamard block. Its groups have `group_size` values; the
last may be shorter (still a multiple of 32), so a short row costs no more than 31 padded values. Scales are
bf16. Codes of 8 bits are signed; smaller ones are offset by 2^(bits - 1), or by 5 with 3.5 bits. They are
symmetric: a stored 0 is never written with 2, 3 or 4 bits.

* 4 bits, by halves of a group: byte i holds value i in its low and value i + size / 2 in its high nibble.
* 2 bits, in order: byte i holds values 4i to 4i + 3, the first in its lowest bits.
* 3 bits, block by block of 32 values, 12 bytes each: 8 bytes with the lower two bits of the codes, as with 2
  bits; then 4 bytes with the third bits, of values 8i to 8i + 7 in byte i, the first in its lowest bit.
* 3.5 bits, 11 codes, block by block, 14 bytes each: values i and i + 16 are a pair, the number
  c[i] + 11 c[i + 16] of 7 bits, and the 16 pairs lie in order, the first in the lowest bits.
* 32 bits: the fp32 values themselves, without scales.

With 2 and 3 bits 16 values are thus a word of 32 bits and half a word, wherever groups begin and end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

BLOCK = 32
"""Rows are padded to multiples of this; also the Hadamard block."""
SCALE_BYTES = 2
MESSAGE_ALIGNMENT = 16
"""Message sizes are multiples of this many bytes: each message of a buffer is aligned for wide loads."""
FULL_PRECISION = 32
SUPPORTED_BITS = (2, 3, 3.5, 4, 8, FULL_PRECISION)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below value."""
    return -(-value // multiple) * multiple


def largest_code(bits: float) -> int:
    """Return the largest code: 1, 3, 5, 7, 127 for 2, 3, 3.5, 4, 8 bits."""
    return 5 if bits == 3.5 else (1 << int(bits) - 1) - 1


@dataclass(frozen=True, kw_only=True)
class MessageLayout:
    """Layout of one message: where its codes and scales lie.

    Raises:
        ValueError: bits not 2, 3, 3.5, 4, 8, 32; a group size that is no multiple of 32; or negative counts.
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
        """Bytes beyond bits / 8 per value and 2 per group_size values: the cost of raggedness."""
        scales = 0.0 if self.bits == FULL_PRECISION else SCALE_BYTES / self.group_size
        return self.nbytes - self.parts * self.numel * (self.bits / 8 + scales)


@dataclass(frozen=True)
class JointLayout:
    """Layout of a message of several parts, one behind the other, each aligned for wide loads."""

    layouts: tuple[MessageLayout, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return sum(layout.nbytes for layout in self.layouts)

    @cached_property
    def padding_bytes(self) -> float:
        """Bytes that the raggedness of the parts costs; see MessageLayout."""
        return math.fsum(layout.padding_bytes for layout in self.layouts)

    @cached_property
    def places(self) -> tuple[slice, ...]:
        """Where the parts lie in the message."""
        ends = tuple(accumulate(layout.nbytes for layout in self.layouts))
        return tuple(slice(start, end) for start, end in pairwise((0, *ends)))


@lru_cache(maxsize=4096, typed=True)
def message_layout(*, numel: int, bits: float, group_size: int, parts: int = 1) -> MessageLayout:
    """Return a layout, the same object for equal arguments, so that its sizes are computed once.

    Raises:
        ValueError: as :class:`MessageLayout`.
    """
    return MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=parts)
