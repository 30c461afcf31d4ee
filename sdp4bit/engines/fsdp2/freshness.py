"""The decision which refresh the replica of a parameter group needs.

A replica represents one version of the main weights. Optimizer steps, edits, loads and NaN make it stale.
`Freshness` holds all that decides, `next_refresh` is the table, and neither sends anything: `events.py` makes
the ranks agree on their flags, and `hooks.py` sends the refresh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sdp4bit.collectives.sections import Range, take_ranges
from sdp4bit.collectives.transport import HostCopy
from sdp4bit.engines.edits import LARGEST_SMALL_EDIT
from sdp4bit.engines.fsdp2.view import FSDPView
from sdp4bit.quantization import ops


class State(Enum):
    """How the replica of a parameter group relates to its main weights."""

    NEVER = auto()  # never refreshed
    CURRENT = auto()  # equals the main weights up to the rounding of the last differences
    STEPPED = auto()  # an optimizer has changed trainable weights
    EDITED = auto()  # weights anywhere in the row have changed a little
    LOADED = auto()  # rows of a checkpoint are due; it was saved with nothing pending
    LOADED_STEPPED = auto()  # the same, saved between an optimizer step and the refresh after it
    FULL_DUE = auto()  # weights were loaded or replaced, or full precision was requested
    NOT_FINITE = auto()  # holds NaN or infinity and weights have changed: a difference would be NaN


class Event(Enum):
    """A reason for another refresh, or a use of the weights; the same on all ranks of a group."""

    STEP = auto()  # an optimizer has stepped
    SMALL_EDIT = auto()  # weights were changed by other means, by at most LARGEST_SMALL_EDIT
    LARGE_CHANGE = auto()  # they changed by more, or a step in evaluation mode did
    NONFINITE = auto()  # the last refresh has left NaN or infinity in the replica
    WEIGHTS_LOADED = auto()  # a state dict was loaded into the model
    RESYNC = auto()  # full precision was requested or is due on a rank, or weights have another dtype
    STATE_LOADED = auto()  # the communication state was loaded, with nothing pending
    STEPPED_STATE_LOADED = auto()  # the same, with a step that had not been sent
    MISFIT = auto()  # rows of a checkpoint belong to other weights or to another rank
    GATHER = auto()  # the weights are needed, outside of backward


class Refresh(NamedTuple):
    """A refresh and the state after it; full-precision rows are sent before a difference."""

    # "full" sends main shards, "checkpoint" loaded rows, both in full precision.
    kind: Literal["none", "full", "checkpoint", "difference", "checkpoint, difference"]
    # The part of a row whose quantized difference is sent; "trained" excludes frozen parameters.
    ranges: Literal["none", "trained", "row"]
    state: State

    @property
    def is_full(self) -> bool:
        return self.kind not in ("none", "difference")


_REFRESHES = {
    State.NEVER: Refresh("full", "none", State.CURRENT),
    State.CURRENT: Refresh("none", "none", State.CURRENT),
    State.STEPPED: Refresh("difference", "trained", State.CURRENT),
    State.EDITED: Refresh("difference", "row", State.CURRENT),
    State.LOADED: Refresh("checkpoint", "none", State.CURRENT),
    State.LOADED_STEPPED: Refresh("checkpoint, difference", "trained", State.CURRENT),
    State.FULL_DUE: Refresh("full", "none", State.CURRENT),
    State.NOT_FINITE: Refresh("full", "none", State.CURRENT),
}
_HELD = (State.CURRENT, State.STEPPED, State.EDITED)  # differences from the held weights make sense
FROM_CHECKPOINT = (State.LOADED, State.LOADED_STEPPED)
_TRANSITIONS: dict[Event, dict[State, State]] = {
    Event.STEP: {State.CURRENT: State.STEPPED, State.LOADED: State.LOADED_STEPPED},
    Event.SMALL_EDIT: {State.CURRENT: State.EDITED, State.STEPPED: State.EDITED},
    Event.LARGE_CHANGE: dict.fromkeys((*_HELD, State.LOADED_STEPPED), State.FULL_DUE),
    # Unchanged weights that are not finite need no second refresh.
    Event.NONFINITE: {State.STEPPED: State.NOT_FINITE, State.EDITED: State.NOT_FINITE},
    # Rows of a checkpoint stay due: their weights may be loaded after them.
    Event.WEIGHTS_LOADED: dict.fromkeys((*_HELD, State.NOT_FINITE), State.FULL_DUE),
    Event.RESYNC: dict.fromkeys([state for state in State if state is not State.NEVER], State.FULL_DUE),
    Event.STATE_LOADED: dict.fromkeys(State, State.LOADED),
    Event.STEPPED_STATE_LOADED: dict.fromkeys(State, State.LOADED_STEPPED),
    Event.MISFIT: dict.fromkeys(FROM_CHECKPOINT, State.FULL_DUE),
}
_REASONS = {
    Event.LARGE_CHANGE: f"weights changed by more than 1/{round(1 / LARGEST_SMALL_EDIT)} of their norm",
    Event.NONFINITE: "the refresh before held NaN or infinity",
    Event.WEIGHTS_LOADED: "weights were loaded",
    Event.RESYNC: "requested (resync, full_precision, audit), interrupted, or due on another rank",
    Event.STATE_LOADED: "rows of a checkpoint",
    Event.STEPPED_STATE_LOADED: "rows of a checkpoint",
    Event.MISFIT: "the loaded state belongs to other weights, ranks or nodes",
}
"""Why a refresh in full precision is due, in logs and statistics."""


def next_refresh(state: State, event: Event) -> Refresh:
    """Return the refresh that an event causes."""
    if event is Event.GATHER:
        return _REFRESHES[state]
    return Refresh("none", "none", _TRANSITIONS[event].get(state, state))


def decision_table() -> str:
    """Return `next_refresh` in Markdown: the next state, "-" if it stays, and the refresh of GATHER."""
    lines = [f"| | {' | '.join(f'`{event.name}`' for event in Event)} |", "|---" * (len(Event) + 1) + "|"]
    for state in State:
        after = [next_refresh(state, event).state for event in Event if event is not Event.GATHER]
        kind, ranges, _ = next_refresh(state, Event.GATHER)
        gather = kind if ranges == "none" else f"{kind} ({ranges})"
        cells = [f"`{state.name}`", *("-" if each is state else each.name for each in after), gather]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@dataclass
class Seen:
    """The events of a group since its last refresh, as this rank has seen them."""

    has_stepped: bool = False  # an optimizer has stepped; reset when the ranks have agreed on it
    was_loaded: bool = False  # a state dict was loaded; reset likewise
    is_reduced: bool = False  # gradients have been reduced
    trained: frozenset[int] = frozenset()  # params that required a gradient when gradients were reduced


class Flags(NamedTuple):
    """Events on which the ranks of a group agree: each is set if any of them has set it."""

    full_due: bool  # a refresh in full precision is due, or one was interrupted by an exception
    stepped: bool
    edited: bool
    loaded: bool
    nonfinite: bool
    evaluates: bool
    misfit: bool


class Due(NamedTuple):
    """A refresh of this rank's row, which `Freshness.sent` takes when it has been sent."""

    refresh: Refresh
    loaded: Tensor | None = None  # [n], the row of a checkpoint
    ranges: list[Range] | None = None  # whose difference is sent; None for the entire row
    trained: frozenset[int] = frozenset()  # params that are trainable now


NOTHING_DUE = Due(_REFRESHES[State.CURRENT])


class Freshness:
    """All that decides the refreshes of one group: its state, this rank's events, and the last refresh."""

    def __init__(self, group: FSDPView, *, nodes: int) -> None:
        self._group = group
        self._nodes = nodes
        self.state = State.NEVER
        self.full_reason = "first use"  # of the refresh in full precision that is due, or of the last one
        self.seen = Seen()
        self._set_trained(frozenset())
        # Of the row of the last refresh: checksums of its trained and its frozen part, int64 [2], its dtype,
        # and whether it held NaN or infinity.
        self._checksums: Tensor | None = None
        self._dtype = torch.float32
        self._nonfinite: HostCopy | None = None
        self._comparisons: list[HostCopy] = []  # with these checksums, on their way to the host
        self._is_accumulating = False  # the last forward was in training and only accumulated gradients
        self.full_in_a_row = 0
        # From a checkpoint, until the next refresh: the replica's row of this rank's shard, and fingerprints
        # of the main shards when they were saved, int64 [params, slots of this rank].
        self.loaded_row: Tensor | None = None
        self.loaded_fingerprints: Tensor | None = None

    # -- events that this rank sees ---------------------------------------------------------------------

    def note_reduction(self) -> None:
        """Record that gradients of the group are being reduced."""
        self.seen.is_reduced = True
        self.seen.trained |= self._group.requiring_grad()

    def note_step(self, *, by_hand: bool) -> None:
        """Record that an optimizer of this rank has stepped somewhere in the model."""
        # Any optimizer counts, because other ranks may divide the parameters among optimizers differently. A
        # group without a gradient since its last refresh does not count, unless the user reports the step.
        # So a discriminator's step does not send the generator's weights.
        trainable = self._trainable()
        has_gradient = self.seen.is_reduced or self._group.has_gradient(trainable)
        self.seen.has_stepped |= bool(trainable) and (by_hand or has_gradient)

    def _trainable(self) -> frozenset[int]:
        """Return the params that an optimizer step may change; the same on every rank of the group."""
        # A parameter that was frozen after its gradient was reduced may still change in the step. Its `.grad`
        # must not decide that, because a rank whose shard is empty may never clear it.
        return self.seen.trained | self._group.requiring_grad()

    def load(self, row: Tensor | None, *, fingerprints: Tensor | None, due: frozenset[int]) -> None:
        """Continue from a checkpoint; `row` [n] and fingerprints are None if some are missing."""
        # The difference of the due params had not been sent when it was saved.
        self.seen = Seen(trained=due)
        self._set_trained(due)
        self.loaded_row, self.loaded_fingerprints = row, fingerprints
        self.apply(Event.STEPPED_STATE_LOADED if due else Event.STATE_LOADED)

    # -- agreement of the ranks -------------------------------------------------------------------------

    def find_edits(self) -> Tensor | None:
        """Compare the weights with those of the last refresh; called once per forward.

        Returns:
            Whether they differ, a bool scalar on the device; None if unknown or if the host does not wait.
        """
        group, was_accumulating = self._group, self._is_accumulating
        self._is_accumulating = group.module.training and not group.reduces_gradients
        # A GPU would be waited for in every micro-batch after one whose gradients are not reduced. The last
        # one finds an edit between them, and the first forward after the result has arrived sends it.
        may_wait = _is_on_host(group) or not (was_accumulating and group.module.training)
        if not may_wait and self._is_accumulating:
            return None
        before = self._checksums
        if self.state not in (State.CURRENT, State.STEPPED) or before is None:
            return None
        # After a step only the frozen part is compared, because the difference of the rest is sent anyway.
        has_stepped = self.seen.has_stepped or self.state is State.STEPPED
        trained, frozen = self._parts
        if has_stepped and not frozen:
            return None
        row = self._group.main_shard(self._dtype)
        first = int(has_stepped)
        sums = _add_checksums(row, (trained, frozen)[first:], torch.zeros_like(before[first:]))
        is_edited = (sums != before[first:]).any()
        if may_wait:
            return is_edited
        self._comparisons.append(HostCopy(is_edited))
        return None

    def flags(self, *, edited: bool, is_torn: bool, has_gradients: bool) -> Flags:
        """Return the events that this rank has seen; `edited` is the result of `find_edits`."""
        # The host does not wait for the flag of the device: one that arrives late counts in the next step.
        nonfinite = None if self._nonfinite is None else self._nonfinite.arrived()
        late = [(copy, copy.arrived()) for copy in self._comparisons]
        self._comparisons = [copy for copy, found in late if found is None]
        return Flags(
            full_due=is_torn or self.state in (State.NEVER, State.FULL_DUE),
            stepped=self.seen.has_stepped or self.state in (State.STEPPED, State.LOADED_STEPPED),
            edited=edited or any(bool(found) for _, found in late if found is not None),
            loaded=self.seen.was_loaded,
            nonfinite=nonfinite is not None and bool(nonfinite),
            # Training in eval mode, which only switches dropout off, has gradients.
            evaluates=not self._group.module.training and not has_gradients,
            misfit=self._has_misfit(),
        )

    def _has_misfit(self) -> bool:
        """Return whether the loaded row is missing or was saved by another rank or with other weights."""
        if self.state not in FROM_CHECKPOINT:
            return False
        if self.loaded_row is None or self.loaded_fingerprints is None:
            return True
        return not bool((self.loaded_fingerprints == self.fingerprints().unsqueeze(1)).all())

    def fingerprints(self) -> Tensor:
        """Return fingerprints of the main shards and the number of nodes, int64 [params]."""
        return self._group.fingerprints() + (self._nodes << 40)

    def agree(self, flags: Flags) -> bool:
        """Apply the events that any rank has seen; return whether rows of a checkpoint were refused."""
        self.seen.has_stepped = self.seen.was_loaded = False
        events = {
            Event.RESYNC: flags.full_due,
            Event.STEP: flags.stepped,
            Event.WEIGHTS_LOADED: flags.loaded,
            Event.NONFINITE: flags.nonfinite,
        }
        for event in (event for event, is_set in events.items() if is_set):
            self.apply(event)
        before = self.state
        if flags.misfit:
            self.apply(Event.MISFIT)
        return self.state is not before

    def needs_size(self, flags: Flags, *, sends_differences: bool) -> bool:
        """Return whether the size of the change decides between a difference and full precision."""
        # An evaluation may have replaced the weights by averages, for which a difference is too coarse, and
        # its bytes hardly matter. With mode="direct" the replica always differs.
        has_changed = self.state in (State.STEPPED, State.EDITED, State.LOADED_STEPPED)
        is_evaluated = has_changed and flags.evaluates and sends_differences
        return is_evaluated or (flags.edited and self.state in _HELD)

    def agree_on_size(self, flags: Flags, *, is_large: bool, sends_differences: bool) -> None:
        """Apply the size of a change, on which the ranks have agreed."""
        if is_large or (flags.edited and not sends_differences):
            self.apply(Event.LARGE_CHANGE)
        elif flags.edited:
            self.apply(Event.SMALL_EDIT)

    def apply(self, event: Event) -> None:
        """Change the state by an event other than a gather; called on all ranks."""
        before, self.state = self.state, next_refresh(self.state, event).state
        if self.state is not before and _REFRESHES[self.state].is_full and event is not Event.STEP:
            self.full_reason = _REASONS[event]
        if self.state not in FROM_CHECKPOINT:
            self.loaded_row = None

    # -- the refresh ------------------------------------------------------------------------------------

    @property
    def holds_nonfinite(self) -> bool:
        """Whether NaN or infinity cause the refresh in full precision that is due, or caused the last one."""
        return self.full_reason == _REASONS[Event.NONFINITE]

    def due(self) -> Due:
        """Return the refresh that the next gather needs; nothing changes until it has been `sent`."""
        refresh = next_refresh(self.state, Event.GATHER)
        if refresh.kind == "none":
            return NOTHING_DUE
        is_part = refresh.ranges == "trained" and self._sends_part()
        ranges = self._parts[0] if is_part else None
        return Due(refresh, self.loaded_row, ranges, self._group.requiring_grad())

    def _sends_part(self) -> bool:
        """Return whether a difference leaves out the frozen params."""
        # Edits of weights that were frozen until now may have gone undetected: then all are sent.
        return self.trained == self._trainable() != self._group.row.everything

    def due_params(self) -> frozenset[int]:
        """Return the params whose difference is due, including steps not yet agreed on."""
        ranges = next_refresh(self.state, Event.GATHER).ranges
        if ranges == "none" and not (self.seen.has_stepped and self.state is State.CURRENT):
            return frozenset()
        return self.trained if ranges != "row" and self._sends_part() else self._group.row.everything

    def sent(self, due: Due, row: Tensor, *, nonfinite: Tensor) -> None:
        """Record a refresh; called once its transfers have been issued.

        Args:
            row: [n], the main shard in the gathered dtype.
            nonfinite: whether the values that were sent held NaN or infinity, a bool scalar on the device.
        """
        # The state first: if the checksums below run out of memory, the other ranks have this state, too, and
        # the old checksums find an edit.
        self.state, self.seen, self.loaded_row = due.refresh.state, Seen(), None
        self._nonfinite = HostCopy(nonfinite)
        before, is_full = self._checksums, due.refresh.is_full
        # An evaluation may have swapped averages in, and the next forward in training has them out again.
        counts = is_full and before is not None and self._group.module.training
        self.full_in_a_row = self.full_in_a_row + 1 if counts else 0
        if due.ranges is None and due.trained != self.trained:
            self._set_trained(due.trained)
        trained, frozen = self._parts
        sums = row.new_zeros(2, dtype=torch.int64)
        if frozen and before is not None and not is_full and due.ranges is not None:
            # A difference of the rest has not sent an edit of the frozen part, which must still be detected.
            sums[1], frozen = before[1], []
        self._checksums, self._dtype = _add_checksums(row, (trained, frozen), sums), row.dtype

    def _set_trained(self, trained: frozenset[int]) -> None:
        """Set the params that are trainable at a refresh; the others are frozen and not sent."""
        row = self._group.row
        self.trained, self._parts = trained, (row.ranges(trained), row.ranges(row.everything - trained))


def _add_checksums(row: Tensor, parts: Sequence[Sequence[Range]], sums: Tensor) -> Tensor:
    """Add the checksums of parts of a row [n] to sums, int64 [parts], and return these."""
    for ranges, out in zip(parts, sums, strict=True):
        if ranges:
            pieces = take_ranges(row, ranges)
            ops.add_checksum(pieces[0] if len(pieces) == 1 else torch.cat(pieces), out=out)
    return sums


def _is_on_host(group: FSDPView) -> bool:
    return group.device.type == "cpu"
