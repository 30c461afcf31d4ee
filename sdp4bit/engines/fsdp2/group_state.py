"""One FSDP2 parameter group: its quantizers, and the decision when its replica is refreshed."""

from __future__ import annotations

import torch
from torch import Tensor

from sdp4bit.collectives.group import Group, Remarks
from sdp4bit.collectives.topology import Nodes
from sdp4bit.engines.edits import change_squares
from sdp4bit.engines.fsdp2.freshness import Event, Freshness, State, next_refresh
from sdp4bit.engines.fsdp2.view import FSDPGroup
from sdp4bit.observe.audit import ReplicaCopy
from sdp4bit.observe.measures import sample_of
from sdp4bit.quantization.ops import checksum


class FSDPGroupState(Group):
    """A parameter group with its quantizers, and the decision when its replica is refreshed."""

    group: FSDPGroup

    def __init__(self, group: FSDPGroup, *, index: int, layout: Nodes, replicas: Nodes | None) -> None:
        super().__init__(group, index=index, layout=layout, replicas=replicas)
        self.data_rank, self.data_ranks_of_replicas = group.data_rank, group.data_ranks_of_replicas
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

    def awaits_refresh(self) -> bool:
        seen = self.fresh.seen
        return seen.has_stepped or seen.was_loaded or self.fresh.state is not State.CURRENT

    def remarks(self) -> Remarks:
        segments = self.group.segments
        frozen = sum(not segment.sharded.requires_grad for segment in segments)
        exact = sum(segment.sharded.requires_grad and segment.holds_bits for segment in segments)
        weights = [f"{frozen} frozen not sent"] if frozen else []
        weights += [f"{exact} of another dtype in full precision"] if exact else []
        return Remarks(weights=weights, gradients="none, all frozen" if frozen == len(segments) else "")

    def main_copy(self) -> ReplicaCopy | None:
        """Return a checksum of the main shard if quantized all-reduces keep it equal on replicas (HSDP)."""
        if self.all_reduce is None or self.replica_layout is None:
            return None
        assert self.group.replicas is not None
        return ReplicaCopy(
            name=f"{self.group.name} (main weights)",
            rows=checksum(self.group.main_shard(torch.float32)).view(1),
            layout=self.replica_layout,
            process_group=self.group.replicas,
            is_full=True,
            traffic=self.all_reduce_traffic,
            can_be_refreshed=False,
        )
