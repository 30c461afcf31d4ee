"""When the replicas of a model are refreshed, and how: one state machine, and the events that reach it.

A replica represents one state of the main weights. Optimizer steps, edits, loads and NaN end that state, and
`next_refresh` says which refresh follows. Nothing else decides. Ranks see different events, so one reduction
of five flags per group, once per forward, makes the events common before they reach the state machine.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterable, Sequence
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.collectives.work import HostCopy, SideStream
from sdp4bit.config import TelemetryConfig
from sdp4bit.engines.fsdp2.groups import reduce_over_copies
from sdp4bit.engines.fsdp2.host_reductions import HostReductions
from sdp4bit.engines.fsdp2.observers import StateDictAliases, StepObserver
from sdp4bit.engines.group import SMALL_EDIT, is_large_change
from sdp4bit.engines.handle import ModelState

if TYPE_CHECKING:
    from sdp4bit.engines.fsdp2.group_state import FSDPGroupState

FULL_REFRESHES_IN_A_ROW = 3  # so many cause a warning


class State(Enum):
    """How the replica of a parameter group relates to its main weights."""

    NEVER = auto()  # never refreshed
    CURRENT = auto()  # represents the main weights, but for the rounding of the last differences
    STEPPED = auto()  # an optimizer has changed weights that train
    EDITED = auto()  # weights anywhere in the row have changed a little
    LOADED = auto()  # rows of a checkpoint are due, saved when nothing was pending
    LOADED_STEPPED = auto()  # the same, saved between an optimizer step and the refresh after it
    FULL_DUE = auto()  # weights were loaded or replaced, or full precision was asked for
    NOT_FINITE = auto()  # holds NaN or infinity, and weights have changed: no difference can be added


class Event(Enum):
    """A reason for another refresh, or a use of the weights; the same on all ranks of a group."""

    STEP = auto()  # an optimizer has stepped
    SMALL_EDIT = auto()  # weights were changed by other means, by at most SMALL_EDIT
    LARGE_CHANGE = auto()  # by more than that: by other means, or by a step in evaluation mode
    NONFINITE = auto()  # the last refresh has left NaN or infinity in the replica
    WEIGHTS_LOADED = auto()  # a state dict was loaded into the model
    RESYNC = auto()  # the user or an audit asks for full precision, or weights are gathered in another type
    STATE_LOADED = auto()  # the communication's own state was loaded, with nothing pending
    STEPPED_STATE_LOADED = auto()  # the same, with a step that had not been sent
    MISFIT = auto()  # rows of a checkpoint belong to other weights, or to another rank
    GATHER = auto()  # the weights are needed, outside of backward
    GATHER_IN_BACKWARD = auto()  # they are needed again by the backward of the forward that has used them


class Refresh(NamedTuple):
    """A refresh, and the state after it: rows in full precision first, and then a difference."""

    # "full" sends main shards, "checkpoint" rows that were loaded, both in full precision.
    kind: Literal["none", "full", "checkpoint", "difference", "checkpoint, difference"]
    # The part of a row whose quantized difference is sent; "trained" leaves out frozen parameters.
    ranges: Literal["none", "trained", "row"]
    state: State

    @property
    def is_full(self) -> bool:
        """Whether rows are sent in full precision."""
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
    # Rows of a checkpoint stay due: the weights that belong to them may be loaded behind them.
    Event.WEIGHTS_LOADED: dict.fromkeys((*_HELD, State.NOT_FINITE), State.FULL_DUE),
    Event.RESYNC: dict.fromkeys([state for state in State if state is not State.NEVER], State.FULL_DUE),
    Event.STATE_LOADED: dict.fromkeys(State, State.LOADED),
    Event.STEPPED_STATE_LOADED: dict.fromkeys(State, State.LOADED_STEPPED),
    Event.MISFIT: dict.fromkeys(FROM_CHECKPOINT, State.FULL_DUE),
    Event.GATHER_IN_BACKWARD: {},  # a backward uses the weights of its forward
}


def next_refresh(state: State, event: Event) -> Refresh:
    """Return the refresh that an event causes, and the state after it."""
    if event is Event.GATHER:
        return _REFRESHES[state]
    return Refresh("none", "none", _TRANSITIONS[event].get(state, state))


class FSDPModelState(ModelState):
    """The groups of one attached model: their step count, and the events on which their ranks agree."""

    groups: Sequence[FSDPGroupState]

    def __init__(self, groups: Sequence[FSDPGroupState], *, telemetry: TelemetryConfig | None = None) -> None:
        super().__init__(groups, telemetry=telemetry)
        self.aliases = StateDictAliases()
        self.steps_seen = StepObserver(self)
        self.host_reductions = HostReductions()
        self._leader: weakref.ref[object] | None = None
        self._seen: set[int] = set()
        # Process groups between hosts, by their ranks; without one FSDP2's own is used.
        self.decision_groups: dict[tuple[int, ...], ProcessGroup] = {}
        # Whether FSDP2 gathers anything, so that a hook sees each forward.
        self.communicates = any(comm.layout.size > 1 for comm in groups)
        self.counts_reductions = self.communicates or any(comm.replica_layout is not None for comm in groups)
        # Groups reduced over replicas since the last step boundary, if nothing is gathered.
        self._all_reduced: set[int] = set()
        self._warned: set[str] = set()

    @cached_property
    def unshard_stream(self) -> SideStream:
        """Runs the refreshes and gathers of `unshard(async_op=True)` beside the computation."""
        return SideStream(self.groups[0].group.device)

    # -- steps ---------------------------------------------------------------------------------------

    def note_reduction(self, comm: FSDPGroupState) -> None:
        """Note that gradients of a group are being reduced: the next forward begins a new step."""
        comm.is_reduced = self.steps_seen.is_reduced = True
        self.step_pending = self.step_pending or self.communicates

    def after_step(self, *, by_hand: bool) -> None:
        """Note that an optimizer of this rank has stepped over parameters of the model."""
        self.aliases.forget_writes()  # some optimizers write parameters in ways that look like a load
        for comm in self.groups:
            comm.note_step(by_hand=by_hand)
            if comm.has_unsummed_gradients():
                self.warn_once(
                    "sdp4bit: an optimizer has stepped with gradients that were reduced over shards, and not "
                    f"over replicas since ({comm.group.name}): either the last backward before it had "
                    "set_requires_all_reduce(False), or FSDP2 has all-reduced them by itself, in full "
                    "precision, over another process group than when sdp4bit attached"
                )
        self.reshard([comm for comm in self.groups if comm.has_stepped])

    def before_all_reduce(self, comm: FSDPGroupState) -> None:
        """Notice a step boundary if no shard is gathered, as no hook sees a forward then."""
        if self.communicates:
            return
        # A group is reduced over replicas once a step; the first one that is reduced again begins the next.
        if comm.index in self._all_reduced:
            self._all_reduced.clear()
            self._end_step()
        self._all_reduced.add(comm.index)
        self.steps_seen.is_reduced = self.step_pending = True

    def _end_step(self) -> None:
        if self.step_pending:
            self.step_pending = False
            self.steps += 1
            self.end_traffic()
            self.measure_step()

    # -- loads and requests --------------------------------------------------------------------------

    def note_load(self, *_: object) -> None:
        """Note that a state dict was loaded into the model, on this rank; a hook of torch.nn modules."""
        for comm in self.groups:
            comm.was_loaded = True

    def request_resync(self, comms: Collection[FSDPGroupState] | None = None) -> None:
        """Have the replicas of all groups, or of these, refreshed in full precision; called on all ranks."""
        comms = self.groups if comms is None else comms
        self.reshard(comms)
        for comm in comms:
            comm.apply(Event.RESYNC)

    def reshard(self, comms: Iterable[FSDPGroupState]) -> None:
        """Free parameters that stayed unsharded: they would hide a refresh. Those in use are kept."""
        for comm in comms:
            # FSDP2 does not gather a group that is unsharded. During a forward or backward it is in use, and
            # FSDP2 reshards it afterwards.
            if comm.group.is_unsharded and comm.group.is_idle:
                comm.group.module.reshard()

    # -- agreement -----------------------------------------------------------------------------------

    def before_unshard(self, comm: FSDPGroupState) -> None:
        """Let the ranks agree on what has happened to the weights; called outside of backward."""
        # The first group of a forward asks for all groups of its root at once, in one small reduction. A
        # gather outside of forward asks for its own group only.
        ended, self.step_pending = self.step_pending, False
        if ended:
            self.steps += 1
            self.end_traffic()
            self._leader = None  # a forward has begun, whatever path it takes through the groups
        leader = comm.group.forward_leader
        if leader is None:
            self._agree([comm])
        else:
            # FSDP2 does not tell when a forward begins: with the leader's own group, unless that stayed
            # unsharded after the last one, or else with a group that this forward would have gathered before.
            is_known = self._leader is not None and self._leader() is leader
            if comm.group.leads(leader) or not is_known or comm.index in self._seen:
                self._leader = weakref.ref(leader)
                self._seen.clear()
                self._agree([each for each in self.groups if each.group.context is comm.group.context])
            self._seen.add(comm.index)
        if ended:
            self.measure_step()

    @torch.no_grad()
    @torch.inference_mode(False)
    def _agree(self, comms: Sequence[FSDPGroupState]) -> None:
        if self.aliases.take_loads(
            segment.name for comm in comms for segment in comm.group.segments if segment.is_on_all_ranks
        ):
            # Other roots look for themselves: one that has used the load must not use it again.
            for comm in comms:
                comm.was_loaded = True
        asked: dict[tuple[int, ...], list[FSDPGroupState]] = {}
        for comm in comms:
            # These states are the same on all ranks, and no event changes the refresh that follows.
            if comm.replica is not None and comm.state not in (State.NEVER, State.FULL_DUE):
                asked.setdefault(comm.layout.ranks, []).append(comm)
        for together in asked.values():
            flags = self._reduced_flags(together)
            measured = []
            # Rows of a checkpoint are used for all groups or for none.
            misfits = any(misfit for *_, misfit in flags)
            for comm, (stepped, edited, loaded, nonfinite, evaluates, _) in zip(together, flags, strict=True):
                comm.has_stepped = comm.was_loaded = False
                if stepped:
                    comm.apply(Event.STEP)
                if loaded:
                    comm.apply(Event.WEIGHTS_LOADED)
                if nonfinite:
                    comm.apply(Event.NONFINITE)
                if misfits and comm.state in FROM_CHECKPOINT:
                    comm.apply(Event.MISFIT)
                    self.warn_once(
                        "sdp4bit: the loaded communication state was not saved with these weights, or not by "
                        "each rank for itself, or with another layout: replicas are refreshed in full "
                        f"precision instead ({comm.group.name} first)"
                    )
                # The bytes of an evaluation do not matter, and its weights may be averages that were put in
                # place of those that the optimizer has stepped. Weights sent directly are always off.
                is_evaluated = (
                    comm.state in (State.STEPPED, State.EDITED, State.LOADED_STEPPED)
                    and evaluates
                    and comm.replica is not None
                    and comm.replica.sends_differences
                )
                if is_evaluated or (edited and comm.state in _HELD):
                    measured.append((comm, bool(edited)))
            if measured:
                self._apply_sizes(measured)

    def _reduced_flags(self, comms: Sequence[FSDPGroupState]) -> list[list[int]]:
        """Return for each of these groups, all of the same ranks, which events any rank has seen."""
        edits: dict[int, Tensor] = {}
        for index, comm in enumerate(comms):
            edit = comm.has_edits() if _may_wait(comm) else None
            if edit is not None:
                edits[index] = edit
        edited = dict(zip(edits, torch.stack(list(edits.values())).tolist(), strict=True)) if edits else {}
        seen = [
            (
                comm.has_stepped or comm.state is State.LOADED_STEPPED,
                edited.get(index, False),
                comm.was_loaded,
                _is_set(comm.nonfinite),
                not comm.group.module.training,
                comm.has_misfit(),
            )
            for index, comm in enumerate(comms)
        ]
        # The flags travel between hosts. Without checksums nothing in them depends on a GPU's queue, so that
        # a step does not wait for it.
        flags = torch.tensor(seen, dtype=torch.int32)
        self._reduce(flags, comms, op=dist.ReduceOp.MAX, what="agreement on changed weights")
        rows: list[list[int]] = self._over_copies(flags, comms).tolist()
        return rows

    def _apply_sizes(self, measured: Sequence[tuple[FSDPGroupState, bool]]) -> None:
        """Let the size of a change decide between a difference and full precision."""
        comms = [comm for comm, _ in measured]
        # The host waits for the device: a rare event, and the choice of the collective depends on it.
        squares = torch.stack([comm.change_squares() for comm in comms]).cpu()
        self._reduce(squares, comms, op=dist.ReduceOp.SUM, what="agreement on the size of edits")
        is_large = self._over_copies(is_large_change(squares).to(torch.int32), comms)
        for (comm, edited), large in zip(measured, is_large.tolist(), strict=True):
            assert comm.replica is not None
            if large or (edited and not comm.replica.sends_differences):
                comm.apply(Event.LARGE_CHANGE)
            elif edited:
                comm.apply(Event.SMALL_EDIT)

    def _reduce(
        self, values: Tensor, comms: Sequence[FSDPGroupState], *, op: dist.ReduceOp.RedOpType, what: str
    ) -> None:
        """Reduce values on the host, in place, over the ranks of these groups."""
        group = self.decision_groups.get(comms[0].layout.ranks, comms[0].group.process_group)
        with comm_error_context(what, group=group):
            dist.all_reduce(values, op=op, group=group)

    @staticmethod
    def _over_copies(flags: Tensor, comms: Sequence[FSDPGroupState]) -> Tensor:
        """Return the maximum over tensor-parallel ranks: one of them may see an edit of its part alone."""
        if any(comm.has_copies for comm in comms):
            # On the device: FSDP2's tensor-parallel groups may have no backend for the host.
            flags = flags.to(comms[0].group.device)
            reduce_over_copies(flags, [comm.group for comm in comms], op=dist.ReduceOp.MAX)
        return flags

    def warn_of_full_refreshes(self, comm: FSDPGroupState) -> None:
        """Warn once of weights that travel in full precision again and again."""
        if comm.full_in_a_row == FULL_REFRESHES_IN_A_ROW:
            self.warn_once(
                f"sdp4bit: weights ({comm.group.name} first) were sent in full precision "
                f"{FULL_REFRESHES_IN_A_ROW} times in a row: they were loaded, held NaN or infinity, or were "
                f"edited by more than 1/{round(1 / SMALL_EDIT)} of their size with no optimizer step since. "
                "If an optimizer made these edits, call comm.mark_step() after each: then differences are "
                "sent. comm.explain() counts full refreshes per group"
            )

    def warn_once(self, message: str) -> None:
        """Warn, but not again for the same message."""
        key = message.partition("(")[0]
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=3)

    def detach(self) -> None:
        """See ModelState."""
        super().detach()
        self.aliases, self.steps_seen = StateDictAliases(), StepObserver(self)


def _may_wait(comm: FSDPGroupState) -> bool:
    """Return whether the host may wait for checksums of the device."""
    # On a GPU it would wait in every micro-batch of an accumulation. An edit between two of them is found by
    # the forward whose gradients are reduced.
    is_accumulating = comm.group.module.training and not comm.group.reduces_gradients
    was_accumulating, comm.is_accumulating = comm.is_accumulating, is_accumulating
    return _is_on_host(comm) or not (is_accumulating and was_accumulating)


def _is_on_host(comm: FSDPGroupState) -> bool:
    return comm.group.device.type == "cpu"


def _is_set(copy: HostCopy | None) -> bool:
    """Return whether a flag is set and has arrived."""
    # A GPU that has not got that far in a step tells in the next one; the host does not wait.
    flag = None if copy is None else copy.arrived()
    return flag is not None and bool(flag)
