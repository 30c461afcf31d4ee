"""The reference implementation's command line on Megatron's argument parser."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

from sdp4bit.config import GradientConfig, SDP4BitConfig, WeightConfig

_WITHOUT_MEANING: dict[str, dict[str, Any]] = {
    "--no-async-tensor-model-parallel-allreduce": {"action": "store_true"},
    "--data-impl": {"type": str, "default": None},
}
"""Flags of the reference's launch scripts that current Megatron no longer has, with how they parse."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser takes the reference implementation's flags, by its names and defaults; returns the parser.

    --hadamard-random-signs is this library's own.
    Goes to Megatron as `extra_args_provider`. Flags of the reference's launch scripts that current versions
    of Megatron have dropped are taken and ignored, with a warning by :func:`from_args`.
    """
    group = parser.add_argument_group("quantized communication (SDP4Bit)")
    bits = {"type": int, "choices": (4, 8)}
    flags: dict[str, dict[str, Any]] = {
        "--quantized-weights": {
            "action": "store_true",
            "help": "send quantized differences of the weights instead of the weights",
        },
        "--weight-quantization-bits": {**bits, "default": 4, "help": "bits per weight difference"},
        "--wq-group-size": {"type": int, "default": 2048, "help": "weight differences that share a scale"},
        "--quantized-gradients": {
            "action": "store_true",
            "help": "reduce gradients by the two-level quantized exchange",
        },
        "--gradient-quantization-bits-inter": {
            **bits,
            "default": 4,
            "help": "bits per gradient value between nodes",
        },
        "--gq-group-size-inter": {
            "type": int,
            "default": 128,
            "help": "gradient values that share a scale between nodes",
        },
        "--gradient-quantization-bits-intra": {
            **bits,
            "default": 8,
            "help": "bits per gradient value inside a node",
        },
        "--gq-group-size-intra": {
            "type": int,
            "default": 512,
            "help": "gradient values that share a scale inside a node",
        },
        "--gradients-quantization-start-iteration": {
            "type": int,
            "default": 0,
            "help": "optimizer steps with gradients in full precision before quantization starts",
        },
        "--gradient-alltoall-pipeline": {
            "type": int,
            "default": 1,
            "help": "slices of a gradient whose exchanges inside and between nodes overlap",
        },
        "--hadamard-transform": {
            "action": "store_true",
            "help": "spread outliers of gradients over blocks of 32 values before quantization",
        },
        "--hadamard-random-signs": {
            "action": "store_true",
            "help": "change random signs of the gradients, the same on all ranks, before that transform",
        },
    }
    for flag, options in flags.items():
        group.add_argument(flag, **options)
    for flag, options in _WITHOUT_MEANING.items():
        try:
            group.add_argument(flag, help="taken and ignored: this Megatron has no such choice", **options)
        except argparse.ArgumentError:
            continue  # a Megatron that still has the flag keeps its own meaning of it
    return parser


def from_args(args: argparse.Namespace) -> SDP4BitConfig:
    """Return what the flags of :func:`add_arguments` ask for; the rounding seed is Megatron's `--seed`.

    Raises:
        ValueError: a value that is not supported.
    """
    weights = gradients = None
    if args.quantized_weights:
        weights = WeightConfig(
            bits=args.weight_quantization_bits, group_size=args.wq_group_size, replica="full"
        )
    if args.quantized_gradients:
        gradients = GradientConfig(
            intra_bits=args.gradient_quantization_bits_intra,
            inter_bits=args.gradient_quantization_bits_inter,
            intra_group_size=args.gq_group_size_intra,
            inter_group_size=args.gq_group_size_inter,
            hadamard=args.hadamard_transform,
            random_signs=args.hadamard_random_signs,
            pipeline_chunks=args.gradient_alltoall_pipeline,
            start_step=args.gradients_quantization_start_iteration,
        )
    else:
        for flag in ("--hadamard-transform", "--hadamard-random-signs"):
            if getattr(args, flag.strip("-").replace("-", "_")):
                warnings.warn(f"sdp4bit: {flag} has no effect without --quantized-gradients", stacklevel=2)
    for flag in _WITHOUT_MEANING:
        if getattr(args, flag.strip("-").replace("-", "_"), None):
            warnings.warn(f"sdp4bit: {flag} has no effect on this Megatron", stacklevel=2)
    return SDP4BitConfig(weights=weights, gradients=gradients, seed=getattr(args, "seed", 0))
