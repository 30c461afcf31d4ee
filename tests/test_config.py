"""Settings: defaults, presets, and every bad value is refused with its name and a way out."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest

from sdp4bit.config import (
    AlertConfig,
    AuditConfig,
    GradientConfig,
    SDP4BitConfig,
    TelemetryConfig,
    WeightConfig,
)
from sdp4bit.quantization.layout import message_layout

WEIGHTS = {
    "bits": 4,
    "group_size": 2048,
    "mode": "difference",
    "clip": None,
    "replica": "node",
}
GRADIENTS = {
    "intra_bits": 8,
    "inter_bits": 4,
    "intra_group_size": 128,
    "inter_group_size": 128,
    "hadamard": True,
    "inside_one_node": False,
    "intra_rounding": "stochastic",
    "inter_rounding": "dither",
    "exact_own": True,
    "pipeline_chunks": None,
    "start_step": 0,
    "min_numel": 1024,
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("sdp4bit", 1.0166), ("sdp4bit-w3g3.5", 0.84375), ("sdp4bit-w2g3", 0.6953), ("sdp4bit-w2g2", 0.5703)],
)
def test_bytes_per_parameter_of_the_presets(name: str, expected: float) -> None:
    config, numel = SDP4BitConfig.preset(name), 1 << 20
    weights, gradients = config.weights, config.gradients
    assert weights is not None and weights.bits and gradients is not None and gradients.inter_bits
    sent = (
        message_layout(numel=numel, bits=weights.bits, group_size=weights.group_size),
        message_layout(numel=numel, bits=gradients.inter_bits, group_size=gradients.inter_group_size),
    )
    assert sum(message.nbytes for message in sent) / numel == pytest.approx(expected, abs=1e-4)


def test_defaults_are_the_paper_method_with_dither_and_an_exact_own_part_between_nodes() -> None:
    assert SDP4BitConfig() == SDP4BitConfig.preset("sdp4bit")
    assert dataclasses.asdict(WeightConfig()) == WEIGHTS
    assert dataclasses.asdict(GradientConfig()) == GRADIENTS


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        (GradientConfig, "bits", "did you mean inter_bits or intra_bits?"),
        (GradientConfig, "group_size", "did you mean inter_group_size or intra_group_size?"),
        (WeightConfig, "inter_bits", "did you mean bits?"),
        (TelemetryConfig, "every", "there are interval, sample_numel"),
        (SDP4BitConfig, "gradient", "did you mean gradients?"),
    ],
)
def test_an_unknown_setting_is_refused_with_similar_ones(kind: type, name: str, hint: str) -> None:
    with pytest.raises(TypeError) as error:
        kind(**{name: 4})
    assert str(error.value) == f"{kind.__name__} has no setting {name!r}: {hint}"
    with pytest.raises(TypeError, match="positional argument"):
        kind(4)


@pytest.mark.parametrize("name", ["SDP4Bit", "tlqhs", ""])
def test_unknown_preset_lists_all_names(name: str) -> None:
    with pytest.raises(ValueError, match="unknown preset") as error:
        SDP4BitConfig.preset(name)
    assert repr(name) in str(error.value)
    assert "use one of sdp4bit, sdp4bit-w3g3.5, sdp4bit-w2g3, sdp4bit-w2g2" in str(error.value)


@pytest.mark.parametrize("config", [WeightConfig(), GradientConfig(), TelemetryConfig(), SDP4BitConfig()])
def test_settings_are_frozen_and_hashable(config: object) -> None:
    field = dataclasses.fields(config)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, None)
    assert hash(config) == hash(dataclasses.replace(config))  # type: ignore[type-var]


@pytest.mark.parametrize(
    "cls", [SDP4BitConfig, WeightConfig, GradientConfig, TelemetryConfig, AuditConfig, AlertConfig]
)
def test_help_explains_every_setting_in_order(cls: Any) -> None:
    (section,) = inspect.getdoc(cls).split("Attributes:\n")[1:]
    assert re.findall(r"^    (\w+): ", section, re.MULTILINE) == [f.name for f in dataclasses.fields(cls)]


@pytest.mark.parametrize("cls", [WeightConfig, GradientConfig, TelemetryConfig, SDP4BitConfig])
def test_settings_are_keyword_only(cls: type) -> None:
    with pytest.raises(TypeError, match="positional"):
        cls(4)


@pytest.mark.parametrize("clip", [0, 0.09, 1.01, -0.6, True, "0.6", float("nan")])
def test_clips_that_leave_little_or_nothing_are_refused(clip: object) -> None:
    with pytest.raises(ValueError, match=r"must be from 0\.1 to 1 \(no clipping\), or None for") as error:
        WeightConfig(clip=clip)  # type: ignore[arg-type]
    assert f"weights.clip={clip!r}" in str(error.value)


def test_only_2_bit_differences_are_clipped_unasked() -> None:
    assert WeightConfig(bits=2).effective_clip == 0.6
    others: list[dict[str, object]] = [{"mode": "direct"}]
    others += [{"bits": bits} for bits in (3, 3.5, 4, 8, None)]
    for changed in others:
        assert WeightConfig(**{"bits": 2} | changed).effective_clip == 1.0  # type: ignore[arg-type]
        assert WeightConfig(**changed, clip=0.3).effective_clip == 0.3  # type: ignore[arg-type]
    assert WeightConfig(bits=2, clip=1).effective_clip == 1.0


def test_alerts_have_a_threshold_and_are_measured() -> None:
    with pytest.raises(ValueError, match="all thresholds of alerts are None"):
        AlertConfig(gradient_error=None, weight_error=None, weight_drift=None, nonfinite_groups=None)
    assert SDP4BitConfig().telemetry is None
    assert SDP4BitConfig(alerts=AlertConfig()).telemetry == TelemetryConfig()
    given = TelemetryConfig(interval=7)
    assert SDP4BitConfig(alerts=AlertConfig(), telemetry=given).telemetry == given


def test_automatic_thresholds_follow_the_bits_and_given_ones_do_not() -> None:
    auto, given = AlertConfig(), AlertConfig(gradient_error=0.5, weight_error=None)
    assert auto.thresholds == (0.3, 0.6, 0.05, 0)
    expected = {
        None: (0.3, 0.6),
        8: (0.3, 0.6),
        4: (0.3, 0.6),
        3.5: (0.45, 0.6),
        3: (0.7, 0.75),
        2: (2.1, 0.9),
    }
    for bits, thresholds in expected.items():
        assert auto.for_bits(gradients=bits, weights=bits).thresholds == (*thresholds, 0.05, 0)
        assert given.for_bits(gradients=bits, weights=bits) == given


CHOICE = ["Nearest", "", None, 1]
REFUSED: list[tuple[type, str, list[object], str]] = [
    *(
        (cls, name, [0, 1, 2.5, 5, 6, 32, -4, True, 4.0, "4"], "use one of 2, 3, 3.5, 4, 8, 16, or None")
        for cls, name in (
            (WeightConfig, "weights.bits"),
            (GradientConfig, "gradients.intra_bits"),
            (GradientConfig, "gradients.inter_bits"),
        )
    ),
    *(
        (cls, name, values, f"for example {suggested}")
        for cls, name in (
            (WeightConfig, "weights.group_size"),
            (GradientConfig, "gradients.intra_group_size"),
            (GradientConfig, "gradients.inter_group_size"),
        )
        for values, suggested in (
            ([0, -32, 1, 33, True, 128.0, "128", None], "32 or 64"),
            ([100], "96 or 128"),
            ([2047], "2016 or 2048"),
        )
    ),
    (WeightConfig, "weights.mode", CHOICE, "'difference', 'direct'"),
    (WeightConfig, "weights.replica", CHOICE, "'node', 'full'"),
    (GradientConfig, "gradients.intra_rounding", CHOICE, "'nearest', 'stochastic'"),
    (GradientConfig, "gradients.inter_rounding", CHOICE, "'nearest', 'stochastic'"),
    (GradientConfig, "gradients.pipeline_chunks", [0, -5, True, 1.0, "1"], "at least 1"),
    (GradientConfig, "gradients.start_step", [-1, True, 0.0, "1", None], "at least 0"),
    (GradientConfig, "gradients.min_numel", [-1, True, 0.0, "1", None], "at least 0"),
    (SDP4BitConfig, "seed", [-1, True, 0.0, "1", None], "at least 0"),
    (TelemetryConfig, "telemetry.interval", [0, -5, True, 1.0, "1", None], "at least 1"),
    (TelemetryConfig, "telemetry.sample_numel", [0, -5, True, 1.0, "1", None], "at least 1"),
    (GradientConfig, "gradients.hadamard", [0, 1, None, "yes"], "must be True or False"),
    (GradientConfig, "gradients.exact_own", [0, 1, None, "yes"], "must be True or False"),
    (GradientConfig, "gradients.inside_one_node", [0, 1, None, "yes"], "must be True or False"),
]


@pytest.mark.parametrize(("cls", "name", "values", "remedy"), REFUSED)
def test_bad_values_are_refused_with_their_name_and_what_works(
    cls: type, name: str, values: list[object], remedy: str
) -> None:
    for value in values:
        with pytest.raises(ValueError) as error:
            cls(**{name.rpartition(".")[2]: value})
        assert f"{name}={value!r}" in str(error.value)
        assert remedy in str(error.value)


def test_parts_in_each_others_place_are_an_error() -> None:
    with pytest.raises(ValueError, match="must be a WeightConfig or None"):
        SDP4BitConfig(weights=GradientConfig())  # type: ignore[arg-type]
