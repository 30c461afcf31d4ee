"""Cost of a step with one kind of communication: bytes, named times, and memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from sdp4bit.config import SDP4BitConfig
from sdp4bit.traffic import Grid
from sdp4bit_lab.plan.devices import KernelLimits, Operator, Work
from sdp4bit_lab.plan.host import HostTime, host_time
from sdp4bit_lab.plan.latency import Latency
from sdp4bit_lab.plan.layout import ParallelLayout, Range
from sdp4bit_lab.plan.memory import communicator_bytes, memory_per_rank
from sdp4bit_lab.plan.model import ShardedGroup
from sdp4bit_lab.plan.traffic import Exchange, GroupTraffic, group_traffic

FORWARD_SHARE, FORWARD_SHARE_LORA = 1 / 3, 1 / 2
"""Forward is a third of the arithmetic; without gradients of frozen weights, half."""


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
    latency: Latency = field(default_factory=Latency)
    quantization_bandwidth: float | None = None
    """Bytes per second that the quantization kernels read and write; None omits their time."""
    kernels: KernelLimits | None = None
    """Arithmetic of the kernels, if memory does not bound all of them."""
    device_memory: float | None = None
    """Bytes of a device."""
    host: HostTime = field(default_factory=lambda: host_time("measured"))

    def inter_bandwidth_per_rank(self, *, tensor_parallel: int) -> float:
        """Return a rank's share of its node's link when all ranks of the node send."""
        shared = self.inter_bandwidth_shared if tensor_parallel > 1 else None
        return (shared or self.inter_bandwidth) / self.devices_per_node

    def split(self) -> Cluster:
        """Return the cluster whose nodes are the devices of this one's single node (`topology=1`)."""
        return replace(
            self,
            nodes=self.devices_per_node,
            devices_per_node=1,
            inter_bandwidth=self.intra_bandwidth,
            inter_bandwidth_shared=None,
            latency=replace(self.latency, message=self.latency.nvlink),
        )

    def kernel_seconds(self, work: Work) -> float:
        """Return the time of an operator, which memory or arithmetic bounds."""
        if self.quantization_bandwidth is None:
            return 0.0
        arithmetic = self.kernels.seconds(work) if self.kernels else 0.0
        return max(work.moved_bytes / self.quantization_bandwidth, arithmetic)


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
    transfer_seconds: float
    """Bytes over bandwidth."""
    ring_seconds: float
    """Latency of gathers and reductions by NCCL's algorithms."""
    all_to_all_seconds: float
    """Latency of all-to-alls, which grows with their peers."""
    hidden_seconds: Range
    """Part of the communication that overlaps with computation."""
    kernel_seconds: dict[Operator, float]
    """Quantization, by operator."""
    agreement_seconds: float
    """Hosts agree on changed weights at each forward, which is never hidden."""
    host_seconds: float
    """The host launches model and communication; a step takes at least this time."""
    host_computes: bool
    """Whether the host's time adds to the step's instead, because its cores are the devices."""
    memory: dict[str, int]
    """Bytes per rank by use, without activations."""

    @property
    def communication_seconds(self) -> float:
        return self.transfer_seconds + self.ring_seconds + self.all_to_all_seconds

    @property
    def quantization_seconds(self) -> float:
        return sum(self.kernel_seconds.values())

    @property
    def launched_seconds(self) -> Range:
        """Time of everything but the host, with the least and the most overlap."""
        launched = self.compute_seconds + self.communication_seconds + self.quantization_seconds
        least, most = (launched - hidden for hidden in self.hidden_seconds)
        return least, most

    @property
    def step_seconds(self) -> Range:
        together = sum if self.host_computes else max
        least, most = (
            together((launched, self.host_seconds)) + self.agreement_seconds
            for launched in self.launched_seconds
        )
        return least, most

    @property
    def is_limited_by_host(self) -> bool:
        """Whether the host takes longer than everything that it launches, with some overlap."""
        return not self.host_computes and self.host_seconds > min(self.launched_seconds)

    @property
    def total_memory(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a model's step on a cluster."""

    groups: Sequence[ShardedGroup]
    flops_per_sequence: float
    cluster: Cluster
    layout: ParallelLayout

    def of(self, config: SDP4BitConfig, *, row_bytes: int, grid: Grid, replicas: Grid) -> StepCost:
        """Return the cost of a configuration.

        Args:
            row_bytes: bytes per gradient in the rows that are reduced.
            grid: ranks that shard the model.
            replicas: ranks that hold the same shard.
        """
        cluster, layout = self.cluster, self.layout
        blocks_alike: dict[ShardedGroup, GroupTraffic] = {}
        for group in (replace(each, name="") for each in self.groups):
            if group not in blocks_alike:
                blocks_alike[group] = group_traffic(
                    group,
                    grid=grid,
                    replicas=replicas,
                    config=config,
                    accumulation=layout.accumulation,
                    dense_bytes=row_bytes,
                    least_padding=layout.least_padding,
                )
        traffic = [blocks_alike[replace(group, name="")] for group in self.groups]
        exchanges = [exchange for group in traffic for exchange in group.exchanges]
        calls = [call for exchange in exchanges for call in exchange.calls]
        is_flat = any(group.is_flat for group in self.groups)

        # 1. Computation, and the communication that it hides.
        parts = layout.tensor_parallel * layout.pipeline_parallel
        sequences = (layout.micro_batch_size or 1) * layout.accumulation
        arithmetic = self.flops_per_sequence * sequences / parts / cluster.device_flops
        forward_share = FORWARD_SHARE
        if any(group.frozen for group in self.groups):
            forward_share = FORWARD_SHARE_LORA
            arithmetic *= FORWARD_SHARE / FORWARD_SHARE_LORA
        passes = self._passes(traffic)
        least, most = (
            sum(
                count * min(overlap * seconds, share * arithmetic / layout.accumulation)
                for count, seconds, share in (
                    (1, passes.first_forward, forward_share),
                    (layout.accumulation - 1, passes.forward, forward_share),
                    (layout.accumulation - 1, passes.backward, 1 - forward_share),
                    (1, passes.last_backward, 1 - forward_share),
                )
            )
            for overlap in layout.overlaps
        )
        bubble = (layout.pipeline_parallel - 1) / layout.accumulation

        # 2. Latency by kind of collective, and kernels by operator.
        latency = {"ring": 0.0, "all-to-all": 0.0}
        for call in calls:
            kind = "all-to-all" if call.kind == "all-to-all" else "ring"
            latency[kind] += cluster.latency.seconds(call)
        kernels: dict[Operator, float] = {}
        for work in (work for exchange in exchanges for work in exchange.work):
            kernels[work.operator] = kernels.get(work.operator, 0.0) + cluster.kernel_seconds(work)

        # 3. The host. A flat buffer has no groups whose launches are known, and no agreement.
        quantized = sum(part is not None for part in (config.weights, config.gradients))
        host = cluster.host.seconds(
            groups=0
            if is_flat
            else sum(any(len(shape) > 1 for shape in each.shapes) for each in self.groups),
            accumulation=layout.accumulation,
            added_groups=len(self.groups),
            quantized=quantized,
        )
        agreement = 0.0
        if quantized and not is_flat:
            agreement = layout.accumulation * cluster.latency.agreement(ranks=grid.size)

        memory = memory_per_rank(traffic, grid=grid, accumulation=layout.accumulation, row_bytes=row_bytes)
        memory["communicators"] = communicator_bytes(traffic, grid=grid, replicas=replicas)
        inter_bytes = sum(exchange.inter_bytes for exchange in exchanges)
        return StepCost(
            intra_bytes=sum(exchange.intra_bytes for exchange in exchanges),
            inter_bytes=inter_bytes,
            inter_bytes_per_node=inter_bytes * cluster.devices_per_node,
            collectives=sum(exchange.collectives for exchange in exchanges),
            compute_seconds=arithmetic * (1 + bubble),
            transfer_seconds=sum(
                transfer_seconds(each, cluster=cluster, layout=layout) for each in exchanges
            ),
            ring_seconds=latency["ring"],
            all_to_all_seconds=latency["all-to-all"],
            hidden_seconds=(least, most),
            kernel_seconds=kernels,
            agreement_seconds=agreement,
            host_seconds=host,
            host_computes=cluster.host.computes,
            memory=memory,
        )

    def fits(self, cost: StepCost) -> bool:
        """Return whether the memory of a device suffices; True if it is unknown."""
        return self.cluster.device_memory is None or cost.total_memory <= self.cluster.device_memory

    def _passes(self, traffic: Sequence[GroupTraffic]) -> _Passes:
        def seconds(exchanges: Iterable[Exchange]) -> float:
            return sum(
                transfer_seconds(each, cluster=self.cluster, layout=self.layout)
                + sum(self.cluster.latency.seconds(call) for call in each.calls)
                for each in exchanges
            )

        gradients = seconds(exchange for group in traffic for exchange in (group.gradients, group.all_reduce))
        refresh = seconds(group.refresh for group in traffic)
        again = seconds(group.gathers for group in traffic if group.gathers_in_backward)
        once = seconds(group.gathers for group in traffic if not group.gathers_in_backward)
        if any(group.group.is_flat for group in traffic):
            # Gathered before the first forward.
            return _Passes(first_forward=refresh + once, forward=0.0, backward=0.0, last_backward=gradients)
        backward = again / 2 / self.layout.accumulation
        forward = backward + once / self.layout.accumulation
        return _Passes(
            first_forward=refresh + forward,
            forward=forward,
            backward=backward,
            last_backward=gradients + backward,
        )


@dataclass(frozen=True, kw_only=True)
class _Passes:
    """Seconds of communication that can overlap with each pass of a step."""

    first_forward: float
    forward: float
    backward: float
    last_backward: float


def transfer_seconds(exchange: Exchange, *, cluster: Cluster, layout: ParallelLayout) -> float:
    """Return the time of an exchange without latency.

    A ring keeps both levels busy at once; of two hops in chunks, one chunk of the shorter hop is exposed.
    """
    intra = exchange.intra_bytes / cluster.intra_bandwidth
    inter = exchange.inter_bytes / cluster.inter_bandwidth_per_rank(tensor_parallel=layout.tensor_parallel)
    longer, shorter = max(intra, inter), min(intra, inter)
    return longer if exchange.chunks is None else longer + shorter / exchange.chunks
