"""Flags of the reference implementation, files of options, and what they turn into."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdp4bit import AlertConfig, AuditConfig, SDP4BitConfig, TelemetryConfig
from sdp4bit_lab.cli import COMMANDS, main
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.common.strategies import STRATEGIES
from sdp4bit_lab.pretrain.config.communication import CommunicationConfig
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig

PAPER_FLAGS = [
    "--quantized-weights",
    *("--weight-quantization-bits", "4", "--wq-group-size", "2048"),
    "--quantized-gradients",
    *("--gradient-quantization-bits-inter", "4", "--gq-group-size-inter", "128"),
    *("--gradient-quantization-bits-intra", "8", "--gq-group-size-intra", "128"),
    "--hadamard-transform",
    *("--gradient-alltoall-pipeline", "8"),
]


def pretrain_config(*arguments: str) -> PretrainConfig:
    config = COMMANDS["pretrain"].parse(arguments)
    assert isinstance(config, PretrainConfig)
    return config


def test_flags_of_the_reference_scripts_make_the_paper_s_method_and_have_its_defaults():
    expected = STRATEGIES["sdp4bit-paper"]
    gradients = replace(expected.gradients, pipeline_chunks=8)
    expected = replace(expected, telemetry=TelemetryConfig(), seed=1234, gradients=gradients)
    assert pretrain_config(*PAPER_FLAGS).quantization == expected
    config = pretrain_config("--quantized-weights", "--quantized-gradients").quantization
    assert (config.weights.bits, config.weights.group_size, config.weights.mode) == (4, 2048, "difference")
    gradients = config.gradients
    assert (gradients.inter_bits, gradients.inter_group_size) == (4, 128)
    assert (gradients.intra_bits, gradients.intra_group_size) == (8, 512)
    assert (gradients.hadamard, gradients.pipeline_chunks, gradients.start_step) == (False, None, 0)


def test_nothing_given_is_the_default_of_the_library():
    config = pretrain_config()
    assert config.strategy_name == "sdp4bit"
    assert config.quantization == replace(
        SDP4BitConfig.preset("sdp4bit"), telemetry=TelemetryConfig(), seed=1234
    )


def test_flags_that_make_a_strategy_have_its_name_and_others_are_custom():
    assert [PretrainConfig(strategy=name).strategy_name for name in STRATEGIES] == list(STRATEGIES)
    assert pretrain_config("--quantized-weights").strategy_name == "qwd"
    assert pretrain_config("--quantized-weights", "--wq-group-size", "64").strategy_name == "custom"
    assert pretrain_config(*PAPER_FLAGS[:-2]).strategy_name == "sdp4bit-paper"
    assert pretrain_config(*PAPER_FLAGS).strategy_name == "sdp4bit-paper"
    assert pretrain_config("--strategy", "tlq", "--hadamard-transform").strategy_name == "tlq-hs"
    assert pretrain_config("--strategy", "tlq", "--gq-group-size-inter", "64").strategy_name == "tlq"
    assert COMMANDS["plan"].parse(PAPER_FLAGS).strategy_name == "sdp4bit-paper"


def test_a_strategy_with_details_changed():
    config = pretrain_config(
        "--strategy", "tlq", "--hadamard-transform", "--gq-group-size-intra", "256",
        "--gradient-rounding-inter", "nearest", "--gradients-quantization-start-iteration", "7",
    ).quantization  # fmt: skip
    gradients = STRATEGIES["tlq-hs"].gradients
    expected = replace(gradients, intra_group_size=256, inter_rounding="nearest", start_step=7)
    assert (config.weights, config.gradients) == (None, expected)


def test_options_of_reliability_become_the_library_s_settings():
    nothing = pretrain_config().quantization
    assert nothing.audit == AuditConfig() and nothing.alerts is None
    assert pretrain_config("--audit-interval", "0").quantization.audit is None
    given = pretrain_config(
        *("--audit-interval", "7", "--audit-on-mismatch", "resync", "--alerts", "warn"),
    ).quantization
    assert given.audit == AuditConfig(interval=7, on_mismatch="resync")
    assert given.alerts == AlertConfig()


def test_micro_batches_follow_from_the_global_batch():
    config = PretrainConfig(training=TrainingConfig(global_batch_size=64, micro_batch_size=4))
    assert [config.micro_batches(ranks) for ranks in (1, 2, 8, 16)] == [16, 8, 2, 1]
    with pytest.raises(SettingError, match="64 is not a multiple of 12, --micro-batch-size 4 on 3"):
        config.micro_batches(3)


def test_reference_flags_without_effect_are_taken_and_explained(capsys):
    given = ["--fp16", "--bf16", "--loss_scale=8", "--hysteresis", "2", "--use-distributed-optimizer"]
    config = pretrain_config(*given, "--train-iters", "7", "--data-impl", "mmap")
    assert config == pretrain_config("--train-iters", "7")
    lines = capsys.readouterr().err.splitlines()
    flags = ["--fp16", "--bf16", "--loss-scale", "--hysteresis", "--use-distributed-optimizer", "--data-impl"]
    assert [line.split()[1] for line in lines] == flags
    assert all("has no effect here. " in line for line in lines)
    assert main(["pretrain", "--position-embedding-type", "rope"]) == 2
    assert "--position-embedding-type rope is not supported, only learned_absolute" in capsys.readouterr().err


YAML = """
model:
  preset: 125M
  num-layers: 2
train_iters: 7
quantized-weights: true
tensorboard: false
lr: 1e-3
tensorboard-dir:
"""
TOML = """
train_iters = 7
quantized-weights = true
tensorboard = false
lr = 1e-3
[model]
preset = "125M"
num-layers = 2
"""


@pytest.mark.parametrize(("name", "text"), [("run.yaml", YAML), ("run.toml", TOML)])
def test_a_file_holds_options_and_the_command_line_wins(name, text, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    expected = pretrain_config(
        "--preset", "125M", "--num-layers", "2", "--train-iters", "7", "--quantized-weights",
        "--no-tensorboard", "--lr", "1e-3",
    )  # fmt: skip
    assert pretrain_config("--config-file", str(path)) == expected
    changed = pretrain_config("--train-iters", "9", f"--config-file={path}")
    assert changed == replace(expected, training=replace(expected.training, steps=9))


def test_a_wrong_file_is_named_with_its_key(tmp_path, capsys):
    for name, text, message in (
        ("a.yaml", "a: [", "a.yaml cannot be read"),
        ("a.yaml", "- 1", "must contain a mapping of options, not list"),
        ("a.toml", "a = ", "a.toml cannot be read"),
        ("a.yaml", "lr: 1\nmodel:\n  lr: 2", "lr is given more than once"),
        ("a.json", "{}", "must end in .yaml, .yml or .toml"),
    ):
        (tmp_path / name).write_text(text)
        assert main(["pretrain", "--config-file", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "a.yaml").write_text("num-layrs: 2")
    assert main(["pretrain", "--config-file", str(tmp_path / "a.yaml")]) == 2
    assert "has no option --num-layrs: did you mean --num-layers?" in capsys.readouterr().err


def test_communication_settings_restricted_to_a_strategy():
    settings = CommunicationConfig(weight_group_size=64, inter_group_size=256, hadamard_transform=True)
    assert settings.restricted_to("qwd") == CommunicationConfig(weight_group_size=64)
    assert settings.restricted_to("tlq") == CommunicationConfig(inter_group_size=256, hadamard_transform=True)
    assert settings.restricted_to("sdp4bit") == settings
