"""One FSDP2 parameter group: the state of its replica."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdp4bit.collectives.group import Group, Remarks
from sdp4bit.collectives.sections import Range, merge_ranges
from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.collectives.work import HostCopy
from sdp4bit.engines.edits import change_squares
from sdp4bit.engines.fsdp2.groups import FSDPGroup
from sdp4bit.engines.fsdp2.refresh import FROM_CHECKPOINT, Event, Refresh, Seen, State, next_refresh
from sdp4bit.observe.audit import ReplicaCopy
from sdp4bit.observe.measures import sample_of
from sdp4bit.quantization.checksum import checksum


class FSDPGroupState(Group):
    """A parameter group, the state of its replica, and the events that this rank has seen."""

    group: FSDPGroup

    def __init__(
        self, group: FSDPGroup, *, index: int, layout: NodeLayout, replicas: NodeLayout | None
    ) -> None:
        super().__init__(group, index=index, layout=layout, replicas=replicas)
        self.data_rank, self.data_ranks_of_replicas = group.data_rank, group.data_ranks_of_replicas
        self.has_copies = bool(group.copied_over)
        self.state = State.NEVER
        # Segments that were trainable at the last refresh; the others are frozen and not sent.
        self.trained: frozenset[int] = frozenset()
        # `_checksums` of the main shard at the last refresh.
        self.refreshed_from: Tensor | None = None
        # Whether this rank's part of the last refresh held NaN or infinity.
        self.nonfinite: HostCopy | None = None
        self.full_in_a_row = 0
        # From a checkpoint, until the next refresh: the replica's row of this rank's shard, and fingerprints
        # of the main shards when they were saved, int64 [segments, slots of this rank].
        self.loaded_shard: Tensor | None = None
        self.loaded_fingerprints: Tensor | None = None
        # HSDP: gradients were reduced over shards but not over replicas since.
        self.awaits_replicas = False
        self.is_accumulating = False  # the last forward only accumulated gradients
        self.seen = Seen()

    @property
    def refresh_is_full(self) -> bool:
        return self.due().is_full

    def apply(self, event: Event) -> None:
        """Change the state by an event other than a gather."""
        self.state = next_refresh(self.state, event).state
        if self.state not in FROM_CHECKPOINT:
            self.loaded_shard = None

    def due(self) -> Refresh:
        """Return the refresh that the next gather needs; `note_refresh` changes the state."""
        return next_refresh(self.state, Event.GATHER)

    @property
    def needs_full_refresh(self) -> bool:
        """Whether the replica does not exist, must be replaced, or was left unfinished by an exception."""
        is_torn = self.replica is not None and self.replica.is_torn
        return is_torn or self.state in (State.NEVER, State.FULL_DUE)

    def trainable(self) -> frozenset[int]:
        """Return the segments that an optimizer step may change; the same on every rank of the group."""
        # A parameter that was frozen after its gradient was reduced may still change in the step. Its `.grad`
        # must not decide that, because a rank whose shard is empty may never clear it.
        return self.seen.trained | self._requiring_grad()

    def _requiring_grad(self) -> frozenset[int]:
        return frozenset(i for i, segment in enumerate(self.group.segments) if segment.sharded.requires_grad)

    def note_reduction(self) -> None:
        """Record that gradients of the group are being reduced."""
        self.seen.is_reduced = True
        self.seen.trained |= self._requiring_grad()

    def note_step(self, *, by_hand: bool) -> None:
        """Record that an optimizer of this rank has stepped somewhere in the model."""
        # Any optimizer counts, because other ranks may divide the parameters among optimizers differently. A
        # group without a gradient since its last refresh does not count, unless the user reports the step.
        # So a discriminator's step does not send the generator's weights.
        trainable = self.trainable()
        segments = self.group.segments
        has_gradient = self.seen.is_reduced or any(
            segments[i].is_on_all_ranks and segments[i].sharded.grad is not None for i in trainable
        )
        self.seen.has_stepped |= bool(trainable) and (by_hand or has_gradient)

    def has_unsummed_gradients(self) -> bool:
        """Return whether gradients exist that were not summed over replicas."""
        return self.awaits_replicas and any(s.sharded.grad is not None for s in self.group.segments)

    def due_segments(self) -> frozenset[int]:
        """Return the segments whose difference is due, including steps not yet agreed on."""
        ranges = self.due().ranges
        if ranges == "row":
            return frozenset(range(len(self.group.segments)))
        if ranges == "trained" or (self.seen.has_stepped and self.state is State.CURRENT):
            return self._sent_segments()
        return frozenset()

    def ranges_of(self, refresh: Refresh) -> list[Range] | None:
        """Return the ranges of the row that a refresh sends; None for the entire row."""
        everything = frozenset(range(len(self.group.segments)))
        chosen = self._sent_segments() if refresh.ranges == "trained" else everything
        return None if chosen == everything else self._ranges(chosen)

    def _sent_segments(self) -> frozenset[int]:
        """Return the segments that were trainable at the last refresh; all segments if that has changed."""
        # Edits of weights that were frozen until then may have gone undetected.
        everything = frozenset(range(len(self.group.segments)))
        return self.trained if self.trained == self.trainable() else everything

    def _ranges(self, chosen: frozenset[int]) -> list[Range]:
        segments = self.group.segments
        return merge_ranges([(segments[index].start, segments[index].end) for index in sorted(chosen)])

    def has_edits(self) -> Tensor | None:
        """Return whether weights differ from those of the last refresh, a bool scalar; None if unknown."""
        replica, before = self.replica, self.refreshed_from
        if self.state not in (State.CURRENT, State.STEPPED) or replica is None or before is None:
            return None
        assert replica.rows is not None
        # After a step only the frozen part is compared, because the difference of the rest is sent anyway.
        has_stepped = self.seen.has_stepped or self.state is State.STEPPED
        if has_stepped and len(self.trained) == len(self.group.segments):
            return None
        row = self.group.main_shard(replica.rows.dtype)
        if has_stepped:
            return self._frozen_checksum(row) != before[1]
        return (self._checksums(row) != before).any()

    def _checksums(self, row: Tensor) -> Tensor:
        """Return the checksums of the trained and the frozen part of a row [n], int64 [2]."""
        return torch.stack([self._checksum(row, self.trained), self._frozen_checksum(row)])

    def _frozen_checksum(self, row: Tensor) -> Tensor:
        return self._checksum(row, frozenset(range(len(self.group.segments))) - self.trained)

    def _checksum(self, row: Tensor, chosen: frozenset[int]) -> Tensor:
        pieces = [row[start:end] for start, end in self._ranges(chosen)]
        if not pieces:
            return row.new_zeros((), dtype=torch.int64)
        return checksum(pieces[0] if len(pieces) == 1 else torch.cat(pieces))

    def has_misfit(self) -> bool:
        """Return whether the loaded row is missing or was saved by another rank or with other weights."""
        if self.state not in FROM_CHECKPOINT:
            return False
        if self.loaded_shard is None or self.loaded_fingerprints is None:
            return True
        return not bool((self.loaded_fingerprints == self.fingerprints().unsqueeze(1)).all())

    def fingerprints(self) -> Tensor:
        """Return fingerprints of the main shards and the number of nodes, int64 [segments]."""
        return self.group.fingerprints() + (self.layout.nodes << 40)

    def values_of(self, row: Tensor) -> Tensor:
        """Return the part of a row [n] that holds values and not bits."""
        return row if self.group.value_ranges is None else sample_of(row, self.group.value_ranges)

    def change_squares(self) -> Tensor:
        """Return |main - replica|^2 and |main|^2 over this rank's shard, fp64 [2]."""
        assert self.replica is not None
        held = self.replica.own_shard if self.loaded_shard is None else self.loaded_shard
        main = self.group.main_shard(held.dtype)
        return change_squares(self.values_of(main), self.values_of(held))

    def note_refresh(self, row: Tensor, *, refresh: Refresh, ranges: Sequence[Range] | None) -> None:
        """Record a refresh of these ranges that has been sent.

        Args:
            row: [n], the main shard in the gathered dtype.
        """
        assert self.replica is not None
        self.state, self.seen, self.loaded_shard = refresh.state, Seen(), None
        self.nonfinite = HostCopy(self.replica.nonfinite)
        before, is_full = self.refreshed_from, refresh.is_full
        # An evaluation may have swapped averages in, and the next forward in training has them out again.
        counts = is_full and before is not None and self.group.module.training
        self.full_in_a_row = self.full_in_a_row + 1 if counts else 0
        if is_full:
            self.count_full_refresh()
        with torch.inference_mode(False):
            if ranges is not None:
                # Unless the rows of a checkpoint were sent, too, an edit of the frozen part has not been sent
                # and must still be detected.
                assert is_full or before is not None
                frozen = self._frozen_checksum(row) if before is None or is_full else before[1]
                self.refreshed_from = torch.stack([self._checksum(row, self.trained), frozen])
            else:
                self.trained = self.trainable()
                self.refreshed_from = self._checksums(row)

    def awaits_refresh(self) -> bool:
        return self.seen.has_stepped or self.seen.was_loaded or self.state is not State.CURRENT

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
