"""Sections of a row, which are quantized separately and share one message.

Scale groups, Hadamard blocks and random bits do not cross sections. With a section per parameter, parameters
do not affect each other, and 1-D parameters can have more bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from sdp4bit.quantization.formats import BLOCK, Bits, format_of
from sdp4bit.quantization.layout import MessageLayout, message_layout, round_up

if TYPE_CHECKING:
    from torch import Tensor

Range = tuple[int, int]  # start and end of a range of a row

FINE_BITS, FINE_GROUP_SIZE = 8, BLOCK
"""Minimum bits and group size of parameters with at most one dimension, that is, norms and biases."""


def fine_bits(bits: Bits) -> Bits:
    """Return the bits of these parameters for the configured bits."""
    return FINE_BITS if format_of(bits).bits < FINE_BITS else bits


def merge_ranges(ranges: Sequence[Range]) -> list[Range]:
    """Merge adjacent ranges, given in ascending order, and drop empty ones."""
    merged: list[Range] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        elif start < end:
            merged.append((start, end))
    return merged


def common_ranges(first: Sequence[Range], second: Sequence[Range]) -> list[Range]:
    """Intersect two lists of ascending ranges."""
    pairs = [(max(a, c), min(b, d)) for a, b in first for c, d in second]
    return [(start, end) for start, end in pairs if start < end]


def take_ranges(values: Tensor, ranges: Sequence[Range]) -> list[Tensor]:
    """Return views of these ascending ranges of values [n], with a single torch call."""
    if list(ranges) == [(0, values.shape[0])]:
        return [values]
    lengths: list[int] = []
    at = 0
    for start, end in ranges:
        lengths += (start - at, end - start)
        at = end
    return list(values.split([*lengths, values.shape[0] - at])[1::2])


def other_ranges(ranges: Sequence[Range], numel: int) -> list[Range]:
    """Return the ranges of a row [numel] that are not in these ascending ranges."""
    starts, ends = [0, *(end for _, end in ranges)], [*(start for start, _ in ranges), numel]
    return merge_ranges(list(zip(starts, ends, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Section:
    """Ranges of a row that share one part of a message."""

    ranges: tuple[Range, ...] = ()
    """In ascending order. A single range is read and written in place, several are copied."""
    is_fine: bool = False  # at least 8 bits in groups of 32, and each range is padded to complete blocks
    unit: int = BLOCK  # the section may be cut at multiples of this, where parameters begin
    number: int = 0
    """Number of the section in its row, from 0 to count - 1; part of the key of the random bits."""
    count: int = 1

    @cached_property
    def numel(self) -> int:
        """Values of the section, padding included."""
        if len(self.ranges) == 1:
            return self.ranges[0][1] - self.ranges[0][0]
        return sum(self._filled(end - start) for start, end in self.ranges)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The blocks of the section in the row, as `ops.hadamard_quantize` takes them."""
        return tuple(
            place * 64 + min(BLOCK, end - place)
            for start, end in self.ranges
            for place in range(start, end, BLOCK)
        )

    @cached_property
    def is_in_place(self) -> bool:
        """Whether operators read and write several ranges where they are in a row, by their `blocks`.

        Ranges of other sections are joined without padding, so their blocks cross them.
        """
        return self.is_fine and len(self.ranges) > 1

    def call(self, call: int) -> int:
        """Return a number that is unique to this section and call."""
        return call * self.count + self.number

    def layout(self, numel: int, *, bits: Bits, group_size: int, parts: int = 1) -> MessageLayout:
        """Return the layout of a message part with `numel` values of the section."""
        if self.is_fine:
            bits, group_size = fine_bits(bits), FINE_GROUP_SIZE
        return message_layout(numel=numel, bits=bits, group_size=group_size, parts=parts)

    def within(self, ranges: Sequence[Range]) -> Section:
        """Return the section restricted to ranges of complete parameters."""
        # Not merged, because adjacent ranges of a fine section do not share blocks.
        return replace(self, ranges=tuple(common_ranges(self.ranges, ranges)))

    def take(self, rows: Tensor) -> Tensor:
        """Return the section [..., m] of rows [..., n]; a view for a single range, else a copy."""
        if len(self.ranges) == 1:
            start, end = self.ranges[0]
            return rows[..., start:end]
        import torch  # here, because the planner runs without torch

        pieces = []
        for start, end in self.ranges:
            pieces.append(rows[..., start:end])
            missing = self._filled(end - start) - (end - start)
            if missing:
                pieces.append(rows.new_zeros(*rows.shape[:-1], missing))
        return torch.cat(pieces, dim=-1)

    def put(self, values: Tensor, rows: Tensor) -> None:
        """Write a section [..., m] back to rows [..., n] if `take` returned a copy."""
        if len(self.ranges) == 1:
            return
        at = 0
        for start, end in self.ranges:
            rows[..., start:end] = values[..., at : at + end - start]
            at += self._filled(end - start)

    def _filled(self, length: int) -> int:
        return round_up(length, BLOCK) if self.is_fine else length


WHOLE = Section()  # settings of an uncut row, without its range


@lru_cache(maxsize=1024)
def whole_row(numel: int) -> tuple[Section, ...]:
    """Return a row as one section, in which blocks and groups cross parameters."""
    return (replace(WHOLE, ranges=((0, numel),)),) if numel else ()


@dataclass(frozen=True, kw_only=True)
class CutParam:
    """A parameter in a row that is cut."""

    numel: int  # values in the row
    is_fine: bool  # whether the unsharded parameter has at most one dimension
    number: int  # index of the parameter in its group
    kind: Hashable = None  # parameters of different kinds never share a section


def cut_row(parameters: Sequence[CutParam], *, unit: int, count: int) -> tuple[Section, ...]:
    """Cut a row into sections, so that no scale group and no Hadamard block crosses parameters.

    Adjacent parameters share a section if the second begins at a multiple of `unit` in it. All fine
    parameters of a kind share one section, after the others.

    Args:
        parameters: in the order of the row.
        unit: a multiple of 32 and of the group size of every hop.
        count: number of parameters of the group, including those missing from the row.
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
    """Append a range, or extend the last one if the new range continues it at a multiple of unit."""
    if ranges and ranges[-1][1] == new[0] and (new[0] - ranges[-1][0]) % unit == 0:
        return (*ranges[:-1], (ranges[-1][0], new[1]))
    return (*ranges, new)
