"""One FSDP2 parameter group: its quantizers, its freshness, and descriptions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.collectives.sections import Range, common_ranges
from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.engines.fsdp2.freshness import Event, Freshness, State, next_refresh
from sdp4bit.engines.fsdp2.view import FSDPGroup
from sdp4bit.engines.group import GroupState, change_squares
from sdp4bit.observe.audit import ReplicaCopy
from sdp4bit.observe.explain import describe_all_reduce, describe_ranks
from sdp4bit.observe.measures import GradientQuantizer, sample_of
from sdp4bit.quantization.checksum import checksum
from sdp4bit.traffic import TrafficCounter


class FSDPGroupState(GroupState):
    """A parameter group with its quantizers, and the decision when its replica is refreshed."""

    group: FSDPGroup
    replica: WeightReplica | None

    def __init__(
        self, group: FSDPGroup, *, index: int, layout: NodeLayout, replicas: NodeLayout | None
    ) -> None:
        """Create a group without quantizers.

        Args:
            replicas: the nodes of the ranks with the same shard (HSDP); None for a single replica.
        """
        # Sums gradients over replicas; without it FSDP2 does, in full precision.
        self.all_reduce: QuantizedAllReduce | None = None
        self.all_reduces = 0  # quantized ones so far
        self.replica_layout = replicas
        nodes, per_node = (1, 1) if replicas is None else (replicas.nodes, replicas.ranks_per_node)
        self.all_reduce_traffic = TrafficCounter(nodes=nodes, ranks_per_node=per_node)
        super().__init__(group, index=index, layout=layout)
        self.fresh = Freshness(group, nodes=layout.nodes)
        # HSDP: gradients were reduced over shards but not over replicas since.
        self.awaits_replicas = False

    @property
    def refresh_is_full(self) -> bool:
        return next_refresh(self.fresh.state, Event.GATHER).is_full

    @property
    def sends_differences(self) -> bool:
        return self.replica is not None and self.replica.sends_differences

    def has_unsummed_gradients(self) -> bool:
        """Return whether gradients exist that were not summed over replicas."""
        return self.awaits_replicas and any(s.sharded.grad is not None for s in self.group.segments)

    def values_of(self, row: Tensor) -> Tensor:
        """Return the part of a row [n] that holds values and not bits."""
        return row if self.group.value_ranges is None else sample_of(row, self.group.value_ranges)

    def change_squares(self) -> Tensor:
        """Return |main - replica|^2 and |main|^2 over this rank's shard, fp64 [2]."""
        assert self.replica is not None
        loaded = self.fresh.loaded_row
        held = self.replica.own_shard if loaded is None else loaded
        main = self.group.main_shard(held.dtype)
        return change_squares(self.values_of(main), self.values_of(held))

    @property
    def counters(self) -> tuple[TrafficCounter, ...]:
        return (*super().counters, self.all_reduce_traffic)

    @property
    def gradient_quantizers(self) -> Sequence[GradientQuantizer]:
        return [*super().gradient_quantizers, *([] if self.all_reduce is None else [self.all_reduce])]

    @property
    def gradient_layouts(self) -> Sequence[NodeLayout]:
        over_replicas = [] if self.all_reduce is None else [self.replica_layout]
        return [*super().gradient_layouts, *(layout for layout in over_replicas if layout is not None)]

    def sample_weights(self, ranges: Sequence[Range], *, may_wait: bool) -> tuple[Tensor, Tensor] | None:
        replica = self.replica
        if replica is None or replica.rows is None or (replica.is_pending and not may_wait):
            return None
        if self.group.value_ranges is not None:
            ranges = common_ranges(ranges, self.group.value_ranges)
        return (self.group.sample_main(ranges), sample_of(replica.own_shard, ranges)) if ranges else None

    def awaits_refresh(self) -> bool:
        seen = self.fresh.seen
        return seen.has_stepped or seen.was_loaded or self.fresh.state is not State.CURRENT

    def copies(self) -> Sequence[ReplicaCopy]:
        """See GroupState; with HSDP also a checksum of the main shard, which must equal other replicas'."""
        copies = []
        if self.replica is not None:
            self.replica.wait()
            if self.replica.rows is not None:
                copies.append(
                    ReplicaCopy(
                        name=self.group.name,
                        rows=self.replica.rows,
                        layout=self.layout,
                        process_group=self.group.process_group,
                        is_full=self.replica.is_full,
                        traffic=self.weight_traffic,
                    )
                )
        if self.all_reduce is not None and self.replica_layout is not None:
            assert self.group.replicas is not None
            copies.append(
                ReplicaCopy(
                    name=f"{self.group.name} (main weights)",
                    rows=checksum(self.group.main_shard(torch.float32)).view(1),
                    layout=self.replica_layout,
                    process_group=self.group.replicas,
                    is_full=True,
                    traffic=self.all_reduce_traffic,
                    can_be_refreshed=False,
                )
            )
        return copies

    def describe_weights(self) -> str:
        text = super().describe_weights()
        if self.replica is None:
            return text
        frozen = sum(not segment.sharded.requires_grad for segment in self.group.segments)
        exact = sum(segment.sharded.requires_grad and segment.holds_bits for segment in self.group.segments)
        text += f", {frozen} frozen not sent" if frozen else ""
        return text + (f", {exact} of another dtype in full precision" if exact else "")

    def describe_gradients(self) -> str:
        if not any(segment.sharded.requires_grad for segment in self.group.segments):
            return "none, all frozen"
        text = super().describe_gradients()
        if self.all_reduce is not None and self.replica_layout is not None:
            numel = self.group.shard_numel
            text += f", {describe_all_reduce(self.all_reduce.config, self.replica_layout, numel)}"
        return text

    def describe_ranks(self) -> str:
        replicas = self.replica_layout
        text = super().describe_ranks()
        return text if replicas is None else f"{text}, replicas {describe_ranks(replicas)}"
