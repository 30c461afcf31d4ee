"""What the parameter groups of one attached model share: step borders, edits of weights, measures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.exchange_error import naming
from sdp4bit.config import TelemetryConfig
from sdp4bit.integrations.fsdp_edits import StateDictAliases
from sdp4bit.integrations.fsdp_group_comm import GroupComm, reduce_over_copies
from sdp4bit.integrations.fsdp_measures import group_squares
from sdp4bit.integrations.measures import SQUARES, SampledMeasures
from sdp4bit.telemetry import Traffic


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
        self._places: dict[int, tuple[GroupComm, int]] = {}
        self._resharding_after = -1
        self._unsharded_since_check: set[int] = set()
        self._warned: set[str] = set()

    # -- what changes weights ------------------------------------------------------------------------

    def mark_changed(self, params: Iterable[Any] | None = None) -> bool:
        """Note an optimizer step over these parameters (None: all trainable ones); False if none is ours."""
        places = self._all_places() if params is None else self._places_of(params)
        if not places:
            return False
        for comm, index in places:
            segment = comm.group.segments[index]
            if segment.sharded.requires_grad:
                comm.changed.add(index)
                # An edit of a parameter that the step does not cover is still to be noticed.
                if comm.versions:
                    comm.versions[index] = segment.version
        self.step_pending = True
        self.reductions_since_step = 0
        if not in_backward():
            self._reshard_changed()
        elif self._resharding_after != torch._C._current_graph_task_id():
            self._resharding_after = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._reshard_changed)
        return True

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

    def _all_places(self) -> list[tuple[GroupComm, int]]:
        return [(comm, index) for comm in self.groups for index in range(len(comm.group.segments))]

    def _places_of(self, params: Iterable[Any]) -> list[tuple[GroupComm, int]]:
        """Return the group and segment of those of the parameters that are ours.

        Optimizers that step in backward ask once for every parameter, so the answer comes from a table.
        """
        wanted = list(params)
        found = [place for place in map(self._place_of, wanted) if place]
        if len(found) < len(wanted):
            # FSDP2 may have replaced parameters since.
            self._places = {id(c.group.segments[i].sharded): (c, i) for c, i in self._all_places()}
            found = [place for place in map(self._place_of, wanted) if place]
        return found

    def _place_of(self, param: Any) -> tuple[GroupComm, int] | None:
        place = self._places.get(id(param))
        return place if place and place[0].group.segments[place[1]].sharded is param else None

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
        # The root's group comes first in a forward, unless it stayed unsharded after the last one.
        seen = self._unsharded_since_check
        if comm.index == 0 or comm.index in seen or not seen:
            seen.clear()
            self._check_edits()
        seen.add(comm.index)
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

    def _check_edits(self) -> None:
        """Resync if the weights were loaded or edited in place without an optimizer step.

        Only signs that all ranks see alike lead to a resync by itself: operations on DTensors, and a change
        of the local tensors of all parameters that every rank holds a part of, as a checkpoint load makes.
        Others are reported; acting on them could leave ranks waiting for each other.
        """
        written, operated, edited = self.aliases.written(), False, {}
        for comm in self.groups:
            segments = comm.group.segments
            before, comm.versions = comm.versions, [segment.version for segment in segments]
            for segment, old, new in zip(segments, before or comm.versions, comm.versions, strict=True):
                by_operation, in_place = written.get(segment.name, (False, False))
                operated = operated or by_operation or old[0] != new[0]
                edited[segment.name, segment.is_on_all_ranks] = in_place or old[1:] != new[1:]
        common = [changed for (_, is_common), changed in edited.items() if is_common]
        if operated or (common and all(common)):
            self.request_resync(keep_loaded=True)
        elif any(edited.values()):
            self.warn_once(
                "sdp4bit: some parameters were edited in place on this rank, outside an optimizer step; the "
                "replicas do not know. Call comm.resync() on all ranks after such edits"
            )

    # -- what the handle asks ------------------------------------------------------------------------

    def last_traffic(self, comm: GroupComm) -> Traffic:
        """Return what a group sent in the last step, which ends with its optimizer step."""
        counters = (comm.weight_traffic, comm.gradient_traffic)
        return sum((c.current_step if self.step_pending else c.last_step for c in counters), Traffic())

    def detach(self) -> None:
        """Nothing of the model is referred to any more; the step count stays."""
        self.groups, self._places, self.aliases = [], {}, StateDictAliases()
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
