"""Sections of a row: ranges that are quantized apart from each other and travel in one message.

A section has scale groups, Hadamard blocks and random bits of its own. With a section per parameter no value
of a parameter is changed through a neighbour, and parameters of one dimension can have more bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from sdp4bit.quantization.layout import (
    BLOCK,
    FULL_PRECISION,
    JointLayout,
    MessageLayout,
    message_layout,
    round_up,
)

if TYPE_CHECKING:
    from torch import Tensor

Range = tuple[int, int]
"""Start and end of a range of a row."""

FINE_BITS, FINE_GROUP_SIZE = 8, BLOCK
"""Fewest bits, and values per scale, of parameters with at most one dimension: norms and biases."""


def merge_ranges(ranges: Sequence[Range]) -> list[Range]:
    """Return ranges, in ascending order, as few as possible: none is empty, no two touch."""
    merged: list[Range] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        elif start < end:
            merged.append((start, end))
    return merged


def common_ranges(first: Sequence[Range], second: Sequence[Range]) -> list[Range]:
    """Intersect two lists of ranges, each in ascending order."""
    pairs = [(max(a, c), min(b, d)) for a, b in first for c, d in second]
    return [(start, end) for start, end in pairs if start < end]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Ranges of a row that share one part of a message."""

    ranges: tuple[Range, ...] = ()
    """In ascending order. One range is read and written in place, several are copied."""
    is_fine: bool = False
    """At least 8 bits in groups of 32, and every range begins with a block of its own."""
    unit: int = BLOCK
    """Borders of parameters inside the section lie at multiples of this; it may be cut there."""
    number: int = 0
    """Of the section among the parameters of its row, for the random bits."""
    count: int = 1
    """How many numbers there are."""

    @cached_property
    def numel(self) -> int:
        """Values of the section, what fills up the ranges of a fine one included."""
        if len(self.ranges) == 1:
            return self.ranges[0][1] - self.ranges[0][0]
        return sum(self._filled(end - start) for start, end in self.ranges)

    def call(self, call: int) -> int:
        """Return the number of this section's part of a call, which no other section or call has."""
        return call * self.count + self.number

    def bits(self, bits: float | None) -> float:
        """Return the bits of the section's values where those of a row have so many; 32 for None."""
        if bits is None:
            return FULL_PRECISION
        return max(bits, FINE_BITS) if self.is_fine else bits

    def layout(self, numel: int, *, bits: float | None, group_size: int, parts: int = 1) -> MessageLayout:
        """Return the layout of a part of a message with so many of the section's values."""
        size = FINE_GROUP_SIZE if self.is_fine else group_size
        return message_layout(numel=numel, bits=self.bits(bits), group_size=size, parts=parts)

    def within(self, ranges: Sequence[Range]) -> Section:
        """Return the section of those of its parameters that are in ranges of whole parameters."""
        # Not merged: ranges of a fine section that touch have blocks of their own.
        return replace(self, ranges=tuple(common_ranges(self.ranges, ranges)))

    def take(self, rows: Tensor) -> Tensor:
        """Return the section [..., m] of rows [..., n]: a view if it is one range, else a copy."""
        if len(self.ranges) == 1:
            start, end = self.ranges[0]
            return rows[..., start:end]
        import torch  # the planner cuts rows without it

        pieces = []
        for start, end in self.ranges:
            pieces.append(rows[..., start:end])
            missing = self._filled(end - start) - (end - start)
            if missing:
                pieces.append(rows.new_zeros(*rows.shape[:-1], missing))
        return torch.cat(pieces, dim=-1)

    def put(self, values: Tensor, rows: Tensor) -> None:
        """Write a section [..., m] that was taken as a copy to its places in rows [..., n]."""
        if len(self.ranges) == 1:
            return
        at = 0
        for start, end in self.ranges:
            rows[..., start:end] = values[..., at : at + end - start]
            at += self._filled(end - start)

    def _filled(self, length: int) -> int:
        return round_up(length, BLOCK) if self.is_fine else length


WHOLE = Section()
"""The settings of a row that is not cut; without its range."""


def whole_row(numel: int) -> tuple[Section, ...]:
    """Return a row as one section, in which blocks and groups cross the borders of parameters."""
    return (replace(WHOLE, ranges=((0, numel),)),) if numel else ()


@dataclass(frozen=True, kw_only=True)
class RowParameter:
    """A parameter as the cutting of a row sees it."""

    numel: int
    """Values in the row."""
    is_fine: bool
    """Whether it has at most one dimension, before it is sharded."""
    number: int
    """Of the parameter in its group."""
    kind: Hashable = None
    """Parameters of different kinds never share a section."""


def cut_row(parameters: Sequence[RowParameter], *, unit: int, count: int) -> tuple[Section, ...]:
    """Cut a row into sections, so that no scale group and no Hadamard block crosses a parameter's border.

    Neighbours that are not fine share a section when the border between them is a multiple of `unit` from its
    start. All fine parameters of a kind share one section, which comes behind the others.

    Args:
        parameters: in the order of the row.
        unit: a multiple of 32 and of the group size of every hop.
        count: parameters of the group, of which those in the row may be a part.
    """
    coarse: list[Section] = []
    fine: dict[Hashable, Section] = {}
    last_kind: Hashable = None
    end = 0
    for parameter in parameters:
        start, end = end, end + parameter.numel
        if start == end:
            continue
        if parameter.is_fine:
            known = fine.get(parameter.kind) or Section(is_fine=True, number=parameter.number, count=count)
            fine[parameter.kind] = replace(known, ranges=_extended(known.ranges, (start, end), unit=BLOCK))
            continue
        previous = coarse[-1].ranges if coarse and last_kind == parameter.kind else ()
        ranges = _extended(previous, (start, end), unit=unit)
        if len(ranges) == len(previous):
            coarse[-1] = replace(coarse[-1], ranges=ranges, unit=unit)
        else:
            coarse.append(Section(ranges=((start, end),), number=parameter.number, count=count))
            last_kind = parameter.kind
    return (*coarse, *fine.values())


def _extended(ranges: tuple[Range, ...], new: Range, *, unit: int) -> tuple[Range, ...]:
    """Return ranges with a new one, which becomes part of the last if it begins a whole unit behind that."""
    if ranges and ranges[-1][1] == new[0] and (new[0] - ranges[-1][0]) % unit == 0:
        return (*ranges[:-1], (ranges[-1][0], new[1]))
    return (*ranges, new)


def split_messages(messages: Tensor, layout: JointLayout) -> list[Tensor]:
    """Return the parts of messages [m, nbytes], views [m, nbytes of the part]."""
    return [messages[:, place] for place in layout.places]
