"""Predict a step with and without quantized communication: bytes, time, memory and a recommendation.

This is a model, not a measurement. The time of a step is computation, plus bytes over bandwidth and the
latency of collectives, minus overlap, plus quantization kernels and the agreements of the hosts. It is at
least the time that the host needs to launch all of it. Overlap is unknown, so times are ranges from none to
all that fits. The bytes are exact (:mod:`sdp4bit_lab.plan.traffic`). Bandwidths come from `sdp4bit probe` or
a fit to the paper's (:mod:`sdp4bit_lab.plan.clusters`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sdp4bit.config import SDP4BitConfig
from sdp4bit.traffic import ALONE, Grid, format_bytes
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.plan.costs import Cluster, Costs, StepCost
from sdp4bit_lab.plan.layout import BF16_BYTES, FP32_BYTES, ParallelLayout, Range
from sdp4bit_lab.plan.model import ShardedGroup
from sdp4bit_lab.plan.traffic import GATHERED_BYTES

BASELINE = SDP4BitConfig(weights=None, gradients=None)
MIN_GAIN_OF_BLOCKS = 0.01
"""Relative gain of a step from three levels, which round gradients once more."""
MIN_GAIN_TO_CONSIDER, MIN_GAIN_TO_ENABLE = 0.05, 0.20
"""Relative gains over a baseline's step."""
_NO, _PERHAPS = "do not enable", "perhaps"


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """HSDP with the fewest nodes per replica whose shards fit the devices."""

    shards: Grid
    replicas: int
    plain: StepCost
    """bf16 gradients."""
    quantized: StepCost

    @property
    def name(self) -> str:
        return "DDP" if self.shards.size == 1 else "HSDP"


@dataclass(frozen=True, kw_only=True)
class ThreeLevels:
    """The strategy with blocks of nodes."""

    nodes_per_block: int
    quantized: StepCost


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A layout that fits the devices, and its memory per rank."""

    advice: str
    memory: int


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A strategy and its baselines on one cluster."""

    parameters: int
    """Parameters of one model-parallel rank."""
    row_numel: int
    """Values in one rank's rows, including FSDP2's padding."""
    grid: Grid
    """Ranks that shard the model."""
    replicas: Grid
    """Ranks that hold the same shard: one, except with HSDP."""
    is_split: bool
    """Whether each device of a single node counts as a node (`topology=1`)."""
    baseline: StepCost
    """fp32 reduce-scatter of gradients, bf16 all-gather of weights."""
    bf16_baseline: StepCost
    """The same with bf16 gradients."""
    hybrid: Hybrid | None
    """None if the planned layout is HSDP, or no HSDP fits the devices."""
    quantized: StepCost
    three_levels: ThreeLevels | None
    """None if they are planned already, or not faster."""
    device_memory: float | None
    remedies: tuple[Remedy, ...]
    """If the strategy does not fit the devices."""
    most_padded: str
    """Group with the most padding, and its padded size relative to its parameters."""
    frozen_bytes_per_node: float
    """Frozen weights that a node sends once, before the first step."""

    def speedups(self, baseline: StepCost) -> Range:
        """Return the speed-up of a step over a baseline."""
        ours, plain = self.quantized.step_seconds, baseline.step_seconds
        return plain[0] / ours[0], plain[1] / ours[1]

    @property
    def padding(self) -> float:
        """Values in all rows divided by parameters, by which padding multiplies every byte count."""
        return self.row_numel * self.grid.size / self.parameters

    @property
    def fits(self) -> bool:
        """Return whether the strategy fits the devices, as far as their memory is known."""
        return self.device_memory is None or self.quantized.total_memory <= self.device_memory

    @property
    def recommendation(self) -> str:
        """Recommendation with the speed-up of a step, in one sentence."""
        if self.grid.size * self.replicas.size == 1:
            return f"{_NO}: the data-parallel group has one rank and sends nothing"
        gains = [self.speedups(self.baseline), self.speedups(self.bf16_baseline)]
        text = (
            f"{_span(gains[0])} times as fast as with fp32 gradients, {_span(gains[1])} with bf16 gradients"
        )
        if self.hybrid is not None:
            gains.append(self.speedups(self.hybrid.plain))
            text += f", {_span(gains[2])} as {self.hybrid.name} with bf16 gradients"
        if not self.fits:
            return f"does not fit: {format_bytes(self.quantized.total_memory)} per device; {text}"
        advice = {_advice(*at_one_end) for at_one_end in zip(*gains, strict=True)}
        prefix = advice.pop() if len(advice) == 1 else _PERHAPS
        if _NO in advice:
            prefix = "depends on how much of the communication is hidden"
        # The default topology quantizes nothing on a single node.
        how = " (topology=1)" * (self.is_split and prefix != _NO)
        return f"{prefix}{how}: {text}"


def _advice(over_fp32: float, *over_bf16: float) -> str:
    if min(over_fp32, *over_bf16) < 1 + MIN_GAIN_TO_CONSIDER:
        return _NO
    return _PERHAPS if min(over_bf16) < 1 + MIN_GAIN_TO_ENABLE else "enable"


def _span(speedups: Range) -> str:
    low, high = (f"{value:.2f}" for value in sorted(speedups))
    return low if low == high else f"{low} to {high}"


def plan_step(
    groups: Sequence[ShardedGroup],
    *,
    flops_per_sequence: float,
    cluster: Cluster,
    layout: ParallelLayout,
    config: SDP4BitConfig,
) -> StepPlan:
    """Return the cost of a steady-state step with this configuration and with its baselines.

    On a single node, a configuration that would quantize nothing there takes each device as a node.

    Args:
        groups: parameters of one model-parallel rank.
        flops_per_sequence: forward and backward of the full model over one sequence.

    Raises:
        SettingError: the layout does not fit the cluster.
    """
    grid, replicas = layout.grids(nodes=cluster.nodes, devices_per_node=cluster.devices_per_node)
    parts = (part for part in (config.weights, config.gradients) if part is not None)
    is_split = cluster.nodes == 1 < cluster.devices_per_node and not any(
        part.applies_to(nodes=1) for part in parts
    )
    if is_split:
        cluster = cluster.split()
        grid, replicas = layout.grids(nodes=cluster.nodes, devices_per_node=1)
    costs = Costs(groups=groups, flops_per_sequence=flops_per_sequence, cluster=cluster, layout=layout)
    quantized = costs.of(config, row_bytes=layout.row_bytes, grid=grid, replicas=replicas)
    is_flat = any(group.is_flat for group in groups)
    hybrid = None if is_flat or replicas.size > 1 else _hybrid(costs, grid=grid, config=config)
    rows, trained = (
        [
            group.row_numel(ranks=grid.size, least_padding=layout.least_padding, trained_only=only)
            for group in groups
        ]
        for only in (False, True)
    )
    once = GATHERED_BYTES * (sum(rows) - sum(trained)) * (grid.nodes - 1) * cluster.devices_per_node
    shares = [(row * grid.size / group.numel, group.name) for row, group in zip(rows, groups, strict=True)]
    worst, name = max(shares, key=lambda share: share[0])
    return StepPlan(
        parameters=sum(group.numel for group in groups),
        row_numel=sum(rows),
        grid=grid,
        replicas=replicas,
        is_split=is_split,
        baseline=costs.of(BASELINE, row_bytes=FP32_BYTES, grid=grid, replicas=replicas),
        bf16_baseline=costs.of(BASELINE, row_bytes=BF16_BYTES, grid=grid, replicas=replicas),
        hybrid=hybrid,
        quantized=quantized,
        three_levels=None if config.gradients is None else _three_levels(costs, config, two=quantized),
        device_memory=cluster.device_memory,
        remedies=() if costs.fits(quantized) else _remedies(costs, grid=grid, config=config, hybrid=hybrid),
        most_padded=f"{name}: {worst:.2f} x",
        frozen_bytes_per_node=once if config.weights is not None else 0.0,
    )


def _hybrid(costs: Costs, *, grid: Grid, config: SDP4BitConfig) -> Hybrid | None:
    """Return HSDP with the fewest nodes per replica that fits the devices."""
    for nodes in range(1, grid.nodes):
        if grid.nodes % nodes:
            continue
        cluster, layout = costs.cluster, replace(costs.layout, replicas=grid.nodes // nodes)
        try:
            shards, replicas = layout.grids(nodes=cluster.nodes, devices_per_node=cluster.devices_per_node)
        except SettingError:  # replicas do not fill the blocks of nodes
            continue
        plain = costs.of(BASELINE, row_bytes=BF16_BYTES, grid=shards, replicas=replicas)
        if costs.fits(plain):
            ours = costs.of(config, row_bytes=costs.layout.row_bytes, grid=shards, replicas=replicas)
            return Hybrid(shards=shards, replicas=replicas.nodes, plain=plain, quantized=ours)
    return None


def _three_levels(costs: Costs, config: SDP4BitConfig, *, two: StepCost) -> ThreeLevels | None:
    """Return the cost with the blocks that send the fewest messages, if a step is faster."""
    cluster, layout = costs.cluster, costs.layout
    divisors = [each for each in range(2, cluster.nodes) if cluster.nodes % each == 0]
    if layout.nodes_per_block is not None or not divisors:
        return None
    chosen = min(divisors, key=lambda each: each + cluster.nodes // each)
    try:
        grids = replace(layout, nodes_per_block=chosen).grids(
            nodes=cluster.nodes, devices_per_node=cluster.devices_per_node
        )
    except SettingError:  # a group's nodes do not fill these blocks
        return None
    grid, replicas = grids
    three = costs.of(config, row_bytes=layout.row_bytes, grid=grid, replicas=replicas)
    gains = [before / after - 1 for before, after in zip(two.step_seconds, three.step_seconds, strict=True)]
    if max(gains) < MIN_GAIN_OF_BLOCKS or min(gains) < 0:
        return None
    return ThreeLevels(nodes_per_block=chosen, quantized=three)


def _remedies(
    costs: Costs, *, grid: Grid, config: SDP4BitConfig, hybrid: Hybrid | None
) -> tuple[Remedy, ...]:
    """Return layouts with less memory that fit the devices."""
    row_bytes, found = costs.layout.row_bytes, []
    if hybrid is not None and costs.fits(hybrid.quantized):
        advice = f"{hybrid.name}, {hybrid.shards.size} ranks per replica (--replicas {hybrid.replicas})"
        found.append(Remedy(advice=advice, memory=hybrid.quantized.total_memory))
    if config.weights is None:
        return tuple(found)
    gradients = costs.of(replace(config, weights=None), row_bytes=row_bytes, grid=grid, replicas=ALONE)
    if costs.fits(gradients):
        advice = "quantized gradients only (weights=None, --strategy tlq-hs)"
        found.append(Remedy(advice=advice, memory=gradients.total_memory))
    for nodes in range(2, grid.nodes):
        if grid.nodes % nodes == 0:
            block = Grid(nodes=grid.nodes // nodes, ranks_per_node=nodes * grid.ranks_per_node)
            cost = costs.of(config, row_bytes=row_bytes, grid=block, replicas=ALONE)
            if costs.fits(cost):
                advice = (
                    f"a replica over {nodes} nodes (topology={block.ranks_per_node}), whose gathers in bf16 "
                    f"cross the links of {nodes} nodes"
                )
                found.append(Remedy(advice=advice, memory=cost.total_memory))
                break
    return tuple(found)
