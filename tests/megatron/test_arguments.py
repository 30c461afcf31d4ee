"""The reference implementation's command line on Megatron's parser. Layer: no process."""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings

import pytest

import sdp4bit_megatron
from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig

NOTHING = SDP4BitConfig(weights=None, gradients=None)


def config(line: str) -> SDP4BitConfig:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    assert sdp4bit_megatron.add_arguments(parser) is parser
    return sdp4bit_megatron.from_args(parser.parse_args(line.split()))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--quantized-weights --quantized-gradients",
            SDP4BitConfig(gradients=GradientConfig(intra_group_size=512, hadamard=False)),
        ),
        # The official script.
        (
            "--quantized-weights --weight-quantization-bits 4 --wq-group-size 2048 --quantized-gradients "
            "--gradient-quantization-bits-inter 4 --gq-group-size-inter 128 "
            "--gradient-quantization-bits-intra 8 --gq-group-size-intra 128 --hadamard-transform",
            SDP4BitConfig(),
        ),
        # Every flag, with values that are not the defaults.
        (
            "--quantized-weights --weight-quantization-bits 2 --wq-group-size 64 --wq-clip 0.5 "
            "--quantized-gradients --gradient-quantization-bits-inter 3.5 --gq-group-size-inter 256 "
            "--gradient-quantization-bits-intra 4 --gq-group-size-intra 32 --hadamard-transform "
            "--gradients-quantization-start-iteration 7 --gradient-alltoall-pipeline 3 "
            "--gradients-inside-one-node --seed 5",
            SDP4BitConfig(
                weights=WeightConfig(bits=2, group_size=64, clip=0.5),
                gradients=GradientConfig(
                    inter_bits=3.5,
                    inter_group_size=256,
                    intra_bits=4,
                    intra_group_size=32,
                    start_step=7,
                    pipeline_chunks=3,
                    inside_one_node=True,
                ),
                seed=5,
            ),
        ),
    ],
)
def test_flags_become_settings(line: str, expected: SDP4BitConfig) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config(line) == expected


def test_unsupported_values_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("--quantized-weights --wq-group-size 33", "--seed -1"):
        with pytest.raises(ValueError, match=r"group_size=33|seed=-1"):
            config(line)
    with pytest.raises(SystemExit):
        config("--weight-quantization-bits 5")
    assert "--weight-quantization-bits" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    ["--no-async-tensor-model-parallel-allreduce", "--data-impl mmap", "--hadamard-transform"],
)
def test_flags_without_effect_are_taken_with_a_warning(line: str) -> None:
    with pytest.warns(UserWarning, match=line.split(maxsplit=1)[0]):
        assert config(line) == NOTHING


def test_a_configuration_that_quantizes_nothing_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="neither --quantized-weights nor --quantized-gradients"):
        assert config("") == NOTHING


def test_flag_that_megatron_still_has_keeps_its_meaning() -> None:
    parser = argparse.ArgumentParser()
    flag = "--no-async-tensor-model-parallel-allreduce"
    parser.add_argument(flag, action="store_false", dest="async_tensor_model_parallel_allreduce")
    args = sdp4bit_megatron.add_arguments(parser).parse_args([flag, "--quantized-weights"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sdp4bit_megatron.from_args(args).gradients is None
    assert args.async_tensor_model_parallel_allreduce is False


def test_the_adapter_imports_without_megatron_core() -> None:
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "import sdp4bit_megatron, sdp4bit\n"
        "from sdp4bit_megatron import quantize_communication\n"
        "assert sdp4bit_megatron.quantize_communication is quantize_communication\n"
        "assert quantize_communication is not sdp4bit.quantize_communication"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
