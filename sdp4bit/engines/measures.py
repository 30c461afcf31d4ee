"""What quantization cost: measured on the device, in samples, and read by the host when it has arrived.

A group's measures are kept as squares, one row of fp64 numbers per group, so that they can be added over
groups. A row begins as NaN: what does not apply stays so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.weight_replica import Span
from sdp4bit.collectives.work import HostCopy
from sdp4bit.config import TelemetryConfig
from sdp4bit.traffic import Traffic

COLUMNS = ("gradient_error", "weight_error", "weight_drift", "nonfinite_groups")
"""What the columns of the measures [groups, 4] are."""
SQUARES = 7
"""Columns of the squares: distance and norm of each error, then the groups that are not finite."""
_STRETCHES = 8


@dataclass(frozen=True, kw_only=True)
class GroupMeasures:
    """What quantization cost one parameter group in one optimizer step, on this rank."""

    name: str
    step: int
    """Optimizer steps that were done when it was measured: the gradient is that of this step."""
    gradient_error: float | None
    """Relative error of quantizing a sample of the gradient; None if it is not quantized or not finite."""
    weight_error: float | None
    """Relative error of quantizing a sample of the weight difference that the step made necessary."""
    weight_drift: float | None
    """|main - replica| / |main| of a sample, of the replica that has been sent this difference."""
    nonfinite_groups: int
    """Quantization groups of the gradient that reached this rank and held a NaN or an infinity."""


def sample_spans(numel: int, *, sample_numel: int, unit: int) -> list[Span]:
    """Return at most eight stretches of whole units, spread evenly over a row: a sample of about that size.

    Args:
        unit: values of a quantization group; only the last stretch may end with a shorter group.
    """
    if numel <= max(sample_numel, unit):
        return [(0, numel)]
    units = -(-numel // unit)
    length = max(1, sample_numel // (_STRETCHES * unit))
    count = min(_STRETCHES, max(1, sample_numel // (length * unit)), units // length)
    starts = [(index * units // count) * unit for index in range(count)]
    return [(start, min(start + length * unit, numel)) for start in starts]


def sample_of(values: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return a copy of these stretches of values [n], one behind the other."""
    return torch.cat([values[start:end] for start, end in spans])


@dataclass(frozen=True, kw_only=True)
class GradientSample:
    """What is kept of one reduction, to be measured when its step is done; both on the device."""

    values: Tensor
    nonfinite: Tensor
    """How many quantization groups that came in with it were not finite; the reduction counts them."""


def sample_gradient(gradient: Tensor, *, sample_numel: int, unit: int) -> GradientSample:
    """Return a sample of a gradient that is about to be reduced."""
    spans = sample_spans(gradient.numel(), sample_numel=sample_numel, unit=unit)
    return GradientSample(
        values=sample_of(gradient, spans),
        nonfinite=torch.zeros((), dtype=torch.int64, device=gradient.device),
    )


def gradient_squares(reduction: QuantizedReduceScatter, sample: Tensor) -> Tensor:
    """Return |Q(g) - g|**2 and |g|**2 of a sample, fp64 [2]."""
    return _squares(reduction.requantized(sample) - sample.float(), sample)


class DifferenceQuantizer(Protocol):
    """What quantizes the refreshes of a replica."""

    @property
    def sends_differences(self) -> bool:
        """Whether a quantized refresh adds to what is held, rather than replacing it."""
        ...

    def quantized_differences(self, row: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a quantized refresh has to send and what arrives of it, both [n] in fp32."""
        ...


def weight_squares(
    replica: DifferenceQuantizer, main: Tensor, *, row: Tensor, held: Tensor, exact: bool, refreshed: bool
) -> Tensor:
    """Return the squares of the error and the difference, of the drift and the main weights, fp64 [4].

    Args:
        main: [n], a sample of the main weights in fp32, of whole quantization groups.
        row: [n], the same as a refresh takes them: in fp32, or rounded to the model's type.
        held: [n], what the replica holds there.
        exact: its next refresh is in full precision, so that the first two do not apply.
        refreshed: the drift is that which the refresh will leave, not that which there is now.
    """
    if not main.numel():
        return torch.full((4,), math.nan, dtype=torch.float64, device=main.device)
    if exact:
        error = torch.full((2,), math.nan, dtype=torch.float64, device=main.device)
        after = row.to(held.dtype)
    else:
        wanted, received = replica.quantized_differences(row, held)
        error = _squares(received - wanted, wanted)
        after = (held.float() + received if replica.sends_differences else received).to(held.dtype)
    return torch.cat([error, _squares(main - (after if refreshed else held).float(), main)])


def squares_row(
    numel: int,
    *,
    reduction: QuantizedReduceScatter | None,
    gradient: GradientSample | None,
    weights: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Return the squares of a group whose rows have this many values, fp64 [7]; None does not apply."""
    row = torch.full((SQUARES,), math.nan, dtype=torch.float64, device=device)
    if reduction is not None and gradient is not None:
        # Sums over groups weigh each by its size, whatever the size of its sample.
        row[0:2] = gradient_squares(reduction, gradient.values) * (numel / gradient.values.numel())
        row[6] = gradient.nonfinite
    if weights is not None:
        row[2:6] = weights
    return row


def _squares(distance: Tensor, whole: Tensor) -> Tensor:
    # In fp64: squares of small gradients are below the smallest fp32 number.
    return torch.stack([distance.double().square().sum(), whole.double().square().sum()])


def measures_of(squares: Tensor) -> Tensor:
    """Return the measures [groups, 4] of squares [groups, 7]; NaN where they do not apply."""
    distance, norm = squares[:, 0:6:2], squares[:, 1:6:2]
    ratios = torch.where(norm == 0, torch.zeros_like(norm), (distance / norm).sqrt())
    return torch.cat([ratios, squares[:, 6:7]], dim=1)


class SampledMeasures:
    """The squares of the last measured step, on the device, and on the host once they have arrived there."""

    def __init__(self, config: TelemetryConfig | None, names: Sequence[str]) -> None:
        self._interval = 0 if config is None else config.interval
        self.sample_numel = TelemetryConfig().sample_numel if config is None else config.sample_numel
        self._names = list(names)
        self.step = 0
        """The last measured step; 0 before the first."""
        self._squares: Tensor | None = None
        self._under_way: tuple[int, HostCopy] | None = None
        self._arrived: tuple[int, Tensor] | None = None

    def is_due(self, step: int) -> bool:
        """Whether this step is measured."""
        return self._interval > 0 and step > 0 and step % self._interval == 0

    def publish(self, squares: Tensor, *, step: int) -> None:
        """These are the squares [groups, 7] of the step; a copy is on its way to the host, which goes on."""
        self._poll()
        self._squares, self.step = squares, step
        self._under_way = (step, HostCopy(squares))

    def on_device(self) -> Tensor | None:
        """Return the measures [groups, 4] of the last measured step; None before the first."""
        return None if self._squares is None else measures_of(self._squares).float()

    def with_last_gradients(self, squares: Tensor) -> Tensor:
        """Return squares whose columns of gradients are the last measured ones, where they do not apply."""
        if self._squares is None:
            return squares
        columns = torch.tensor([True, True, *[False] * (SQUARES - 3), True], device=squares.device)
        return torch.where(squares.isnan() & columns, self._squares, squares)

    def latest(self) -> tuple[int, Tensor] | None:
        """Return the last measured step whose squares have arrived, and these; does not wait."""
        self._poll()
        return self._arrived

    def totals(self) -> dict[str, Any]:
        """Return the measures over all groups that have arrived, and their step, by name."""
        step, squares = self.latest() or (None, torch.empty(0, SQUARES))
        return {"sampled_step": step, **total_measures(squares)}

    def _poll(self) -> None:
        if self._under_way is not None:
            step, copy = self._under_way
            squares = copy.arrived()
            if squares is not None:
                self._arrived, self._under_way = (step, squares), None

    def by_group(self) -> list[GroupMeasures]:
        """Return the measures of every group that have arrived; none before the first."""
        latest = self.latest()
        if latest is None:
            return []
        step, squares = latest
        return [
            named_measures(name, row, step=step)
            for name, row in zip(self._names, measures_of(squares).tolist(), strict=True)
        ]


def total_measures(squares: Tensor) -> dict[str, Any]:
    """Return the measures over all groups by name, those of groups that are not finite left out."""
    counted = [squares[squares[:, at].isfinite(), at - 1 : at + 1].sum(0).tolist() for at in (1, 3, 5)]
    applies = [bool(squares[:, at].isfinite().any()) for at in (1, 3, 5)]
    totals: dict[str, Any] = {
        name: ((distance / norm) ** 0.5 if norm else 0.0) if there else None
        for name, (distance, norm), there in zip(COLUMNS, counted, applies, strict=False)
    }
    return {**totals, COLUMNS[3]: round(squares[:, 6].nansum().item())}


def named_measures(name: str, row: Sequence[float], *, step: int) -> GroupMeasures:
    """Return a row of the measures with names; what does not apply, or is not a number, is None."""
    gradient_error, weight_error, weight_drift, nonfinite = (v if math.isfinite(v) else None for v in row)
    return GroupMeasures(
        name=name,
        step=step,
        gradient_error=gradient_error,
        weight_error=weight_error,
        weight_drift=weight_drift,
        nonfinite_groups=round(nonfinite or 0),
    )


def group_stats(
    name: str,
    traffic: Traffic,
    *,
    measures: GroupMeasures | None,
    weight_bits: int | None,
    gradient_bits: int | None,
) -> dict[str, Any]:
    """Return what is reported of a group: its last step's traffic, and what was measured last."""
    return {
        "name": name,
        "intra_bytes": round(traffic.intra_bytes),
        "inter_bytes": round(traffic.inter_bytes),
        "compression_ratio": traffic.compression_ratio,
        "gradient_error": None if measures is None else measures.gradient_error,
        "weight_error": None if measures is None else measures.weight_error,
        "weight_drift": None if measures is None else measures.weight_drift,
        "nonfinite_groups": 0 if measures is None else measures.nonfinite_groups,
        "exchange_seconds": traffic.exchange_seconds,
        "intra_seconds": traffic.intra_seconds,
        "inter_seconds": traffic.inter_seconds,
        "weight_bits": weight_bits,
        "gradient_bits": gradient_bits,
    }
