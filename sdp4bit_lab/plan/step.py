"""Predict a step with and without quantized communication: bytes, time, memory and a recommendation.

This is a model, not a measurement. The time of a step is computation, plus bytes over bandwidth, plus latency
per collective, minus overlap, plus quantization kernels. Overlap is unknown, so times are ranges from none to
all that fits. The bytes are exact (:mod:`sdp4bit_lab.plan.traffic`). Bandwidths come from `sdp4bit probe` or
a fit to the paper's (:mod:`sdp4bit_lab.plan.clusters`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from sdp4bit.config import SDP4BitConfig
from sdp4bit.traffic import Grid
from sdp4bit_lab.common.settings import option, require, require_at_least
from sdp4bit_lab.plan.memory import memory_per_rank
from sdp4bit_lab.plan.model import ShardedGroup
from sdp4bit_lab.plan.traffic import GATHERED_BYTES, REDUCED_BYTES, Exchange, group_traffic

BF16_BYTES = 2
BASELINE = SDP4BitConfig(weights=None, gradients=None)
FORWARD_SHARE, FORWARD_SHARE_LORA = 1 / 3, 1 / 2
"""Forward is a third of the arithmetic; without gradients of frozen weights, half."""
MIN_GAIN_TO_CONSIDER, MIN_GAIN_TO_ENABLE = 0.05, 0.20
"""Relative gains over a baseline's step."""
_NO, _PERHAPS = "do not enable", "perhaps"

Range = tuple[float, float]
"""Value with the least and with the most overlap."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines and their speeds; bandwidths in bytes per second and direction."""

    name: str
    nodes: int
    devices_per_node: int
    inter_bandwidth: float
    """From one node to the others."""
    intra_bandwidth: float
    """From one device to the others of its node."""
    device_flops: float
    """Floating-point operations per second that a device sustains on the model, without communication."""
    inter_bandwidth_shared: float | None = None
    """Of one node when several data-parallel groups send at once (tensor parallelism); None: the same."""
    latency: float = 0.0
    """Seconds that a collective takes in addition to its bytes."""
    quantization_bandwidth: float | None = None
    """Bytes per second that the quantization kernels read and write; None omits their time."""

    def inter_bandwidth_per_rank(self, *, tensor_parallel: int) -> float:
        """Return a rank's share of its node's link when all ranks of the node send."""
        shared = self.inter_bandwidth_shared if tensor_parallel > 1 else None
        return (shared or self.inter_bandwidth) / self.devices_per_node


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Layout of a step over the devices."""

    tensor_parallel: Annotated[int, option("tensor-model-parallel-size", "tp")] = 1
    """Tensor-parallel ranks, inside a node."""
    pipeline_parallel: Annotated[int, option("pipeline-model-parallel-size", "pp")] = 1
    """Pipeline stages, across nodes."""
    replicas: int = 1
    """Replicas of the sharded model (HSDP), each on consecutive data-parallel ranks. FSDP2 only."""
    micro_batch_size: int | None = None
    """Sequences per rank and forward pass. Default: the preset's."""
    accumulation: int = 1
    """Micro batches per step."""
    overlap: float | None = None
    """Fraction of the communication that overlaps with computation. Default: print the range from 0 to 1."""
    engine: Literal["fsdp2", "megatron"] = "fsdp2"
    """Training engine: fsdp2 (one group per block) or megatron (one flat buffer, gathered once per step)."""
    reshard_after_forward: bool = True
    """Free gathered weights after forward and gather them again in backward (ZeRO-3). Off: gather once per
    micro batch. FSDP2 only."""
    least_padding: bool = False
    """Shard each parameter along the dimension with the least padding (shard_placement_fn). FSDP2 only."""

    def __post_init__(self) -> None:
        require_at_least(
            1, self, "tensor_parallel", "pipeline_parallel", "replicas", "micro_batch_size", "accumulation"
        )
        require(
            self.overlap is None or 0 <= self.overlap <= 1,
            f"--overlap {self.overlap} must be between 0 and 1",
        )
        for is_given, flag in (
            (not self.reshard_after_forward, "--no-reshard-after-forward"),
            (self.least_padding, "--least-padding"),
            (self.replicas > 1, "--replicas"),
        ):
            require(
                not is_given or self.engine == "fsdp2",
                f"{flag} has no effect with --engine {self.engine}: it applies to FSDP2",
            )

    @property
    def overlaps(self) -> Range:
        """Least and largest fraction of the communication that overlaps with computation."""
        return (0.0, 1.0) if self.overlap is None else (self.overlap, self.overlap)

    def grids(self, *, nodes: int, devices_per_node: int) -> tuple[Grid, Grid]:
        """Return the ranks that shard the model, and the ranks that hold the same shard.

        Raises:
            SettingError: model-parallel ranks do not divide the cluster or its nodes, or replicas do not
            divide its data-parallel ranks.
        """
        tensor, parts = self.tensor_parallel, self.tensor_parallel * self.pipeline_parallel
        devices = nodes * devices_per_node
        require(
            devices % parts == 0,
            f"--tp {tensor} times --pp {self.pipeline_parallel} is {parts}, which does not divide the "
            f"{devices} devices of {nodes} nodes",
        )
        require(
            max(tensor, devices_per_node) % min(tensor, devices_per_node) == 0,
            f"--tp {tensor} and the {devices_per_node} devices per node do not divide each other: "
            "data-parallel groups would be spread unevenly over nodes",
        )
        ranks = devices // parts
        per_node = min(ranks, max(1, devices_per_node // tensor))
        require(
            ranks % per_node == 0,
            f"the {ranks} ranks of a data-parallel group do not fill nodes of {per_node} ranks: "
            "choose --pp so that stages consist of complete nodes",
        )
        require(
            ranks % self.replicas == 0,
            f"--replicas {self.replicas} does not divide the {ranks} ranks of a data-parallel group",
        )
        shards = ranks // self.replicas
        inside = min(shards, per_node)
        require(
            max(shards, per_node) % inside == 0,
            f"--replicas {self.replicas} shards the model over {shards} ranks, which do not fill nodes of "
            f"{per_node} ranks evenly",
        )
        beside = per_node // inside
        return (
            Grid(nodes=shards // inside, ranks_per_node=inside),
            Grid(nodes=self.replicas // beside, ranks_per_node=beside),
        )


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Cost of a step with one kind of communication."""

    intra_bytes: float
    """Sent by one rank to others of its node."""
    inter_bytes: float
    """Sent by one rank to other nodes."""
    inter_bytes_per_node: float
    """Sent by all ranks of a node to other nodes."""
    collectives: int
    compute_seconds: float
    """Arithmetic and pipeline bubbles."""
    communication_seconds: float
    hidden_seconds: Range
    """Part of the communication that overlaps with computation."""
    quantization_seconds: float
    memory: dict[str, int]
    """Bytes per rank by use, without activations and communicators."""

    @property
    def step_seconds(self) -> Range:
        least, most = (
            self.compute_seconds + (self.communication_seconds - hidden) + self.quantization_seconds
            for hidden in self.hidden_seconds
        )
        return least, most


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A strategy and two baselines on one cluster."""

    parameters: int
    """Parameters of one model-parallel rank."""
    row_numel: int
    """Values in one rank's rows, including FSDP2's padding."""
    grid: Grid
    """Ranks that shard the model."""
    replicas: Grid
    """Ranks that hold the same shard: one, except with HSDP."""
    baseline: StepCost
    """fp32 reduce-scatter of gradients, bf16 all-gather of weights."""
    bf16_baseline: StepCost
    """The same with bf16 gradients."""
    quantized: StepCost
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
    def recommendation(self) -> str:
        """Recommendation with the speed-up of a step, in one sentence."""
        if self.grid.size * self.replicas.size == 1:
            return f"{_NO}: the data-parallel group has one rank and sends nothing"
        over_fp32, over_bf16 = self.speedups(self.baseline), self.speedups(self.bf16_baseline)
        advice = {_advice(*gains) for gains in zip(over_fp32, over_bf16, strict=True)}
        prefix = advice.pop() if len(advice) == 1 else _PERHAPS
        if _NO in advice:
            prefix = "depends on how much of the communication is hidden"
        fp32, bf16 = _span(over_fp32), _span(over_bf16)
        return f"{prefix}: {fp32} times as fast as with fp32 gradients, {bf16} with bf16 gradients"


def _advice(over_fp32: float, over_bf16: float) -> str:
    if min(over_fp32, over_bf16) < 1 + MIN_GAIN_TO_CONSIDER:
        return _NO
    return _PERHAPS if over_bf16 < 1 + MIN_GAIN_TO_ENABLE else "enable"


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
) -> Plan:
    """Return the cost of a steady-state step with this configuration and with both baselines.

    Args:
        groups: parameters of one model-parallel rank.
        flops_per_sequence: forward and backward of the full model over one sequence.

    Raises:
        SettingError: the layout does not fit the cluster.
    """
    grid, replicas = layout.grids(nodes=cluster.nodes, devices_per_node=cluster.devices_per_node)
    sequences = (layout.micro_batch_size or 1) * layout.accumulation
    parts = layout.tensor_parallel * layout.pipeline_parallel
    arithmetic = flops_per_sequence * sequences / parts / cluster.device_flops
    forward_share = FORWARD_SHARE
    if any(group.frozen for group in groups):
        forward_share = FORWARD_SHARE_LORA
        arithmetic *= FORWARD_SHARE / FORWARD_SHARE_LORA

    def seconds(exchanges: Iterable[Exchange]) -> float:
        return sum(exchange_seconds(each, cluster=cluster, layout=layout) for each in exchanges)

    def cost(config: SDP4BitConfig, dense_bytes: int) -> StepCost:
        traffic = [
            group_traffic(
                group,
                grid=grid,
                replicas=replicas,
                config=config,
                accumulation=layout.accumulation,
                dense_bytes=dense_bytes,
                least_padding=layout.least_padding,
            )
            for group in groups
        ]
        exchanges = [exchange for group in traffic for exchange in group.exchanges]
        inter_bytes = sum(exchange.inter_bytes for exchange in exchanges)
        gradients = seconds(exchange for group in traffic for exchange in (group.gradients, group.all_reduce))
        refresh = seconds(group.refresh for group in traffic)
        gathers = seconds(group.gathers for group in traffic)
        # Gradients overlap with the last backward, the refresh with the first forward, and FSDP2's gathers
        # with the rest. A flat buffer is gathered before the first forward.
        forward = forward_share * arithmetic / layout.accumulation
        backward = (1 - forward_share) * arithmetic / layout.accumulation
        is_flat = any(group.is_flat for group in groups)
        hidden = []
        for overlap in layout.overlaps:
            behind_backward = min(overlap * gradients, backward)
            behind_forward = min(overlap * refresh, forward)
            left = forward - behind_forward if is_flat else arithmetic - behind_backward - behind_forward
            hidden.append(behind_backward + behind_forward + min(overlap * gathers, left))
        bubble = (layout.pipeline_parallel - 1) / layout.accumulation
        rate = cluster.quantization_bandwidth
        return StepCost(
            intra_bytes=sum(exchange.intra_bytes for exchange in exchanges),
            inter_bytes=inter_bytes,
            inter_bytes_per_node=inter_bytes * cluster.devices_per_node,
            collectives=sum(exchange.collectives for exchange in exchanges),
            compute_seconds=arithmetic * (1 + bubble),
            communication_seconds=gradients + refresh + gathers,
            hidden_seconds=(hidden[0], hidden[1]),
            quantization_seconds=sum(exchange.moved_bytes for exchange in exchanges) / rate if rate else 0.0,
            memory=memory_per_rank(traffic, grid=grid, accumulation=layout.accumulation),
        )

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
    return Plan(
        parameters=sum(group.numel for group in groups),
        row_numel=sum(rows),
        grid=grid,
        replicas=replicas,
        baseline=cost(BASELINE, REDUCED_BYTES),
        bf16_baseline=cost(BASELINE, BF16_BYTES),
        quantized=cost(config, REDUCED_BYTES),
        most_padded=f"{name}: {worst:.2f} x",
        frozen_bytes_per_node=once if config.weights is not None else 0.0,
    )


def exchange_seconds(exchange: Exchange, *, cluster: Cluster, layout: ParallelLayout) -> float:
    """Return the time of an exchange.

    A ring keeps both levels busy at once; of two hops in chunks, one chunk of the shorter hop is exposed.
    """
    intra = exchange.intra_bytes / cluster.intra_bandwidth
    inter = exchange.inter_bytes / cluster.inter_bandwidth_per_rank(tensor_parallel=layout.tensor_parallel)
    longer, shorter = max(intra, inter), min(intra, inter)
    transfer = longer if exchange.chunks is None else longer + shorter / exchange.chunks
    return transfer + exchange.collectives * cluster.latency
