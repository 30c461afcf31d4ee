"""What quantization cost: measured on the device, in samples, and read by the host when it has arrived.

A group's measures are kept as sums of squares, so that they can be added over groups. What does not apply is
NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.sections import Range
from sdp4bit.collectives.weight_replica import QuantizedReplica
from sdp4bit.collectives.work import HostCopy
from sdp4bit.config import TelemetryConfig

GradientQuantizer = QuantizedReduceScatter | QuantizedAllReduce
"""What a gradient passes on its way to the optimizer."""

_PIECES = 8


class Squares(NamedTuple):
    """Sums of squares of one parameter group, fp64 scalars, or of several, fp64 [groups]."""

    gradient_error: Tensor
    """|Q(g) - g|**2 of the gradient."""
    gradient: Tensor
    """|g|**2."""
    weight_error: Tensor
    """The same of the weight difference."""
    weight_difference: Tensor
    weight_drift: Tensor
    """|main - replica|**2."""
    weight: Tensor
    """|main|**2."""
    nonfinite_groups: Tensor
    """Quantization groups of the gradient that were not finite: a count, not a square."""

    @classmethod
    def from_table(cls, table: Tensor) -> Squares:
        """Return the columns of [groups, 7]."""
        return cls(*table.unbind(1))

    @property
    def table(self) -> Tensor:
        """The squares of several groups as one tensor [groups, 7]."""
        return torch.stack(self, dim=1)

    def ratios(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return error and whole of the three relative errors, in the order of `Measures`."""
        return (
            (self.gradient_error, self.gradient),
            (self.weight_error, self.weight_difference),
            (self.weight_drift, self.weight),
        )

    def measures(self) -> Tensor:
        """Return the measures, fp64 [groups, 4], columns as in `Measures`; NaN where one does not apply."""
        ratios = [
            torch.where(whole == 0, torch.zeros_like(whole), (error / whole).sqrt())
            for error, whole in self.ratios()
        ]
        return torch.stack([*ratios, self.nonfinite_groups], dim=-1)


class Deviation(NamedTuple):
    """Values of one group, fp32 [n], and what they would be without quantization."""

    found: Tensor
    wanted: Tensor
    scale: float
    """What their squares are multiplied by. Sums over groups weigh each by its size, whatever the size of its
    sample."""


class Deviations(NamedTuple):
    """What is measured of one group; what does not apply is None."""

    gradient: Deviation | None = None
    difference: Deviation | None = None
    """Of the weights, as it is sent."""
    weight: Deviation | None = None
    """Of the replica from the main weights: the drift."""
    nonfinite: Tensor | None = None
    """How many quantization groups of the gradient were not finite, an fp64 scalar."""


def sum_squares(groups: Sequence[Deviations], *, device: torch.device | None = None) -> Squares:
    """Return the squares of several groups as one record, fp64 [groups].

    By as few calls as can be: a forward waits for the host to have made them.
    """
    if not groups:
        return Squares.from_table(torch.empty(0, len(Squares._fields), dtype=torch.float64))
    kinds = [(group.gradient, group.difference, group.weight) for group in groups]
    found = [deviation for group in kinds for deviation in group if deviation is not None]
    sums: list[Tensor] = []
    if found:
        wanted = [deviation.wanted for deviation in found]
        errors = torch._foreach_sub([deviation.found for deviation in found], wanted)
        # In fp64: squares of small gradients are below the smallest fp32 number.
        norms = torch._foreach_norm([*errors, *wanted], 2, dtype=torch.float64)
        sums = list(torch._foreach_mul(torch._foreach_mul(norms, norms), [each.scale for each in found] * 2))
    pairs = zip(sums[: len(found)], sums[len(found) :], strict=True)
    unknown = torch.full((), math.nan, dtype=torch.float64, device=device)
    cells: list[Tensor] = []
    for group, deviations in zip(groups, kinds, strict=True):
        for deviation in deviations:
            cells += (unknown, unknown) if deviation is None else next(pairs)
        cells.append(unknown if group.nonfinite is None else group.nonfinite)
    return Squares.from_table(torch.stack(cells).view(len(groups), -1))


class Measures(TypedDict):
    """What quantization cost one parameter group, or all of them, in one optimizer step, on this rank."""

    gradient_error: float | None
    """Relative error of quantizing a sample of the gradient; None if it is not quantized or not finite."""
    weight_error: float | None
    """Relative error of quantizing a sample of the weight difference that the step made necessary."""
    weight_drift: float | None
    """|main - replica| / |main| of a sample, of the replica that has been sent this difference."""
    nonfinite_groups: int
    """Quantization groups of the gradient that reached this rank and held a NaN or an infinity."""


MEASURES = tuple(Measures.__annotations__)
"""Names of the measures, in the order of the columns of `Squares.measures`."""


def sample_ranges(numel: int, *, sample_numel: int, unit: int) -> list[Range]:
    """Return at most eight ranges of whole units, spread evenly over a shard: a sample of about that size.

    Args:
        unit: values of a quantization group; only the last range may end with a shorter group.
    """
    if numel <= max(sample_numel, unit):
        return [(0, numel)]
    units = -(-numel // unit)
    length = max(1, sample_numel // (_PIECES * unit))
    count = min(_PIECES, max(1, sample_numel // (length * unit)), units // length)
    starts = [(index * units // count) * unit for index in range(count)]
    return [(start, min(start + length * unit, numel)) for start in starts]


def sample_of(values: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return a copy of these ranges of values [n], in ascending order, one behind the other."""
    return torch.cat(pieces_of(values, ranges))


def pieces_of(values: Tensor, ranges: Sequence[Range]) -> list[Tensor]:
    """Return views of these ranges of values [n], in ascending order, by one call."""
    if list(ranges) == [(0, values.shape[0])]:
        return [values]
    lengths: list[int] = []
    at = 0
    for start, end in ranges:
        lengths += (start - at, end - start)
        at = end
    return list(values.split([*lengths, values.shape[0] - at])[1::2])


@dataclass(frozen=True, kw_only=True)
class GradientSample:
    """What is kept of one reduction, to be measured when its step is done; both on the device."""

    values: Tensor
    nonfinite: Tensor
    """How many quantization groups that came in with it were not finite, fp64; the reduction counts them."""


def sample_gradient(gradient: Tensor, *, sample_numel: int, unit: int) -> GradientSample:
    """Return a sample of a gradient that is about to be reduced."""
    ranges = sample_ranges(gradient.numel(), sample_numel=sample_numel, unit=unit)
    return GradientSample(
        values=sample_of(gradient, ranges),
        nonfinite=torch.zeros((), dtype=torch.float64, device=gradient.device),
    )


def gradient_deviation(
    sample: GradientSample, *, quantizers: Sequence[GradientQuantizer], numel: int
) -> Deviation:
    """Return what these make of a gradient, one after another, of which a shard has `numel` values.

    Their errors are added: what one leaves may lie on the grid of the next, while the sum that the next one
    quantizes does not.
    """
    first, *others = quantizers
    wanted = sample.values.float()
    found = first.requantized(sample.values)
    for quantizer in others:
        found = found + (quantizer.requantized(sample.values) - wanted)
    return Deviation(found, wanted, numel / wanted.numel())


def weight_deviations(
    main: Tensor,
    held: Tensor,
    *,
    replica: QuantizedReplica,
    exact: bool,
    refreshed: bool,
    numel: int,
) -> tuple[Deviation | None, Deviation | None]:
    """Return difference and drift of weights of which a shard has `numel` values.

    Args:
        main: [n], a sample of the main weights in fp32, of whole quantization groups.
        held: [n], what the replica holds there.
        exact: the next refresh is in full precision, so that there is no error of the difference.
        refreshed: the drift is that which the refresh will leave, not that which there is now.
    """
    if not main.numel():
        return None, None
    scale, dtype = numel / main.numel(), held.dtype
    held = held.float()
    difference, after = None, main
    if not exact:
        wanted, received = replica.quantized_differences(main, held)
        difference = Deviation(received, wanted, scale)
        after = held + received if replica.sends_differences else received
    return difference, Deviation(after.to(dtype).float() if refreshed else held, main, scale)


class SampledMeasures:
    """The squares of the last measured step, on the device, and on the host once they have arrived there."""

    def __init__(self, config: TelemetryConfig | None, names: Sequence[str]) -> None:
        self._interval = 0 if config is None else config.interval
        self.sample_numel = TelemetryConfig().sample_numel if config is None else config.sample_numel
        self._names = list(names)
        self.step = 0
        """The last measured step; 0 before the first."""
        self._squares: Squares | None = None
        self._under_way: tuple[int, HostCopy] | None = None
        self._arrived: tuple[int, Squares] | None = None

    def is_due(self, step: int) -> bool:
        """Return whether this step is measured."""
        return self._interval > 0 and step > 0 and step % self._interval == 0

    def publish(self, squares: Squares, *, step: int) -> None:
        """Take the squares of all groups after a step; a copy goes to the host, which does not wait."""
        self._poll()
        self._squares, self.step = squares, step
        self._under_way = (step, HostCopy(squares.table))

    def on_device(self) -> Tensor | None:
        """Return the measures of the last measured step, `step`; None before the first.

        Returns:
            fp32 [groups, 4] on the device, columns as in `Measures`, NaN where one does not apply: this
            rank's own values.
        """
        return None if self._squares is None else self._squares.measures().float()

    def with_last_gradients(self, squares: Squares) -> Squares:
        """Return squares with the last measured ones of gradients, where these do not apply."""
        last = self._squares
        if last is None:
            return squares
        names = ("gradient_error", "gradient", "nonfinite_groups")
        known = {name: (getattr(squares, name), getattr(last, name)) for name in names}
        return squares._replace(**{n: torch.where(now.isnan(), old, now) for n, (now, old) in known.items()})

    def latest(self) -> tuple[int, Squares] | None:
        """Return the last measured step whose squares have arrived, and these; does not wait."""
        self._poll()
        return self._arrived

    def _poll(self) -> None:
        if self._under_way is not None:
            step, copy = self._under_way
            table = copy.arrived()
            if table is not None:
                self._arrived, self._under_way = (step, Squares.from_table(table)), None

    def totals(self) -> tuple[int | None, Measures]:
        """Return the last measured step that has arrived, and its measures over all groups."""
        step, squares = self.latest() or (None, sum_squares([]))
        return step, total_measures(squares)

    def by_group(self) -> dict[str, Measures]:
        """Return the measures of every group that have arrived, by its name; none before the first."""
        latest = self.latest()
        rows = [] if latest is None else latest[1].measures().tolist()
        return {name: _named(row) for name, row in zip(self._names, rows, strict=False)}


def total_measures(squares: Squares) -> Measures:
    """Return the measures over all groups, the errors of those that are not finite left out."""
    errors: list[float | None] = []
    for error, whole in squares.ratios():
        counted = whole.isfinite() & error.isfinite()
        distance, norm = error[counted].sum().item(), whole[counted].sum().item()
        errors.append(((distance / norm) ** 0.5 if norm else 0.0) if counted.any() else None)
    return _named([*errors, squares.nonfinite_groups.nansum().item()])


def _named(row: Sequence[float | None]) -> Measures:
    """Return measures with names; what does not apply, or is not a number, is None."""
    gradient_error, weight_error, weight_drift, nonfinite = (
        value if value is not None and math.isfinite(value) else None for value in row
    )
    return {
        "gradient_error": gradient_error,
        "weight_error": weight_error,
        "weight_drift": weight_drift,
        "nonfinite_groups": round(nonfinite or 0),
    }


NOTHING_MEASURED: Measures = _named([None] * len(MEASURES))
