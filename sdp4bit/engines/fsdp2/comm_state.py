"""What the parameter groups of one attached model share: step borders, edits of weights, measures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.errors import naming
from sdp4bit.config import TelemetryConfig
from sdp4bit.engines.fsdp2.edits import SMALL_EDIT, EditDetector, StateDictAliases
from sdp4bit.engines.fsdp2.group_comm import GroupComm, reduce_over_copies
from sdp4bit.engines.fsdp2.groups import ParamSegment
from sdp4bit.engines.fsdp2.measures import group_squares
from sdp4bit.engines.measures import SQUARES, SampledMeasures
from sdp4bit.traffic import Traffic

_FULL_REFRESHES_IN_A_ROW = 3
"""So many are said to be a habit."""


def in_backward() -> bool:
    """Whether autograd is running on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class CommState:
    """What the groups of one attached model share: the step count and what happened to the weights."""

    def __init__(self, groups: Sequence[GroupComm], *, telemetry: TelemetryConfig | None = None) -> None:
        self.groups = groups
        self.sampled = SampledMeasures(telemetry, [comm.group.name for comm in groups])
        self.step_listeners: list[Callable[[int], None]] = []
        """Called once per optimizer step, with its number, on all ranks alike: when the step's measures are
        available, and before anything that follows it is sent. The ranks may communicate in it."""
        self.steps = 0
        """Optimizer steps that have been followed by an unshard."""
        self.step_pending = False
        """An optimizer has stepped and no parameter has been unsharded since."""
        self.reductions_since_step = 0
        self.aliases = StateDictAliases()
        self._edits = EditDetector()
        self._segments: dict[int, ParamSegment] = {}
        self._stepping_in = -1
        self._communicates = any(comm.layout.size > 1 for comm in groups)
        self._stepped: set[int] = set()
        """Ids of the parameters stepped since the last step boundary, where nothing is sent."""
        self._warned: set[str] = set()

    # -- what changes weights ------------------------------------------------------------------------

    def mark_changed(self, params: Iterable[Any] | None = None) -> bool:
        """Note an optimizer step over these parameters (None: the user's own); False if none is ours.

        Whose parameters they are tells that a step was taken, and no more: what has to be sent must not
        depend on this rank's optimizer (:meth:`GroupComm.note_step`).
        """
        params = None if params is None else list(params)
        if params is not None and not self._holds_any(params):
            return False
        if not self._communicates:
            self._count_step_alone(params)
        self.step_pending = True
        self.reductions_since_step = 0
        if not in_backward():
            self._after_step(by_hand=params is None)
        elif self._stepping_in != torch._C._current_graph_task_id():
            # Optimizers that step in backward come once per parameter.
            self._stepping_in = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(
                partial(self._after_step, by_hand=params is None)
            )
        return True

    def _after_step(self, *, by_hand: bool) -> None:
        self.aliases.take_written()  # some optimizers write parameters in ways that look like a load
        for comm in self.groups:
            comm.note_step(by_hand=by_hand)
        self._reshard_changed()

    def _count_step_alone(self, params: Sequence[Any] | None) -> None:
        """Count steps where FSDP2 gathers nothing, so that no hook sees the next forward.

        A second step over the same parameter is the next one: optimizers that share a model's parameters, or
        step each in backward, take one together.
        """
        every = [segment.sharded for comm in self.groups for segment in comm.group.segments]
        stepped = {id(param) for param in (every if params is None else params)}
        if not self.step_pending:
            self._stepped.clear()
        elif not self._stepped.isdisjoint(stepped):
            self.steps += 1
            self._stepped.clear()
        self._stepped |= stepped

    def _reshard_changed(self) -> None:
        """Free parameters that stayed unsharded: they would hide the step from the next forward."""
        for comm in self.groups:
            if comm.changed and comm.group.is_unsharded:
                comm.group.module.reshard()

    def reshard(self) -> None:
        """Free parameters that stayed unsharded: they would hide a refresh from the next forward."""
        for comm in self.groups:
            if comm.group.is_unsharded:
                comm.group.module.reshard()

    def _holds_any(self, params: Sequence[Any]) -> bool:
        """Whether any of these is a parameter of ours.

        Optimizers that step in backward ask once for every parameter, so the answer comes from a table.
        """
        if not any(map(self._is_ours, params)):
            # FSDP2 may have replaced parameters since.
            self._segments = {id(s.sharded): s for comm in self.groups for s in comm.group.segments}
        return any(map(self._is_ours, params))

    def _is_ours(self, param: Any) -> bool:
        segment = self._segments.get(id(param))
        return segment is not None and segment.sharded is param

    def request_resync(self, *, keep_loaded: bool = False, only: Collection[GroupComm] | None = None) -> None:
        """All replicas, or only these groups', are refreshed in full precision at their next unshard.

        Args:
            keep_loaded: rows from a checkpoint stay candidates, so that the order in which a model's and the
                communication's state are loaded does not matter.
        """
        for comm in self.groups if only is None else only:
            comm.resync_wanted = True
            if keep_loaded:
                # Rows that were found to fit may not fit what has just been loaded.
                comm.load_unsettled = comm.load_unsettled or comm.loaded_row is not None
            else:
                comm.loaded_row = None
                comm.load_unsettled = False
                comm.changed.clear()

    def sampled_measures(self) -> Tensor | None:
        """Return the measures of the last measured step, `sampled.step`; None before the first.

        Returns:
            fp32 [groups, 4] on the device, one row for each of `groups`; the columns are
            `measures.COLUMNS`, NaN where one does not apply. They are this rank's own values.
        """
        return self.sampled.on_device()

    def before_unshard(self, comm: GroupComm) -> None:
        """Notice step borders and edits of the weights that no optimizer made; called outside backward."""
        ended, self.step_pending = self.step_pending, False
        if ended:
            self.steps += 1
            for each in self.groups:
                each.weight_traffic.end_step()
                each.gradient_traffic.end_step()
        if self._was_loaded_in_place():
            self.request_resync(keep_loaded=True)
        self._edits.look(comm, self.groups)
        if self._edits.take_late():
            self.warn_once(
                "sdp4bit: weights were edited in place between micro-batches, or frozen weights between "
                "steps, and have been used as they were before. On a GPU a training step does not wait to "
                "find such edits first: call comm.resync() on all ranks after them"
            )
        if ended:
            self._measure()
            for listener in self.step_listeners:
                listener(self.steps)
            if self.sampled.is_due(self.steps):
                for each in self.groups:
                    # A group without a gradient in the next measured step is not to report this one again.
                    each.gradient_sample = None

    def _measure(self) -> None:
        if not self.sampled.is_due(self.steps):
            return
        # The forward may be one of inference; what is measured is used in training.
        with torch.no_grad(), torch.inference_mode(False):
            rows = [group_squares(comm, sample_numel=self.sampled.sample_numel) for comm in self.groups]
            self.sampled.publish(torch.stack(rows), step=self.steps)

    def measure(self) -> Tensor:
        """Return the squares [groups, 7] of now: weights over whole shards, gradients as last sampled."""
        with torch.no_grad(), torch.inference_mode(False):
            rows = [group_squares(comm, sample_numel=None) for comm in self.groups]
            return self.sampled.with_last_gradients(torch.stack(rows)) if rows else torch.empty(0, SQUARES)

    def _was_loaded_in_place(self) -> bool:
        """Whether every parameter that all ranks hold a part of was written to through a state dict.

        A checkpoint load does that, on all ranks alike.
        """
        written = self.aliases.take_written()
        if not written:
            return False
        common = [s.name for comm in self.groups for s in comm.group.segments if s.is_on_all_ranks]
        return bool(common) and written.issuperset(common)

    def warn_of_full_refreshes(self, comm: GroupComm) -> None:
        """Say once that a group's weights travel in full precision again and again."""
        if comm.full_in_a_row == _FULL_REFRESHES_IN_A_ROW:
            self.warn_once(
                f"sdp4bit: weights ({comm.group.name} first) were sent in full precision "
                f"{_FULL_REFRESHES_IN_A_ROW} times in a row: they were loaded, or edited by more than "
                f"1/{round(1 / SMALL_EDIT)} of their size, with no optimizer step since. If an optimizer "
                "made these edits, call comm.mark_step() after each: then differences are sent. "
                "comm.explain() counts full refreshes per group"
            )

    # -- what the handle asks ------------------------------------------------------------------------

    def last_traffic(self, comm: GroupComm) -> Traffic:
        """Return what a group sent in the last step, which ends with its optimizer step."""
        counters = (comm.weight_traffic, comm.gradient_traffic)
        return sum((c.current_step if self.step_pending else c.last_step for c in counters), Traffic())

    def detach(self) -> None:
        """Nothing of the model is referred to any more; the step count stays."""
        self.groups, self._segments, self.aliases = [], {}, StateDictAliases()
        self.step_listeners = []

    # -- checkpoints ---------------------------------------------------------------------------------

    def settle_loaded_rows(self, comm: GroupComm) -> None:
        """Use the rows of a loaded checkpoint, or drop them on all ranks if they are not these weights'.

        One reduction over the group's ranks per load makes the decision common.
        """
        peers = [c for c in self.groups if c.layout == comm.layout and c.replica is not None]
        for peer in peers:
            peer.load_unsettled = False
        fits = all(peer.loaded_row_fits() for peer in peers)
        verdict = torch.tensor([int(fits)], device=comm.group.device)
        with naming("agreement on loaded replicas", group=comm.group.process_group):
            dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=comm.group.process_group)
        verdicts = verdict.repeat(len(peers))
        reduce_over_copies(verdicts, peers, op=dist.ReduceOp.MIN)
        if not verdicts.all():
            warnings.warn(
                "sdp4bit: the loaded communication state was not saved with these weights, or not by each "
                "rank for itself; all replicas are refreshed in full precision instead",
                stacklevel=2,
            )
            for peer in peers:
                peer.loaded_row = None
                peer.changed.clear()

    def warn_once(self, message: str) -> None:
        """Warn, but not again for the same message."""
        key = message.partition("(")[0]
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=3)
