"""One FSDP2 parameter group: the state of its replica, its gradients over replicas, its descriptions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.collectives.sections import Range, common_ranges, merge_ranges
from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.collectives.work import HostCopy
from sdp4bit.engines.audit import ReplicaCopy
from sdp4bit.engines.explain import describe_all_reduce, describe_ranks
from sdp4bit.engines.fsdp2.groups import FSDPGroup
from sdp4bit.engines.fsdp2.refresh import FROM_CHECKPOINT, Event, Refresh, State, next_refresh
from sdp4bit.engines.group import GroupState, change_squares
from sdp4bit.engines.measures import GradientQuantizer, sample_of
from sdp4bit.quantization.checksum import checksum
from sdp4bit.traffic import TrafficCounter


class FSDPGroupState(GroupState):
    """A parameter group, the state of its replica, and this rank's view of the events that may follow."""

    group: FSDPGroup
    replica: WeightReplica | None

    def __init__(
        self, group: FSDPGroup, *, index: int, layout: NodeLayout, replicas: NodeLayout | None
    ) -> None:
        """Prepare; nothing is quantized yet.

        Args:
            replicas: the nodes of the ranks with the same shard (HSDP); None if there is one.
        """
        # Sums gradients over replicas; None leaves them to FSDP2, in full precision.
        self.all_reduce: QuantizedAllReduce | None = None
        self.all_reduces = 0  # quantized ones so far, which number the rounding bits
        self.replica_layout = replicas
        nodes, per_node = (1, 1) if replicas is None else (replicas.nodes, replicas.ranks_per_node)
        self.all_reduce_traffic = TrafficCounter(nodes=nodes, ranks_per_node=per_node)
        super().__init__(group, index=index, layout=layout)
        # Tensor-parallel ranks hold some of the parameters alike, and others not.
        self.has_copies = bool(group.copied_over)
        self.state = State.NEVER
        # Segments that could train at the last refresh. The rest of the shard is frozen and not sent.
        self.trained: frozenset[int] = frozenset()
        # Checksums of the main shard that the replica was last refreshed from, see `_checksums`.
        self.refreshed_from: Tensor | None = None
        # Whether this rank's part of the last refresh held NaN or infinity: on its way to the host, which
        # does not wait for it.
        self.nonfinite: HostCopy | None = None
        self.full_in_a_row = 0
        # From a checkpoint, until the next refresh: the replica's row of this rank's shard, and fingerprints
        # of the main shards when they were saved, int64 [segments, slots of this rank].
        self.loaded_shard: Tensor | None = None
        self.loaded_fingerprints: Tensor | None = None
        # HSDP: gradients have been reduced over shards, and not over replicas since.
        self.awaits_replicas = False
        # Seen by this rank since the ranks last agreed on events.
        self.is_accumulating = False  # the last forward only accumulated gradients
        self.is_reduced = False  # gradients of the group have been reduced since the last refresh
        self.has_stepped = False
        self.was_loaded = False
        self._once_trained: set[int] = set()

    # -- refreshes -----------------------------------------------------------------------------------

    @property
    def refresh_is_full(self) -> bool:
        """See GroupState."""
        return self._next(Event.GATHER).is_full

    def _next(self, event: Event) -> Refresh:
        """Return the refresh that an event causes: in full precision if a difference would hold bits."""
        refresh = next_refresh(self.state, event)
        if refresh.ranges == "none" or self.group.value_ranges is None:
            return refresh
        chosen = self._sent_segments() if refresh.ranges == "trained" else range(len(self.group.segments))
        holds_bits = any(self.group.segments[index].holds_bits for index in chosen)
        return refresh._replace(kind="full", ranges="none") if holds_bits else refresh

    def apply(self, event: Event) -> Refresh:
        """Take the state that an event leads to; return the refresh that it causes."""
        refresh = self._next(event)
        self.state = refresh.state
        if self.state not in FROM_CHECKPOINT and event is not Event.GATHER:
            self.loaded_shard = None
        return refresh

    def trainable(self) -> frozenset[int]:
        """Return the segments that an optimizer step may change; the same on every rank of the group."""
        # An optimizer changes whatever has a gradient, also parameters that were frozen after the backward
        # pass. Ranks with an empty shard may leave it out of their optimizer, and of `zero_grad`: their
        # gradient says nothing about the others', so such a parameter counts from its first gradient on.
        indices = set()
        for index, segment in enumerate(self.group.segments):
            param = segment.sharded
            if param.requires_grad:
                self._once_trained.add(index)
                indices.add(index)
            elif param.grad is not None if segment.is_on_all_ranks else index in self._once_trained:
                indices.add(index)
        return frozenset(indices)

    def note_step(self, *, by_hand: bool) -> None:
        """Note that an optimizer of this rank has stepped somewhere in the model."""
        # Whether it holds parameters of this group is not asked: optimizers of other ranks may hold others.
        # A group without a gradient since its last refresh is left alone, unless the user says that a step
        # was taken: the discriminator's step does not make the generator's weights travel.
        trainable = self.trainable()
        segments = self.group.segments
        has_gradient = self.is_reduced or any(
            segments[i].is_on_all_ranks and segments[i].sharded.grad is not None for i in trainable
        )
        self.has_stepped = self.has_stepped or (bool(trainable) and (by_hand or has_gradient))

    def has_unsummed_gradients(self) -> bool:
        """Return whether an optimizer sees gradients that were to be summed over replicas, and were not."""
        return self.awaits_replicas and any(s.sharded.grad is not None for s in self.group.segments)

    def due_segments(self) -> frozenset[int]:
        """Return the segments whose difference is due, a step that is not yet agreed on included."""
        ranges = next_refresh(self.state, Event.GATHER).ranges
        if ranges == "row":
            return frozenset(range(len(self.group.segments)))
        if ranges == "trained" or (self.has_stepped and self.state is State.CURRENT):
            return self._sent_segments()
        return frozenset()

    def ranges_of(self, refresh: Refresh) -> list[Range] | None:
        """Return the ranges of the row that a refresh sends; None for all of it."""
        everything = frozenset(range(len(self.group.segments)))
        chosen = self._sent_segments() if refresh.ranges == "trained" else everything
        return None if chosen == everything else self._ranges(chosen)

    def _sent_segments(self) -> frozenset[int]:
        """Return the segments that trained at the last refresh; all if others train now."""
        # Edits of weights that were frozen until then have been looked for in another part of the row.
        everything = frozenset(range(len(self.group.segments)))
        return self.trained if self.trained == self.trainable() else everything

    def _ranges(self, chosen: frozenset[int]) -> list[Range]:
        segments = self.group.segments
        return merge_ranges([(segments[index].start, segments[index].end) for index in sorted(chosen)])

    def has_edits(self) -> Tensor | None:
        """Return whether weights differ from those last refreshed from, a bool scalar; None if unknown."""
        replica, before = self.replica, self.refreshed_from
        if self.state not in (State.CURRENT, State.STEPPED) or replica is None or before is None:
            return None
        assert replica.rows is not None
        # After a step only the frozen part is compared: the difference of the rest is sent anyway.
        has_stepped = self.has_stepped or self.state is State.STEPPED
        if has_stepped and len(self.trained) == len(self.group.segments):
            return None
        row = self.group.main_shard(replica.rows.dtype)
        if has_stepped:
            return self._frozen_checksum(row) != before[1]
        return (self._checksums(row) != before).any()

    def _checksums(self, row: Tensor) -> Tensor:
        """Return the checksums of the part of a row [n] that trains and of the frozen part, int64 [2]."""
        return torch.stack([self._checksum(row, self.trained), self._frozen_checksum(row)])

    def _frozen_checksum(self, row: Tensor) -> Tensor:
        return self._checksum(row, frozenset(range(len(self.group.segments))) - self.trained)

    def _checksum(self, row: Tensor, chosen: frozenset[int]) -> Tensor:
        pieces = [row[start:end] for start, end in self._ranges(chosen)]
        if not pieces:
            return row.new_zeros((), dtype=torch.int64)
        return checksum(pieces[0] if len(pieces) == 1 else torch.cat(pieces))

    def has_misfit(self) -> bool:
        """Return whether the loaded row was saved by another rank, with other weights, or is missing."""
        if self.state not in FROM_CHECKPOINT:
            return False
        if self.loaded_shard is None or self.loaded_fingerprints is None:
            return True
        return not bool((self.loaded_fingerprints == self.fingerprints().unsqueeze(1)).all())

    def fingerprints(self) -> Tensor:
        """Return numbers, int64 [segments], that tell main shards and numbers of nodes from others."""
        return self.group.fingerprints() + (self.layout.nodes << 40)

    def values_of(self, row: Tensor) -> Tensor:
        """Return the part of a row [n] that holds values."""
        return row if self.group.value_ranges is None else sample_of(row, self.group.value_ranges)

    def change_squares(self) -> Tensor:
        """Return |main - replica|^2 and |main|^2 over this rank's shard, fp64 [2]."""
        assert self.replica is not None
        held = self.replica.own_shard if self.loaded_shard is None else self.loaded_shard
        main = self.group.main_shard(held.dtype)
        return change_squares(self.values_of(main), self.values_of(held))

    def note_refresh(self, row: Tensor, *, refresh: Refresh) -> None:
        """Note a refresh from this row [n], the main shard in the type that is gathered."""
        assert self.replica is not None
        self.has_stepped = self.was_loaded = self.is_reduced = False
        self.loaded_shard = None
        self.nonfinite = HostCopy(self.replica.nonfinite)
        before, is_full = self.refreshed_from, refresh.is_full
        self.full_in_a_row = self.full_in_a_row + 1 if is_full and before is not None else 0
        if is_full:
            self.count_full_refresh()
        with torch.inference_mode(False):
            if not is_full and self.ranges_of(refresh) is not None:
                # An edit of the frozen part has not been sent, and must still be found.
                assert before is not None
                self.refreshed_from = torch.stack([self._checksum(row, self.trained), before[1]])
            else:
                self.trained = self.trainable()
                self.refreshed_from = self._checksums(row)

    # -- gradients, copies and descriptions ----------------------------------------------------------

    @property
    def counters(self) -> tuple[TrafficCounter, ...]:
        """See GroupState."""
        return (*super().counters, self.all_reduce_traffic)

    @property
    def gradient_quantizers(self) -> Sequence[GradientQuantizer]:
        """See GroupState."""
        return [*super().gradient_quantizers, *([] if self.all_reduce is None else [self.all_reduce])]

    @property
    def gradient_layouts(self) -> Sequence[NodeLayout]:
        """See GroupState."""
        over_replicas = [] if self.all_reduce is None else [self.replica_layout]
        return [*super().gradient_layouts, *(layout for layout in over_replicas if layout is not None)]

    def sample_weights(self, ranges: Sequence[Range], *, may_wait: bool) -> tuple[Tensor, Tensor] | None:
        """See GroupState."""
        replica = self.replica
        if replica is None or replica.rows is None or (replica.is_pending and not may_wait):
            return None
        if self.group.value_ranges is not None:
            ranges = common_ranges(ranges, self.group.value_ranges)
        return (self.group.sample_main(ranges), sample_of(replica.own_shard, ranges)) if ranges else None

    def copies(self) -> Sequence[ReplicaCopy]:
        """See GroupState; with HSDP, also a checksum of the main shard, which replicas hold alike."""
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
        """See GroupState."""
        text = super().describe_weights()
        if self.replica is None:
            return text
        frozen = sum(not segment.sharded.requires_grad for segment in self.group.segments)
        return text + (f", {frozen} frozen not sent" if frozen else "")

    def describe_gradients(self) -> str:
        """See GroupState."""
        if not any(segment.sharded.requires_grad for segment in self.group.segments):
            return "none, all frozen"
        text = super().describe_gradients()
        if self.all_reduce is not None and self.replica_layout is not None:
            numel = self.group.shard_numel
            text += f", {describe_all_reduce(self.all_reduce.config, self.replica_layout, numel)}"
        return text

    def describe_ranks(self) -> str:
        """See GroupState."""
        text = super().describe_ranks()
        return (
            text if self.replica_layout is None else f"{text}, replicas {describe_ranks(self.replica_layout)}"
        )
