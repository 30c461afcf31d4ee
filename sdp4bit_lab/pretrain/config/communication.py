"""Settings of quantized communication under the reference implementation's flags, and of its checks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sdp4bit.config import (
    AlertConfig,
    AuditConfig,
    GradientConfig,
    MismatchAction,
    ReplicaPlacement,
    Rounding,
    SDP4BitConfig,
    WeightConfig,
)
from sdp4bit_lab.common.settings import SettingError, option, option_flags
from sdp4bit_lab.common.strategies import DEFAULT_STRATEGY, STRATEGIES, Strategy

REFERENCE_INTRA_GROUP = 512
"""Intra-node default of the reference parser; its scripts, the paper and our strategies use 128."""

if TYPE_CHECKING:
    _Bits = float
else:
    _Bits = Literal[2, 3, 3.5, 4, 8, 16]  # of which type checkers refuse one

_WEIGHTS = {"weight_bits": "bits", "weight_group_size": "group_size", "replica": "replica"}
_GRADIENTS = {
    **{f"{hop}_{size}": f"{hop}_{size}" for hop in ("inter", "intra") for size in ("bits", "group_size")},
    "hadamard_transform": "hadamard",
    "inter_rounding": "inter_rounding",
    "pipeline_chunks": "pipeline_chunks",
    "start_step": "start_step",
    "gradients_inside_one_node": "inside_one_node",
}
"""Map our field names to the library's. Options that are off or None change nothing."""


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig:
    """Details of the quantized communication. With --strategy they modify it. Otherwise --quantized-weights
    and --quantized-gradients enable quantization, as in the reference implementation."""

    quantized_weights: bool = False
    """Send 4-bit weight differences, instead of --strategy."""
    weight_bits: Annotated[_Bits | None, option("weight-quantization-bits")] = None
    """Bits per weight difference. Default: the strategy's, or 4."""
    weight_group_size: Annotated[int | None, option("wq-group-size")] = None
    """Weight differences that share a scale. Default: the strategy's, or 2048."""
    replica: ReplicaPlacement | None = None
    """Weight replica: node (sharded over the ranks of a node) or full (on every rank). Default: node."""
    quantized_gradients: bool = False
    """Reduce gradients with two quantized all-to-alls, instead of --strategy."""
    inter_bits: Annotated[_Bits | None, option("gradient-quantization-bits-inter")] = None
    """Bits per inter-node gradient. Default: the strategy's, or 4."""
    inter_group_size: Annotated[int | None, option("gq-group-size-inter")] = None
    """Inter-node gradients that share a scale. Default: the strategy's, or 128."""
    intra_bits: Annotated[_Bits | None, option("gradient-quantization-bits-intra")] = None
    """Bits per intra-node gradient. Default: the strategy's, or 8."""
    intra_group_size: Annotated[int | None, option("gq-group-size-intra")] = None
    """Intra-node gradients that share a scale. Default: 128 with a strategy, as in the paper; 512 with
    --quantized-gradients, as in the reference implementation."""
    hadamard_transform: bool = False
    """Apply a Hadamard transform to gradients before quantization; part of tlq-hs and sdp4bit."""
    inter_rounding: Annotated[Rounding | None, option("gradient-rounding-inter")] = None
    """Rounding of inter-node gradients. Default: dither with sdp4bit, stochastic with the paper's ones."""
    pipeline_chunks: Annotated[int | None, option("gradient-alltoall-pipeline", "pipeline-chunks")] = None
    """Slices of a gradient exchange whose intra-node and inter-node hops overlap. Default: by size."""
    start_step: Annotated[int | None, option("gradients-quantization-start-iteration")] = None
    """Steps with full-precision gradients before quantization starts. Default: 0."""
    gradients_inside_one_node: bool = False
    """Quantize gradients even if all ranks that share a parameter are on one node."""

    def __post_init__(self) -> None:
        if not self.names_parts:
            return
        for names, part in ((_WEIGHTS, "weights"), (_GRADIENTS, "gradients")):
            self._require_used(
                names, getattr(self, f"quantized_{part}"), f"without --quantized-{part} or a --strategy"
            )
        self.resolve(None, seed=0)

    @property
    def names_parts(self) -> bool:
        """Whether flags instead of a strategy enable quantization."""
        return self.quantized_weights or self.quantized_gradients

    def resolve(self, strategy: Strategy | None, *, seed: int) -> SDP4BitConfig:
        """Return the library's settings; SettingError if they conflict or the strategy does not use them."""
        if self.names_parts:
            if strategy is not None:
                raise SettingError(
                    f"--strategy {strategy} conflicts with --quantized-weights and --quantized-gradients: "
                    "give one or the other"
                )
            reference = GradientConfig(
                intra_group_size=REFERENCE_INTRA_GROUP,
                hadamard=False,
                inter_rounding="stochastic",
                exact_own=False,
            )
            base = SDP4BitConfig(
                weights=WeightConfig() if self.quantized_weights else None,
                gradients=reference if self.quantized_gradients else None,
                separate_parameters=False,  # as the reference implementation
            )
        else:
            strategy = strategy or DEFAULT_STRATEGY
            base = STRATEGIES[strategy]
            for names, part in ((_WEIGHTS, "weights"), (_GRADIENTS, "gradients")):
                users = ", ".join(s for s, c in STRATEGIES.items() if getattr(c, part) is not None)
                self._require_used(
                    names,
                    getattr(base, part) is not None,
                    f"with strategy {strategy}, which does not quantize {part}: remove it, or use {users}",
                )
        try:
            return replace(
                base,
                seed=seed,
                weights=base.weights and replace(base.weights, **self._values(_WEIGHTS)),
                gradients=base.gradients and replace(base.gradients, **self._values(_GRADIENTS)),
            )
        except ValueError as error:
            raise SettingError(str(error)) from error

    def strategy_name(self, strategy: Strategy | None) -> str:
        """Return the preset that flags and details amount to, else the modified strategy, else custom.
        Slicing changes no value and no name."""
        ours = self.resolve(strategy, seed=0)
        uncut = ours.gradients and replace(ours.gradients, pipeline_chunks=None)
        same = (n for n, c in STRATEGIES.items() if (c.weights, c.gradients) == (ours.weights, uncut))
        return next(same, "custom" if self.names_parts else strategy or DEFAULT_STRATEGY)

    def restricted_to(self, strategy: Strategy) -> CommunicationConfig:
        """Drop the settings of parts that the strategy does not quantize."""
        config = STRATEGIES[strategy]
        unused = {**({} if config.weights else _WEIGHTS), **({} if config.gradients else _GRADIENTS)}
        defaults: dict[str, Any] = {name: getattr(CommunicationConfig(), name) for name in unused}
        return replace(self, **defaults)

    def given(self) -> list[str]:
        """List the fields that differ from their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]

    def _values(self, names: dict[str, str]) -> dict[str, Any]:
        given = self.given()
        return {theirs: getattr(self, ours) for ours, theirs in names.items() if ours in given}

    def _require_used(self, names: dict[str, str], used: bool, otherwise: str) -> None:
        given = [name for name in self.given() if name in names]
        if given and not used:
            raise SettingError(f"{option_flags(type(self))[given[0]][0]} has no effect {otherwise}")


@dataclass(frozen=True, kw_only=True)
class ReliabilityConfig:
    """Comparison of the weight replicas, and alerts on quantization errors."""

    audit_interval: int = 100
    """Steps between comparisons of the weight replicas; 0 disables them."""
    audit_on_mismatch: MismatchAction = "error"
    """Action if replicas differ: stop with an error, or warn and refresh them in full precision."""
    alerts: Literal["off", "warn"] = "off"
    """Warn if a quantization error exceeds its threshold. Simulated ranks use the measurements of rank 0."""

    def __post_init__(self) -> None:
        self.applied_to(SDP4BitConfig())
        if self.audit_interval == 0 and self.audit_on_mismatch != "error":
            raise SettingError("--audit-on-mismatch has no effect with --audit-interval 0")

    def applied_to(self, config: SDP4BitConfig) -> SDP4BitConfig:
        """Add these settings to the library's; SettingError for alerts without quantization."""
        try:
            audit = AuditConfig(interval=self.audit_interval or 1, on_mismatch=self.audit_on_mismatch)
            alerts = None if self.alerts == "off" else AlertConfig()
            return replace(config, audit=audit if self.audit_interval else None, alerts=alerts)
        except ValueError as error:
            raise SettingError(str(error)) from error
