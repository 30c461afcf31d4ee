"""The state machine that decides when and how the replicas of a model are refreshed.

A replica represents one version of the main weights. Optimizer steps, edits, loads and NaN make it stale, and
`next_refresh` alone decides which refresh follows. Because ranks see different events, they first agree on
them: one all-reduce of a few flags per group and forward. A refresh changes the state once its messages have
been sent.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
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
from sdp4bit.engines.edits import SMALL_EDIT, is_large_change
from sdp4bit.engines.fsdp2.groups import reduce_over_copies
from sdp4bit.engines.fsdp2.observers import StateDictAliases, StepObserver
from sdp4bit.engines.fsdp2.torch_internals import RootContext
from sdp4bit.engines.handle import logger
from sdp4bit.observe.stats import ModelState

if TYPE_CHECKING:
    from sdp4bit.engines.fsdp2.group_state import FSDPGroupState

FULL_REFRESHES_IN_A_ROW = 3  # consecutive ones that cause a warning


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
    SMALL_EDIT = auto()  # weights were changed by other means, by at most SMALL_EDIT
    LARGE_CHANGE = auto()  # they changed by more, or a step in evaluation mode did
    NONFINITE = auto()  # the last refresh has left NaN or infinity in the replica
    WEIGHTS_LOADED = auto()  # a state dict was loaded into the model
    RESYNC = auto()  # full precision was requested or is due on a rank, or weights have another dtype
    STATE_LOADED = auto()  # the communication state was loaded, with nothing pending
    STEPPED_STATE_LOADED = auto()  # the same, with a step that had not been sent
    MISFIT = auto()  # rows of a checkpoint belong to other weights or to another rank
    GATHER = auto()  # the weights are needed, outside of backward


@dataclass
class Seen:
    """The events of a group since its last refresh, as this rank has seen them."""

    has_stepped: bool = False  # an optimizer has stepped; reset when the ranks have agreed on it
    was_loaded: bool = False  # a state dict was loaded; reset likewise
    is_reduced: bool = False  # gradients have been reduced
    trained: frozenset[int] = frozenset()  # segments that required a gradient when gradients were reduced


class Flags(NamedTuple):
    """Events on which the ranks of a group agree: each is set if any of them has set it."""

    full_due: bool  # a refresh in full precision is due, or one was interrupted by an exception
    stepped: bool
    edited: bool
    loaded: bool
    nonfinite: bool
    evaluates: bool
    misfit: bool


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
NO_REFRESH = _REFRESHES[State.CURRENT]  # also of a gather in backward, which uses the weights of its forward
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


def next_refresh(state: State, event: Event) -> Refresh:
    """Return the refresh that an event causes."""
    if event is Event.GATHER:
        return _REFRESHES[state]
    return Refresh("none", "none", _TRANSITIONS[event].get(state, state))


class FSDPModelState(ModelState):
    """The groups of one attached model, their step count, and the events their ranks agree on."""

    groups: Sequence[FSDPGroupState]

    def __init__(self, groups: Sequence[FSDPGroupState], *, telemetry: TelemetryConfig | None = None) -> None:
        super().__init__(groups, telemetry=telemetry)
        self.aliases = StateDictAliases()
        self.steps_seen = StepObserver(self)
        self._leader: weakref.ref[object] | None = None
        self._seen: set[int] = set()
        self._contexts: weakref.WeakSet[RootContext] = weakref.WeakSet()  # all of their groups have a handle
        # Gloo process groups by their ranks, if FSDP2's own takes no CPU tensors.
        self.decision_groups: dict[tuple[int, ...], ProcessGroup] = {}
        # FSDP2 gathers parameters, so a hook sees each forward.
        self.communicates = any(comm.layout.size > 1 for comm in groups)
        self.counts_reductions = self.communicates or any(comm.replica_layout is not None for comm in groups)
        # Gradients were reduced on this rank since the last step boundary.
        self._is_reduced = False
        self._has_gradients = True
        self._warned: set[str] = set()
        self._has_logged = False  # a load of weights without the state

    @cached_property
    def unshard_stream(self) -> SideStream:
        """The stream for refreshes and gathers of `unshard(async_op=True)`."""
        return SideStream(self.groups[0].group.device)

    def note_reduction(self, comm: FSDPGroupState) -> None:
        """Record that gradients of a group are being reduced."""
        comm.note_reduction()
        self.steps_seen.is_reduced = True
        # The next gather outside of backward begins a new forward.
        self._is_reduced, self._leader = True, None

    def after_step(self, *, by_hand: bool) -> None:
        self.aliases.forget_writes()  # some optimizers' writes look like a load
        if self.counts_reductions and self._is_reduced:
            self.step_pending = True
        for comm in self.groups:
            comm.note_step(by_hand=by_hand)
            if comm.has_unsummed_gradients():
                self.warn_once(
                    "sdp4bit: an optimizer has stepped with gradients that were reduced over shards but not "
                    f"over replicas since ({comm.group.name}). Either the last backward had "
                    "set_requires_all_reduce(False), or FSDP2 all-reduced them in full precision over a "
                    "process group that was set after sdp4bit attached"
                )
        self.reshard([comm for comm in self.groups if comm.seen.has_stepped])

    def before_all_reduce(self, comm: FSDPGroupState) -> None:
        """Detect step boundaries if nothing is gathered, because no hook then sees a forward."""
        if self.communicates:
            return
        # The first reduction after an optimizer step ends that step. The ranks need not agree: each of them
        # holds all parameters, so its optimizers see every step.
        if self.step_pending:
            self._end_step()
            self.measure_step()
        self.steps_seen.is_reduced = self._is_reduced = True

    def _end_step(self) -> None:
        self.step_pending = self._is_reduced = False
        self.steps += 1
        self.end_traffic()

    def forget_events(self) -> None:
        """Forget the events that this rank has seen; a loaded state replaces them."""
        self.step_pending = self._is_reduced = self.steps_seen.is_reduced = False
        for comm in self.groups:
            comm.seen = Seen()

    def note_forward(self, *_: object) -> None:
        """Record whether a forward that begins has gradients; FSDP2 gathers without them in any case."""
        self._has_gradients = torch.is_grad_enabled()

    def note_load(self, *_: object) -> None:
        """Record that a state dict was loaded on this rank; a hook of torch.nn modules."""
        for comm in self.groups:
            comm.seen.was_loaded = True

    def request_resync(self, comms: Collection[FSDPGroupState] | None = None) -> None:
        """Request a full-precision refresh of these groups (None: all); called on all ranks."""
        comms = self.groups if comms is None else comms
        self.reshard(comms)
        for comm in comms:
            comm.apply(Event.RESYNC)

    def reshard(self, comms: Iterable[FSDPGroupState]) -> None:
        """Free unsharded parameters that are not in use, so that the next forward gathers them again."""
        for comm in comms:
            # A group that is in use by a forward or backward is resharded by FSDP2 afterwards.
            if comm.group.is_unsharded and comm.group.is_idle:
                comm.group.module.reshard()

    def before_unshard(self, comm: FSDPGroupState) -> None:
        """Make the ranks agree on changes of the weights; called outside of backward."""
        # The first gather of a forward reduces the flags of all groups of its root. A gather outside of
        # forward reduces those of its own group.
        leader = comm.group.forward_leader
        if leader is not None and comm.group.context not in self._contexts:
            self._contexts.add(comm.group.context)
            names = comm.group.find_unattached()
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise RuntimeError(
                    f"fully_shard was called after sdp4bit.quantize_communication, so {', '.join(names[:3])}"
                    f"{more} would be sent in full precision: call quantize_communication after the last "
                    "fully_shard, with the root of the model. skip= leaves modules in full precision"
                )
        if leader is None:
            self._agree([comm])
        else:
            # FSDP2 does not announce a forward. It begins with the leader's group, unless that stayed
            # unsharded. Then a new leader, or a group that was already gathered, shows a new forward.
            is_known = self._leader is not None and self._leader() is leader
            if comm.group.leads(leader) or not is_known or comm.index in self._seen:
                self._leader = weakref.ref(leader)
                self._seen.clear()
                self._agree([each for each in self.groups if each.group.context is comm.group.context])
            self._seen.add(comm.index)

    @torch.no_grad()
    @torch.inference_mode(False)
    def _agree(self, comms: Sequence[FSDPGroupState]) -> None:
        if self.aliases.take_loads(
            segment.name for comm in comms for segment in comm.group.segments if segment.is_on_all_ranks
        ):
            # Recorded per group because take_loads reports each load once.
            for comm in comms:
                comm.seen.was_loaded = True
        self._log_stateless_load(comms)
        # All ranks of these groups come here, and reduce in the same order, whatever each of them has seen.
        asked: dict[tuple[int, ...], list[FSDPGroupState]] = {}
        for comm in comms:
            asked.setdefault(comm.layout.ranks, []).append(comm)
        changed, reduced = self.step_pending, self._is_reduced
        for together in asked.values():
            if together[0].layout.size == 1:
                continue
            (changed, reduced), flags = self._reduced_flags(together, (changed, reduced))
            together = [comm for comm in together if comm.replica is not None]
            measured = []
            # Rows of a checkpoint are used for all groups or for none.
            misfits = any(flag.misfit for flag in flags)
            for comm, flag in zip(together, flags, strict=True):
                # Weights that another kind of optimizer has changed are found as edits.
                changed = changed or flag.edited
                comm.seen.has_stepped = comm.seen.was_loaded = False
                if flag.full_due:
                    comm.apply(Event.RESYNC)
                if flag.stepped:
                    comm.apply(Event.STEP)
                if flag.loaded:
                    comm.apply(Event.WEIGHTS_LOADED)
                if flag.nonfinite:
                    comm.apply(Event.NONFINITE)
                if misfits and comm.state in FROM_CHECKPOINT:
                    comm.apply(Event.MISFIT)
                    self.warn_once(
                        "sdp4bit: the loaded communication state was not saved with these weights, by these "
                        "ranks and with this layout, or the weights were edited after the last forward. "
                        f"Replicas are refreshed in full precision instead ({comm.group.name} first)"
                    )
                # An evaluation may have replaced the weights by averages, for which a difference is too
                # coarse, and its bytes hardly matter. With mode="direct" the replica always differs.
                is_evaluated = (
                    comm.state in (State.STEPPED, State.EDITED, State.LOADED_STEPPED)
                    and flag.evaluates
                    and comm.replica is not None
                    and comm.replica.sends_differences
                )
                if is_evaluated or (flag.edited and comm.state in _HELD):
                    measured.append((comm, flag.edited))
            if measured:
                self._apply_sizes(measured)
        if changed and reduced:
            self._end_step()
            self.measure_step()

    def _log_stateless_load(self, comms: Sequence[FSDPGroupState]) -> None:
        """Log once, on rank 0, if training starts with loaded weights but without the state of a handle."""
        loaded = (
            c.seen.was_loaded and c.replica is not None and c.state not in FROM_CHECKPOINT for c in comms
        )
        if not self.steps and not self._has_logged and dist.get_rank() == 0 and any(loaded):
            self._has_logged = True
            logger.warning(
                "sdp4bit: weights were loaded without this handle's state, so replicas start from the loaded "
                "weights. If this resumes a run, it is not bit-exact: save the handle with the model"
            )

    def _reduced_flags(
        self, comms: Sequence[FSDPGroupState], own: tuple[bool, bool]
    ) -> tuple[tuple[bool, bool], list[Flags]]:
        """Return the events that any rank has seen, for the groups with a replica.

        Args:
            comms: groups of the same ranks.
            own: whether weights have changed and gradients were reduced on this rank; returned for all.
        """
        over, comms = comms[0], [comm for comm in comms if comm.replica is not None]
        edits: dict[int, Tensor] = {}
        for index, comm in enumerate(comms):
            edit = comm.has_edits() if _may_wait(comm) else None
            if edit is not None:
                edits[index] = edit
        edited = dict(zip(edits, torch.stack(list(edits.values())).tolist(), strict=True)) if edits else {}
        seen = [
            Flags(
                full_due=comm.needs_full_refresh,
                stepped=comm.seen.has_stepped or comm.state in (State.STEPPED, State.LOADED_STEPPED),
                edited=edited.get(index, False),
                loaded=comm.seen.was_loaded,
                nonfinite=_is_set(comm.nonfinite),
                # Training in eval mode, which only switches dropout off, has gradients.
                evaluates=not comm.group.module.training and not self._has_gradients,
                misfit=comm.has_misfit(),
            )
            for index, comm in enumerate(comms)
        ]
        # On the CPU: apart from the checksums, the flags do not depend on the GPU, so a step need not wait
        # for it.
        padding = [False] * (len(Flags._fields) - len(own))
        flags = torch.tensor([(*own, *padding), *seen], dtype=torch.int32)
        self._reduce(flags, over, op=dist.ReduceOp.MAX, what="agreement on changed weights")
        rows = self._over_copies(flags[1:], comms).tolist()
        changed, reduced, *_ = flags[0].tolist()
        return (bool(changed), bool(reduced)), [Flags(*map(bool, row)) for row in rows]

    def _apply_sizes(self, measured: Sequence[tuple[FSDPGroupState, bool]]) -> None:
        """Choose between a difference and full precision by the size of each change."""
        comms = [comm for comm, _ in measured]
        # The host waits for the device because its next collective depends on the result; edits are rare.
        squares = torch.stack([comm.change_squares() for comm in comms]).cpu()
        self._reduce(squares, comms[0], op=dist.ReduceOp.SUM, what="agreement on the size of edits")
        is_large = self._over_copies(is_large_change(squares).to(torch.int32), comms)
        for (comm, edited), large in zip(measured, is_large.tolist(), strict=True):
            assert comm.replica is not None
            if large or (edited and not comm.replica.sends_differences):
                comm.apply(Event.LARGE_CHANGE)
            elif edited:
                comm.apply(Event.SMALL_EDIT)

    def _reduce(
        self, values: Tensor, over: FSDPGroupState, *, op: dist.ReduceOp.RedOpType, what: str
    ) -> None:
        group = self.decision_groups.get(over.layout.ranks, over.group.process_group)
        with comm_error_context(what, group=group):
            dist.all_reduce(values, op=op, group=group)

    @staticmethod
    def _over_copies(flags: Tensor, comms: Sequence[FSDPGroupState]) -> Tensor:
        """Return the maximum over tensor-parallel ranks, because one may see an edit that others do not."""
        if any(comm.has_copies for comm in comms):
            # On the device, because tensor-parallel groups may have no CPU backend.
            flags = flags.to(comms[0].group.device)
            reduce_over_copies(flags, [comm.group for comm in comms], op=dist.ReduceOp.MAX)
        return flags

    def warn_of_full_refreshes(self, comm: FSDPGroupState) -> None:
        """Warn once, on the first rank, if training repeatedly sends weights in full precision."""
        if comm.full_in_a_row == FULL_REFRESHES_IN_A_ROW and comm.layout.ranks[0] == dist.get_rank():
            self.warn_once(
                f"sdp4bit: weights ({comm.group.name} first) were sent in full precision "
                f"{FULL_REFRESHES_IN_A_ROW} times in a row: they were loaded, held NaN or infinity, or were "
                f"edited by more than 1/{round(1 / SMALL_EDIT)} of their norm without an optimizer step. If "
                "an optimizer makes these edits, call comm.mark_step() after each to send "
                "differences. If averages (EMA) are swapped in, call model.eval() before you evaluate them. "
                "comm.explain() counts full refreshes per group"
            )

    def warn_once(self, message: str) -> None:
        """Warn unless the text before the first parenthesis was a warning before."""
        key = message.partition("(")[0]
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=3)

    def detach(self) -> None:
        super().detach()
        self.aliases, self.steps_seen = StateDictAliases(), StepObserver(self)


def _may_wait(comm: FSDPGroupState) -> bool:
    """Return whether the host may wait for checksums of the device."""
    # A GPU would be waited for in every micro-batch of an accumulation. The forward whose gradients are
    # reduced finds an edit between two of them.
    is_accumulating = comm.group.module.training and not comm.group.reduces_gradients
    was_accumulating, comm.is_accumulating = comm.is_accumulating, is_accumulating
    return _is_on_host(comm) or not (is_accumulating and was_accumulating)


def _is_on_host(comm: FSDPGroupState) -> bool:
    return comm.group.device.type == "cpu"


def _is_set(copy: HostCopy | None) -> bool:
    # The host does not wait: a flag that arrives late counts in the next step.
    flag = None if copy is None else copy.arrived()
    return flag is not None and bool(flag)
