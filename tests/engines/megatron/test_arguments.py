"""The reference implementation's command line on Megatron's parser. Layer: no process."""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings

import pytest

import sdp4bit
from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig


def config(line: str, parser: argparse.ArgumentParser | None = None) -> SDP4BitConfig:
    parser = argparse.ArgumentParser() if parser is None else parser
    assert sdp4bit.megatron.add_arguments(parser) is parser
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return sdp4bit.megatron.from_args(parser.parse_args(line.split()))


def test_defaults_quantize_nothing() -> None:
    assert config("") == SDP4BitConfig(weights=None, gradients=None)


def test_defaults_of_each_part_are_the_reference_implementations() -> None:
    gradients = GradientConfig(intra_group_size=512, hadamard=False)
    assert config("--quantized-weights --quantized-gradients") == SDP4BitConfig(gradients=gradients)


def test_fewer_bits_than_4() -> None:
    line = (
        "--quantized-weights --weight-quantization-bits 2 --wq-group-size 128 --wq-clip 0.5 "
        "--quantized-gradients --gradient-quantization-bits-inter 3 --gq-group-size-intra 128 "
        "--hadamard-transform"
    )
    weights = WeightConfig(bits=2, group_size=128, clip=0.5)
    assert config(line) == SDP4BitConfig(weights=weights, gradients=GradientConfig(inter_bits=3))


def test_official_script() -> None:
    line = (
        "--quantized-weights --weight-quantization-bits 4 --wq-group-size 2048 --quantized-gradients "
        "--gradient-quantization-bits-inter 4 --gq-group-size-inter 128 --gradient-quantization-bits-intra 8 "
        "--gq-group-size-intra 128 --hadamard-transform"
    )
    assert config(line) == SDP4BitConfig()


def test_every_flag_takes_effect() -> None:
    line = (
        "--quantized-weights --weight-quantization-bits 8 --wq-group-size 64 --quantized-gradients "
        "--gradient-quantization-bits-inter 8 --gq-group-size-inter 256 --gradient-quantization-bits-intra 4 "
        "--gq-group-size-intra 32 --hadamard-transform "
        "--gradients-quantization-start-iteration 7 --gradient-alltoall-pipeline 3 "
        "--gradients-inside-one-node --seed 5"
    )
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1234)
    gradients = GradientConfig(
        inter_bits=8,
        inter_group_size=256,
        intra_bits=4,
        intra_group_size=32,
        start_step=7,
        pipeline_chunks=3,
        inside_one_node=True,
    )
    weights = WeightConfig(bits=8, group_size=64)
    assert config(line, parser) == SDP4BitConfig(weights=weights, gradients=gradients, seed=5)


@pytest.mark.parametrize("line", ["--quantized-weights --wq-group-size 33", "--seed -1"])
def test_unsupported_values_are_refused(line: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    with pytest.raises(ValueError, match=r"group_size=33|seed=-1"):
        config(line, parser)


def test_unsupported_bits_are_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config("--weight-quantization-bits 5")
    assert "--weight-quantization-bits" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "--no-async-tensor-model-parallel-allreduce",
        "--data-impl mmap",
        "--hadamard-transform",
    ],
)
def test_flags_without_effect_are_taken_and_say_so(line: str) -> None:
    args = sdp4bit.megatron.add_arguments(argparse.ArgumentParser()).parse_args(line.split())
    with pytest.warns(UserWarning, match=line.split(maxsplit=1)[0]):
        assert sdp4bit.megatron.from_args(args) == SDP4BitConfig(weights=None, gradients=None)


def test_flag_that_megatron_still_has_keeps_its_meaning() -> None:
    parser = argparse.ArgumentParser()
    flag = "--no-async-tensor-model-parallel-allreduce"
    parser.add_argument(flag, action="store_false", dest="async_tensor_model_parallel_allreduce")
    assert config(flag, parser) == SDP4BitConfig(weights=None, gradients=None)
    assert parser.parse_args([flag]).async_tensor_model_parallel_allreduce is False


def test_short_name_imports_without_megatron_core() -> None:
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "import sdp4bit.megatron, sdp4bit\n"
        "from sdp4bit.megatron import quantize_communication\n"
        "assert sdp4bit.megatron.quantize_communication is quantize_communication\n"
        "assert quantize_communication is not sdp4bit.quantize_communication"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
