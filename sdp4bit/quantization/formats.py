"""Formats of the values in a message: their codes, and the bytes of the codes.

A quantized value is an integer code times the scale of its group. Codes are symmetric, from -largest to
largest. The two conversions use methods of tensors alone, because the planner runs without torch.

A new format is an instance of one of these classes, or of a new one, in `FORMATS`. Each back end needs an
entry, too (`kernels/cpu/formats.py`, `kernels/triton/formats.py`); without one the reference serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
"""Values of a Hadamard block. Rows are padded to multiples of it, and group sizes are multiples of it."""
LEAST_CLIP = 0.1
"""Minimum fraction of a group's largest magnitude that the largest code represents."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How values are sent. Each subclass is a way of packing codes."""

    name: str
    """Name in tables and in the back ends; identifies the format."""
    largest: int
    """Largest code; 0 for floats without scales, fp32 as they are or bf16 rounded to nearest even."""
    block_bytes: int
    """Bytes of 32 values, an even number."""
    clip: float = 1.0
    """Fraction of a group's largest magnitude that the largest code of a weight difference represents."""
    gradient_error: float = 0.3
    weight_error: float = 0.6
    """Automatic thresholds of alerts (docs/reliability.md)."""

    def __post_init__(self) -> None:
        """Raise ValueError for codes that do not fit in their bits, or a packing of another size."""
        if self.block_bytes <= 0 or self.block_bytes % 2 or self.block_bytes != self.packed_bytes:
            raise ValueError(
                f"format {self.name}: block_bytes={self.block_bytes} for 32 values, but its codes are packed "
                f"in {self.packed_bytes} bytes: both must be the same even number"
            )
        if self.has_scales and self.codes > 2**self.bits:
            raise ValueError(
                f"format {self.name}: {self.codes} codes for largest={self.largest}, but {self.bits:g} bits "
                f"have {2**self.bits:.4g}: reduce largest, or use more bits"
            )

    @property
    def packed_bytes(self) -> int:
        """Bytes into which `pack` writes 32 codes."""
        return self.block_bytes

    @property
    def codes(self) -> int:
        """Codes that are told apart, with the one that marks zeros."""
        return 2 * self.largest + 2

    @property
    def has_scales(self) -> bool:
        return self.largest > 0

    @property
    def bits(self) -> float:
        """Bits per value, without scales."""
        return self.block_bytes * 8 / BLOCK

    @property
    def offset(self) -> int:
        """Number that makes codes unsigned."""
        return self.largest + 1

    def pack(self, codes: Tensor) -> Tensor:
        """Return the codes of groups, int32 [..., size], as uint8 [..., size * block_bytes / 32]."""
        raise NotImplementedError(f"format {self.name}: its class defines no packing of codes")

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the codes of groups, int8 [..., size], from their bytes."""
        raise NotImplementedError(f"format {self.name}: its class defines no packing of codes")

    def mark_zeros(self, codes: Tensor, is_zero: Tensor) -> Tensor:
        """Return dithered codes with zeros replaced by an otherwise unused code, which decodes to 0."""
        return codes.masked_fill(is_zero, -self.offset)

    def find_zeros(self, codes: Tensor) -> Tensor:
        """Return which unpacked codes are marked as zeros."""
        return codes == -self.offset


class Signed(Format):
    """A byte per code, with its sign."""

    @property
    def packed_bytes(self) -> int:
        return BLOCK

    def pack(self, codes: Tensor) -> Tensor:
        return codes.byte()

    def unpack(self, packed: Tensor) -> Tensor:
        return packed.contiguous().char()


class InHalves(Format):
    """4 bits, by halves of a group: byte i has values i (low nibble) and i + size / 2 (high nibble)."""

    @property
    def packed_bytes(self) -> int:
        return BLOCK // 2

    def pack(self, codes: Tensor) -> Tensor:
        halves: Tensor = (codes + self.offset).unflatten(-1, (2, -1))
        return (halves << codes.new_tensor([[0], [4]])).sum(-2).byte()

    def unpack(self, packed: Tensor) -> Tensor:
        nibbles = packed.unsqueeze(-2) >> packed.new_tensor([[0], [4]]) & 15
        return nibbles.flatten(-2).char() - self.offset


@dataclass(frozen=True, kw_only=True)
class InOrder(Format):
    """Blocks of 32 unsigned codes: the lowest bits of all, in order from the lowest bit on, then the next.

    With 2 bits, byte i has values 4i to 4i + 3. With 3 bits a block has 8 bytes like those, and then 4 bytes
    of third bits, those of values 8i to 8i + 7 in byte i.
    """

    widths: tuple[int, ...]
    """Bits of each code that lie together; each 1, 2 or 4."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not {1, 2, 4}.issuperset(self.widths):
            raise ValueError(f"format {self.name}: widths={self.widths}, but each must be 1, 2 or 4")

    @property
    def packed_bytes(self) -> int:
        return BLOCK // 8 * sum(self.widths)

    def pack(self, codes: Tensor) -> Tensor:
        blocks: Tensor = (codes + self.offset).unflatten(-1, (-1, BLOCK))
        packed = blocks.new_empty(*blocks.shape[:-1], self.block_bytes)
        start = taken = 0
        for width in self.widths:
            numbers = (blocks >> taken & (1 << width) - 1).unflatten(-1, (-1, 8 // width))
            shifts = codes.new_tensor(range(0, 8, width))
            packed[..., start : start + 4 * width] = (numbers << shifts).sum(-1)
            start, taken = start + 4 * width, taken + width
        return packed.flatten(-2).byte()

    def unpack(self, packed: Tensor) -> Tensor:
        blocks: Tensor = packed.unflatten(-1, (-1, self.block_bytes))
        codes = blocks.new_zeros(*blocks.shape[:-1], BLOCK)
        start = taken = 0
        for width in self.widths:
            shifts = packed.new_tensor(range(0, 8, width))
            numbers = blocks[..., start : start + 4 * width].unsqueeze(-1) >> shifts & (1 << width) - 1
            codes |= numbers.flatten(-2) << taken
            start, taken = start + 4 * width, taken + width
        return codes.flatten(-2).char() - self.offset


class InPairs(Format):
    """11 codes, 7 bits per pair of values i and i + 16 of a block: the number c[i] + 11 c[i + 16].

    The 16 pairs of a block lie in order, the first in the lowest bits.
    """

    _SHAPE = (-1, 2, BLOCK // 2)
    """Blocks, with the pairs as columns."""

    @property
    def packed_bytes(self) -> int:
        return 7 * BLOCK // 16

    @property
    def codes(self) -> int:
        return 2 * self.largest + 1  # an unused number of a pair marks zeros

    @property
    def offset(self) -> int:
        return self.largest  # no number is free for an unused code

    def pack(self, codes: Tensor) -> Tensor:
        pairs = (codes.long() + self.offset).unflatten(-1, self._SHAPE)
        return _regroup((pairs * codes.new_tensor([[1], [11]])).sum(-2).flatten(-2), 7, 8).byte()

    def unpack(self, packed: Tensor) -> Tensor:
        pairs = _regroup(packed.long(), 8, 7).unflatten(-1, (-1, 1, BLOCK // 2))
        columns: Tensor = pairs // pairs.new_tensor([[1], [11]]) % pairs.new_tensor([[11], [128]])
        return columns.flatten(-3).char() - self.offset

    def mark_zeros(self, codes: Tensor, is_zero: Tensor) -> Tensor:
        """Two zeros, as in a block of zeros, get codes -5 and 6, the second of which is out of range."""
        pairs: Tensor = codes.unflatten(-1, self._SHAPE)
        differs = ~is_zero.unflatten(-1, self._SHAPE).all(-2, keepdim=True)
        marks = codes.new_tensor([[-self.largest], [self.largest + 1]])
        return pairs.where(differs, marks).flatten(-3)

    def find_zeros(self, codes: Tensor) -> Tensor:
        pairs: Tensor = codes.unflatten(-1, self._SHAPE)
        return (pairs[..., 1:, :] > self.largest).expand_as(pairs).flatten(-3)


def _regroup(numbers: Tensor, width: int, new_width: int) -> Tensor:
    """Return the bits of numbers of 7 or 8 bits, int64 [..., n], in numbers of the other width."""
    shifts = numbers.new_tensor(range(8))
    sevens: Tensor = numbers.unflatten(-1, (-1, 56 // width))  # or eights, 56 bits
    words = (sevens << width * shifts[: 56 // width]).sum(-1, keepdim=True)
    return (words >> new_width * shifts[: 56 // new_width] & (1 << new_width) - 1).flatten(-2)


INT2 = InOrder(
    name="int2", largest=1, block_bytes=8, widths=(2,), clip=0.6, gradient_error=2.1, weight_error=0.9
)
INT3 = InOrder(name="int3", largest=3, block_bytes=12, widths=(2, 1), gradient_error=0.7, weight_error=0.75)
ELEVEN = InPairs(name="int3.5", largest=5, block_bytes=14, gradient_error=0.45)
INT4 = InHalves(name="int4", largest=7, block_bytes=16)
INT8 = Signed(name="int8", largest=127, block_bytes=32)
BF16 = Format(name="bf16", largest=0, block_bytes=64, gradient_error=0.01, weight_error=0.01)
FP32 = Format(name="fp32", largest=0, block_bytes=128)

Bits = float | str | None
"""How settings name a format: a number of bits, None for full precision, or the name of another format."""

FORMATS: dict[Bits, Format] = {
    2: INT2,
    3: INT3,
    3.5: ELEVEN,
    4: INT4,
    8: INT8,
    16: BF16,
    32: FP32,
    None: FP32,
}


def with_scales() -> list[Bits]:
    """Return how settings name each format of integer codes."""
    return [bits for bits, each in FORMATS.items() if each.has_scales]


def choices() -> list[Bits]:
    """Return the formats that settings may name; None, full precision, apart."""
    return [bits for bits, each in FORMATS.items() if each is not FP32]


def format_of(bits: Bits) -> Format:
    """Return the format that settings name.

    Raises:
        ValueError: there is none of this name.
    """
    if bits not in FORMATS:
        raise ValueError(f"bits={bits!r} is not one of {', '.join(map(repr, FORMATS))}")
    return FORMATS[bits]
