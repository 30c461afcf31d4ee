"""The two objects FSDP2 calls to communicate, and the state they share."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.all_gather import Span, WeightReplica
from sdp4bit.collectives.exchange import all_gather_dense, reduce_scatter_dense
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.collectives.work import CompletedWork
from sdp4bit.config import GradientConfig
from sdp4bit.integrations.fsdp_groups import FSDPGroup
from sdp4bit.telemetry import TrafficCounter

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
        self.resync_wanted = True
        """The next refresh is in full precision; so is the first."""
        self.loaded_row: Tensor | None = None
        """What a checkpoint says the devices held of this rank's shard, until the next refresh."""
        self.load_unsettled = False
        """A checkpoint was loaded and the ranks have not yet agreed whether to use its rows."""
        self.refreshes = 0
        self.reductions = 0
        self.gradient_sample: Tensor | None = None

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
        self._versions: list[tuple[int, int, int]] = []
        self._unsharded_since_check: set[int] = set()
        self._warned: set[str] = set()

    # -- what changes weights ------------------------------------------------------------------------

    def mark_changed(self, params: Iterable[Any] | None = None) -> bool:
        """Note an optimizer step over these parameters (None: all trainable ones); False if none is ours."""
        ids = None if params is None else {id(p) for p in params}
        found = False
        for comm in self.groups:
            for index, segment in enumerate(comm.group.segments):
                sharded = segment.sharded
                if ids is None or id(sharded) in ids:
                    found = True
                    if sharded.requires_grad:
                        comm.changed.add(index)
        if not found:
            return False
        self.step_pending = True
        self.reductions_since_step = 0
        if not in_backward():
            for comm in self.groups:
                # Parameters that stay unsharded would hide the update from the next forward.
                if comm.group.is_unsharded:
                    comm.group.module.reshard()
        self._versions = self._read_versions()
        return True

    def request_resync(self, *, keep_loaded: bool = False) -> None:
        """All replicas are refreshed in full precision at their next unshard.

        Args:
            keep_loaded: rows from a checkpoint stay candidates, so that the order in which a model's and the
                communication's state are loaded does not matter.
        """
        for comm in self.groups:
            comm.resync_wanted = True
            if not keep_loaded:
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
        if comm.index in self._unsharded_since_check or not self._unsharded_since_check:
            self._unsharded_since_check.clear()
            self._check_edits()
        self._unsharded_since_check.add(comm.index)

    def _read_versions(self) -> list[tuple[int, int, int]]:
        """Version counters of every parameter: as a DTensor, and of the local tensor with its identity."""
        result = []
        for comm in self.groups:
            for segment in comm.group.segments:
                sharded: Any = segment.sharded
                local = sharded._local_tensor
                result.append((sharded._version, id(local) if local.numel() else 0, local._version))
        return result

    def _check_edits(self) -> None:
        """Resync if the weights were loaded or edited in place without an optimizer step.

        Only signs that all ranks see alike lead to a resync by itself: operations on DTensors, and a change
        of every local tensor, as a checkpoint load makes. Others are reported; acting on them could leave
        ranks waiting for each other.
        """
        before, self._versions = self._versions, self._read_versions()
        if not before or before == self._versions:
            return
        pairs = list(zip(before, self._versions, strict=True))
        edited = sum(old[1:] != new[1:] for old, new in pairs if new[1])
        if any(old[0] != new[0] for old, new in pairs) or edited == sum(new[1] != 0 for _, new in pairs):
            self.request_resync(keep_loaded=True)
        elif edited:
            self.warn_once(
                "sdp4bit: some parameters were edited in place on this rank, outside an optimizer step; the "
                "replicas do not know. Call comm.resync() on all ranks after such edits"
            )

    # -- checkpoints ---------------------------------------------------------------------------------

    def settle_loaded_rows(self, comm: GroupComm) -> None:
        """Use the rows of a loaded checkpoint, or drop them on all ranks if they are not these weights'.

        A row that was saved by another rank, or belongs to other weights, is far from this rank's shard.
        One reduction over the group's ranks per load makes the decision common.
        """
        peers = [c for c in self.groups if c.layout == comm.layout and c.replica is not None]
        distance = norm = 0.0
        pending = complete = True
        for peer in peers:
            peer.load_unsettled = False
            row = peer.loaded_row
            if row is None:
                complete = False
                continue
            main = peer.group.main_row(row.dtype).float()
            distance += float((row.float() - main).square().sum())
            norm += float(main.square().sum())
            pending = pending and bool(peer.changed)
        limit = 0.5 if pending else 0.05
        fits = complete and distance <= limit**2 * norm
        verdict = torch.tensor([int(fits)], device=comm.group.device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=comm.group.process_group)
        if not verdict.item():
            self.warn_once(
                "sdp4bit: the loaded communication state was not saved for these weights by this rank "
                f"(relative distance {(distance / norm) ** 0.5 if norm else float('inf'):.3g} on this rank); "
                "all replicas are refreshed in full precision instead"
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
                self._refresh(replica, input_tensor, outside_backward=outside_backward)
        if replica.is_full:
            assert replica.rows is not None
            output_tensor.set_(replica.rows.view(-1))  # type: ignore[call-overload]  # FSDP2 copies out of the replica itself
        else:
            replica.gather(output_tensor)
        return CompletedWork(output_tensor.device) if async_op else None

    def _refresh(self, replica: WeightReplica, row: Tensor, *, outside_backward: bool) -> None:
        comm = self._comm
        if comm.resync_wanted or replica.rows is None or replica.rows.dtype != row.dtype:
            if comm.load_unsettled:
                self._state.settle_loaded_rows(comm)
            loaded, comm.loaded_row = comm.loaded_row, None
            replica.refresh_full(row if loaded is None else loaded)
            comm.resync_wanted = False
            if loaded is None:
                comm.changed.clear()
        if comm.changed and outside_backward:
            replica.refresh_quantized(row, call=comm.refreshes, spans=comm.changed_spans())
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
                "these parameters; if the optimizer is no torch.optim.Optimizer, call comm.mark_step() after it"
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
        f"{name}: FSDP2 asks for the reduction {op}, which cannot be quantized; keep "
        "set_force_sum_reduction_for_comms(True), as quantize_communication sets it"
    )
