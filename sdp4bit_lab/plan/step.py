"""What quantized communication would gain: bytes, step time, memory and a verdict, before anything is rented.

A model of a step, not a measurement: computation, plus communication as bytes over bandwidth (and a latency
per collective), less what hides behind computation, plus the time the quantization kernels take. How much is
hidden is no one number: a plan is made for none of it and for all that can be. The bytes
are exact (:mod:`sdp4bit_lab.plan.traffic`); `sdp4bit probe` measures the bandwidths, or the paper's
tables imply them (:mod:`sdp4bit_lab.plan.paper`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sdp4bit.config import SDP4BitConfig
from sdp4bit_lab.plan.kernels import Device, kernel_seconds
from sdp4bit_lab.plan.memory import COMMUNICATOR_BYTES, memory_per_rank
from sdp4bit_lab.plan.model import ShardedGroup
from sdp4bit_lab.plan.traffic import REDUCED_BYTES, Exchange, GroupTraffic, RankGrid, group_traffic

BF16_BYTES = 2
BASELINE = SDP4BitConfig.preset("baseline")
FORWARD_SHARE = 1 / 3
"""Forward takes a third of the arithmetic, backward two."""
WORTHLESS, SMALL = 0.05, 0.20
"""Below the first gain the verdict is no, below the second it is a maybe."""
_NO, _PERHAPS = "do not enable", "perhaps"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines as the planner sees them; bandwidths in bytes per second and direction."""

    name: str
    nodes: int
    devices_per_node: int
    inter_bandwidth: float
    """Of one node to the others."""
    intra_bandwidth: float
    """Of one device to the others of its node."""
    device_flops: float
    """Floating-point operations per second that a device sustains on the model, without communication."""
    inter_bandwidth_shared: float | None = None
    """Of one node when several data-parallel groups send at once (tensor parallelism); None: the same."""
    efficiency: float = 1.0
    """Share of the bandwidths that collectives reach; 1 if they were measured with collectives."""
    latency: float = 0.0
    """Seconds that a collective takes beside its bytes."""
    quantization_bandwidth: float | None = None
    """Bytes per second that the quantization kernels were measured to read and write."""
    device: Device | None = None
    """What these kernels' time follows from where they were not measured; None too: it is left out."""
    communicator_bytes: float = COMMUNICATOR_BYTES
    """Memory of a device that a communicator takes."""

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("inter_bandwidth", "intra_bandwidth", "device_flops"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        for name in ("inter_bandwidth_shared", "quantization_bandwidth"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be positive, or None")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency={self.efficiency} must be above 0 and at most 1")
        if not self.communicator_bytes >= 0:
            raise ValueError(f"communicator_bytes={self.communicator_bytes} must be at least 0")
        if not self.latency >= 0:
            raise ValueError(f"latency={self.latency} must be at least 0 seconds")

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    def inter_bandwidth_per_rank(self, *, tensor_parallel: int) -> float:
        """Return what one rank has of its node's link when all ranks of the node send."""
        shared = self.inter_bandwidth_shared if tensor_parallel > 1 else None
        return (shared or self.inter_bandwidth) * self.efficiency / self.devices_per_node


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """How a step is laid out over the devices: tensor parallelism intra-node, pipeline stages inter-node."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    micro_batch_size: int = 1
    """Sequences per rank in one forward."""
    accumulation: int = 1
    """Micro batches per step."""
    replicas: int = 1
    """Copies of the sharded model (HSDP), each on neighbouring data-parallel ranks."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel", "micro_batch_size", "accumulation", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def grids(self, cluster: Cluster) -> tuple[RankGrid, RankGrid]:
        """Return the ranks among which a rank's model is sharded, and those that hold the same shard.

        Raises:
            ValueError: model-parallel ranks do not divide the cluster or its nodes, or replicas do not
                divide its data-parallel ranks.
        """
        whole = self._data_parallel(cluster)
        if whole.size % self.replicas:
            raise ValueError(
                f"--replicas {self.replicas} does not divide the {whole.size} ranks of a data-parallel group"
            )
        shards = whole.size // self.replicas
        if max(shards, whole.ranks_per_node) % min(shards, whole.ranks_per_node):
            raise ValueError(
                f"--replicas {self.replicas} shards the model over {shards} ranks, which do not fill nodes "
                f"with {whole.ranks_per_node} of them each evenly"
            )
        inside = min(shards, whole.ranks_per_node)
        beside = whole.ranks_per_node // inside
        return (
            RankGrid(nodes=shards // inside, ranks_per_node=inside),
            RankGrid(nodes=self.replicas // beside, ranks_per_node=beside),
        )

    def _data_parallel(self, cluster: Cluster) -> RankGrid:
        """Return all ranks of a data-parallel group, replicas included."""
        tensor, pipeline = self.tensor_parallel, self.pipeline_parallel
        if cluster.devices % (tensor * pipeline):
            raise ValueError(
                f"--tp {tensor} times --pp {pipeline} is {tensor * pipeline}, which "
                f"does not divide the {cluster.devices} devices of {cluster.name}"
            )
        if max(tensor, cluster.devices_per_node) % min(tensor, cluster.devices_per_node):
            raise ValueError(
                f"--tp {tensor} and the {cluster.devices_per_node} devices of a node do not "
                "divide each other: ranks of a data-parallel group would be spread unevenly"
            )
        ranks = cluster.devices // (tensor * pipeline)
        ranks_per_node = min(ranks, max(1, cluster.devices_per_node // tensor))
        if ranks % ranks_per_node:
            raise ValueError(
                f"the {ranks} ranks of a data-parallel group do not fill nodes with {ranks_per_node} of them "
                f"each: choose --pp so that stages are made of whole nodes"
            )
        return RankGrid(nodes=ranks // ranks_per_node, ranks_per_node=ranks_per_node)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A step with one way of communicating."""

    name: str
    intra_bytes: float
    """Sent by one rank to others of its node."""
    inter_bytes: float
    """Sent by one rank to other nodes."""
    intra_bytes_per_node: float
    inter_bytes_per_node: float
    """Sent by all ranks of a node to other nodes."""
    padding_bytes: float
    collectives: int
    compute_seconds: float
    """Arithmetic, waiting for other pipeline stages included."""
    communication_seconds: float
    hidden_seconds: float
    """Part of the communication that takes place behind computation."""
    quantization_seconds: float
    memory: dict[str, int]
    """Bytes per rank by use, without activations."""

    @property
    def step_seconds(self) -> float:
        """Time of a step."""
        exposed = self.communication_seconds - self.hidden_seconds
        return self.compute_seconds + exposed + self.quantization_seconds


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A strategy beside the two baselines, on one cluster."""

    parameters: int
    """Of one rank's share under tensor and pipeline parallelism."""
    row_numel: int
    """Values in the rows of one rank, FSDP2's padding included."""
    grid: RankGrid
    """The ranks among which the model is sharded."""
    replicas: RankGrid
    """The ranks that hold the same shard: one, but with HSDP."""
    baseline: StepCost
    """fp32 gradients, reduce-scattered; bf16 weights, gathered."""
    bf16_baseline: StepCost
    """The same with bf16 gradients."""
    quantized: StepCost
    most_padded: str
    """The group whose rows hold most padding, with how often its parameters they are as long."""

    @property
    def speedup(self) -> float:
        """Over the baseline with fp32 gradients."""
        return self.baseline.step_seconds / self.quantized.step_seconds

    @property
    def speedup_over_bf16(self) -> float:
        """Over the baseline with bf16 gradients."""
        return self.bf16_baseline.step_seconds / self.quantized.step_seconds

    @property
    def padding(self) -> float:
        """Values in all rows over parameters: what every byte count is multiplied with by uneven cuts."""
        return self.row_numel * self.grid.size / self.parameters

    @property
    def verdict(self) -> str:
        """Whether to enable it, in plain words."""
        if self.grid.size * self.replicas.size == 1:
            return f"{_NO}: the data-parallel group has one rank, nothing is sent"
        gain, over_bf16 = self.speedup - 1, self.speedup_over_bf16 - 1
        if gain < WORTHLESS:
            return f"{_NO}: {_gain(gain)}"
        if over_bf16 < WORTHLESS:
            return f"{_NO}: reduce gradients in bf16 instead; beyond that it {_gain(over_bf16)}"
        if over_bf16 < SMALL:
            return (
                f"{_PERHAPS}: {_gain(gain)}, and {_gain(over_bf16)} over bf16 gradients; compare losses "
                "first, and overlap communication first"
            )
        return (
            f"enable: {self.speedup:.2f} times as fast as with fp32 gradients, {self.speedup_over_bf16:.2f} "
            "times as fast as with bf16 gradients"
        )


def _gain(gain: float) -> str:
    percent = round(100 * gain)
    return f"gains {percent} %" if percent >= 0 else f"loses {-percent} %"


def plan_step(
    groups: Sequence[ShardedGroup],
    *,
    flops_per_sequence: float,
    cluster: Cluster,
    layout: ParallelLayout,
    config: SDP4BitConfig,
    overlap: float = 0.0,
    least_padding: bool = False,
) -> Plan:
    """Return what a steady step costs with this configuration and with both baselines.

    Args:
        groups: the parameters of one model-parallel rank.
        flops_per_sequence: forward and backward of the whole model over one sequence.
        overlap: share of the communication, 0 to 1, that runs beside computation; never more than fits
            there. Gradients hide behind the backward of the last micro batch, the weight refresh behind the
            first forward, FSDP2's gathers behind what is left.
        least_padding: parameters are cut along the dimension that pads least.

    Raises:
        ValueError: a layout that the cluster does not hold, or an overlap outside 0 to 1.
    """
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap={overlap} must be between 0 and 1")
    grid, replicas = layout.grids(cluster)
    parts = layout.tensor_parallel * layout.pipeline_parallel
    sequences = layout.micro_batch_size * layout.accumulation
    arithmetic = flops_per_sequence * sequences / parts / cluster.device_flops
    model = _StepModel(
        cluster=cluster,
        layout=layout,
        grid=grid,
        replicas=replicas,
        arithmetic=arithmetic,
        overlap=overlap,
        groups=groups,
    )

    def cost(name: str, config: SDP4BitConfig, dense_bytes: int) -> StepCost:
        traffic = [
            group_traffic(
                group,
                grid=grid,
                replicas=replicas,
                config=config,
                accumulation=layout.accumulation,
                dense_bytes=dense_bytes,
                least_padding=least_padding,
            )
            for group in groups
        ]
        return model.cost(name, traffic, config=config)

    rows = [group.row_numel(ranks=grid.size, least_padding=least_padding) for group in groups]
    shares = [(row * grid.size / group.numel, group.name) for row, group in zip(rows, groups, strict=True)]
    worst, name = max(shares, key=lambda share: share[0])
    return Plan(
        parameters=sum(group.numel for group in groups),
        row_numel=sum(rows),
        grid=grid,
        replicas=replicas,
        baseline=cost("fp32 gradients, bf16 weights", BASELINE, REDUCED_BYTES),
        bf16_baseline=cost("bf16 gradients, bf16 weights", BASELINE, BF16_BYTES),
        quantized=cost("quantized", config, REDUCED_BYTES),
        most_padded=f"{name}: {worst:.2f} x",
    )


@dataclass(frozen=True, kw_only=True)
class _StepModel:
    """What the alternatives have in common."""

    cluster: Cluster
    layout: ParallelLayout
    grid: RankGrid
    replicas: RankGrid
    arithmetic: float
    """Seconds of computation, without waiting for other pipeline stages."""
    overlap: float
    groups: Sequence[ShardedGroup]

    def cost(self, name: str, traffic: Sequence[GroupTraffic], *, config: SDP4BitConfig) -> StepCost:
        """Return the cost of a step that sends this."""
        exchanges = [exchange for group in traffic for exchange in group.exchanges]
        intra = sum(exchange.intra_bytes for exchange in exchanges)
        inter = sum(exchange.inter_bytes for exchange in exchanges)
        gradients = self._seconds(
            exchange for group in traffic for exchange in (group.gradients, group.all_reduce)
        )
        refresh = self._seconds(group.refresh for group in traffic)
        gathers = self._seconds(group.gathers for group in traffic)
        bubble = (self.layout.pipeline_parallel - 1) / self.layout.accumulation
        devices = self.cluster.devices_per_node
        return StepCost(
            name=name,
            intra_bytes=intra,
            inter_bytes=inter,
            intra_bytes_per_node=intra * devices,
            inter_bytes_per_node=inter * devices,
            padding_bytes=sum(exchange.padding_bytes for exchange in exchanges),
            collectives=sum(exchange.collectives for exchange in exchanges),
            compute_seconds=self.arithmetic * (1 + bubble),
            communication_seconds=gradients + refresh + gathers,
            hidden_seconds=self._hidden(gradients, refresh, gathers),
            quantization_seconds=self._quantization_seconds(exchanges),
            memory=memory_per_rank(
                self.groups,
                traffic,
                grid=self.grid,
                replicas=self.replicas,
                config=config,
                accumulation=self.layout.accumulation,
                communicator_bytes=self.cluster.communicator_bytes,
            ),
        )

    def _quantization_seconds(self, exchanges: Sequence[Exchange]) -> float:
        rate, device = self.cluster.quantization_bandwidth, self.cluster.device
        if rate is not None:
            return sum(exchange.moved_bytes for exchange in exchanges) / rate
        if device is None:
            return 0.0
        return sum(kernel_seconds(exchange.kernels, device) for exchange in exchanges)

    def _seconds(self, exchanges: Iterable[Exchange]) -> float:
        per_rank = self.cluster.inter_bandwidth_per_rank(tensor_parallel=self.layout.tensor_parallel)
        total = 0.0
        for exchange in exchanges:
            intra = exchange.intra_bytes / (self.cluster.intra_bandwidth * self.cluster.efficiency)
            total += exchange_seconds(exchange, intra=intra, inter=exchange.inter_bytes / per_rank)
            total += exchange.collectives * self.cluster.latency
        return total

    def _hidden(self, gradients: float, refresh: float, gathers: float) -> float:
        first_forward = FORWARD_SHARE * self.arithmetic / self.layout.accumulation
        last_backward = (1 - FORWARD_SHARE) * self.arithmetic / self.layout.accumulation
        hidden = min(self.overlap * gradients, last_backward)
        behind_forward = min(self.overlap * refresh, first_forward)
        is_flat = any(group.is_flat for group in self.groups)
        left = first_forward - behind_forward if is_flat else self.arithmetic - hidden - behind_forward
        return hidden + behind_forward + min(self.overlap * gathers, left)


def verdict(unhidden: Plan, hidden: Plan) -> str:
    """Return in one sentence whether to enable it, whatever part of the communication is hidden.

    Args:
        unhidden, hidden: the same step with nothing hidden, and with all that can be.
    """
    if unhidden.verdict == hidden.verdict:
        return unhidden.verdict
    advice, hidden_advice = (plan.verdict.partition(":")[0] for plan in (unhidden, hidden))
    over_fp32 = _span(unhidden.speedup, hidden.speedup)
    over_bf16 = _span(unhidden.speedup_over_bf16, hidden.speedup_over_bf16)
    times = (
        f"{over_fp32} times as fast as with fp32 gradients, {over_bf16} times as fast as with bf16 gradients"
    )
    if advice == hidden_advice:
        return f"{advice}: {times}"
    if _NO not in (advice, hidden_advice):
        return f"{_PERHAPS}: {times}"
    return f"depends on how much of the communication is hidden: {times}"


def _span(first: float, last: float) -> str:
    low, high = (f"{value:.2f}" for value in sorted((first, last)))
    return low if low == high else f"{low} to {high}"


def exchange_seconds(exchange: Exchange, *, intra: float, inter: float) -> float:
    """Return how long an exchange takes whose levels would take these seconds alone.

    A ring keeps both levels busy at once. Of two hops cut into chunks, the shorter one shows only once.
    """
    longer, shorter = max(intra, inter), min(intra, inter)
    return longer if exchange.chunks is None else longer + shorter / exchange.chunks


def at_bandwidth(cluster: Cluster, *, inter_bandwidth: float) -> Cluster:
    """Return the cluster with another network, for sweeps."""
    return replace(cluster, inter_bandwidth=inter_bandwidth, inter_bandwidth_shared=None)
