"""Communication of one FSDP2 parameter group: what quantizes it, and what it has done so far."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.errors import naming
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.collectives.weight_replica import Span, WeightReplica, merge_spans
from sdp4bit.engines.fsdp2.groups import FSDPGroup
from sdp4bit.engines.measures import GradientSample
from sdp4bit.quantization.checksum import checksum
from sdp4bit.traffic import Traffic, TrafficCounter

RefreshKind = Literal["full", "whole row", "trained part"]
"""In full precision, or by differences of all values or of those that train."""


class GroupComm:
    """Communication of one FSDP2 parameter group: settings, replica, counters."""

    def __init__(self, group: FSDPGroup, *, index: int, layout: NodeLayout) -> None:
        self.group = group
        self.index = index
        self.layout = layout
        self.replica: WeightReplica | None = None
        self.weights_dense_because = ""
        self.reduce_scatter: QuantizedReduceScatter | None = None
        self.gradients_dense_because = ""
        self.moved: dict[str, str] = {}
        """Why "weights" or "gradients" are not quantized as configured, where alerts have moved them."""
        self.weight_traffic = TrafficCounter(nodes=layout.nodes, ranks_per_node=layout.ranks_per_node)
        self.gradient_traffic = TrafficCounter(nodes=layout.nodes, ranks_per_node=layout.ranks_per_node)
        self.changed: set[int] = set()
        """Segments that have changed since the last refresh; the next one sends their difference."""
        self.trained: frozenset[int] = frozenset()
        """Segments that could train at the last refresh. The rest of the row is frozen and not sent."""
        self.refreshed_from: Tensor | None = None
        """`row_checksums` of the main shard that the replica was last refreshed from."""
        self.is_reduced = False
        """Gradients of the group have been reduced since the last refresh."""
        self._once_trained: set[int] = set()
        self.resync_wanted = True
        """The next refresh is in full precision; so is the first."""
        self.full_refreshes = 0
        """Refreshes in full precision, the first left out: after loads, and after edits of the weights."""
        self.full_in_a_row = 0
        self.loaded_row: Tensor | None = None
        """What a checkpoint says the devices held of this rank's shard, until the next refresh."""
        self.loaded_fingerprint: Tensor | None = None
        """The fingerprint, in each of its elements, of the main shard that the loaded row belongs to."""
        self.load_unsettled = False
        """A checkpoint was loaded and the ranks have not yet agreed whether to use its rows."""
        self.refreshes = 0
        self.reductions = 0
        self.gradient_bits: int | None = None
        """Of the last reduction, on its last hop; None for full precision."""
        self.gradient_sample: GradientSample | None = None
        """Of the last reduction in a step that is to be measured."""

    @property
    def total_traffic(self) -> Traffic:
        """What the group has sent so far."""
        return self.weight_traffic.total + self.gradient_traffic.total

    def loaded_row_fits(self) -> bool:
        """Whether a row was loaded and this rank saved it when its main shard was bit for bit what it is."""
        if self.loaded_row is None or self.loaded_fingerprint is None:
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
        """An optimizer has stepped somewhere in the model, as all ranks know.

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

    def due_spans(self) -> list[Span] | None:
        """Return the stretches of the row whose difference the next refresh sends; None for all of it."""
        due = self.due_segments()
        return None if len(due) == len(self.group.segments) else self._spans(due)

    def _spans(self, chosen: frozenset[int]) -> list[Span]:
        segments = self.group.segments
        return merge_spans([(segments[index].start, segments[index].end) for index in sorted(chosen)])

    def row_checksums(self, row: Tensor) -> Tensor:
        """Return the checksums of the part of a row [n] that trains and of the frozen part, int64 [2]."""
        return torch.stack([self._checksum(row, self.trained), self.frozen_checksum(row)])

    def frozen_checksum(self, row: Tensor) -> Tensor:
        """Return the checksum of the frozen part of a row [n], an int64 scalar."""
        return self._checksum(row, frozenset(range(len(self.group.segments))) - self.trained)

    def _checksum(self, row: Tensor, chosen: frozenset[int]) -> Tensor:
        pieces = [row[start:end] for start, end in self._spans(chosen)]
        if not pieces:
            return row.new_zeros((), dtype=torch.int64)
        return checksum(pieces[0] if len(pieces) == 1 else torch.cat(pieces))

    def note_refresh(self, row: Tensor, *, kind: RefreshKind) -> None:
        """The replica has been refreshed from this row [n], the main shard in the type that is gathered."""
        self.changed.clear()
        self.is_reduced = False
        before = self.refreshed_from
        self.full_in_a_row = self.full_in_a_row + 1 if kind == "full" and before is not None else 0
        self.full_refreshes += self.full_in_a_row > 0
        with torch.inference_mode(False):
            if kind == "trained part" and before is not None:
                # An edit of the frozen part has not been sent, and must still be found.
                self.refreshed_from = torch.stack([self._checksum(row, self.trained), before[1]])
            else:
                self.trained = self.trainable()
                self.refreshed_from = self.row_checksums(row)

    def gradient_parts(self, numel: int) -> list[list[Span]] | None:
        """Return the stretches of a gradient row [numel] that each of the group's parts has, maybe none.

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
                    merge_spans([place[segment.name] for segment in part if segment.name in place])
                    for part in group.parts
                ]
        return None


def reduce_over_copies(values: Tensor, comms: Sequence[GroupComm], *, op: Any) -> None:
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
        with naming("agreement of tensor-parallel ranks", group=group):
            dist.all_reduce(part, op=op, group=group)
        values[chosen] = part
