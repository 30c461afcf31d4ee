"""What is quantized and how: frozen, keyword-only settings. The default is the paper's method, but for
subtractive dither between nodes, which costs half as much in loss (docs/numerics.md), for the own node's
gradient, which is not rounded between nodes, and for parameters that are quantized separately.

Source of the other defaults: SDP4Bit (NeurIPS 2024, arXiv 2410.15526), sections 3 and 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

VERSION = "0.2.0"
"""Of the package; all ranks of a job run the same."""

TESTED_TORCH = "torch 2.9 to 2.14"
"""For errors; newer releases are taken if they keep what is relied on."""

Rounding = Literal["nearest", "stochastic", "dither"]
ReplicaPlacement = Literal["node", "full"]
WeightMode = Literal["difference", "direct"]
MismatchAction = Literal["error", "resync"]

QUANTIZED_BITS = (2, 3, 3.5, 4, 8)
LEAST_CLIP = 0.1
"""Of `WeightConfig.clip`."""
TERNARY_CLIP = 0.6
"""`WeightConfig.clip` of 2-bit differences, measured (docs/numerics.md)."""
HADAMARD_BLOCK = 32
"""Length of the blocks that the Walsh-Hadamard transform mixes; groups are multiples of it."""


def _check_bits(name: str, bits: float | None) -> None:
    # Of equal numbers only one type is taken: settings are compared between ranks as they are written.
    if bits is not None and (type(bits), bits) not in [(type(each), each) for each in QUANTIZED_BITS]:
        raise ValueError(
            f"{name}={bits!r} is not supported: use 2, 3, 3.5, 4 or 8, or None for full precision at this hop"
        )


def _check_group_size(name: str, group_size: int) -> None:
    is_count = isinstance(group_size, int) and not isinstance(group_size, bool)
    if not is_count or group_size < HADAMARD_BLOCK or group_size % HADAMARD_BLOCK:
        near = group_size if is_count else HADAMARD_BLOCK
        lower = max(HADAMARD_BLOCK, near // HADAMARD_BLOCK * HADAMARD_BLOCK)
        raise ValueError(
            f"{name}={group_size!r} must be a positive multiple of {HADAMARD_BLOCK}, "
            f"for example {lower} or {lower + HADAMARD_BLOCK}"
        )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: use one of {', '.join(map(repr, choices))}")


def _check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def _check_at_least(name: str, value: int, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}={value!r} must be an integer of at least {minimum}")


@dataclass(frozen=True, kw_only=True)
class WeightConfig:
    """Quantized weight differences, qWD (paper section 3.1, algorithm 2)."""

    bits: float | None = 4
    """Bits per transmitted value: 2, 3, 3.5, 4 or 8. None sends the new weights in the model's own dtype.
    Below 4 bits groups of 128 are worth their scales (docs/numerics.md)."""
    group_size: int = 2048
    """Values that share one scale; a multiple of 32."""
    mode: WeightMode = "difference"
    """"difference" sends main shard minus replica; "direct" sends the weights themselves (qW)."""
    clip: float | None = None
    """Part of a group's largest magnitude that the largest code stands for, from 0.1 to 1; what is larger
    saturates, and is made good by the next difference. None clips only where that has been measured to pay:
    0.6 for 2-bit differences, 1 (no clipping) otherwise."""
    replica: ReplicaPlacement = "node"
    """"node" spreads one replica over the ranks of a node, "full" keeps one on every rank. If all ranks are
    on one node, "node" leaves the weights in full precision."""

    def __post_init__(self) -> None:
        _check_bits("weights.bits", self.bits)
        _check_group_size("weights.group_size", self.group_size)
        _check_choice("weights.mode", self.mode, get_args(WeightMode))
        _check_choice("weights.replica", self.replica, get_args(ReplicaPlacement))
        is_number = isinstance(self.clip, int | float) and not isinstance(self.clip, bool)
        if self.clip is not None and not (is_number and LEAST_CLIP <= self.clip <= 1):
            raise ValueError(
                f"weights.clip={self.clip!r} must be from {LEAST_CLIP} to 1, which does not clip, or None, "
                "which chooses"
            )

    @property
    def effective_clip(self) -> float:
        """The clip, chosen if it is None."""
        if self.clip is not None:
            return float(self.clip)
        # Weights that are sent as they are do not get back what was cut off.
        return TERNARY_CLIP if self.bits == 2 and self.mode == "difference" else 1.0

    def applies_to(self, *, nodes: int) -> bool:
        """Return whether weights of ranks on so many nodes travel as differences.

        One that is spread over the ranks of a node is gathered inside the node whenever it is used. Where
        that is all there is, differences would be sent, and precision lost, for nothing.
        """
        return nodes > 1 or self.replica == "full"


@dataclass(frozen=True, kw_only=True)
class GradientConfig:
    """Two-level quantized reduce-scatter with Hadamard smoothing, TLq-HS (paper section 3.2, algorithm 3)."""

    intra_bits: float | None = 8
    """Bits inside a node: 2, 3, 3.5, 4 or 8; None sends fp32."""
    inter_bits: float | None = 4
    """Bits between nodes: 2, 3, 3.5, 4 or 8; None sends fp32. 3.5 bits are 11 levels, a pair in 7 bits."""
    intra_group_size: int = 128
    """Values that share one scale inside a node; a multiple of 32."""
    inter_group_size: int = 128
    """Values that share one scale between nodes; a multiple of 32, independent of the other."""
    hadamard: bool = True
    """Transform blocks of 32 values before the first quantization and back after the last sum."""
    intra_rounding: Rounding = "stochastic"
    """Rounding of the hop inside a node; nearest is as good at 8 bits."""
    inter_rounding: Rounding = "dither"
    """Rounding of the hop between nodes. Subtractive dither has half the squared error of "stochastic", the
    paper's, for the same bytes; "nearest" leaves a bias that averaging over steps cannot remove."""
    exact_own: bool = True
    """Add the own node's gradient unrounded at the hop between nodes, so that only the others' are rounded:
    with N nodes (N - 1) / N of the squared error for the same bytes. False rounds it too, as in the paper."""
    pipeline_chunks: int | None = None
    """Slices of a row whose hops overlap: one is inside the node while another crosses it. None chooses by
    the size of the row and the nodes (docs/method.md); the result is the same for any number."""
    start_step: int = 0
    """Steps whose gradients are reduced in full precision before quantization starts. A step is a backward
    pass whose gradients are reduced, whatever optimizer uses them."""
    min_numel: int = 1024
    """Rows (one rank's share of one reduction) shorter than this are reduced in full precision."""
    inside_one_node: bool = False
    """Quantize also where all ranks that share a group's parameters, replicas included, are on one node.
    Links there are fast, so that rounding costs precision and gains little: full precision by default."""

    def __post_init__(self) -> None:
        _check_bits("gradients.intra_bits", self.intra_bits)
        _check_bits("gradients.inter_bits", self.inter_bits)
        _check_group_size("gradients.intra_group_size", self.intra_group_size)
        _check_group_size("gradients.inter_group_size", self.inter_group_size)
        _check_flag("gradients.hadamard", self.hadamard)
        _check_choice("gradients.intra_rounding", self.intra_rounding, get_args(Rounding))
        _check_choice("gradients.inter_rounding", self.inter_rounding, get_args(Rounding))
        _check_flag("gradients.exact_own", self.exact_own)
        if self.pipeline_chunks is not None:
            _check_at_least("gradients.pipeline_chunks", self.pipeline_chunks, 1)
        _check_at_least("gradients.start_step", self.start_step, 0)
        _check_at_least("gradients.min_numel", self.min_numel, 0)
        _check_flag("gradients.inside_one_node", self.inside_one_node)

    def applies_to(self, *, nodes: int) -> bool:
        """Return whether the gradients of ranks on so many nodes are quantized."""
        return nodes > 1 or self.inside_one_node


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """How often, and on how many values, the cost of quantization is measured while training."""

    interval: int = 10
    """Steps from one measured step to the next; counted alike on all ranks."""
    sample_numel: int = 4096
    """Values per parameter group and rank that a measure looks at, rounded to whole quantization groups."""

    def __post_init__(self) -> None:
        _check_at_least("telemetry.interval", self.interval, 1)
        _check_at_least("telemetry.sample_numel", self.sample_numel, 1)


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """How often the copies of a weight replica are compared, and what happens if they differ."""

    interval: int = 100
    """Steps from one audit to the next."""
    on_mismatch: MismatchAction = "error"
    """"error" raises ReplicaMismatchError on all ranks that share the group; "resync" warns, and refreshes
    the group's replica in full precision at the next forward."""

    def __post_init__(self) -> None:
        _check_at_least("audit.interval", self.interval, 1)
        _check_choice("audit.on_mismatch", self.on_mismatch, get_args(MismatchAction))


def _check_threshold(name: str, value: float | str | None) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if 0 < value < math.inf:
            return
    elif value is None or (value == "auto" and not name.endswith("drift")):
        return
    auto = "" if name.endswith("drift") else ', "auto" to follow the bits'
    raise ValueError(f"{name}={value!r} must be a positive number{auto}, or None not to watch it")


_USUAL_GRADIENT_ERROR: dict[float, float] = {2: 2.1, 3: 0.7, 3.5: 0.45}
_USUAL_WEIGHT_ERROR: dict[float, float] = {2: 0.9, 3: 0.75}
"""Automatic thresholds below 4 bits, see docs/reliability.md; others are 0.3 and 0.6."""


@dataclass(frozen=True, kw_only=True)
class AlertConfig:
    """Thresholds on the measured errors of quantization, per parameter group; None does not watch a measure.

    A measure that crosses its threshold is logged once and passed to the callbacks of `on_alert`. The reasons
    for the defaults are in docs/reliability.md.
    """

    gradient_error: float | Literal["auto"] | None = "auto"
    """Relative error of quantizing a gradient: 4 bits cost 0.16 on bell-shaped values. At 0.3 the noise is
    that of a batch 8 % smaller. "auto" is twice what is usual: 0.3, 0.45 with 3.5 bits, 0.7 with 3, 2.1
    with 2."""
    weight_error: float | Literal["auto"] | None = "auto"
    """Relative error of quantizing a weight difference, which the next difference makes good; never above 1
    with nearest rounding. "auto" is 0.6, 0.75 with 3 bits, 0.9 with 2."""
    weight_drift: float | None = 0.05
    """Relative distance from the main weights to what the devices hold after the refresh."""
    nonfinite_groups: int | None = 0
    """Quantization groups of a gradient with a NaN or an infinity."""

    def __post_init__(self) -> None:
        for name in ("gradient_error", "weight_error", "weight_drift"):
            _check_threshold(f"alerts.{name}", getattr(self, name))
        if self.nonfinite_groups is not None:
            _check_at_least("alerts.nonfinite_groups", self.nonfinite_groups, 0)
        if self.thresholds == (None,) * 4:
            raise ValueError("alerts watch nothing: set a threshold, or alerts=None")

    @property
    def thresholds(self) -> tuple[float | None, ...]:
        """The thresholds in the order of the measures; automatic ones for 4 and more bits."""
        gradient = 0.3 if self.gradient_error == "auto" else self.gradient_error
        weight = 0.6 if self.weight_error == "auto" else self.weight_error
        return gradient, weight, self.weight_drift, self.nonfinite_groups

    def for_bits(self, *, gradients: float | None, weights: float | None) -> AlertConfig:
        """Return these settings with the automatic thresholds of a group whose traffic has so few bits.

        Args:
            gradients: the fewest bits that are configured for them; None for full precision.
            weights: likewise.
        """
        gradient, weight, *_ = self.thresholds
        if self.gradient_error == "auto":
            gradient = _USUAL_GRADIENT_ERROR.get(gradients or 0, gradient)
        if self.weight_error == "auto":
            weight = _USUAL_WEIGHT_ERROR.get(weights or 0, weight)
        return replace(self, gradient_error=gradient, weight_error=weight)


PRESETS = ("sdp4bit", "sdp4bit-w3g3.5", "sdp4bit-w2g3", "sdp4bit-w2g2")
"""Names of the default and of three that send less."""


@dataclass(frozen=True, kw_only=True)
class SDP4BitConfig:
    """What sharded data parallelism quantizes; a part that is None stays in full precision."""

    weights: WeightConfig | None = field(default_factory=WeightConfig)
    """How weights travel after a step."""
    gradients: GradientConfig | None = field(default_factory=GradientConfig)
    """How gradients are reduced."""
    separate_parameters: bool = True
    """No scale group and no Hadamard block has values of two parameters, and parameters of at most one
    dimension travel in at least 8 bits, in the same messages. False: rows are quantized as a whole, as in the
    paper. Only FSDP2 and simulated ranks follow it; Megatron-Core cuts its buffers anywhere."""
    seed: int = 0
    """Seed of the rounding bits; the global random state is never touched."""
    telemetry: TelemetryConfig | None = None
    """How often the errors of quantization are measured while training; None measures them only on demand, by
    `measure()`, and every 10 steps if there are alerts. Results of training do not depend on it."""
    audit: AuditConfig | None = field(default_factory=AuditConfig)
    """Comparison of weight replicas over the ranks that hold copies. On by default: copies that drifted apart
    spoil a run without any other sign, and an audit costs one pass over the replica every 100 steps."""
    alerts: AlertConfig | None = None
    """Thresholds on what quantization costs; looked at whenever telemetry measures."""

    def __post_init__(self) -> None:
        _check_flag("separate_parameters", self.separate_parameters)
        _check_at_least("seed", self.seed, 0)
        kinds = {
            "weights": WeightConfig,
            "gradients": GradientConfig,
            "telemetry": TelemetryConfig,
            "audit": AuditConfig,
            "alerts": AlertConfig,
        }
        for name, kind in kinds.items():
            part = getattr(self, name)
            if part is not None and not isinstance(part, kind):
                article = "an" if kind.__name__.startswith("A") else "a"
                raise ValueError(f"{name}={part!r} must be {article} {kind.__name__} or None")
        if self.alerts is not None and self.weights is None and self.gradients is None:
            raise ValueError("nothing is quantized, so alerts have nothing to watch: set alerts=None")
        if self.alerts is not None and self.telemetry is None:
            object.__setattr__(self, "telemetry", TelemetryConfig())

    @classmethod
    def preset(cls, name: str) -> SDP4BitConfig:
        """Return the default or one that sends less (docs/numerics.md).

        sdp4bit: 4-bit weight differences; gradients of 8 bits inside a node and 4 bits between nodes. It
        is the default because the paper has evidence for 4 bits from 125M to 6.7B parameters; nobody has for
        fewer.
        sdp4bit-w3g3.5: weight differences of 3 bits in groups of 128, and gradients of 11 levels, 3.5 bits,
        between nodes: 0.84 bytes per parameter instead of 1.02.
        sdp4bit-w2g3, sdp4bit-w2g2: weight differences of 2 bits, and gradients of 3 or 2 bits between nodes,
        in smaller groups: 0.70 and 0.57 bytes per parameter, for more loss.

        Raises:
            ValueError: another name; lists these.
        """
        narrow = WeightConfig(bits=2, group_size=256)
        presets = {
            "sdp4bit": cls(),
            "sdp4bit-w3g3.5": cls(
                weights=WeightConfig(bits=3, group_size=128), gradients=GradientConfig(inter_bits=3.5)
            ),
            "sdp4bit-w2g3": cls(weights=narrow, gradients=GradientConfig(inter_bits=3, inter_group_size=32)),
            "sdp4bit-w2g2": cls(weights=narrow, gradients=GradientConfig(inter_bits=2, inter_group_size=32)),
        }
        if name not in presets:
            raise ValueError(f"unknown preset {name!r}: use one of {', '.join(PRESETS)}")
        return presets[name]


def as_config(config: SDP4BitConfig | str | None) -> SDP4BitConfig:
    """Return the settings that are meant: themselves, a preset by its name, or the default for None.

    Raises:
        ValueError: no preset of this name.
        TypeError: something else.
    """
    if config is None:
        return SDP4BitConfig()
    if isinstance(config, str):
        return SDP4BitConfig.preset(config)
    if not isinstance(config, SDP4BitConfig):
        raise TypeError(
            f"config={config!r} is unknown: use an SDP4BitConfig, the name of a preset "
            f"({', '.join(PRESETS)}), or None for the default"
        )
    return config
