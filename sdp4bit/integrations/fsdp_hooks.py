"""The two objects FSDP2 calls to communicate, and the state they share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.all_gather import Span, WeightReplica
from sdp4bit.collectives.exchange import all_gather_dense, reduce_scatter_dense
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.collectives.work import CompletedWork, DeferredWork
from sdp4bit.config import GradientConfig
from sdp4bit.integrations.fsdp_edits import StateDictAliases
from sdp4bit.integrations.fsdp_groups import FSDPGroup, Version
from sdp4bit.telemetry import Traffic, TrafficCounter

_SAMPLE_NUMEL = 4096
_REDUCTIONS_WITHOUT_STEP = 1000


def in_backward() -> bool:
    """Whether autograd is running on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


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
        self.gradient_sample: Tensor | None = None

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
        spans: list[Span] = []
        for index in sorted(self.changed):
            start, end = segments[index].start, segments[index].end
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((start, end))
        return spans


class CommState:
    """What the groups of one attached model share: the step count and what happened to the weights."""

    def __init__(self, groups: Sequence[GroupComm]) -> None:
        self.groups = groups
        self.steps = 0
        """Optimizer steps that have been followed by an unshard."""
        self.step_pending = False
        """An optimizer has stepped and no parameter has been unsharded since."""
        self.reductions_since_step = 0
        self.aliases = StateDictAliases()
        self.step_listeners: list[Callable[[], None]] = []
        """Called once per step border on all ranks, before the first refresh of the new step."""
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

    def request_resync(
        self, *, keep_loaded: bool = False, only: Collection[GroupComm] | None = None
    ) -> None:
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

    def before_unshard(self, comm: GroupComm) -> None:
        """Notice step borders and edits of the weights that no optimizer made; called outside backward."""
        if self.step_pending:
            self.step_pending = False
            self.steps += 1
            for each in self.groups:
                each.weight_traffic.end_step()
                each.gradient_traffic.end_step()
            for listener in self.step_listeners:
                listener()
        # The root's group comes first in a forward, unless it stayed unsharded after the last one.
        seen = self._unsharded_since_check
        if comm.index == 0 or comm.index in seen or not seen:
            seen.clear()
            self._check_edits()
        seen.add(comm.index)

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
        self.step_listeners.clear()

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
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=comm.group.process_group)
        if not verdict.item():
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


class _Allocate:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor each time: the all-gather may exchange its storage."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGatherHook(_Allocate):
    """FSDP2's all-gather, served from a replica that a quantized difference updates once per step."""

    def __init__(self, comm: GroupComm, state: CommState) -> None:
        self._comm = comm
        self._state = state

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """`output_tensor` [ranks * n] holds the weights that all ranks agree on.

        Args:
            input_tensor: [n], this rank's shard in the model's type; a row of output_tensor.
        """
        comm, row_bytes = self._comm, input_tensor.nbytes
        if group.size() != comm.layout.size:
            raise ValueError(
                f"{comm.group.name}: gathered over {group.size()} instead of {comm.layout.size} ranks; an "
                'int reshard_after_forward is not supported, use True and WeightConfig(replica="node")'
            )
        outside_backward = not in_backward()
        if outside_backward:
            self._state.before_unshard(comm)
        comm.weight_traffic.count_plain(row_bytes)
        replica = comm.replica
        if replica is None:
            comm.weight_traffic.count_ring(row_bytes)
            return all_gather_dense(output_tensor, input_tensor, group, async_op=async_op)
        if replica.rows is None or outside_backward:
            with torch.inference_mode(False):
                self._start_refresh(replica, input_tensor, outside_backward=outside_backward)
        if replica.is_full:
            assert replica.rows is not None
            output_tensor.set_(replica.rows.view(-1))  # type: ignore[call-overload]  # FSDP2 copies out of the replica itself
        finish = replica.settle if replica.is_full else partial(replica.gather, output_tensor)
        if replica.is_pending and output_tensor.device.type == "cpu":
            # FSDP2 waits for it when it needs the weights: at once, unless they are prefetched. On a GPU the
            # streams do this.
            return DeferredWork(finish)
        finish()
        return CompletedWork(output_tensor.device) if async_op else None

    def _start_refresh(self, replica: WeightReplica, row: Tensor, *, outside_backward: bool) -> None:
        comm = self._comm
        if comm.resync_wanted or replica.rows is None or replica.rows.dtype != row.dtype:
            if comm.load_unsettled:
                self._state.settle_loaded_rows(comm)
            loaded, comm.loaded_row = comm.loaded_row, None
            replica.start_full_refresh(row if loaded is None else loaded)
            comm.resync_wanted = False
            if loaded is None:
                comm.changed.clear()
        if comm.changed and outside_backward:
            replica.start_quantized_refresh(row, call=comm.refreshes, spans=comm.changed_spans())
            comm.refreshes += 1
            comm.changed.clear()


class ReduceScatterHook(_Allocate):
    """FSDP2's reduce-scatter in two quantized levels."""

    def __init__(self, comm: GroupComm, state: CommState, *, config: GradientConfig | None) -> None:
        self._comm = comm
        self._state = state
        self._config = config

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """`output_tensor` [n] holds this rank's row of the reduction of `input_tensor` [ranks * n].

        Only parameters that got a gradient are in the rows, so n changes from call to call.
        """
        comm, state, numel = self._comm, self._state, output_tensor.numel()
        state.reductions_since_step += 1
        if state.reductions_since_step == _REDUCTIONS_WITHOUT_STEP * len(state.groups):
            state.warn_once(
                f"sdp4bit: {_REDUCTIONS_WITHOUT_STEP} gradient reductions without an optimizer step over "
                "these parameters; unless the optimizer is a torch.optim.Optimizer, call comm.mark_step()"
            )
        quantized, config = comm.reduce_scatter, self._config
        if quantized is None or config is None or numel < config.min_numel or state.steps < config.start_step:
            comm.gradient_traffic.count_plain(output_tensor.nbytes)
            comm.gradient_traffic.count_ring(output_tensor.nbytes)
            reduce_scatter_dense(output_tensor, input_tensor, group, op)
            return
        multiplier = _multiplier(op, group.size(), comm.group.name)
        sample = input_tensor[:_SAMPLE_NUMEL]
        if comm.gradient_sample is None or comm.gradient_sample.shape != sample.shape:
            comm.gradient_sample = torch.empty_like(sample)
        comm.gradient_sample.copy_(sample)
        quantized(output_tensor, input_tensor, call=comm.reductions, multiplier=multiplier)
        comm.reductions += 1


def _multiplier(op: Any, size: int, name: str) -> float:
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / size
    raise ValueError(
        f"{name}: FSDP2 asks for the reduction {getattr(op, 'op', op)}, which cannot be quantized; keep "
        "set_force_sum_reduction_for_comms(True), as quantize_communication sets it"
    )
