"""Weights of a parameter group: the only place that decides which refresh is due, and that counts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sdp4bit.collectives.host import all_reduce_on_host
from sdp4bit.collectives.plan import RefreshPlan
from sdp4bit.collectives.reasons import Cause, FullReason, Unquantized
from sdp4bit.collectives.sections import Range
from sdp4bit.collectives.topology import Nodes
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.grad_mode import outside_autograd
from sdp4bit.traffic import TrafficCounter

T = TypeVar("T")
LARGEST_SMALL_EDIT = 1 / 128
"""Largest edit that is sent as a quantized difference, relative to the weights (Euclidean norms). 4 bits then
leave an error of about a quarter of it, the cost of rounding weights to bf16."""


class Due(IntEnum):
    """The part of a row that the next refresh sends. Events raise it, and a refresh that was sent ends it."""

    NOTHING = 0
    TRAINED = 1  # an optimizer has stepped: the difference of the trainable params
    ROW = 2  # weights anywhere have changed by at most LARGEST_SMALL_EDIT: the difference of the row
    FULL = 3  # a difference would be too coarse or NaN: the row in full precision


class Events(NamedTuple):
    """Events of a group, on which its ranks agree: each is the maximum over the ranks."""

    due: int = Due.NOTHING
    torn: bool = False  # an exception has interrupted a refresh, so ranks may hold different rows
    edited: bool = False  # weights differ from those of the last refresh
    loaded: bool = False  # a state dict was loaded
    nonfinite: bool = False  # the last refresh held NaN or infinity
    evaluates: bool = False  # a forward without gradients comes next
    misfit: bool = False  # rows of a checkpoint belong to other weights, ranks or nodes


class Weights:
    """Gathers of the weights of one parameter group, from a replica or in full precision.

    A replica represents one version of the main weights. An engine reports changes (`mark_changed`,
    `raise_to`), and calls `gather` before weights are used, or `refresh` if it reads the replica itself. The
    level `due` only rises until a refresh has been sent. Ranks refresh by the highest level of any of them,
    and in full precision if an exception has interrupted a refresh on one: see `agree_on_refreshes`.
    """

    def __init__(self, *, nodes: Nodes) -> None:
        """Create weights without a replica, which the engine gathers in full precision."""
        self.nodes = nodes
        self.host: ProcessGroup | None = None
        """A process group with these ranks for tensors on the CPU; None for the default group of the job."""
        self.unquantized_reason: Unquantized | None = None
        """Why there is no replica; if it is None when an engine is attached, one is created."""
        self.make_replica: Callable[..., WeightReplica] = WeightReplica  # engines bind more arguments
        self.replica: WeightReplica | None = None
        self.traffic = TrafficCounter(nodes)
        self.refreshes = 0  # quantized refreshes so far
        self.full_refreshes = 0
        """Full-precision refreshes after the first one."""
        self.full_refresh_reason: FullReason | None = None  # of the last one that counts
        self.in_evaluation = False  # the last refresh in full precision
        self._was_refreshed = False
        self.due = Due.FULL
        self.reason = FullReason.FIRST_USE  # of the refresh in full precision that is due, or of the last one
        self.is_from_checkpoint = False  # loaded rows go first; they are dropped if full precision is due
        self.loaded_row: Tensor | None = None  # [n], this rank's row of a checkpoint
        self._is_agreed = False  # by `agree_on_refreshes`, until the next gather

    @property
    def plan(self) -> RefreshPlan | Unquantized:
        """The latest plan of a refresh, or the reason why there is none."""
        plan = None if self.replica is None else self.replica.plans.last
        return plan or self.unquantized_reason or Unquantized(Cause.NOT_PLANNED)

    # -- events --------------------------------------------------------------------------------------------

    def mark_changed(self) -> None:
        """Report a change of the main weights on all ranks, such as an optimizer step."""
        self.raise_to(Due.TRAINED)

    def raise_to(self, due: Due, reason: FullReason = FullReason.REQUESTED) -> None:
        """Make at least this level due; called on all ranks.

        Args:
            reason: of full precision. The first one counts, but NaN gives way to any other.
        """
        if due is Due.FULL and (self.due < due or self.reason is FullReason.NONFINITE):
            self.reason = reason
        self.due = max(self.due, due)
        if self.due is Due.FULL:
            self.is_from_checkpoint, self.loaded_row = False, None

    def state(self) -> Mapping[str, int]:
        """Return the counters and the level, for a checkpoint."""
        return {"refreshes": self.refreshes, "due": Due.NOTHING if self.replica is None else self.due}

    def load(self, state: Mapping[str, int]) -> None:
        """Continue from a state; a replica that was never refreshed keeps its first use due."""
        self.refreshes = state["refreshes"]
        if self.replica is not None and self.replica.rows is not None:
            self.due = Due(state["due"])

    def load_rows(self, row: Tensor | None, *, due: Due) -> None:
        """Begin the next refresh with a row of a checkpoint [n]; None if this rank has none that fits.

        Args:
            due: the level when it was saved, less than `FULL`.
        """
        self.due, self.is_from_checkpoint, self.loaded_row = due, True, row
        self.reason = FullReason.CHECKPOINT

    # -- agreement of the ranks ----------------------------------------------------------------------------

    def events(self) -> Events:
        """Return the events that this rank knows of; engines that detect others replace fields."""
        return Events(due=self.due, torn=self.replica is not None and self.replica.is_torn)

    def agree(self, events: Events) -> bool:
        """Apply the events that any rank has seen; return whether rows of a checkpoint were refused."""
        if events.torn:
            self.raise_to(Due.FULL)
        if events.due > self.due:
            self.raise_to(Due(events.due))
        # Rows of a checkpoint stay due: their weights may be loaded after them.
        if events.loaded and not self.is_from_checkpoint:
            self.raise_to(Due.FULL, FullReason.LOADED)
        # Unchanged weights that are not finite need no second refresh.
        if events.nonfinite and self.due and not self.is_from_checkpoint:
            self.raise_to(Due.FULL, FullReason.NONFINITE)
        is_refused = events.misfit and self.is_from_checkpoint
        if is_refused:
            self.raise_to(Due.FULL, FullReason.MISFIT)
        return is_refused

    def needs_size(self, events: Events) -> bool:
        """Return whether the size of the change decides between a difference and full precision."""
        # An evaluation may have replaced the weights by averages, for which a difference is too coarse, and
        # its bytes hardly matter. With mode="direct" the replica always differs.
        if events.evaluates and self._sends_differences and self.sends_difference:
            return True
        return events.edited and self.due < Due.FULL and not self.is_from_checkpoint

    def agree_on_size(self, events: Events, *, is_large: bool) -> None:
        """Apply the size of a change, on which the ranks have agreed; see `is_large_change`."""
        if is_large or (events.edited and not self._sends_differences):
            self.raise_to(Due.FULL, FullReason.LARGE)
        elif events.edited and not self.is_from_checkpoint:
            self.raise_to(Due.ROW)

    @property
    def _sends_differences(self) -> bool:
        return self.replica is not None and self.replica.sends_differences

    # -- the refresh ---------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the next refresh begins with rows in full precision."""
        return self.is_from_checkpoint or self.due is Due.FULL

    @property
    def sends_difference(self) -> bool:
        """Whether the next refresh ends with the quantized difference of the main weights."""
        return Due.NOTHING < self.due < Due.FULL

    @property
    def is_current(self) -> bool:
        """Whether no refresh is due."""
        return not (self.due or self.is_from_checkpoint)

    def gather(self, output: Tensor, main: Tensor, *, plain: Callable[[], object]) -> None:
        """Write the weights of all ranks to the output, from the replica after a refresh if one is due.

        Args:
            output: [ranks * n], in the dtype of the replica, which the first call decides.
            main: [n], this rank's main shard, for instance in fp32.
            plain: the engine's own all-gather into the output, for weights without a replica.
        """
        if self.replica is None:
            self.gather_plain(output.nbytes // self.nodes.size, plain)
            return
        self.traffic.count_plain(output.nbytes // self.nodes.size)  # of the gather that this replaces
        if not self._is_agreed:
            agree_on_refreshes([self])
        self._is_agreed = False
        self.refresh(main, row=main.to(output.dtype) if self.is_full else None)
        self.replica.gather(output)

    @outside_autograd  # an evaluation may create the replica that training updates in place
    def refresh(
        self,
        main: Tensor,
        *,
        row: Tensor | None = None,
        ranges: Sequence[Range] | None = None,
        in_evaluation: bool = False,
    ) -> bool:
        """Start the refresh that is due, if any; `replica.wait()` or `replica.gather()` finishes it.

        Args:
            main: [n], this rank's main shard; must not change until the end of the refresh.
            row: [n], the main shard in the dtype of the replica, for rows and ranges that are sent as they
                are; None to convert the main shard.
            ranges: ranges that optimizer steps may have changed, the same on all ranks; None for all.
            in_evaluation: reports mention it.

        Returns:
            Whether a refresh was due.
        """
        replica, is_full = self.replica, self.is_full
        assert replica is not None
        if self.is_current:
            return False
        if is_full:
            if row is None:
                row = main if replica.rows is None else main.to(replica.rows.dtype)
            replica.start_full_refresh(row if self.loaded_row is None else self.loaded_row)
        if self.sends_difference:
            ranges = ranges if self.due is Due.TRAINED else None
            replica.start_quantized_refresh(main, ranges=ranges, as_gathered=row)
            self.refreshes += 1
        # Only now, so that an exception above leaves the refresh due.
        if is_full:
            self.note_full_refresh(in_evaluation=in_evaluation)
        self.due, self.is_from_checkpoint, self.loaded_row = Due.NOTHING, False, None
        return True

    def note_full_refresh(self, *, in_evaluation: bool = False) -> None:
        """Count a refresh in full precision, also one that the engine has sent; nothing is due then."""
        if self._was_refreshed:
            self.full_refreshes += 1
            self.full_refresh_reason = self.reason
        self._was_refreshed, self.in_evaluation = True, in_evaluation
        self.due = Due.NOTHING

    def gather_plain(
        self, row_bytes: int, plain: Callable[[], T], *, members: Sequence[int] | None = None
    ) -> T:
        """Gather in full precision by the engine's own collective, and count its bytes; nothing is due then.

        Args:
            row_bytes: size of a rank's row.
            plain: the engine's own all-gather.
            members: indices in the nodes of the ranks that take part; None for all.
        """
        self.due = Due.NOTHING
        self.traffic.count_plain(row_bytes, members)
        self.traffic.count_ring(row_bytes, members)
        return plain()


def agree_on_refreshes(every: Sequence[Weights]) -> None:
    """Let the ranks of each of these weights agree on the refreshes that are due; collective over them.

    `Weights.gather` does it for one group. An engine with many groups calls it once before it gathers them.
    """
    asked: dict[int, list[Weights]] = {}
    for weights in every:  # by the nodes, which groups share; the ranks would take long to hash
        if weights.replica is not None:
            asked.setdefault(id(weights.nodes), []).append(weights)
    for together in asked.values():
        first, flags = together[0], torch.tensor([each.events() for each in together], dtype=torch.int32)
        host = first.host or dist.group.WORLD
        assert host is not None
        what = "agreement on refreshes that are due"
        all_reduce_on_host(flags, host, ranks=first.nodes.ranks, op=dist.ReduceOp.MAX, what=what)
        for each, (due, *others) in zip(together, flags.tolist(), strict=True):
            each.agree(Events(due, *map(bool, others)))
            each._is_agreed = True


def change_squares(main: Tensor, held: Tensor) -> Tensor:
    """Return |main - held|^2 and |main|^2 of weights and their replica, of one dtype; fp64 [2]."""
    change = main.float() - held.float()
    return torch.stack([change.square().sum(), main.float().square().sum()]).double()


def is_large_change(squares: Tensor) -> Tensor:
    """Return which changes are sent in full precision, bool [n]; NaN and infinity count as large.

    Args:
        squares: [n, 2], per group the sum of `change_squares` over its ranks.
    """
    change, size = squares.unbind(-1)
    # An infinite change is not larger than a part of infinite weights.
    return ~((change <= LARGEST_SMALL_EDIT**2 * size) & change.isfinite())
