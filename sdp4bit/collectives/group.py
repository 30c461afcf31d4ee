"""Communication of one parameter group: its quantized collectives, or the reasons for full precision.

An engine gathers and reduces the group's rows (:class:`Rows`) and calls the collectives of a :class:`Group`.
Reports read its attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.collectives.plan import AllReducePlan, ReducePlan, RefreshPlan
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.sections import Range, common_ranges, take_ranges
from sdp4bit.collectives.topology import Nodes
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import GradientConfig
from sdp4bit.quantization.formats import Bits
from sdp4bit.traffic import ALONE, TrafficCounter

GradientQuantizer = QuantizedReduceScatter | QuantizedAllReduce  # a collective that quantizes gradients


class Rows(Protocol):
    """Parameters that an engine gathers and reduces together, one row per rank."""

    @property
    def name(self) -> str:
        """Name in errors, tables and alerts; unique in a model."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that it is sharded over, in order."""

    @property
    def process_group(self) -> ProcessGroup | None:
        """These ranks; None if a single process simulates them."""

    @property
    def shard_numel(self) -> int:
        """Values of one rank's row, padding included."""

    @property
    def device(self) -> torch.device:
        """Device of computation and communication."""

    @property
    def value_ranges(self) -> Sequence[Range] | None:
        """Ranges of a row that hold values and not bits of other dtypes; None for the entire row."""

    def sample_main(self, ranges: Sequence[Range]) -> Tensor:
        """Return a copy of these ranges of this rank's main shard, concatenated, in fp32."""


@dataclass(frozen=True, kw_only=True)
class Remarks:
    """Properties of a group in its engine, in words for `explain()`."""

    numel: int | None = None  # values in a row, if its length counts some of them several times
    place: str = ""  # of the replica, if not the configured one
    weights: Sequence[str] = ()
    gradients: str = ""  # why none are reduced
    staged: str = ""  # how chunks of successive groups overlap, instead of those of one row


class GroupPlan(NamedTuple):
    """The plans of a parameter group; prints itself."""

    weights: RefreshPlan | str
    """Of the last refresh, or the reason why there is none."""
    gradients: ReducePlan | str
    all_reduce: AllReducePlan | str | None
    """Over the replicate dimension; None without one."""

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {plan}" for name, plan in zip(self._fields, self, strict=True) if plan is not None
        )


_NOT_YET = "not planned yet: a plan is made when it is first needed"


class Group:
    """Communication of one parameter group: replica, reduction, reasons and counters.

    Without a replica or a reduction the engine's own collective runs, for the reason given.
    """

    def __init__(self, view: Rows, *, index: int, layout: Nodes, replicate: Nodes | None = None) -> None:
        """Create a group without quantizers.

        Args:
            view: the group's rows in the engine.
            index: number of the group in its model, the same on all its ranks.
            layout: the nodes of its ranks.
            replicate: the nodes of the ranks with the same shard (HSDP); None without HSDP.
        """
        self.view: Rows = view
        self.index = index
        # Numbers of the data of this rank, and of the ranks with the same shard, for the rounding of
        # gradients; None for this rank's index in the group.
        self.data_rank: int | None = None
        self.replicate_data_ranks = range(0)
        self.layout = layout
        self.replicate_layout = replicate
        self.weight_traffic, self.gradient_traffic = TrafficCounter(layout), TrafficCounter(layout)
        self.all_reduce_traffic = TrafficCounter(replicate or ALONE)
        self.separate_parameters = False
        """Whether rows are cut into sections of complete parameters, see `SDP4BitConfig`."""
        self.make_replica: Callable[..., WeightReplica] = WeightReplica  # engines bind more arguments
        self.replica: WeightReplica | None = None
        self.weights_unquantized_reason = ""
        self.reduction: QuantizedReduceScatter | None = None
        self.gradients_unquantized_reason = ""
        # Sums gradients over the replicate dimension; without it the engine does, in full precision.
        self.all_reduce: QuantizedAllReduce | None = None
        self.is_changed = False  # the main weights have changed since the last refresh
        self.refreshes = 0  # quantized refreshes so far
        self.full_refreshes = 0
        """Full-precision refreshes after the first one."""
        self.full_refresh_reason: str | None = None  # of the last one that counts
        self._was_refreshed = False
        self.reductions = 0  # quantized reductions so far; part of the counter for rounding bits
        self.all_reduces = 0  # quantized ones so far
        self.gradient_bits: Bits = None  # bits of the last reduction; None for full precision
        self.gradient_sample: Tensor | None = None
        """Sample of the last reduction in a step that will be measured."""
        self.counts_nonfinite = False  # whether steps are measured
        self.nonfinite_groups: Tensor | None = None
        """Received non-finite quantization groups since the last measured step, fp64 on the device."""

    @property
    def counters(self) -> tuple[TrafficCounter, ...]:
        """The group's traffic counters, each for its own set of ranks."""
        return self.weight_traffic, self.gradient_traffic, self.all_reduce_traffic

    @property
    def plan(self) -> GroupPlan:
        """The latest plans that were run, or reasons: `print(comm.groups[0].plan)`.

        A later step may have been in full precision; `stats()` reports it.
        """
        replica, reduction, all_reduce = self.replica, self.reduction, self.all_reduce
        summed: AllReducePlan | str | None = None
        if self.replicate_layout is not None:
            summed = "in full precision" if all_reduce is None else all_reduce.plans.last or _NOT_YET
        return GroupPlan(
            self.weights_unquantized_reason if replica is None else replica.plans.last or _NOT_YET,
            self.gradients_unquantized_reason if reduction is None else reduction.plans.last or _NOT_YET,
            summed,
        )

    @property
    def gradient_quantizers(self) -> Sequence[GradientQuantizer]:
        """The quantized collectives of a gradient, in order, all with the same settings."""
        return [each for each in (self.reduction, self.all_reduce) if each is not None]

    @property
    def gradient_config(self) -> GradientConfig | None:
        return self.gradient_quantizers[0].config if self.gradient_quantizers else None

    def next_reduction(self) -> int:
        """Return the number of the next quantized reduction, and count it.

        Counted before it is sent. One rank alone may see an exception in it, and the numbers, from which all
        derive the rounding bits, must stay equal.
        """
        self.reductions += 1
        return self.reductions - 1

    def next_all_reduce(self) -> int:
        """Return the number of the next quantized all-reduce, and count it; see `next_reduction`."""
        self.all_reduces += 1
        return self.all_reduces - 1

    def count_full_refresh(self, reason: str) -> None:
        """Count a full-precision refresh, except for the first."""
        if self._was_refreshed:
            self.full_refreshes += 1
            self.full_refresh_reason = reason
        self._was_refreshed = True

    def count_dense(
        self, traffic: TrafficCounter, shard_bytes: int, *, members: Sequence[int] | None = None
    ) -> None:
        """Count a full-precision collective of the engine over shards of this size.

        Args:
            members: indices in the layout of the ranks that take part; None for all.
        """
        traffic.count_plain(shard_bytes, members)
        traffic.count_ring(shard_bytes, members)

    # Engines that know more than the attributes above answer these questions themselves.

    @property
    def refresh_is_full(self) -> bool:
        """Whether the next refresh will be in full precision although the group has a quantizer."""
        return False

    def awaits_refresh(self) -> bool:
        """Return whether this rank knows of a change of the weights that has not been sent."""
        return self.is_changed

    def remarks(self) -> Remarks:
        return Remarks()

    def sample_weights(self, ranges: Sequence[Range], *, may_wait: bool) -> tuple[Tensor, Tensor] | None:
        """Return these ranges of this rank's main shard, in fp32, and of its replica.

        Args:
            may_wait: finish a pending refresh, which is a collective of the node.

        Returns:
            None if there is no replica, or if its refresh is pending and `may_wait` is False.
        """
        replica, values = self.replica, self.view.value_ranges
        if replica is None or replica.rows is None or (replica.is_pending and not may_wait):
            return None
        ranges = ranges if values is None else common_ranges(ranges, values)
        if not ranges:
            return None
        return self.view.sample_main(ranges), torch.cat(take_ranges(replica.own_shard, ranges))


def mean_factor(op: object, process_group: ProcessGroup) -> float:
    """Return the factor that turns a sum into the requested reduction; NaN if it is neither sum nor mean."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    return 1.0 / process_group.size() if op == dist.ReduceOp.AVG else math.nan


def reduction_multiplier(op: object, process_group: ProcessGroup, *, name: str, engine: str) -> float:
    """Return the factor that turns a sum over the ranks into the requested reduction.

    Raises:
        ValueError: the reduction is neither a sum nor a mean.
    """
    factor = mean_factor(op, process_group)
    if not math.isnan(factor):
        return factor
    raise ValueError(
        f"{name}: {engine} asks for the reduction {getattr(op, 'op', op)}, but only sums and means can be "
        "quantized. On FSDP2, keep set_force_sum_reduction_for_comms(True)"
    )
