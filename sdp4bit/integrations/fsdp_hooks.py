"""The two objects FSDP2 calls to communicate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.all_gather import WeightReplica
from sdp4bit.collectives.exchange import all_gather_dense, reduce_scatter_dense
from sdp4bit.collectives.work import CompletedWork, DeferredWork
from sdp4bit.config import GradientConfig
from sdp4bit.integrations.fsdp_comm_state import CommState, in_backward
from sdp4bit.integrations.fsdp_group_comm import GroupComm
from sdp4bit.integrations.measures import sample_gradient

_REDUCTIONS_WITHOUT_STEP = 1000


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
            what = f"full-precision weight all-gather of {comm.group.name}"
            stop = comm.weight_traffic.start_ring_timer(input_tensor.device)
            return all_gather_dense(
                output_tensor, input_tensor, group, async_op=async_op, what=what, stop=stop
            )
        # The refresh is only queued here. It reads the input, a view of memory that FSDP2 allocated for the
        # output on its copy-in stream, or a loaded row from the compute stream; freed on return, they could
        # be overwritten before. FSDP2 keeps the output until both of its streams have been made to wait for
        # its copy-out (its "Note: Overlapping all-gather copy-in and all-gather"): the output keeps them too.
        read = (input_tensor.untyped_storage(), comm.loaded_row)
        output_tensor.read_by_refresh = read  # type: ignore[attr-defined]
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
            comm.gradient_bits = None
            what = f"full-precision gradient reduce-scatter of {comm.group.name}"
            stop = comm.gradient_traffic.start_ring_timer(input_tensor.device)
            reduce_scatter_dense(output_tensor, input_tensor, group, op, what=what)
            stop()
            return
        multiplier = _multiplier(op, group.size(), comm.group.name)
        nonfinite = None
        if numel and state.sampled.is_due(state.steps + 1):
            comm.gradient_sample = sample_gradient(
                input_tensor, sample_numel=state.sampled.sample_numel, unit=quantized.group_unit
            )
            nonfinite = comm.gradient_sample.nonfinite
        quantized(
            output_tensor,
            input_tensor,
            call=comm.reductions,
            multiplier=multiplier,
            nonfinite=nonfinite,
        )
        comm.reductions += 1
        comm.gradient_bits = quantized.bits


def _multiplier(op: Any, size: int, name: str) -> float:
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / size
    raise ValueError(
        f"{name}: FSDP2 asks for the reduction {getattr(op, 'op', op)}, which cannot be quantized; keep "
        "set_force_sum_reduction_for_comms(True), as quantize_communication sets it"
    )
