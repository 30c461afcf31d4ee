"""Strategies with options: the grammar of `compare --strategies`, and its errors. No process."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.compare.config import CompareConfig
from sdp4bit_lab.compare.variants import parse_variants
from sdp4bit_lab.pretrain.config.communication import CommunicationConfig
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig

NONE = CommunicationConfig()


def test_options_stand_behind_their_strategy():
    quantized, plain = parse_variants(
        "sdp4bit:wq-group-size=512:gradient-rounding-inter=nearest, sdp4bit", shared=NONE
    )
    config = quantized.communication.resolve(quantized.strategy, seed=3)
    assert config.seed == 3
    assert config.weights is not None and config.weights.group_size == 512
    assert config.gradients is not None and config.gradients.inter_rounding == "nearest"
    assert config.gradients.intra_rounding == "stochastic"
    assert plain.communication.resolve(plain.strategy, seed=3) != config


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (" qwd : wq_group_size=0512 ", "qwd:wq-group-size=512"),
        ("tlq-hs:pipeline-chunks=2", "tlq-hs:gradient-alltoall-pipeline=2"),
        ("tlq:--hadamard-transform", "tlq:hadamard-transform"),
        ("sdp4bit:gq-group-size-inter=64:replica=full", "sdp4bit:replica=full:gq-group-size-inter=64"),
    ],
)
def test_a_label_has_each_option_s_own_name_in_a_fixed_order(text, label):
    for given in (text, label):
        (variant,) = parse_variants(given, shared=NONE)
        assert variant.label == label
        assert ":" not in variant.folder_name and "/" not in variant.folder_name


def test_shared_options_apply_to_strategies_that_use_them_and_a_variant_s_own_win():
    shared = CommunicationConfig(weight_group_size=512)
    tlq, qwd, own = parse_variants("tlq,qwd,qwd:wq-group-size=2048", shared=shared)
    assert tlq.communication.weight_group_size is None
    assert [qwd.communication.weight_group_size, own.communication.weight_group_size] == [512, 2048]
    assert [qwd.label, own.label] == ["qwd", "qwd:wq-group-size=2048"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "give at least one of sdp4bit, "),
        ("fast", "'fast' is unknown: use one of sdp4bit, "),
        ("qwd:wq-group-size=33", "must be a positive multiple of 32"),
        ("qwd:quantized-gradients", "conflicts with --quantized-weights"),
        (
            "tlq:wq-group-size=64",
            "no effect with strategy tlq, which does not quantize weights: .* use sdp4bit, ",
        ),
        ("qwd:replica=full,qwd: replica=full", "qwd:replica=full is given twice"),
    ],
)
def test_contradictions_are_refused_with_the_way_out(text, message):
    with pytest.raises(SettingError, match=message) as error:
        parse_variants(text, shared=NONE)
    assert str(error.value).startswith("--strategies")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qwd:steps=64", "qwd has no option --steps: "),
        ("qwd:wq-group-size=many", "--wq-group-size many: an integer is expected"),
    ],
)
def test_options_are_parsed_as_those_of_pretrain(text, message):
    with pytest.raises(SettingError, match=f"--strategies: {text}: {message}"):
        parse_variants(text, shared=NONE)


def test_the_baseline_is_one_of_the_strategies():
    config = CompareConfig(strategies="qwd,qwd:wq-group-size=512", baseline="qwd:wq_group_size=512")
    labels = [variant.label for variant, _ in config.runs()]
    assert config.choose_baseline(labels) == "qwd:wq-group-size=512"
    assert CompareConfig().choose_baseline(["baseline", "qw"]) == "baseline"
    assert CompareConfig().choose_baseline(["qwd", "qw"]) is None
    with pytest.raises(SettingError, match=r"--baseline: tlq is not among .* use one of qwd, qw$"):
        CompareConfig(strategies="qwd,qw", baseline="tlq")
    with pytest.raises(SettingError, match="--baseline: 'fast' is unknown"):
        CompareConfig(baseline="fast")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training": TrainingConfig(exit_interval=5)}, "--exit-interval is for `pretrain`"),
        (
            {"strategies": "tlq", "communication": CommunicationConfig(weight_group_size=32)},
            "--wq-group-size has no effect on any of the strategies",
        ),
        ({"seeds": "1,1"}, "different integers"),
        ({"merge": (Path("a"),)}, "--merge needs --out"),
        (
            {"merge": (Path("a"),), "out": Path("b"), "model": ModelConfig(layers=2)},
            "use it with --out and --baseline only",
        ),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        CompareConfig(**settings)
