"""Decisions of the fallback: when a group moves, when it is only reported, and that it does not swing.

Layer: no process; the measures are made up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from sdp4bit import AlertConfig, GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.engines.alerts import saved_positions
from sdp4bit.engines.fallback import (
    STATE_NUMEL,
    GroupFallback,
    TrafficKind,
    gradient_precisions,
    thresholds_for,
    weight_precisions,
)

NONE = -1.0
PRECISIONS = {
    "gradients": ["int8/int4", "int8", "full precision"],
    "weights": ["int4", "int8", "full precision"],
}


def fallback(action: str = "fallback", **settings: float | None) -> GroupFallback:
    config = AlertConfig(action=action, calm_samples=2, **settings)  # type: ignore[arg-type]
    return GroupFallback("layers.3", PRECISIONS, config=config)  # type: ignore[arg-type]


def sample(
    gradient: float = 0.1, weight: float = 0.1, drift: float = 0.001, nonfinite: float = 0
) -> Sequence[float]:
    return (gradient, weight, drift, nonfinite)


def drive(subject: GroupFallback, errors: Sequence[tuple[float, float]]) -> list[str]:
    """Feed gradient errors, as they are and one precision lower, every ten steps; return the messages."""
    return [
        f"{alert.step}: {alert.message}"
        for index, (now, below) in enumerate(errors, 1)
        for alert in subject.decide(sample(now), sample(below), step=10 * index)
    ]


def test_gradients_climb_while_their_error_is_too_high_and_come_back_when_calm() -> None:
    subject = fallback()
    up = drive(subject, [(0.2, NONE), (0.41, NONE), (0.35, 0.5)])
    assert up == [
        "20: gradient error 0.41 > 0.3: gradients int8/int4 -> int8",
        "30: gradient error 0.35 > 0.3: gradients int8 -> full precision",
    ]
    assert (subject.precision("gradients"), subject.precision("weights")) == (2, 0)
    assert subject.reason("gradients") == "since step 30 (alert: gradient error 0.35 > 0.3)"
    assert subject.reason("weights") == ""
    # Not while a precision lower would be too expensive, or only just good enough, or unknown.
    assert drive(subject, [(0.0, 0.4), (0.0, 0.1), (0.0, 0.25), (0.0, 0.1), (0.0, NONE)]) == []
    assert drive(subject, [(0.0, 0.12)]) == [
        "10: gradient error 0.12 <= 0.3: calm, gradients full precision -> int8"
    ]
    assert drive(subject, [(0.01, 0.16), (0.01, 0.16)]) == [
        "20: gradient error 0.16 <= 0.3: calm, gradients int8 -> int8/int4"
    ]
    assert not subject.is_raised and subject.reason("gradients") == ""
    assert drive(subject, [(0.16, NONE)] * 20) == []


def test_stepping_down_too_early_takes_longer_each_time() -> None:
    subject = fallback()
    waits = []
    for _ in range(7):
        assert len(drive(subject, [(0.5, NONE)])) == 1
        waits.append(next(n for n in range(1, 100) if drive(subject, [(0.01, 0.1)])))
    assert waits == [2, 4, 8, 16, 32, 32, 32]
    assert drive(subject, [(0.1, NONE)] * 33) == []
    drive(subject, [(0.5, NONE)])
    assert next(n for n in range(1, 100) if drive(subject, [(0.01, 0.1)])) == 2


def test_weights_move_by_themselves_for_error_or_drift() -> None:
    subject = fallback()
    (alert,) = subject.decide(sample(weight=0.7), sample(NONE, NONE, NONE), step=10)
    assert alert.message == "weight error 0.7 > 0.6: weights int4 -> int8"
    (alert,) = subject.decide(sample(drift=0.06), sample(weight=0.7), step=20)
    assert alert.message == "weight drift 0.06 > 0.05: weights int8 -> full precision"
    # At the top nothing is left to do; it is said once.
    (alert,) = subject.decide(sample(drift=0.07), sample(), step=30)
    assert alert.message == "weight drift 0.07 > 0.05: weights stay at full precision"
    assert subject.decide(sample(drift=0.07), sample(), step=40) == []
    # Both measures must be calm.
    for step in (50, 60, 70):
        assert subject.decide(sample(weight=NONE), sample(weight=0.1, drift=0.045), step=step) == []
    assert (subject.precision("gradients"), subject.precision("weights")) == (0, 2)


def test_a_warning_is_given_once_until_the_measure_has_been_low() -> None:
    subject = fallback("warn")
    errors = [0.4, 0.5, 0.28, 0.4, NONE, 0.4, 0.2, 0.4, math.inf]
    assert drive(subject, [(error, NONE) for error in errors]) == [
        "10: gradient error 0.4 > 0.3",
        "80: gradient error 0.4 > 0.3",
    ]
    assert not subject.is_raised


def test_values_that_are_not_finite_are_reported_and_move_nothing() -> None:
    subject = fallback()
    below = sample(NONE, NONE, NONE, NONE)
    (alert,) = subject.decide(sample(NONE, nonfinite=3), below, step=10)
    assert (alert.message, alert.measure) == ("nonfinite groups 3 > 0", "nonfinite_groups")
    assert subject.decide(sample(NONE, nonfinite=1), below, step=20) == []
    assert subject.decide(sample(), below, step=30) == []
    assert len(subject.decide(sample(nonfinite=1), below, step=40)) == 1
    assert not subject.is_raised


def test_measures_without_a_threshold_are_not_watched() -> None:
    subject = fallback(gradient_error=None, nonfinite_groups=None)
    assert subject.decide(sample(0.9, nonfinite=5), sample(), step=10) == []
    subject.decide(sample(weight=0.9), sample(), step=20)
    assert subject.is_raised


def test_state_continues_where_it_was() -> None:
    events = [(0.5, NONE), (0.5, 0.5), (0.01, 0.1), (0.01, 0.1), (0.5, 0.6), (0.2, 0.2)]
    later = [(0.01, 0.1)] * 9 + [(0.5, 0.5)] * 3
    whole, first, second = fallback(), fallback(), fallback()
    drive(whole, events)
    drive(first, events)
    assert first.state().numel() == STATE_NUMEL
    second.load(first.state())
    assert second.reason("gradients") == whole.reason("gradients") != ""
    expected = drive(whole, later)
    assert drive(second, later) == expected and len(expected) > 3
    second.load(None)
    assert not second.is_raised
    warning = fallback("warn")
    warning.load(first.state())
    assert not warning.is_raised


def layout(nodes: int, ranks_per_node: int) -> NodeLayout:
    return NodeLayout(ranks=tuple(range(nodes * ranks_per_node)), nodes=nodes, ranks_per_node=ranks_per_node)


def test_rungs_are_those_that_differ() -> None:
    config = GradientConfig()
    assert list(gradient_precisions(config, layout(2, 2))) == ["int8/int4", "int8", "full precision"]
    assert list(gradient_precisions(config, layout(2, 1))) == ["int4", "int8", "full precision"]
    assert list(gradient_precisions(config, layout(1, 4))) == ["int8", "full precision"]
    assert list(gradient_precisions(GradientConfig(intra_bits=None), layout(2, 2))) == [
        "full precision/int4",
        "full precision/int8",
        "full precision",
    ]
    assert list(gradient_precisions(GradientConfig(intra_bits=None, inter_bits=None), layout(2, 2))) == [
        "full precision"
    ]
    assert [precision.bits for precision in weight_precisions(WeightConfig()).values()] == [4, 8, None]
    assert list(weight_precisions(WeightConfig(bits=8))) == ["int8", "full precision"]
    below = weight_precisions(WeightConfig(bits=2))
    assert list(below) == ["int2", "int3", "int4", "int8", "full precision"]
    assert [precision.effective_clip for precision in below.values()] == [0.6, 1.0, 1.0, 1.0, 1.0]
    assert list(gradient_precisions(GradientConfig(inter_bits=2), layout(2, 2))) == [
        *("int8/int2", "int8/int3", "int8/int4", "int8", "full precision"),
    ]
    assert list(gradient_precisions(GradientConfig(intra_bits=4, inter_bits=3), layout(2, 2))) == [
        *("int4/int3", "int4", "int8", "full precision"),
    ]


def test_thresholds_are_those_of_the_hop_with_the_fewest_bits() -> None:
    gradients, weights = GradientConfig(intra_bits=4, inter_bits=2), WeightConfig(bits=3)

    def found(**changed: object) -> tuple[float | None, ...]:
        named: dict[str, Any] = {"gradients": gradients, "weights": weights, "layouts": [layout(2, 2)]}
        return thresholds_for(AlertConfig(), **named | changed).thresholds

    assert found() == (2.1, 0.75, 0.05, 0)
    assert found(layouts=[layout(1, 4)]) == (0.3, 0.75, 0.05, 0)
    assert found(gradients=None, weights=None) == (0.3, 0.6, 0.05, 0)
    changed = {"gradients": replace(gradients, inter_bits=None), "weights": WeightConfig(bits=2)}
    assert found(**changed) == (0.3, 0.9, 0.05, 0)


@pytest.mark.parametrize("kind", ["gradients", "weights"])
def test_2_bits_climb_a_precision_per_sample_and_come_back(kind: TrafficKind) -> None:
    """2 -> 3 -> 4 -> 8 -> full precision, and as many steps down; what was saved on the way goes on."""
    names = {
        "gradients": list(gradient_precisions(GradientConfig(inter_bits=2), layout(2, 1))),
        "weights": list(weight_precisions(WeightConfig(bits=2))),
    }
    config = AlertConfig(action="fallback", calm_samples=2).for_bits(gradients=2, weights=2)
    subject = GroupFallback("block", names, config=config)  # type: ignore[arg-type]
    high, low = sample(gradient=4.0, weight=0.95), sample(gradient=0.5, weight=0.5)
    seen = [names[kind][subject.precision(kind)]]
    for step in range(1, 8):
        subject.decide(high, sample(), step=step)
        seen.append(names[kind][subject.precision(kind)])
        resumed = GroupFallback("block", names, config=config)  # type: ignore[arg-type]
        resumed.load(subject.state())
        subject = resumed
    assert list(dict.fromkeys(seen)) == ["int2", "int3", "int4", "int8", "full precision"]
    for step in range(8, 60):
        subject.decide(low, low, step=step)
        seen.append(names[kind][subject.precision(kind)])
    assert list(dict.fromkeys(seen[8:])) == ["full precision", "int8", "int4", "int3", "int2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_error": 0}, r"alerts\.gradient_error=0 must be a positive number"),
        ({"weight_drift": math.nan}, r"alerts\.weight_drift=nan must be a positive number"),
        ({"nonfinite_groups": -1}, r"alerts\.nonfinite_groups=-1 must be an integer of at least 0"),
        ({"action": "stop"}, r"alerts\.action='stop' is unknown: use one of 'warn', 'fallback'"),
        ({"calm_samples": 0}, r"alerts\.calm_samples=0 must be an integer of at least 1"),
        ({"calm_ratio": 1.5}, r"alerts\.calm_ratio=1\.5 must be above 0 and at most 1"),
        (
            dict.fromkeys(("gradient_error", "weight_error", "weight_drift", "nonfinite_groups")),
            "alerts watch nothing",
        ),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlertConfig(**settings)  # type: ignore[arg-type]


def test_alerts_need_telemetry() -> None:
    with pytest.raises(ValueError, match="alerts look at what telemetry measures"):
        SDP4BitConfig(alerts=AlertConfig(), telemetry=None)


def test_the_earlier_names_are_read() -> None:
    with pytest.warns(DeprecationWarning, match='is now "fallback"'):
        assert AlertConfig(action="ladder").action == "fallback"  # type: ignore[arg-type]
    assert saved_positions({"ladder": 1}) == saved_positions({"fallback": 1}) == 1
    assert saved_positions({}) is None
