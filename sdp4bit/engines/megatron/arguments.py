"""The reference implementation's command line on Megatron's argument parser."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import Field, fields
from typing import Any

from sdp4bit.config import QUANTIZED_BITS, GradientConfig, SDP4BitConfig, WeightConfig

_WITHOUT_MEANING: dict[str, dict[str, Any]] = {
    "--no-async-tensor-model-parallel-allreduce": {"action": "store_true"},
    "--data-impl": {"type": str, "default": None},
}
"""Flags of the reference's launch scripts that current Megatron no longer has, with how they parse."""


_REFERENCE = GradientConfig(intra_group_size=512, hadamard=False)
"""The reference parser's defaults; its scripts and the paper use groups of 128."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let the parser take the reference implementation's flags, by its names and defaults; return the parser.

    --gradients-inside-one-node and --wq-clip are this library's own.
    Goes to Megatron as `extra_args_provider`. Flags of the reference's launch scripts that current versions
    of Megatron have dropped are taken and ignored, with a warning by :func:`from_args`.
    """
    group = parser.add_argument_group("quantized communication (SDP4Bit)")
    for part, config, text in (
        ("weights", WeightConfig(), "send quantized differences of the weights instead of the weights"),
        ("gradients", _REFERENCE, "reduce gradients by the two-level quantized exchange"),
    ):
        group.add_argument(f"--quantized-{part}", action="store_true", help=text)
        for field in _with_flags(config):
            _add(group, field, default=getattr(config, field.name))
    for flag, options in _WITHOUT_MEANING.items():
        try:
            group.add_argument(flag, help="taken and ignored: this Megatron has no such choice", **options)
        except argparse.ArgumentError:
            continue  # a Megatron that still has the flag keeps its own meaning of it
    return parser


def _with_flags(config: WeightConfig | GradientConfig) -> list[Field[object]]:
    return [field for field in fields(config) if "flag" in field.metadata]


def _add(group: argparse._ArgumentGroup, field: Field[object], *, default: object) -> None:
    flag, text = f"--{field.metadata['flag']}", field.metadata["help"]
    if isinstance(default, bool):
        group.add_argument(flag, action="store_true", default=default, help=text)
    else:
        choices: tuple[object, ...] | None = QUANTIZED_BITS if field.name.endswith("bits") else None
        kind = float if field.name == "clip" else str if isinstance(default, str) else int
        group.add_argument(flag, type=kind, choices=choices, default=default, help=text)


def _given(args: argparse.Namespace, config: WeightConfig | GradientConfig) -> dict[str, Any]:
    """Return what the flags say of a part of the configuration, by the names of its fields."""
    return {f.name: getattr(args, f.metadata["flag"].replace("-", "_")) for f in _with_flags(config)}


def from_args(args: argparse.Namespace) -> SDP4BitConfig:
    """Return what the flags of :func:`add_arguments` ask for; the rounding seed is Megatron's `--seed`.

    Raises:
        ValueError: a value that is not supported.
    """
    weights = gradients = None
    if args.quantized_weights:
        weights = WeightConfig(**_given(args, WeightConfig()))
    if args.quantized_gradients:
        gradients = GradientConfig(**_given(args, _REFERENCE))
    else:
        for field in _with_flags(_REFERENCE):
            flag = field.metadata["flag"]
            if getattr(args, flag.replace("-", "_")) is True:
                warnings.warn(f"sdp4bit: --{flag} has no effect without --quantized-gradients", stacklevel=2)
    for flag in _WITHOUT_MEANING:
        if getattr(args, flag.strip("-").replace("-", "_"), None):
            warnings.warn(f"sdp4bit: {flag} has no effect on this Megatron", stacklevel=2)
    return SDP4BitConfig(weights=weights, gradients=gradients, seed=getattr(args, "seed", 0))
