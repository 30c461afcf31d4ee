"""Communication of one FSDP2 parameter group: what its next refresh has to send, and what it has done."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.collectives.weight_replica import Range, WeightReplica, merge_ranges
from sdp4bit.engines.audit import ReplicaCopy
from sdp4bit.engines.explain import describe_all_reduce, describe_ranks
from sdp4bit.engines.fsdp2.groups import FSDPGroup
from sdp4bit.engines.group import GroupCommunication
from sdp4bit.engines.measures import GradientQuantizer, sample_of
from sdp4bit.quantization.checksum import checksum
from sdp4bit.traffic import TrafficCounter

RefreshKind = Literal["full", "whole row", "trained part"]
"""In full precision, or by differences of all values or of those that train."""


class FSDPCommunication(GroupCommunication[FSDPGroup, WeightReplica]):
    """Communication of one FSDP2 parameter group, and what has happened to its weights."""

    def __init__(
        self, group: FSDPGroup, *, index: int, layout: NodeLayout, replicas: NodeLayout | None
    ) -> None:
        """Prepare; nothing is quantized yet.

        Args:
            replicas: the nodes of the ranks with the same shard (HSDP); None if there is one.
        """
        self.all_reduce: QuantizedAllReduce | None = None
        """What sums gradients over replicas; None leaves them to FSDP2, in full precision."""
        self.all_reduces = 0
        """Quantized all-reduces so far, which number the rounding bits."""
        self.awaits_replicas = False
        """Gradients have been reduced over shards, and not over replicas since."""
        self.replica_layout = replicas
        nodes, per_node = (1, 1) if replicas is None else (replicas.nodes, replicas.ranks_per_node)
        self.all_reduce_traffic = TrafficCounter(nodes=nodes, ranks_per_node=per_node)
        super().__init__(group, index=index, layout=layout)
        self.resync_wanted = True  # the first refresh is in full precision, too
        self.changed: set[int] = set()
        """Segments that have changed since the last refresh; the next one sends their difference."""
        self.trained: frozenset[int] = frozenset()
        """Segments that could train at the last refresh. The rest of the shard is frozen and not sent."""
        self.refreshed_from: Tensor | None = None
        """`shard_checksums` of the main shard that the replica was last refreshed from."""
        self.is_reduced = False
        """Gradients of the group have been reduced since the last refresh."""
        self._once_trained: set[int] = set()
        self.full_in_a_row = 0
        self.loaded_shard: Tensor | None = None
        """What a checkpoint says the devices held of this rank's shard, until the next refresh."""
        self.loaded_fingerprint: Tensor | None = None
        """The fingerprint, in each of its elements, of the main shard that the loaded one belongs to."""
        self.load_undecided = False
        """A checkpoint was loaded and the ranks have not yet agreed whether to use its shards."""

    @property
    def counters(self) -> tuple[TrafficCounter, ...]:
        """See GroupCommunication."""
        return (*super().counters, self.all_reduce_traffic)

    @property
    def gradient_quantizers(self) -> Sequence[GradientQuantizer]:
        """See GroupCommunication."""
        return [*super().gradient_quantizers, *([] if self.all_reduce is None else [self.all_reduce])]

    @property
    def gradient_layouts(self) -> Sequence[NodeLayout]:
        """See GroupCommunication."""
        over_replicas = [] if self.all_reduce is None else [self.replica_layout]
        return [*super().gradient_layouts, *(layout for layout in over_replicas if layout is not None)]

    def loaded_shard_fits(self) -> bool:
        """Return whether this rank saved the loaded shard when its main shard was bit for bit what it is."""
        if self.loaded_shard is None or self.loaded_fingerprint is None:
            return False
        return bool((self.loaded_fingerprint == self.group.fingerprint()).all())

    def trainable(self) -> frozenset[int]:
        """Return the segments that an optimizer step may change; the same on every rank of the group.

        An optimizer changes whatever has a gradient, also what was frozen after the backward pass. Ranks
        with an empty shard may leave it out of their optimizer, and with it out of `zero_grad`: what they see
        of its gradient is no sign of what the others see, so such a parameter counts from the first time that
        it requires a gradient.
        """
        found = set()
        for index, segment in enumerate(self.group.segments):
            param = segment.sharded
            if param.requires_grad:
                self._once_trained.add(index)
                found.add(index)
            elif param.grad is not None if segment.is_on_all_ranks else index in self._once_trained:
                found.add(index)
        return frozenset(found)

    def note_step(self, *, by_hand: bool) -> None:
        """Note that an optimizer has stepped somewhere in the model, as all ranks know.

        Whether it holds parameters of this group is not asked: optimizers of other ranks may hold others.
        A group without a gradient since its last refresh is left alone, unless the user says that a step was
        taken: the discriminator's step does not make the generator's weights travel.
        """
        if len(self.changed) == len(self.group.segments):
            return
        trainable = self.trainable()
        segments = self.group.segments
        if (
            by_hand
            or self.is_reduced
            or any(segments[i].is_on_all_ranks and segments[i].sharded.grad is not None for i in trainable)
        ):
            self.changed |= trainable

    def has_unsummed_gradients(self) -> bool:
        """Return whether an optimizer sees gradients that were to be summed over replicas, and were not."""
        if not self.awaits_replicas:
            return False
        return any(segment.sharded.grad is not None for segment in self.group.segments)

    def due_segments(self) -> frozenset[int]:
        """Return the segments whose difference the next refresh sends; none if nothing has changed.

        All of them when other segments train than at the last refresh: edits of what was frozen until then
        have been looked for in another part of the row.
        """
        if not self.changed:
            return frozenset()
        everything = len(self.group.segments)
        # What trains is asked of every parameter, so not where the answer makes no difference.
        if len(self.changed) < everything and self.changed <= self.trained == self.trainable():
            return self.trained
        return frozenset(range(everything))

    def due_ranges(self) -> list[Range] | None:
        """Return the ranges of the row whose difference the next refresh sends; None for all of it."""
        due = self.due_segments()
        return None if len(due) == len(self.group.segments) else self._ranges(due)

    def _ranges(self, chosen: frozenset[int]) -> list[Range]:
        segments = self.group.segments
        return merge_ranges([(segments[index].start, segments[index].end) for index in sorted(chosen)])

    def shard_checksums(self, row: Tensor) -> Tensor:
        """Return the checksums of the part of a row [n] that trains and of the frozen part, int64 [2]."""
        return torch.stack([self._checksum(row, self.trained), self.frozen_checksum(row)])

    def frozen_checksum(self, row: Tensor) -> Tensor:
        """Return the checksum of the frozen part of a row [n], an int64 scalar."""
        return self._checksum(row, frozenset(range(len(self.group.segments))) - self.trained)

    def _checksum(self, row: Tensor, chosen: frozenset[int]) -> Tensor:
        pieces = [row[start:end] for start, end in self._ranges(chosen)]
        if not pieces:
            return row.new_zeros((), dtype=torch.int64)
        return checksum(pieces[0] if len(pieces) == 1 else torch.cat(pieces))

    def note_refresh(self, row: Tensor, *, kind: RefreshKind) -> None:
        """Note a refresh from this row [n], the main shard in the type that is gathered."""
        self.changed.clear()
        self.is_reduced = False
        before = self.refreshed_from
        self.full_in_a_row = self.full_in_a_row + 1 if kind == "full" and before is not None else 0
        if kind == "full":
            self.count_full_refresh()
        with torch.inference_mode(False):
            if kind == "trained part" and before is not None:
                # An edit of the frozen part has not been sent, and must still be found.
                self.refreshed_from = torch.stack([self._checksum(row, self.trained), before[1]])
            else:
                self.trained = self.trainable()
                self.refreshed_from = self.shard_checksums(row)

    def gradient_parts(self, numel: int) -> list[list[Range]] | None:
        """Return the ranges of a gradient row [numel] that each of the group's parts has, maybe none.

        FSDP2 does not tell which parameters got a gradient and are in the row. Its length tells whether all
        are, or all that train; otherwise None is returned, unless there is but one part.
        """
        group = self.group
        if len(group.parts) == 1:
            return [[(0, numel)]]
        trainable = [segment for segment in group.segments if segment.sharded.requires_grad]
        for present in (group.segments, trainable):
            ends = list(accumulate(segment.end - segment.start for segment in present))
            if ends and ends[-1] == numel:
                place = {
                    segment.name: (start, end)
                    for segment, start, end in zip(present, [0, *ends], ends, strict=False)
                }
                return [
                    merge_ranges([place[segment.name] for segment in part if segment.name in place])
                    for part in group.parts
                ]
        return None

    def sample_weights(self, ranges: Sequence[Range], *, may_wait: bool) -> tuple[Tensor, Tensor] | None:
        """See GroupCommunication."""
        replica = self.replica
        if replica is None or replica.rows is None or (replica.is_pending and not may_wait):
            return None
        return self.group.sample_main(ranges), sample_of(replica.own_shard, ranges)

    def copies(self) -> Sequence[ReplicaCopy]:
        """See GroupCommunication; with HSDP, also a checksum of the main shard, which replicas hold alike."""
        found = []
        if self.replica is not None:
            self.replica.wait()
            if self.replica.rows is not None:
                found.append(
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
            found.append(
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
        return found

    def describe_weights(self) -> str:
        """See GroupCommunication."""
        text = super().describe_weights()
        if self.replica is None or self.replica.bits is None:
            return text
        frozen = sum(not segment.sharded.requires_grad for segment in self.group.segments)
        return text + self._describe_copies() + (f", {frozen} frozen not sent" if frozen else "")

    def describe_gradients(self) -> str:
        """See GroupCommunication."""
        if not any(segment.sharded.requires_grad for segment in self.group.segments):
            return "none, all frozen"
        text = super().describe_gradients()
        if self.reduction is not None and self.group.shard_numel >= self.reduction.config.min_numel:
            text += self._describe_copies(min_numel=self.reduction.config.min_numel)
        if self.all_reduce is not None and self.replica_layout is not None:
            numel = self.group.shard_numel
            text += f", {describe_all_reduce(self.all_reduce.config, self.replica_layout, numel)}"
        return text

    def describe_ranks(self) -> str:
        """See GroupCommunication."""
        text = super().describe_ranks()
        return (
            text if self.replica_layout is None else f"{text}, replicas {describe_ranks(self.replica_layout)}"
        )

    def _describe_copies(self, *, min_numel: int = 0) -> str:
        """Return how what tensor-parallel ranks hold alike travels beside what they split, in one group."""
        parts = self.group.parts
        if len(parts) == 1:
            return ""
        everywhere = len({ranks for part in parts for ranks in part[0].split_over})
        apart = dense = 0
        for part in parts:
            if len(part[0].split_over) < everywhere:
                short = sum(segment.end - segment.start for segment in part) < min_numel
                dense, apart = dense + len(part) * short, apart + len(part) * (not short)
        text = f", {apart} TP copies apart" if apart else ""
        return text + (f", {dense} TP copies in full precision" if dense else "")


def reduce_over_copies(
    values: Tensor, comms: Sequence[FSDPCommunication], *, op: dist.ReduceOp.RedOpType
) -> None:
    """Reduce values in place over the tensor-parallel ranks that hold copies of a part of a group.

    For decisions on how replicas are refreshed, when the data-parallel ranks have agreed on theirs: what one
    of these ranks does, all do. Nothing is sent for groups without such copies.

    Args:
        values: [n], one for each of the n groups.
        comms: the same groups on all of these ranks, but for those without copies.
    """
    for group in dict.fromkeys(group for comm in comms for group in comm.group.copied_over):
        chosen = [index for index, comm in enumerate(comms) if group in comm.group.copied_over]
        part = values[chosen]
        with comm_error_context("agreement of tensor-parallel ranks", group=group):
            dist.all_reduce(part, op=op, group=group)
        values[chosen] = part
