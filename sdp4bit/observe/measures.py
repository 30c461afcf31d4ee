"""Telemetry: relative errors of quantization on samples of the gradients and weights.

Measures are stored as squared norms, which can be summed over groups. NaN marks those that do not apply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from sdp4bit.collectives.group import Group
from sdp4bit.collectives.samples import sample_ranges
from sdp4bit.collectives.sections import Range
from sdp4bit.config import TelemetryConfig


class Measures(TypedDict):
    """Errors of quantization of one parameter group, or all, in one optimizer step on this rank."""

    gradient_error: float | None
    """Relative error of quantizing a sample of the gradient; None if it is not quantized or not finite."""
    weight_error: float | None
    """Relative error of quantizing a sample of the step's weight difference."""
    weight_drift: float | None
    """|main - replica| / |main| of a sample after the difference has been sent."""
    nonfinite_groups: int | None
    """Quantization groups of gradients that reached this rank with a NaN or an infinity, since the last
    measured step; None if none was measured."""


class Measurement(Measures):
    """Errors of quantization now; see `CommHandle.measure`."""

    pending: float | None
    """|main - replica| / |main| if the next refresh sends a change of the weights, else 0."""


MEASURES = tuple(Measures.__annotations__)
"""Names of the measures, in the order of the columns of `Telemetry.measures`."""
SQUARES = 7
"""Numbers per group: squared error and squared norm of the gradient, of the weight difference and of the
weights (drift), and the number of non-finite gradient groups."""


def group_squares(group: Group, *, sample_numel: int | None) -> Tensor:
    """Return the current squared norms of a group, fp64 [SQUARES]; sends nothing.

    Args:
        sample_numel: size of the weight sample, taken at the end of a step. None measures the entire shard.
    """
    numel, replica = group.view.shard_numel, group.weights.replica
    unknown = torch.full((), math.nan, dtype=torch.float64, device=group.view.device)
    gradient, difference, drift = [unknown] * 2, [unknown] * 2, [unknown] * 2

    # 1. The gradient that was sampled last. Errors of successive collectives are measured separately and
    # added; see `QuantizedAllReduce.requantized`.
    exact = group.gradients.sample
    if group.gradients.quantizers and exact is not None:
        first, *others = group.gradients.quantizers
        received = first.requantized(exact)
        for quantizer in others:
            received = received + (quantizer.requantized(exact) - exact)
        gradient = squared_norms(received, exact, numel=numel)

    # 2. The difference of the weights, which has no error in full precision, and the drift: after the next
    # refresh if one is due, else now.
    sample = None
    if replica is not None:
        ranges: list[Range] = [(0, numel)]
        if sample_numel is not None:
            ranges = sample_ranges(numel, sample_numel=sample_numel, unit=replica.config.group_size)
        sample = group.sample_weights(ranges, may_wait=sample_numel is None)
    if replica is not None and sample is not None and sample[0].numel():
        main, held = sample
        before, after = held.float(), main
        if not group.weights.is_full and replica.bits is not None:
            sent, received = replica.quantized_differences(main, before)
            difference = squared_norms(received, sent, numel=numel)
            after = before + received if replica.sends_differences else received
        is_refreshed = sample_numel is not None or group.awaits_refresh()
        drift = squared_norms(after.to(held.dtype).float() if is_refreshed else before, main, numel=numel)

    # 3. Non-finite groups that arrived since the last measured step.
    nonfinite = unknown if group.gradients.nonfinite_groups is None else group.gradients.nonfinite_groups
    return torch.stack([*gradient, *difference, *drift, nonfinite])


def pending_squares(group: Group) -> Tensor:
    """Return |main - replica|^2 and |main|^2 of a group's change not sent yet, fp64 [2]; sends nothing."""
    numel = group.view.shard_numel
    sample = None if group.weights.replica is None else group.sample_weights([(0, numel)], may_wait=True)
    if sample is None or not sample[0].numel():
        return torch.full((2,), math.nan, dtype=torch.float64, device=group.view.device)
    main, held = sample
    return torch.stack(squared_norms(held.float() if group.awaits_refresh() else main, main, numel=numel))


def squared_norms(received: Tensor, exact: Tensor, *, numel: int) -> list[Tensor]:
    """Return |received - exact|^2 and |exact|^2, fp64, of a sample [n], scaled to a shard of `numel`."""
    # fp64, because squares of small gradients underflow in fp32.
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in (received - exact, exact)]
    return [norm * norm * (numel / exact.numel()) for norm in norms]


def relative_errors(squares: Tensor) -> Tensor:
    """Return the measures [groups, 4], in the order of `MEASURES`, of squares [groups, SQUARES]."""
    error, norm = squares[:, 0:6:2], squares[:, 1:6:2]
    ratios = torch.where(norm == 0, torch.zeros_like(norm), (error / norm).sqrt())
    return torch.cat([ratios, squares[:, 6:]], dim=1)


class Telemetry:
    """The squares of the last measured step."""

    def __init__(self, config: TelemetryConfig | None, names: Sequence[str]) -> None:
        self._interval = 0 if config is None else config.interval
        self.sample_numel = TelemetryConfig().sample_numel if config is None else config.sample_numel
        self._names = list(names)
        self.step: int | None = None  # the last measured step; None before the first
        self.squares: Tensor | None = None  # fp64 [groups, SQUARES] on the host, of this rank

    @property
    def is_on(self) -> bool:
        """Whether steps are measured."""
        return self._interval > 0

    def is_due(self, step: int) -> bool:
        return self.is_on and step > 0 and step % self._interval == 0

    def publish(self, squares: Tensor, *, step: int) -> None:
        """Store the squares of all groups after a step; the host waits for the device."""
        self.squares, self.step = squares.cpu(), step

    def measures(self) -> Tensor:
        """Return the measures of the last measured step, fp64 [groups, 4]; NaN if not applicable."""
        squares = torch.full((len(self._names), SQUARES), math.nan) if self.squares is None else self.squares
        return relative_errors(squares)

    def by_group(self) -> dict[str, Measures]:
        return {name: _named(row) for name, row in zip(self._names, self.measures().tolist(), strict=True)}

    def with_last_gradients(self, squares: Tensor) -> Tensor:
        """Replace NaN gradient squares in [groups, SQUARES] by those of the last measured step."""
        if self.squares is None:
            return squares
        gradient = torch.tensor([0, 1, 6])
        squares = squares.cpu()
        now = squares[:, gradient]
        squares[:, gradient] = torch.where(now.isnan(), self.squares[:, gradient], now)
        return squares


def total_measures(squares: Tensor | None) -> Measures:
    """Return the measures over all groups [groups, SQUARES]; groups with non-finite errors are excluded."""
    if squares is None or not len(squares):
        return _named([None] * len(MEASURES))
    errors = [total_error(squares[:, column : column + 2]) for column in (0, 2, 4)]
    counts = squares[:, 6][~squares[:, 6].isnan()]
    return _named([*errors, counts.sum().item() if len(counts) else None])


def total_error(squares: Tensor) -> float | None:
    """Return the relative error over all groups of squares [groups, 2] (error, norm) that are finite."""
    squares = squares.cpu()
    finite = squares[squares.isfinite().all(dim=1)]
    error, norm = finite.sum(dim=0).tolist()
    return ((error / norm) ** 0.5 if norm else 0.0) if len(finite) else None


def _named(row: Sequence[float | None]) -> Measures:
    """Return measures by name; None if not applicable or not finite."""
    gradient_error, weight_error, weight_drift, nonfinite = (
        value if value is not None and math.isfinite(value) else None for value in row
    )
    return {
        "gradient_error": gradient_error,
        "weight_error": weight_error,
        "weight_drift": weight_drift,
        "nonfinite_groups": None if nonfinite is None else round(nonfinite),
    }
