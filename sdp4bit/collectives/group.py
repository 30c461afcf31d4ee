"""Communication of one parameter group: its weights and its gradients.

An engine gathers and reduces the group's rows (:class:`Rows`) through the :class:`Weights` and
:class:`Gradients` of a :class:`Group`. Reports read their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sdp4bit.collectives.gradients import Gradients
from sdp4bit.collectives.plan import AllReducePlan, ReducePlan, RefreshPlan
from sdp4bit.collectives.reasons import Unquantized
from sdp4bit.collectives.samples import sample_of
from sdp4bit.collectives.sections import Range, common_ranges
from sdp4bit.collectives.topology import Nodes
from sdp4bit.collectives.weights import Weights
from sdp4bit.traffic import TrafficCounter


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

    weights: RefreshPlan | Unquantized
    """Of the last refresh, or the reason why there is none."""
    gradients: ReducePlan | Unquantized
    all_reduce: AllReducePlan | Unquantized | None
    """Over the replicate dimension; None without one."""

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {plan}" for name, plan in zip(self._fields, self, strict=True) if plan is not None
        )


class Group:
    """Communication of one parameter group."""

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
        self.separate_parameters = False
        """Whether rows are cut into sections of complete parameters, see `SDP4BitConfig`."""
        self.weights = Weights(nodes=layout)
        self.gradients = Gradients(view.name, nodes=layout, replicate=replicate)

    @cached_property
    def counters(self) -> tuple[TrafficCounter, ...]:
        """The group's traffic counters, each for its own set of ranks."""
        return self.weights.traffic, self.gradients.traffic, self.gradients.all_reduce_traffic

    @property
    def plan(self) -> GroupPlan:
        """The latest plans that were run, or reasons: `print(comm.groups[0].plan)`.

        A later step may have been in full precision; `stats()` reports it.
        """
        summed = None if self.replicate_layout is None else self.gradients.all_reduce_plan
        return GroupPlan(self.weights.plan, self.gradients.plan, summed)

    def state(self) -> dict[str, int]:
        """Return the saved state of both directions, for a checkpoint."""
        return {**self.gradients.state(), **self.weights.state()}

    def load(self, state: Mapping[str, int]) -> None:
        """Continue from a state of `state`."""
        self.gradients.load(state)
        self.weights.load(state)

    # Engines that know more than the attributes above answer these questions themselves.

    def awaits_refresh(self) -> bool:
        """Return whether this rank knows of a change of the weights that has not been sent."""
        return not self.weights.is_current

    def remarks(self) -> Remarks:
        return Remarks()

    def sample_weights(self, ranges: Sequence[Range], *, may_wait: bool) -> tuple[Tensor, Tensor] | None:
        """Return these ranges of this rank's main shard, in fp32, and of its replica.

        Args:
            may_wait: finish a pending refresh, which is a collective of the node.

        Returns:
            None if there is no replica, or if its refresh is pending and `may_wait` is False.
        """
        replica, values = self.weights.replica, self.view.value_ranges
        if replica is None or replica.rows is None or (replica.is_pending and not may_wait):
            return None
        ranges = ranges if values is None else common_ranges(ranges, values)
        if not ranges:
            return None
        return self.view.sample_main(ranges), sample_of(replica.own_shard, ranges)
