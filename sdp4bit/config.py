"""Settings: frozen, keyword-only dataclasses.

The defaults are the paper's (SDP4Bit, NeurIPS 2024, arXiv 2410.15526, sections 3 and 5), except for three.
Subtractive dither between nodes halves the loss increase (docs/numerics.md), the own node's gradient is not
rounded between nodes, and parameters are quantized separately.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from sdp4bit.quantization.formats import BLOCK, INT4, LEAST_CLIP, Bits, choices, format_of

VERSION = "0.2.0"
"""Version of the package, equal on all ranks of a job."""

TESTED_TORCH = "torch 2.9 to 2.15"
"""For errors; newer releases work if they keep the private attributes that the engines use."""

Rounding = Literal["nearest", "stochastic", "dither"]
ReplicaPlacement = Literal["node", "full"]
WeightMode = Literal["difference", "direct"]
MismatchAction = Literal["error", "resync"]

_Settings = TypeVar("_Settings")


def _suggests_names(cls: type[_Settings]) -> type[_Settings]:
    """Make the TypeError of an unknown setting name the similar ones."""
    create: Any = cls.__init__
    known = [each.name for each in fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(create)
    def create_known(self: _Settings, *args: object, **settings: object) -> None:
        for name in settings:
            if name not in known:
                # The similarity of bits and inter_bits is 0.57.
                near = sorted(
                    get_close_matches(name, known, cutoff=0.7) or get_close_matches(name, known, cutoff=0.55)
                )
                hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
                raise TypeError(f"{cls.__name__} has no setting {name!r}: {hint}")
        create(self, *args, **settings)

    cls.__init__ = create_known  # type: ignore[method-assign, assignment]
    return cls


def _check_bits(name: str, bits: Bits) -> None:
    # Of equal numbers only one type is taken: settings are compared between ranks as they are written.
    known = choices()
    if (type(bits), bits) not in [(type(each), each) for each in (*known, None)]:
        names = ", ".join(map(repr, known))
        raise ValueError(
            f"{name}={bits!r} is not supported: use one of {names}, or None for full precision at this hop"
        )


def _check_group_size(name: str, group_size: int) -> None:
    is_count = isinstance(group_size, int) and not isinstance(group_size, bool)
    if not is_count or group_size < BLOCK or group_size % BLOCK:
        near = group_size if is_count else BLOCK
        lower = max(BLOCK, near // BLOCK * BLOCK)
        raise ValueError(
            f"{name}={group_size!r} must be a positive multiple of {BLOCK}, "
            f"for example {lower} or {lower + BLOCK}"
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


@_suggests_names
@dataclass(frozen=True, kw_only=True)
class WeightConfig:
    """Quantized weight differences, qWD (paper section 3.1, algorithm 2).

    Attributes:
        bits: Bits per transmitted value: 2, 3, 3.5, 4, 8, 16 (bf16), or the name of another format. None
            sends the new weights in the model's own dtype. Below 4 bits use smaller groups
            (docs/numerics.md).
        group_size: Values that share one scale; a multiple of 32.
        mode: "difference" sends main shard minus replica; "direct" sends the weights themselves (qW).
        clip: Fraction of a group's largest magnitude that the largest code represents, from 0.1 to 1.
            Larger values saturate, and the next difference corrects them. None uses 0.6 for 2-bit
            differences and 1 (no clipping) otherwise.
        replica: "node" shards one replica over the ranks of a node, "full" keeps one on every rank. If all
            ranks are on one node, "node" leaves the weights in full precision.
    """

    bits: Bits = 4
    group_size: int = 2048
    mode: WeightMode = "difference"
    clip: float | None = None
    replica: ReplicaPlacement = "node"

    def __post_init__(self) -> None:
        _check_bits("weights.bits", self.bits)
        _check_group_size("weights.group_size", self.group_size)
        _check_choice("weights.mode", self.mode, get_args(WeightMode))
        _check_choice("weights.replica", self.replica, get_args(ReplicaPlacement))
        is_number = isinstance(self.clip, int | float) and not isinstance(self.clip, bool)
        if self.clip is not None and not (is_number and LEAST_CLIP <= self.clip <= 1):
            raise ValueError(
                f"weights.clip={self.clip!r} must be from {LEAST_CLIP} to 1 (no clipping), or None for the "
                "default of these bits"
            )

    @property
    def effective_clip(self) -> float:
        """The clip, with None resolved."""
        if self.clip is not None:
            return float(self.clip)
        # With mode="direct" no later difference corrects a saturated value.
        return format_of(self.bits).clip if self.mode == "difference" else 1.0

    def applies_to(self, *, nodes: int) -> bool:
        """Return whether the weights of ranks on this many nodes are quantized.

        A replica that is sharded over a node is gathered inside the node at every use. On a single node that
        is all the traffic, so quantized differences would add bytes and lose precision.
        """
        return nodes > 1 or self.replica == "full"


@_suggests_names
@dataclass(frozen=True, kw_only=True)
class GradientConfig:
    """Two-level quantized reduce-scatter with Hadamard smoothing, TLq-HS (paper section 3.2, algorithm 3).

    Attributes:
        intra_bits: Bits inside a node: 2, 3, 3.5, 4, 8 or 16; None sends fp32.
        inter_bits: Bits between nodes: 2, 3, 3.5, 4, 8 or 16; None sends fp32. 3.5 bits are 11 levels, a
            pair in 7 bits. 16 bits are bf16, rounded to nearest even, without groups and random bits.
        intra_group_size: Values that share one scale inside a node; a multiple of 32.
        inter_group_size: Values that share one scale between nodes; a multiple of 32, independent of
            `intra_group_size`.
        hadamard: Transform blocks of 32 values before the first quantization and back after the last sum.
        intra_rounding: Rounding inside a node; "nearest" is as good at 8 bits.
        inter_rounding: Rounding between nodes. Subtractive dither has half the squared error of
            "stochastic", the paper's, for the same bytes; "nearest" has a bias that averaging over steps
            does not remove.
        exact_own: Add the own node's gradient unrounded between nodes. With N nodes the squared error is
            (N - 1) / N of the paper's (False) for the same bytes.
        pipeline_chunks: Chunks of a row whose intra-node and inter-node transfers overlap. None chooses by
            the size of the row and the nodes (docs/method.md); the result is the same for any number.
        start_step: Steps with full-precision gradients before quantization starts. A step is a backward
            pass whose gradients are reduced, whatever optimizer uses them.
        min_numel: Rows (one rank's share of one reduction) shorter than this are reduced in full precision.
        inside_one_node: Quantize even if all ranks that share a group's parameters, replicas included, are
            on one node. Links inside a node are fast, so rounding there loses precision for little speed.
    """

    intra_bits: Bits = 8
    inter_bits: Bits = 4
    intra_group_size: int = 128
    inter_group_size: int = 128
    hadamard: bool = True
    intra_rounding: Rounding = "stochastic"
    inter_rounding: Rounding = "dither"
    exact_own: bool = True
    pipeline_chunks: int | None = None
    start_step: int = 0
    min_numel: int = 1024
    inside_one_node: bool = False

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
        """Return whether the gradients of ranks on this many nodes are quantized."""
        return nodes > 1 or self.inside_one_node

    def exempts(self, *, numel: int, steps: int | None = None, name: str = "row") -> str:
        """Return why a row of this many values is reduced in full precision; "" if it is quantized.

        Args:
            name: the row's name in the reason. An all-reduce has parts, one per rank.
            steps: steps that have ended; None for any number from `start_step` on.
        """
        if numel < self.min_numel:
            return f"{name} below min_numel={self.min_numel}"
        if steps is not None and steps < self.start_step:
            return f"full precision until step {self.start_step}"
        return ""


@_suggests_names
@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Interval and sample size of the measured quantization errors.

    Attributes:
        interval: Steps from one measured step to the next.
        sample_numel: Sampled values per parameter group and rank, rounded to complete quantization groups.
    """

    interval: int = 10
    sample_numel: int = 4096

    def __post_init__(self) -> None:
        _check_at_least("telemetry.interval", self.interval, 1)
        _check_at_least("telemetry.sample_numel", self.sample_numel, 1)


@_suggests_names
@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Comparison of the copies of each weight replica.

    Attributes:
        interval: Steps from one audit to the next.
        on_mismatch: "error" raises ReplicaMismatchError on all ranks that share the group. "resync" warns
            and refreshes the group's replica in full precision at the next forward.
    """

    interval: int = 100
    on_mismatch: MismatchAction = "error"

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
    raise ValueError(f"{name}={value!r} must be a positive number{auto}, or None to turn it off")


@_suggests_names
@dataclass(frozen=True, kw_only=True)
class AlertConfig:
    """Thresholds on the measured errors of quantization, per parameter group; None turns one off.

    A measure that crosses its threshold is logged once and passed to the callbacks of `on_alert`.
    docs/reliability.md explains the defaults.

    Attributes:
        gradient_error: Relative error of quantizing a gradient. Normal values with 4 bits have 0.12 with
            dither, 0.17 with stochastic rounding. At 0.3 the noise equals that of a batch 8 % smaller.
            "auto" is 0.3, 0.45 with 3.5 bits, 0.7 with 3, 2.1 with 2.
        weight_error: Relative error of quantizing a weight difference, which the next difference corrects;
            at most 1 with nearest rounding. "auto" is 0.6, 0.75 with 3 bits, 0.9 with 2.
        weight_drift: Relative distance between the main weights and the replica after the refresh.
        nonfinite_groups: Quantization groups of a gradient with a NaN or an infinity.
    """

    gradient_error: float | Literal["auto"] | None = "auto"
    weight_error: float | Literal["auto"] | None = "auto"
    weight_drift: float | None = 0.05
    nonfinite_groups: int | None = 0

    def __post_init__(self) -> None:
        for name in ("gradient_error", "weight_error", "weight_drift"):
            _check_threshold(f"alerts.{name}", getattr(self, name))
        if self.nonfinite_groups is not None:
            _check_at_least("alerts.nonfinite_groups", self.nonfinite_groups, 0)
        if self.thresholds == (None,) * 4:
            raise ValueError("all thresholds of alerts are None: set one, or alerts=None")

    @property
    def thresholds(self) -> tuple[float | None, ...]:
        """The thresholds in the order of the measures; "auto" as for 4 and more bits."""
        gradient = INT4.gradient_error if self.gradient_error == "auto" else self.gradient_error
        weight = INT4.weight_error if self.weight_error == "auto" else self.weight_error
        return gradient, weight, self.weight_drift, self.nonfinite_groups

    def for_bits(self, *, gradients: Bits, weights: Bits) -> AlertConfig:
        """Return these settings with "auto" resolved for the fewest bits of each kind of traffic."""
        gradient, weight = self.gradient_error, self.weight_error
        if gradient == "auto":
            gradient = format_of(gradients).gradient_error
        if weight == "auto":
            weight = format_of(weights).weight_error
        return replace(self, gradient_error=gradient, weight_error=weight)


Preset = Literal[
    "sdp4bit",
    "sdp4bit-w3g3.5",
    "sdp4bit-w2g3",
    "sdp4bit-w2g2",
    "bf16-wire",
    "sdp4bit-paper",
    "baseline",
    "qw",
    "qwd",
    "ulq",
    "tlq",
    "tlq-hs",
]
PRESETS: tuple[Preset, ...] = get_args(Preset)
"""Names for `SDP4BitConfig.preset`: our own, then the paper's method and its ablation (Table 6)."""


@_suggests_names
@dataclass(frozen=True, kw_only=True)
class SDP4BitConfig:
    """Settings of quantized communication.

    Attributes:
        weights: Quantization of weights; None sends full precision.
        gradients: Quantization of gradients; None reduces in full precision.
        separate_parameters: Keep every scale group and Hadamard block within one parameter, and send
            parameters of at most one dimension in at least 8 bits, in the same messages. False quantizes
            rows as a unit, as in the paper. Applies to FSDP2 and simulated ranks only, because
            Megatron-Core cuts its buffers anywhere.
        seed: Seed of the rounding bits; the global random state is never used.
        telemetry: Periodic measurement of quantization errors, which does not change training. None
            measures on demand with `measure()`, or every 10 steps with alerts.
        audit: Comparison of weight replicas between ranks, because copies that drift apart ruin a run
            silently. An audit costs one pass over the replica every 100 steps.
        alerts: Thresholds that are checked whenever telemetry measures.
    """

    weights: WeightConfig | None = field(default_factory=WeightConfig)
    gradients: GradientConfig | None = field(default_factory=GradientConfig)
    separate_parameters: bool = True
    seed: int = 0
    telemetry: TelemetryConfig | None = None
    audit: AuditConfig | None = field(default_factory=AuditConfig)
    alerts: AlertConfig | None = None

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
            raise ValueError("alerts need quantized weights or gradients: set alerts=None")
        if self.alerts is not None and self.telemetry is None:
            object.__setattr__(self, "telemetry", TelemetryConfig())

    def rounds_as(self, other: SDP4BitConfig) -> bool:
        """Return whether both quantize the same way, apart from the seed."""
        mine, theirs = ((each.weights, each.gradients, each.separate_parameters) for each in (self, other))
        return mine == theirs

    @classmethod
    def preset(cls, name: str) -> SDP4BitConfig:
        """Return the settings of a preset.

        The default is `sdp4bit`, because the paper has evidence for 4 bits from 125M to 6.7B parameters.
        There is none at that scale for fewer bits. Bytes are per parameter.

        * `sdp4bit`: 4-bit weight differences; gradients of 8 bits inside a node and 4 bits between nodes.
          1.02 bytes.
        * `sdp4bit-w3g3.5`: weight differences of 3 bits in groups of 128, gradients of 3.5 bits (11 levels)
          between nodes. 0.84 bytes.
        * `sdp4bit-w2g3`, `sdp4bit-w2g2`: weight differences of 2 bits, gradients of 3 or 2 bits between
          nodes, in smaller groups. 0.70 and 0.57 bytes at a higher loss (docs/numerics.md).
        * `bf16-wire`: gradients travel in bf16 and are summed in fp32; weights are those of the engine. A
          cautious choice, without groups, transforms or random bits. 2 bytes for gradients.
        * `sdp4bit-paper`: the paper's SDP4Bit, `qwd` and `tlq-hs` together.

        The paper's ablation quantizes rows as a unit:

        * `baseline`: nothing.
        * `qw`: weights in 4 bits.
        * `qwd`: differences of weights in 4 bits.
        * `ulq`: gradients in 4 bits at both hops.
        * `tlq`: gradients in 8 bits inside a node and 4 bits between nodes.
        * `tlq-hs`: the same after a Hadamard transform.

        Raises:
            ValueError: the name is unknown.
        """
        narrow, differences = WeightConfig(bits=2, group_size=256), WeightConfig()
        tlq_hs = GradientConfig(inter_rounding="stochastic", exact_own=False)
        tlq = replace(tlq_hs, hadamard=False)
        paper = functools.partial(cls, weights=None, gradients=None, separate_parameters=False)
        presets: dict[str, SDP4BitConfig] = {
            "baseline": paper(),
            "qw": paper(weights=WeightConfig(mode="direct")),
            "qwd": paper(weights=differences),
            "ulq": paper(gradients=replace(tlq, intra_bits=4)),
            "tlq": paper(gradients=tlq),
            "tlq-hs": paper(gradients=tlq_hs),
            "sdp4bit-paper": paper(weights=differences, gradients=tlq_hs),
            "sdp4bit": cls(),
            "bf16-wire": cls(
                weights=None, gradients=GradientConfig(intra_bits=16, inter_bits=16, hadamard=False)
            ),
            "sdp4bit-w3g3.5": cls(
                weights=WeightConfig(bits=3, group_size=128), gradients=GradientConfig(inter_bits=3.5)
            ),
            "sdp4bit-w2g3": cls(weights=narrow, gradients=GradientConfig(inter_bits=3, inter_group_size=32)),
            "sdp4bit-w2g2": cls(weights=narrow, gradients=GradientConfig(inter_bits=2, inter_group_size=32)),
        }
        if name not in presets:
            raise ValueError(f"unknown preset {name!r}: use one of {', '.join(PRESETS)}")
        return presets[name]


UNQUANTIZED = SDP4BitConfig(weights=None, gradients=None, audit=None)
PLAIN = "plain"
"""Name of the candidate that communicates as without sdp4bit."""


@_suggests_names
@dataclass(frozen=True, kw_only=True)
class Auto:
    """Choice between settings by the time of training steps (docs/auto.md); FSDP2 and DDP.

    All steps train the model. The defaults take at most 83 steps until the choice.

    Attributes:
        candidates: Names of presets, settings, or "plain" (as without sdp4bit), the most exact first. They
            must not differ in seed, telemetry, audit and alerts.
        choice: Name of the candidate to use, without a search; None measures. Settings have the name of the
            preset that rounds identically, or "settings 3" by their position.
        warmup_steps: Steps before the first block, with the first candidate.
        block_steps: Steps of a block, during which one candidate communicates; at least 4. The first two and
            the last are not timed.
        rounds: Blocks of each candidate, in turns. After the second one a candidate drops out whose blocks
            all were more than 10 % slower than all those of the fastest.
        recheck_steps: Steps from a choice to the next search; None keeps the first choice. If not None, a
            search also follows when the median step takes a fifth more or less for 100 steps.
    """

    candidates: tuple[str | SDP4BitConfig, ...] = (PLAIN, "bf16-wire", "sdp4bit")
    choice: str | None = None
    warmup_steps: int = 10
    block_steps: int = 6
    rounds: int = 4
    recheck_steps: int | None = 10_000

    def __post_init__(self) -> None:
        if isinstance(self.candidates, str) or not isinstance(self.candidates, Sequence):
            raise ValueError(f"auto.candidates={self.candidates!r} must be a list of presets or settings")
        object.__setattr__(self, "candidates", tuple(self.candidates))
        named = self.named()
        if not named or len(named) < len(self.candidates):
            raise ValueError(f"auto.candidates={self.candidates!r} must be different, and at least one")
        if self.choice is not None and self.choice not in named:
            raise ValueError(f"auto.choice={self.choice!r} is unknown: use one of {', '.join(named)}")
        _check_at_least("auto.warmup_steps", self.warmup_steps, 0)
        _check_at_least("auto.block_steps", self.block_steps, 4)
        _check_at_least("auto.rounds", self.rounds, 1)
        if self.recheck_steps is not None:
            _check_at_least("auto.recheck_steps", self.recheck_steps, 1)
        for name in ("seed", "telemetry", "audit", "alerts"):
            values = {repr(getattr(each, name)) for each in named.values() if each is not None}
            if len(values) > 1:
                raise ValueError(
                    f"auto.candidates differ in {name} ({', '.join(sorted(values))}): make it equal"
                )

    def named(self) -> dict[str, SDP4BitConfig | None]:
        """Return the candidates by name; None communicates as without sdp4bit."""
        named: dict[str, SDP4BitConfig | None] = {}
        for number, each in enumerate(self.candidates, 1):
            if each == PLAIN:
                named[PLAIN] = None
                continue
            if not (isinstance(each, SDP4BitConfig) or (isinstance(each, str) and each in PRESETS)):
                raise ValueError(
                    f"auto.candidates has {each!r}: use {PLAIN}, a preset ({', '.join(PRESETS)}), or an "
                    "SDP4BitConfig"
                )
            config = as_config(each)
            presets = ((name, SDP4BitConfig.preset(name)) for name in PRESETS)
            name = next((name for name, preset in presets if preset.rounds_as(config)), f"settings {number}")
            named[each if isinstance(each, str) else name] = config
        return named


Settings: TypeAlias = SDP4BitConfig | Auto | str | None
"""Settings, the name of a preset, "auto", or None for the default."""


def as_settings(config: Settings) -> SDP4BitConfig | Auto:
    """Return the settings, or the choice between some, for an argument of users.

    Raises:
        ValueError: the preset is unknown.
        TypeError: the argument is none of these.
    """
    if isinstance(config, Auto):
        return config
    return Auto() if config == "auto" else as_config(config)


def settings_in(settings: SDP4BitConfig | Auto) -> list[SDP4BitConfig]:
    """Return the settings, or those of all candidates that have any, or else settings without effect."""
    if isinstance(settings, SDP4BitConfig):
        return [settings]
    named = settings.named()
    used = named.values() if settings.choice is None else [named[settings.choice]]
    return [each for each in used if each is not None] or [UNQUANTIZED]


def as_config(config: Settings) -> SDP4BitConfig:
    """Return the settings for settings, the name of a preset, or None (the default).

    Raises:
        ValueError: the preset is unknown, or the settings are to be chosen.
        TypeError: the argument is none of these.
    """
    if config is None:
        return SDP4BitConfig()
    if config == "auto" or isinstance(config, Auto):
        raise ValueError(
            f"config={config!r} measures training steps to choose settings, which needs FSDP2 or DDP: name "
            "a preset here"
        )
    if isinstance(config, str):
        return SDP4BitConfig.preset(config)
    if not isinstance(config, SDP4BitConfig):
        raise TypeError(
            f"config={config!r} has an unsupported type: use an SDP4BitConfig, the name of a preset "
            f'({", ".join(PRESETS)}), "auto" with FSDP2 or DDP, or None for the default'
        )
    return config
