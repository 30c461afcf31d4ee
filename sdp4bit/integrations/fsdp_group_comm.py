"""Communication of one FSDP2 parameter group: what quantizes it, and what it has done so far."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.all_gather import Span, WeightReplica, merge_spans
from sdp4bit.collectives.exchange_error import naming
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.integrations.fsdp_groups import FSDPGroup, Version
from sdp4bit.integrations.measures import GradientSample
from sdp4bit.telemetry import Traffic, TrafficCounter


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
        """Segments that an optimizer may have changed since the last refresh."""
        self.versions: list[Version] = []
        """Version of every segment when it was last known to be in `changed` or in the replica."""
        self.resync_wanted = True
        """The next refresh is in full precision; so is the first."""
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

    def changed_spans(self) -> list[Span] | None:
        """Return the stretches of the row that may have changed; None if that is all of it."""
        segments = self.group.segments
        if len(self.changed) == len(segments):
            return None
        return merge_spans([(segments[index].start, segments[index].end) for index in sorted(self.changed)])

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
