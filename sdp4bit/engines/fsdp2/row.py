"""Geometry of a parameter group's row: params, ranges and sections; independent of FSDP2."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from sdp4bit.collectives.plan import MOST_PLANS
from sdp4bit.collectives.sections import CutParam, Range, Section, cut_row, merge_ranges, whole_row


@dataclass(frozen=True, kw_only=True)
class RowParam:
    """One parameter's shard in its group's row."""

    name: str
    start: int  # start and end count values of the row's dtype
    end: int
    numel: int  # values of the shard, padding included
    dim: int  # dimensions of the unsharded parameter
    # Of another dtype than the row, or packed: its bits are sent as they are, and never as a difference.
    holds_bits: bool


class Row:
    """The params of a row of weights, and the sections of rows of weights and gradients."""

    def __init__(self, params: Sequence[RowParam], *, kinds: Sequence[Hashable]) -> None:
        """Describe a row; params of different kinds never share a section."""
        self._params, self._kinds = params, kinds
        self.has_kinds = len(set(kinds)) > 1
        self.numel = params[-1].end
        self.everything = frozenset(range(len(params)))
        values = [index for index, param in enumerate(params) if not param.holds_bits]
        self.value_ranges = None if len(values) == len(params) else self.ranges(values)
        """The ranges of the row that hold values and not bits; None for the entire row."""
        self._gradients: dict[tuple[object, ...], tuple[Section, ...] | None] = {}

    def ranges(self, chosen: Collection[int]) -> list[Range]:
        """Return the ranges of params, chosen by index."""
        params = [self._params[index] for index in sorted(chosen)]
        return merge_ranges([(param.start, param.end) for param in params])

    def weight_sections(self, *, unit: int, separate: bool) -> tuple[Section, ...]:
        """Return the sections of a row of weights; arguments as for `gradient_sections`."""
        if not separate and not self.has_kinds:
            return whole_row(self.numel)
        lengths = [param.end - param.start for param in self._params]
        return self._cut_row(lengths, present=range(len(lengths)), unit=unit, separate=separate)

    def gradient_sections(
        self, numel: int, *, order: Sequence[int], trainable: Collection[int], unit: int, separate: bool
    ) -> tuple[Section, ...] | None:
        """Return the sections of a row of gradients [numel], cached; None if copies could drift apart.

        Args:
            order: indices of the params in the order of the gradients.
            trainable: the params that may have a gradient.
            unit: see `cut_row`.
            separate: see `SDP4BitConfig.separate_parameters`; different kinds are always separated.
        """
        if not separate and not self.has_kinds:
            return whole_row(numel)
        key = (numel, tuple(order), frozenset(trainable), unit, separate)
        if key not in self._gradients:
            if len(self._gradients) >= MOST_PLANS:  # experts without a gradient give many lengths
                self._gradients.clear()
            sections = self._gradient_sections(numel, order, trainable, unit=unit, separate=separate)
            self._gradients[key] = sections
        return self._gradients[key]

    def _gradient_sections(
        self, numel: int, order: Sequence[int], trainable: Collection[int], *, unit: int, separate: bool
    ) -> tuple[Section, ...] | None:
        # FSDP2 omits parameters without a gradient from a row. Its length shows whether the row holds all
        # parameters or all trainable ones.
        lengths, present = [param.numel for param in self._params], order
        if sum(lengths) != numel:
            present = [i for i in order if i in trainable]
        if sum(lengths[i] for i in present) != numel:
            # Tensor-parallel copies must be rounded identically, so they share no section with other values.
            return None if self.has_kinds else whole_row(numel)
        return self._cut_row(lengths, present=present, unit=unit, separate=separate)

    def _cut_row(
        self, lengths: Sequence[int], *, present: Sequence[int], unit: int, separate: bool
    ) -> tuple[Section, ...]:
        parameters = [
            CutParam(
                numel=lengths[i], is_fine=separate and self._params[i].dim <= 1, number=i, kind=self._kinds[i]
            )
            for i in present
        ]
        return cut_row(parameters, unit=unit, count=len(self._params))
