"""Flags of the reference implementation, files of options, and what they turn into."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sdp4bit import AlertConfig, AuditConfig, SDP4BitConfig, TelemetryConfig
from sdp4bit_lab.cli import COMMANDS, main
from sdp4bit_lab.common.options import options_of
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.common.strategies import STRATEGIES
from sdp4bit_lab.pretrain.config.communication import CommunicationConfig
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.config.reference_flags import described_flags
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


# Flags of the reference's scripts, with the values that they pass.
_OWN = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --train-iters 80000
    --max-position-embeddings 2048 --lr 0.0003 --lr-decay-iters 70000 --lr-decay-style cosine --min-lr 0.00003
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-08 --weight-decay .1 --lr-warmup-fraction 0.01
    --clip-grad 1.0 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --micro-batch-size 8
    --global-batch-size 256 --log-interval 100 --save-interval 5002 --eval-interval 100 --eval-iters 10
    --log-throughput --recompute-granularity selective
"""
_IN_ALL = """
    --loss-scale 0 --loss-scale-window 1000 --hysteresis 2 --min-loss-scale 1 --bf16 --timing-log-level 2
    --use-distributed-optimizer --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard
    --tensorboard-log-interval 1 --wandb-project NeurIPS --wandb-save-dir wandb --wandb-exp-name 125M-grad_HT
    --no-async-tensor-model-parallel-allreduce
"""
_ACCURACY = "--recompute-activations --distributed-backend nccl"
_SPEED = f"--mock-data --data-path a b --exit-interval 200 {' '.join(PAPER_FLAGS)}"
_NEWEST = """
    --use-flash-attn --overlap-grad-reduce --overlap-param-gather --bucket-size 40000000 --quantized-weights
    --mock-data --distributed-backend cpu:gloo,cuda:nccl --dropout 0.1
"""


@pytest.mark.parametrize(
    ("given", "own", "noted"),
    [
        (_ACCURACY, "--strategy baseline", "--strategy is baseline"),
        (_SPEED, _SPEED.replace("--data-path a b", ""), "--data-path is not read"),
        (_NEWEST, "--quantized-weights --mock-data --dropout 0.1", "no effect"),
    ],
)
def test_a_script_of_the_reference_runs_with_one_line(given, own, noted, capsys):
    config = pretrain_config(*_OWN.split(), *_IN_ALL.split(), *given.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert config == pretrain_config(*_OWN.split(), *own.split())
    assert noted in line and ("dropout is 0" in line) == ("--dropout" not in given)
    assert {flag for flag in _IN_ALL.split() if flag.startswith("--")} <= set(line.replace(",", " ").split())


def test_mock_data_wins_over_files_with_a_note(capsys):
    for flags in (["--mock-data", "--data-path", "0.5", "a", "b"], ["--data_path=a", "--mock-data"]):
        config = pretrain_config(*flags, "--seed", "3")
        assert config == pretrain_config("--mock-data", "--seed", "3")
        assert capsys.readouterr().err == "sdp4bit: --data-path is not read with --mock-data\n"


def test_every_reference_flag_has_its_outcome(capsys):
    arguments: dict[str, list[str]] = {}
    for flags, outcome, reason in described_flags():
        for flag, value in re.findall(r"(--\S+)((?: [^-\s]\S*)?)", flags):
            first = value.strip().split("|")[0]
            assert outcome != "refused" or not first
            values = {"": [], "N": ["0.5"], "N...": ["1", "2"]}.get(first, [first])
            arguments.setdefault(outcome, []).extend([flag, *values])
            if first not in ("", "N", "N..."):
                arguments.setdefault("wrong", []).append(f"{flag}=other")
            if outcome == "sets an option":
                assert pretrain_config(flag, *values) == pretrain_config(*reason.split(), *values)
    given = {argument for values in arguments.values() for argument in values}
    assert len(given) > 150
    assert not given & {flag for each in options_of(PretrainConfig) for flag in each.flags}

    plain = pretrain_config()
    capsys.readouterr()
    assert pretrain_config(*arguments["accepted with this value"]) == plain
    assert capsys.readouterr().err == ""
    assert pretrain_config(*arguments["no effect"], "--strategy", "sdp4bit") == replace(
        plain, strategy="sdp4bit"
    )
    noted = capsys.readouterr().err.split()
    for wrong, message in (("refused", "is refused: "), ("wrong", "is refused, only ")):
        with pytest.raises(SettingError) as error:
            pretrain_config(*arguments[wrong])
        for argument in arguments[wrong]:
            assert f"{argument.replace('=', ' ')} {message}" in str(error.value)
    for flag in arguments["no effect"]:
        assert not flag.startswith("--") or flag in noted or f"{flag}," in noted


def test_all_problems_with_flags_are_one_error(capsys):
    refused = "--swiglu --rampup-batch-size 16 16 1000 --optimizer sgd --hysteresis --bf16"
    assert main(["pretrain", *refused.split(), "--stategy", "sdp4bit", "--frobnicate", "3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for part in (
        "--swiglu is refused: this program trains GPT-2's architecture",
        "--rampup-batch-size is refused: the batch size is constant",
        "--optimizer sgd is refused, only adam is accepted",
        "--hysteresis needs a value",
        "has no option --stategy (did you mean --strategy?), --frobnicate: see --help-all",
    ):
        assert part in line


def test_values_of_reference_flags_are_compared_as_numbers_and_with_the_model():
    sizes = ["--hidden-size", "256", "--num-attention-heads", "4"]
    equal = "--init-method-std 2e-2 --norm-epsilon 0.00001 --lr_warmup_init 0.0 --kv-channels=64"
    same = pretrain_config(*sizes, *equal.split(), "--ffn-hidden-size", "1024")
    assert same == pretrain_config(*sizes)
    with pytest.raises(SettingError, match=r"-hidden-size 512 is refused, only 1024 .*; --kv-channels 32 is"):
        pretrain_config(*sizes, "--ffn-hidden-size", "512", "--kv-channels", "32")
    both = pretrain_config("--attention-dropout", "0.1", "--hidden-dropout", "1e-1")
    assert both == pretrain_config("--dropout", "0.1")
    with pytest.raises(SettingError, match=r"--attention-dropout 0\.1 and --hidden-dropout 0 differ"):
        pretrain_config("--attention-dropout", "0.1", "--hidden-dropout", "0")


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
        ("a.yaml", "- 1", "must contain a mapping of options, not a sequence"),
        ("a.toml", "a = ", "a.toml cannot be read"),
        ("a.yaml", "lr: 1\nmodel:\n  lr: 2", "a.yaml, line 3: lr is given more than once"),
        ("a.yaml", "lr: 1\nlr: 2", "a.yaml, line 2: lr is given more than once"),
        ("a.yaml", "lr: 1\nlearning_rate: 2", "line 2: learning_rate is given more than once (as lr)"),
        (
            "a.toml",
            "compile = true\n[x]\nno-compile = true",
            "no-compile is given more than once (as compile)",
        ),
        ("a.toml", "lr = 1\nlr = 2", "a.toml cannot be read"),
        ("a.yaml", "compile: yes", "line 1: compile must be true or false, not yes"),
        ("a.yaml", "bf16: 'true'", "line 1: bf16 must be true or false, not true"),
        ("a.yaml", "lr: [[1]]", "line 1: lr: a list must contain values, not lists"),
        ("a.yaml", "data-path: [a, --seed]", "line 1: data-path contains the option --seed"),
        ("a.yaml", "a: &a {b: *a}", "a section is repeated by an alias"),
        ("a.yaml", "? [a]\n: 1", "line 1: a name is expected, not a sequence"),
        ("a.yaml", "[" * 5000, "a.yaml cannot be read"),
        ("a.yaml", "lrr:", "has no option --lrr"),
        ("a.json", "{}", "must end in .yaml, .yml or .toml"),
    ):
        (tmp_path / name).write_text(text)
        assert main(["pretrain", "--config-file", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "a.yaml").write_text("num-layrs: 2")
    assert main(["pretrain", "--config-file", str(tmp_path / "a.yaml")]) == 2
    assert "has no option --num-layrs (did you mean --num-layers?)" in capsys.readouterr().err


def test_communication_settings_restricted_to_a_strategy():
    settings = CommunicationConfig(weight_group_size=64, inter_group_size=256, hadamard_transform=True)
    assert settings.restricted_to("qwd") == CommunicationConfig(weight_group_size=64)
    assert settings.restricted_to("tlq") == CommunicationConfig(inter_group_size=256, hadamard_transform=True)
    assert settings.restricted_to("sdp4bit") == settings
