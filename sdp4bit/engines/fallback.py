"""Alerts on what quantization costs one parameter group, and its precision fallback.

Pure decisions: the same measures give the same alerts and moves on every rank. A group has two kinds of
traffic, its gradients and its weights, which move by themselves along the precisions that they have: as
configured, then at least 3, 4 and 8 bits, full precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.config import QUANTIZED_BITS, AlertConfig, GradientConfig, WeightConfig
from sdp4bit.engines.measures import MEASURES

TrafficKind = Literal["gradients", "weights"]
TRAFFIC_KINDS: tuple[TrafficKind, ...] = get_args(TrafficKind)

Config = TypeVar("Config", GradientConfig, WeightConfig)

_COLUMNS_OF: dict[TrafficKind, tuple[int, ...]] = {"gradients": (0,), "weights": (1, 2)}
_NONFINITE = MEASURES.index("nonfinite_groups")
_MOST_RELAPSES = 4


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A measure of a parameter group that crossed its threshold, or a step back down; alike on its ranks."""

    step: int
    """Optimizer steps done when it was measured; a move holds from the next step on."""
    group: str
    measure: str
    """One of gradient_error, weight_error, weight_drift, nonfinite_groups."""
    value: float
    """The largest of all ranks; for a step down, what the lower precision would cost."""
    threshold: float
    change: str
    """What has been done about it, as text; empty if nothing."""

    @property
    def message(self) -> str:
        """What happened, without the group's name."""
        relation = ">" if self.value > self.threshold else "<="
        text = f"{self.measure.replace('_', ' ')} {self.value:.3g} {relation} {self.threshold:g}"
        return f"{text}: {self.change}" if self.change else text


@dataclass(kw_only=True)
class Position:
    """Where one kind of traffic of a group stands, and what it remembers."""

    precision: int = 0
    since: int = 0
    """Step of the last move."""
    age: int = 0
    """Samples since then."""
    calm: int = 0
    """Calm samples in a row."""
    relapses: int = 0
    """Times in a row that a step down was taken back soon."""
    lowered: int = 0
    """Whether the last move was down."""
    cause: int = -1
    """Column of the measure that last moved it up."""
    value: float = 0.0
    """That measure's value."""


_PLACES = len(fields(Position))
_COUNTS = [field.name for field in fields(Position)][:-1]
STATE_NUMEL = len(TRAFFIC_KINDS) * _PLACES + 1
"""Numbers in the state of a group's fallback."""


class GroupFallback:
    """Alerts of one parameter group and the precisions of its traffic."""

    def __init__(
        self, name: str, precisions: Mapping[TrafficKind, Sequence[str]], *, config: AlertConfig
    ) -> None:
        """Begin with everything as configured.

        Args:
            precisions: names of the precisions of each kind of traffic, the configured one first; none if it
                is not quantized.
        """
        self.name = name
        self._precisions = precisions
        self._config = config
        self._positions: dict[TrafficKind, Position] = {kind: Position() for kind in TRAFFIC_KINDS}
        self._over = 0
        """Measures above their thresholds that have been reported, as bits."""

    def precision(self, kind: TrafficKind) -> int:
        """Return how many precisions above the configured one this traffic is."""
        return self._positions[kind].precision

    @property
    def is_raised(self) -> bool:
        """Whether any traffic is above its configured precision."""
        return any(position.precision for position in self._positions.values())

    def reason(self, kind: TrafficKind) -> str:
        """Return since when and why this traffic is raised; empty if it is not."""
        position = self._positions[kind]
        limit = self._config.thresholds[position.cause]
        if not position.precision or limit is None:
            return ""
        why = f"{MEASURES[position.cause].replace('_', ' ')} {position.value:.3g} > {limit:g}"
        return f"since step {position.since} (alert: {why})"

    def decide(self, now: Sequence[float], below: Sequence[float], *, step: int) -> list[Alert]:
        """Return the alerts of a sample, having moved what it makes move.

        Args:
            now: the measures as things are, in the order of `MEASURES`; negative where there is none.
            below: what they would be with raised kinds of traffic one precision lower.
        """
        alerts = []
        for kind in TRAFFIC_KINDS:
            alerts += self._decide_kind(kind, now, below, step)
        if self._newly_over(_NONFINITE, now):
            alerts.append(self._alert(_NONFINITE, now, step, ""))
        return alerts

    def _decide_kind(
        self, kind: TrafficKind, now: Sequence[float], below: Sequence[float], step: int
    ) -> list[Alert]:
        position, names = self._positions[kind], self._precisions[kind]
        over = [column for column in _COLUMNS_OF[kind] if self._is_over(column, now)]
        new = [column for column in _COLUMNS_OF[kind] if self._newly_over(column, now)]
        position.age += 1
        if over and self._config.action == "fallback" and position.precision + 1 < len(names):
            cause = over[0]
            for column in over:
                # If even the next precision is not enough, that is news.
                self._over &= ~(1 << column)
            self._raise(position, cause, now[cause], step)
            change = f"{kind} {names[position.precision - 1]} -> {names[position.precision]}"
            return [self._alert(cause, now, step, change)]
        if over:
            position.calm = 0
            stuck = f"{kind} stay at {names[position.precision]}" if position.precision else ""
            return [self._alert(column, now, step, stuck) for column in new]
        cause = self._count_calm(position, kind, below)
        if cause < 0 or position.calm < self._config.calm_samples << position.relapses:
            return []
        position.precision -= 1
        position.since, position.age, position.calm, position.lowered = step, 0, 0, 1
        change = f"calm, {kind} {names[position.precision + 1]} -> {names[position.precision]}"
        return [self._alert(cause, below, step, change)]

    def _raise(self, position: Position, cause: int, value: float, step: int) -> None:
        early = position.lowered and position.age <= self._config.calm_samples << position.relapses
        position.relapses = min(position.relapses + 1, _MOST_RELAPSES) if early else 0
        position.precision += 1
        position.since, position.age, position.calm, position.lowered = step, 0, 0, 0
        position.cause, position.value = cause, value

    def _count_calm(self, position: Position, kind: TrafficKind, below: Sequence[float]) -> int:
        """Count a sample as calm or not, if it says anything; return the measure nearest its limit."""
        if not position.precision:
            return -1
        parts = {
            column: below[column] / limit
            for column in _COLUMNS_OF[kind]
            if (limit := self._config.thresholds[column]) is not None and below[column] >= 0
        }
        if not parts:
            return -1
        nearest = max(parts, key=lambda column: parts[column])
        position.calm = position.calm + 1 if parts[nearest] <= self._config.calm_ratio else 0
        return nearest

    def _is_over(self, column: int, values: Sequence[float]) -> bool:
        limit = self._config.thresholds[column]
        return limit is not None and values[column] > limit

    def _newly_over(self, column: int, now: Sequence[float]) -> bool:
        """Whether a measure is above its threshold and has not been since it was well below."""
        limit, bit = self._config.thresholds[column], 1 << column
        if self._is_over(column, now):
            new = not self._over & bit
            self._over |= bit
            return new
        if limit is not None and 0 <= now[column] <= limit * self._config.calm_ratio:
            self._over &= ~bit
        return False

    def _alert(self, column: int, values: Sequence[float], step: int, change: str) -> Alert:
        limit = self._config.thresholds[column]
        assert limit is not None
        return Alert(
            step=step,
            group=self.name,
            measure=MEASURES[column],
            value=values[column],
            threshold=limit,
            change=change,
        )

    def state(self) -> Tensor:
        """Return what a resume needs, fp64 [STATE_NUMEL]."""
        places = [number for kind in TRAFFIC_KINDS for number in astuple(self._positions[kind])]
        return torch.tensor([*places, self._over], dtype=torch.float64)

    def load(self, state: Tensor | None) -> None:
        """Continue as saved; as configured if nothing or something of another size was saved."""
        if state is None or state.numel() != STATE_NUMEL:
            state = GroupFallback(self.name, self._precisions, config=self._config).state()
        numbers = state.tolist()
        for index, kind in enumerate(TRAFFIC_KINDS):
            *counts, value = numbers[index * _PLACES : (index + 1) * _PLACES]
            position = Position(**dict(zip(_COUNTS, map(int, counts), strict=True)), value=value)
            highest = max(len(self._precisions[kind]) - 1, 0) if self._config.action == "fallback" else 0
            self._positions[kind] = replace(position, precision=min(position.precision, highest))
        self._over = int(numbers[-1])


def gradient_precisions(config: GradientConfig, *layouts: NodeLayout) -> dict[str, GradientConfig]:
    """Return the settings of each precision by its name, the configured one first.

    Args:
        layouts: of the ranks that gradients are exchanged over.
    """
    raised = [
        replace(
            config,
            intra_bits=_at_least(config.intra_bits, bits),
            inter_bits=_at_least(config.inter_bits, bits),
        )
        for bits in QUANTIZED_BITS
    ]
    precisions = [config, *raised, replace(config, intra_bits=None, inter_bits=None)]
    return _distinct([(_gradient_name(precision, layouts), precision) for precision in precisions])


def weight_precisions(config: WeightConfig) -> dict[str, WeightConfig]:
    """Return the settings of each precision by its name, the configured one first."""
    raised = [replace(config, bits=_at_least(config.bits, bits)) for bits in QUANTIZED_BITS]
    precisions = [config, *raised, replace(config, bits=None)]
    return _distinct([(_bits_name(precision.bits), precision) for precision in precisions])


def _distinct(precisions: Sequence[tuple[str, Config]]) -> dict[str, Config]:
    named: dict[str, Config] = {}
    for name, precision in precisions:
        named.setdefault(name, precision)
    return named


def _gradient_bits(config: GradientConfig, layouts: Sequence[NodeLayout]) -> list[int | None]:
    """Return the bits of the hops that there are."""
    hops = [config.intra_bits] if any(layout.ranks_per_node > 1 for layout in layouts) else []
    return hops + ([config.inter_bits] if any(layout.nodes > 1 for layout in layouts) else [])


def _gradient_name(config: GradientConfig, layouts: Sequence[NodeLayout]) -> str:
    """Return the bits of the hops that there are: one number if they are equal."""
    return "/".join(dict.fromkeys(_bits_name(bits) for bits in _gradient_bits(config, layouts)))


def thresholds_for(
    config: AlertConfig,
    *,
    gradients: GradientConfig | None,
    weights: WeightConfig | None,
    layouts: Sequence[NodeLayout],
) -> AlertConfig:
    """Return the settings with automatic thresholds as a group's configured bits need them.

    Args:
        layouts: of the ranks that gradients are exchanged over.
    """
    hops = [] if gradients is None else [bits for bits in _gradient_bits(gradients, layouts) if bits]
    return config.for_bits(
        gradients=min(hops, default=None), weights=None if weights is None else weights.bits
    )


def _at_least(bits: int | None, least: int) -> int | None:
    return None if bits is None else max(bits, least)


def _bits_name(bits: int | None) -> str:
    return "full precision" if bits is None else f"int{bits}"
