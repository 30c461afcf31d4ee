"""Strategies with options: how `compare --strategies` is read, and what it refuses. No process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sdp4bit_lab.common.settings import SettingError, option_flags
from sdp4bit_lab.compare.config import CompareConfig
from sdp4bit_lab.compare.variants import parse_variant, parse_variants
from sdp4bit_lab.pretrain.config.communication import CommunicationConfig
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig

NONE = CommunicationConfig()


def labels(text: str, shared: CommunicationConfig = NONE) -> list[str]:
    return [variant.label for variant in parse_variants(text, shared=shared)]


def test_options_stand_behind_their_strategy():
    quantized, plain = parse_variants(
        "sdp4bit:wq-group-size=512:gradient-rounding-inter=nearest, sdp4bit", shared=NONE
    )
    config = quantized.quantization(seed=3)
    assert config.seed == 3
    assert config.weights is not None and config.weights.group_size == 512
    assert config.gradients is not None and config.gradients.inter_rounding == "nearest"
    assert config.gradients.intra_rounding == "stochastic"
    assert plain.quantization(seed=3) != config


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (" qwd : wq_group_size = 0512 ", "qwd:wq-group-size=512"),
        ("tlq-hs:inter-rounding=nearest", "tlq-hs:gradient-rounding-inter=nearest"),
        ("tlq-hs:pipeline-chunks=2", "tlq-hs:gradient-alltoall-pipeline=2"),
        ("tlq:--hadamard-transform", "tlq:hadamard-transform"),
        (
            "sdp4bit:gq-group-size-inter=64:replica=full",
            "sdp4bit:replica=full:gq-group-size-inter=64",
        ),
    ],
)
def test_a_label_has_each_option_s_own_name_in_a_fixed_order(text, label):
    assert labels(text) == [label]
    assert labels(label) == [label]


def test_every_communication_option_is_understood():
    names = {name for flags in option_flags(CommunicationConfig).values() for name in flags}
    for flag in names:
        if flag in ("--quantized-weights", "--quantized-gradients"):
            continue
        # The only switch that the strategy does not have already.
        if flag == "--gradients-inside-one-node":
            assert labels(f"sdp4bit:{flag}") == [f"sdp4bit:{flag.removeprefix('--')}"]
            continue
        with pytest.raises(SettingError, match=r"needs a value|changes nothing"):
            labels(f"sdp4bit:{flag}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extended(CommunicationConfig):
    random_order: bool = False
    """A switch with both forms."""
    share: float | None = None
    """A number."""
    checked: bool | None = None
    """Undecided when not given."""

    def resolve(self, strategy, *, seed):
        return super().resolve(strategy, seed=seed), self.random_order, self.share, self.checked


def test_an_option_that_is_added_to_the_communication_s_settings_is_part_of_the_grammar(monkeypatch):
    monkeypatch.setattr("sdp4bit_lab.compare.variants.CommunicationConfig", Extended)
    shared = Extended(random_order=True)
    text = "qwd:no-random-order,qwd:share=0.5,qwd:checked=True:share=2"
    assert labels(text, shared) == ["qwd:no-random-order", "qwd:share=0.5", "qwd:share=2.0:checked=True"]
    variants = parse_variants(text, shared=shared)
    assert [variant.quantization(seed=0)[1:] for variant in variants] == [
        (False, None, None),
        (True, 0.5, None),
        (True, 2.0, True),
    ]


def test_shared_options_hold_where_the_strategy_has_a_use_for_them_and_its_own_win():
    shared = CommunicationConfig(weight_group_size=512)
    tlq, qwd, own = parse_variants("tlq,qwd,qwd:wq-group-size=2048", shared=shared)
    assert tlq.communication.weight_group_size is None
    assert [qwd.communication.weight_group_size, own.communication.weight_group_size] == [512, 2048]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "give at least one of baseline, qw"),
        ("fast", "'fast' is unknown: use any of baseline, qw"),
        ("qwd:wq-group=64", "'wq-group' is not an option of communication: did you mean wq-group-size"),
        ("qwd:steps=64", "'steps' is not an option of communication: .*sdp4bit pretrain --help"),
        ("qwd:wq-group-size=many", r"wq-group-size=many is not possible: give \{None\}\|INT"),
        ("qwd:wq-group-size", "wq-group-size needs a value"),
        ("qwd:wq-group-size=33", "must be a positive multiple of 32"),
        ("qwd:weight-quantization-bits=5", r"=5 is not possible: give \{None,2,3,4,8\}"),
        ("tlq:gradient-rounding-inter=up", r"=up is not possible: give \{None,nearest,stochastic,dither\}"),
        ("tlq:hadamard-transform=yes", "is a switch: write it without a value"),
        ("qwd:replica=full:replica=node", "gives replica twice"),
        ("qwd:quantized-gradients", "the strategy says what is quantized"),
        ("tlq:wq-group-size=64", "no effect with strategy tlq, which does not quantize weights: .* use qw, "),
        ("baseline:hadamard-transform", "no effect with strategy baseline"),
        ("qwd:wq-group-size=2048", "changes nothing, as qwd has that already: leave it out, or give another"),
        ("tlq-hs:hadamard-transform", "changes nothing, as tlq-hs has that already: leave it out$"),
        ("qwd:replica=full,qwd: replica=full", "qwd:replica=full is given twice"),
        ("tlq-hs,tlq:hadamard-transform", "tlq-hs and tlq:hadamard-transform are the same settings"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_way_out(text, message):
    with pytest.raises(SettingError, match=message) as error:
        parse_variants(text, shared=NONE)
    assert str(error.value).startswith("--strategies")


def test_folders_have_safe_names():
    config = CompareConfig(strategies="tlq:hadamard-transform")
    assert config.runs()[0].logging.out == Path("runs/compare/tlq+hadamard-transform-seed1")
    variant = parse_variant("qwd:wq-group-size=512:replica=full", shared=NONE)
    assert variant.folder_name == "qwd+wq-group-size=512+replica=full"


def test_the_baseline_is_one_of_the_strategies():
    assert CompareConfig(strategies="baseline,qw").baseline_label == "baseline"
    assert CompareConfig(strategies="qwd,qw").baseline_label is None
    config = CompareConfig(strategies="qwd,qwd:wq-group-size=512", baseline="qwd:wq_group_size=512")
    assert config.baseline_label == "qwd:wq-group-size=512"
    with pytest.raises(SettingError, match=r"--baseline: tlq is not among .* choose one of qwd, qw$"):
        CompareConfig(strategies="qwd,qw", baseline="tlq")
    with pytest.raises(SettingError, match="--baseline: 'fast' is unknown"):
        CompareConfig(baseline="fast")


def test_settings_that_only_pretrain_or_training_has_a_use_for_are_refused():
    with pytest.raises(SettingError, match="--exit-interval is for `pretrain`"):
        CompareConfig(training=TrainingConfig(exit_interval=5))
    with pytest.raises(SettingError, match="--wq-group-size has no effect with any of the strategies"):
        CompareConfig(
            strategies="qwd:wq-group-size=64", communication=CommunicationConfig(weight_group_size=32)
        )
    with pytest.raises(SettingError, match="--merge needs --out"):
        CompareConfig(merge=(Path("a"),))
    out = Path("merged")
    with pytest.raises(SettingError, match="--merge trains nothing, so --seeds has no effect"):
        CompareConfig(merge=(Path("a"),), out=out, seeds="1,2")
    with pytest.raises(SettingError, match="--merge trains nothing, so --num-layers has no effect"):
        CompareConfig(merge=(Path("a"),), out=out, model=ModelConfig(layers=2))
    CompareConfig(merge=(Path("a"), Path("b")), out=out, baseline="tlq")
