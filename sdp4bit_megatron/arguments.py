"""The reference implementation's command line on Megatron's argument parser."""

from __future__ import annotations

import argparse
from typing import Any

from sdp4bit.config import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.quantization.formats import with_scales
from sdp4bit.warn import warn_user

_WITHOUT_MEANING: dict[str, dict[str, Any]] = {
    "--no-async-tensor-model-parallel-allreduce": {"action": "store_true"},
    "--data-impl": {"type": str, "default": None},
}
"""Flags of the reference's launch scripts that Megatron has removed, with their parser options."""

_WEIGHTS = {
    "bits": ("--weight-quantization-bits", "bits per weight difference"),
    "group_size": ("--wq-group-size", "weight differences that share a scale"),
    "clip": ("--wq-clip", "fraction of a group's largest difference that the largest code represents"),
}
_GRADIENTS = {
    "intra_bits": ("--gradient-quantization-bits-intra", "bits per gradient value, intra-node"),
    "inter_bits": ("--gradient-quantization-bits-inter", "bits per gradient value, inter-node"),
    "intra_group_size": ("--gq-group-size-intra", "gradient values that share a scale, intra-node"),
    "inter_group_size": ("--gq-group-size-inter", "gradient values that share a scale, inter-node"),
    "hadamard": (
        "--hadamard-transform",
        "spread outliers of gradients over blocks of 32 values before quantization",
    ),
    "pipeline_chunks": (
        "--gradient-alltoall-pipeline",
        "chunks of a gradient whose two levels overlap; chosen by the row's size by default",
    ),
    "start_step": (
        "--gradients-quantization-start-iteration",
        "steps with gradients in full precision before quantization starts",
    ),
    "inside_one_node": (
        "--gradients-inside-one-node",
        "quantize gradients even if all ranks that share a parameter are on one node",
    ),
}
"""Flag and help text by field name."""

_REFERENCE = GradientConfig(intra_group_size=512, hadamard=False)
"""The reference parser's defaults; its scripts and the paper use groups of 128."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the reference implementation's flags, with its names and defaults, and return the parser.

    Pass it to Megatron as `extra_args_provider`. --gradients-inside-one-node and --wq-clip are this library's
    own. Flags of the reference's launch scripts that Megatron has removed are ignored, with a warning by
    :func:`from_args`.
    """
    group = parser.add_argument_group("quantized communication (SDP4Bit)")
    text = "send quantized differences of the weights instead of the weights"
    group.add_argument("--quantized-weights", action="store_true", help=text)
    for name, (flag, text) in _WEIGHTS.items():
        _add(group, flag, text, name=name, default=getattr(WeightConfig(), name))
    text = "reduce gradients by the two-level quantized exchange"
    group.add_argument("--quantized-gradients", action="store_true", help=text)
    for name, (flag, text) in _GRADIENTS.items():
        _add(group, flag, text, name=name, default=getattr(_REFERENCE, name))
    for flag, options in _WITHOUT_MEANING.items():
        try:
            group.add_argument(flag, help="ignored: this Megatron version has no such option", **options)
        except argparse.ArgumentError:
            continue  # this Megatron version still has the flag
    return parser


def _add(group: argparse._ArgumentGroup, flag: str, text: str, *, name: str, default: object) -> None:
    if isinstance(default, bool):
        group.add_argument(flag, action="store_true", default=default, help=text)
    else:
        choices = with_scales() if name.endswith("bits") else None
        kind = float if name == "clip" else _number if choices else int
        group.add_argument(flag, type=kind, choices=choices, default=default, help=text)


def _number(text: str) -> float:
    """Return an integer as one: of 4 and 4.0 settings take only the first."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _values(args: argparse.Namespace, flags: dict[str, tuple[str, str]]) -> dict[str, Any]:
    return {name: _value(args, flag) for name, (flag, _) in flags.items()}


def _value(args: argparse.Namespace, flag: str) -> Any:
    return getattr(args, flag.strip("-").replace("-", "_"))


def from_args(args: argparse.Namespace) -> SDP4BitConfig:
    """Create the settings from the flags of :func:`add_arguments`; the rounding seed is Megatron's `--seed`.

    Raises:
        ValueError: a value is not supported.
    """
    weights = gradients = None
    if args.quantized_weights:
        weights = WeightConfig(**_values(args, _WEIGHTS))
    if args.quantized_gradients:
        gradients = GradientConfig(**_values(args, _GRADIENTS))
    else:
        for flag, _ in _GRADIENTS.values():
            if _value(args, flag) is True:
                warn_user(f"{flag} has no effect without --quantized-gradients")
    if weights is None and gradients is None:
        warn_user("neither --quantized-weights nor --quantized-gradients is given: nothing is quantized")
    for flag in _WITHOUT_MEANING:
        if getattr(args, flag.strip("-").replace("-", "_"), None):
            warn_user(f"{flag} has no effect with this Megatron version")
    return SDP4BitConfig(weights=weights, gradients=gradients, seed=getattr(args, "seed", 0))
