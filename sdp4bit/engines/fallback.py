"""Alerts on what quantization costs one parameter group, and its place on the ladder of bits.

Pure decisions: the same measures give the same alerts and moves on every rank. A group has two halves, its
gradients and its weights, which move by themselves along the rungs that they have: as configured, at least 8
bits, full precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.config import AlertConfig, GradientConfig, WeightConfig
from sdp4bit.engines.measures import MEASURES

Half = Literal["gradients", "weights"]
HALVES: tuple[Half, ...] = get_args(Half)

Config = TypeVar("Config", GradientConfig, WeightConfig)

_COLUMNS_OF: dict[Half, tuple[int, ...]] = {"gradients": (0,), "weights": (1, 2)}
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
    """The largest of all ranks; for a step down, what the lower rung would cost."""
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
    """Where a half of a group stands, and what it remembers."""

    rung: int = 0
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
STATE_NUMEL = len(HALVES) * _PLACES + 1
"""Numbers in the state of a group's ladder."""


class GroupLadder:
    """Alerts of one parameter group and the rungs that its halves are on."""

    def __init__(self, name: str, rungs: Mapping[Half, Sequence[str]], *, config: AlertConfig) -> None:
        """Both halves are as configured.

        Args:
            rungs: names of the rungs of each half, the configured one first; none if it is not quantized.
        """
        self.name = name
        self._rungs = rungs
        self._config = config
        self._positions: dict[Half, Position] = {half: Position() for half in HALVES}
        self._over = 0
        """Measures above their thresholds that have been reported, as bits."""

    def rung(self, half: Half) -> int:
        """Return how many rungs above the configured one a half is."""
        return self._positions[half].rung

    @property
    def is_raised(self) -> bool:
        """Whether a half is above its configured rung."""
        return any(position.rung for position in self._positions.values())

    def reason(self, half: Half) -> str:
        """Return since when and why a half is raised; empty if it is not."""
        position = self._positions[half]
        limit = self._config.thresholds[position.cause]
        if not position.rung or limit is None:
            return ""
        why = f"{MEASURES[position.cause].replace('_', ' ')} {position.value:.3g} > {limit:g}"
        return f"since step {position.since} (alert: {why})"

    def decide(self, now: Sequence[float], below: Sequence[float], *, step: int) -> list[Alert]:
        """Return the alerts of a sample; halves have moved.

        Args:
            now: the measures as things are, in the order of `MEASURES`; negative where there is none.
            below: what they would be with raised halves one rung lower.
        """
        alerts = []
        for half in HALVES:
            alerts += self._decide_half(half, now, below, step)
        if self._newly_over(_NONFINITE, now):
            alerts.append(self._alert(_NONFINITE, now, step, ""))
        return alerts

    def _decide_half(
        self, half: Half, now: Sequence[float], below: Sequence[float], step: int
    ) -> list[Alert]:
        position, names = self._positions[half], self._rungs[half]
        over = [column for column in _COLUMNS_OF[half] if self._is_over(column, now)]
        new = [column for column in _COLUMNS_OF[half] if self._newly_over(column, now)]
        position.age += 1
        if over and self._config.action == "ladder" and position.rung + 1 < len(names):
            cause = over[0]
            for column in over:
                # If even the next rung is not enough, that is news.
                self._over &= ~(1 << column)
            self._raise(position, cause, now[cause], step)
            change = f"{half} {names[position.rung - 1]} -> {names[position.rung]}"
            return [self._alert(cause, now, step, change)]
        if over:
            position.calm = 0
            stuck = f"{half} stay at {names[position.rung]}" if position.rung else ""
            return [self._alert(column, now, step, stuck) for column in new]
        cause = self._count_calm(position, half, below)
        if cause < 0 or position.calm < self._config.calm_samples << position.relapses:
            return []
        position.rung -= 1
        position.since, position.age, position.calm, position.lowered = step, 0, 0, 1
        change = f"calm, {half} {names[position.rung + 1]} -> {names[position.rung]}"
        return [self._alert(cause, below, step, change)]

    def _raise(self, position: Position, cause: int, value: float, step: int) -> None:
        early = position.lowered and position.age <= self._config.calm_samples << position.relapses
        position.relapses = min(position.relapses + 1, _MOST_RELAPSES) if early else 0
        position.rung += 1
        position.since, position.age, position.calm, position.lowered = step, 0, 0, 0
        position.cause, position.value = cause, value

    def _count_calm(self, position: Position, half: Half, below: Sequence[float]) -> int:
        """Count a sample as calm or not, if it says anything; return the measure nearest its limit."""
        if not position.rung:
            return -1
        parts = {
            column: below[column] / limit
            for column in _COLUMNS_OF[half]
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
        places = [number for half in HALVES for number in astuple(self._positions[half])]
        return torch.tensor([*places, self._over], dtype=torch.float64)

    def load(self, state: Tensor | None) -> None:
        """The ladder is as saved; as configured if nothing or something of another size was saved."""
        if state is None or state.numel() != STATE_NUMEL:
            state = GroupLadder(self.name, self._rungs, config=self._config).state()
        numbers = state.tolist()
        for index, half in enumerate(HALVES):
            *counts, value = numbers[index * _PLACES : (index + 1) * _PLACES]
            position = Position(**dict(zip(_COUNTS, map(int, counts), strict=True)), value=value)
            highest = max(len(self._rungs[half]) - 1, 0) if self._config.action == "ladder" else 0
            self._positions[half] = replace(position, rung=min(position.rung, highest))
        self._over = int(numbers[-1])


def gradient_rungs(config: GradientConfig, layout: NodeLayout) -> dict[str, GradientConfig]:
    """Return the settings of each rung by its name, the configured one first."""
    return _distinct(
        [
            (_gradient_name(rung, layout), rung)
            for rung in (
                config,
                replace(
                    config,
                    intra_bits=_at_least_8(config.intra_bits),
                    inter_bits=_at_least_8(config.inter_bits),
                ),
                replace(config, intra_bits=None, inter_bits=None),
            )
        ]
    )


def weight_rungs(config: WeightConfig) -> dict[str, WeightConfig]:
    """Return the settings of each rung by its name, the configured one first."""
    rungs = (config, replace(config, bits=_at_least_8(config.bits)), replace(config, bits=None))
    return _distinct([(_bits_name(rung.bits), rung) for rung in rungs])


def _distinct(rungs: Sequence[tuple[str, Config]]) -> dict[str, Config]:
    named: dict[str, Config] = {}
    for name, rung in rungs:
        named.setdefault(name, rung)
    return named


def _gradient_name(config: GradientConfig, layout: NodeLayout) -> str:
    """Return the bits of the hops that there are: one number if they are equal."""
    hops = [config.intra_bits] if layout.ranks_per_node > 1 else []
    hops += [config.inter_bits] if layout.nodes > 1 else []
    return "/".join(dict.fromkeys(_bits_name(bits) for bits in hops))


def _at_least_8(bits: int | None) -> int | None:
    return None if bits is None else max(bits, 8)


def _bits_name(bits: int | None) -> str:
    return "full precision" if bits is None else f"int{bits}"
