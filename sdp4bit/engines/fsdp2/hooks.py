"""The objects FSDP2 calls to communicate: one body each, on the stream that FSDP2 has made current.

That is its all-gather stream, its reduce-scatter stream or, for HSDP's replicas, its all-reduce stream.
Memory that a hook allocates belongs to that stream: the caching allocator gives it to later work there only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.collectives.exchange import all_gather_dense, reduce_scatter_dense
from sdp4bit.collectives.sections import Section
from sdp4bit.collectives.work import CompletedWork, DeferredWork
from sdp4bit.engines.fsdp2.group_state import FSDPGroupState
from sdp4bit.engines.fsdp2.observers import in_backward
from sdp4bit.engines.fsdp2.refresh import Event, FSDPModelState, Refresh
from sdp4bit.engines.fsdp2.torch_internals import Comm, gradient_dtype
from sdp4bit.engines.group import reduction_multiplier
from sdp4bit.engines.measures import GradientQuantizer


class AllGatherHook:
    """FSDP2's all-gather, served from a replica that a quantized difference updates once per step."""

    def __init__(self, comm: FSDPGroupState, state: FSDPModelState, *, stock: Comm) -> None:
        """Take over from FSDP2's own object, which still gathers groups without a replica."""
        self._comm = comm
        self._state = state
        self._stock = stock
        self._range = f"sdp4bit::all_gather ({comm.group.name})"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor to gather to; called on FSDP2's copy-in stream."""
        if self._comm.replica is None:
            return self._stock.allocate(size, dtype=dtype, device=device)
        # A new tensor each time: `_fill` may exchange its storage for the replica's, which a second copy-in
        # into the same tensor would overwrite.
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Write the weights that all ranks agree on to `output_tensor` [ranks * n].

        Args:
            input_tensor: [n], this rank's shard in the model's type; a row of output_tensor.
        """
        with record_function(self._range):
            if self._comm.replica is None:
                return self._gather_dense(output_tensor, input_tensor, group, async_op=async_op)
            return self._gather_replica(output_tensor, input_tensor, group, async_op=async_op)

    def _gather_dense(self, output: Tensor, row: Tensor, group: dist.ProcessGroup, *, async_op: bool) -> Any:
        comm = self._comm
        if not in_backward():
            self._state.before_unshard(comm)
        # An int reshard_after_forward gathers over a part of the ranks in backward.
        is_part = group.size() != comm.layout.size
        ranks = dist.get_process_group_ranks(group) if is_part else []
        members = [comm.layout.ranks.index(rank) for rank in ranks] or None
        comm.count_dense(comm.weight_traffic, row.nbytes, members=members)
        what = f"full-precision weight all-gather of {comm.group.name}"
        return all_gather_dense(output, row, group, gather=self._stock, async_op=async_op, what=what)

    def _gather_replica(
        self, output: Tensor, row: Tensor, group: dist.ProcessGroup, *, async_op: bool
    ) -> Any:
        comm, replica = self._comm, self._comm.replica
        assert replica is not None
        if row.dtype == torch.uint8 and comm.group.row_dtype is not None:
            row = row.view(comm.group.row_dtype)  # several types, which FSDP2 gathers as bytes
        if group.size() != comm.layout.size:
            raise ValueError(
                f"{comm.group.name}: gathered over {group.size()} instead of {comm.layout.size} ranks; "
                "an int reshard_after_forward must be set before quantize_communication, and keeps "
                'weights in full precision: use True and WeightConfig(replica="node")'
            )

        # 1. Decide on the host. Backward computes with the weights of its forward, also if an optimizer
        # steps in between.
        if in_backward() and replica.rows is not None:
            refresh = comm.apply(Event.GATHER_IN_BACKWARD)
        else:
            if not in_backward():
                self._state.before_unshard(comm)
            if replica.rows is not None and replica.rows.dtype != row.dtype:
                comm.apply(Event.RESYNC)
            refresh = comm.apply(Event.GATHER)
        # Behind the decision, which may end the last step and its counts.
        comm.weight_traffic.count_plain(row.nbytes)

        # 2. Read the main shard on the current stream: before a side stream does, the optimizer may write it.
        loaded = comm.loaded_shard
        main = None if refresh.ranges == "none" else row
        if main is not None and comm.group.rounds_weights and replica.bits is not None:
            # The difference of the fp32 weights, not of rounded ones: docs/numerics.md, "Differences of fp32
            # weights". A plain tensor also in inference mode, as training reads it later.
            with torch.inference_mode(False):
                main = comm.group.main_shard(torch.float32)
            if comm.group.has_subclasses:
                # A tensor subclass may come to send other values than it holds: these count then.
                main = torch.where(main.to(row.dtype) == row, main, row)

        # 3. Keep what the refresh reads. It is only queued below, and reads memory of other streams: `row`,
        # a view of the output's first storage, which `_fill` drops, is of the copy-in stream; a loaded row
        # and a copy of the main shard are of the compute stream. Freed on return, the caching allocator could
        # give them away before they are read. FSDP2 keeps the output until its streams wait for the copy-out
        # ("Note: Overlapping all-gather copy-in and all-gather" in _fsdp_param_group.py), and the output
        # keeps these.
        is_beside = async_op and row.device.type == "cuda"
        kept = (row.untyped_storage(), loaded, main if is_beside else None)
        output.read_by_refresh = kept  # type: ignore[attr-defined]

        # 4. Refresh the replica, and fill the output from it.
        if is_beside:
            # torch's pipeline schedules unshard so. The current stream is then the one that computes: a
            # refresh there would delay computation. Whoever uses the weights waits for the work returned.
            serve = partial(self._refresh_and_fill, output, row, loaded, main, refresh)
            return replica.run_beside(self._state.unshard_stream, serve)
        self._refresh(row, loaded, main, refresh)
        if replica.is_pending and row.device.type == "cpu":
            # The host's transfers continue until FSDP2 needs the weights, later if they are prefetched. On a
            # GPU the streams overlap them.
            return DeferredWork(partial(self._fill, output))
        self._fill(output)
        # FSDP2 records an event behind a synchronous call by itself.
        return CompletedWork(output.device) if async_op else None

    def _refresh_and_fill(
        self, output: Tensor, row: Tensor, loaded: Tensor | None, main: Tensor | None, refresh: Refresh
    ) -> None:
        self._refresh(row, loaded, main, refresh)
        self._fill(output)

    @torch.inference_mode(False)  # training updates the replica in place, also if an evaluation creates it
    def _refresh(self, row: Tensor, loaded: Tensor | None, main: Tensor | None, refresh: Refresh) -> None:
        """Start the transfers of a refresh.

        Args:
            row: [n], the main shard in the type that is gathered.
            loaded: [n], the row of a checkpoint.
            main: [n], the main shard whose difference is sent.
        """
        comm, replica = self._comm, self._comm.replica
        if refresh.kind == "none":
            return
        assert replica is not None
        if refresh.is_full:
            replica.start_full_refresh(row if loaded is None else loaded)
        if main is not None:
            replica.start_quantized_refresh(main, ranges=comm.ranges_of(refresh))
            comm.refreshes += 1
        comm.note_refresh(row, refresh=refresh)
        self._state.warn_of_full_refreshes(comm)

    def _fill(self, output: Tensor) -> None:
        """Fill the output with the weights of all ranks; waits for the refresh."""
        replica = self._comm.replica
        assert replica is not None
        if not replica.is_full:
            # Between the ranks of the node, into the output itself: no second tensor of its size.
            assert replica.rows is not None
            replica.gather(output.view(replica.rows.dtype))
            return
        replica.wait()
        assert replica.rows is not None
        # FSDP2 copies out of the replica itself: the tensor object stays, its storage is exchanged. The next
        # refresh writes the replica behind that copy-out, as its stream waits for the compute stream first.
        output.set_(replica.rows.view(-1).view(output.dtype))  # type: ignore[call-overload]


class ReduceScatterHook:
    """FSDP2's reduce-scatter in two quantized levels."""

    def __init__(self, comm: FSDPGroupState, state: FSDPModelState, *, stock: Comm) -> None:
        """Take over from FSDP2's own object, which still reduces what is never quantized."""
        self._comm = comm
        self._state = state
        self._stock = stock
        self._range = f"sdp4bit::reduce_scatter ({comm.group.name})"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor for the rows that are reduced, or for the result."""
        comm = self._comm
        if comm.reduction is None:
            return self._stock.allocate(size, dtype=dtype, device=device)
        # Rows of bf16 gradients stay bf16: fp32 would hold the same values, as FSDP2 divides none before an
        # fp32 reduction, and the quantizer reads either. A reduction in full precision needs its own type.
        if (
            dtype == torch.float32
            and gradient_dtype() == torch.bfloat16
            and _quantized_sections(comm, self._state, math.prod(size) // comm.layout.size, comm.reduction)
        ):
            dtype = torch.bfloat16
        # A new tensor each time: the result may become the storage of the gradients.
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Reduce `input_tensor` [ranks * n] to this rank's row, `output_tensor` [n]."""
        # On FSDP2's reduce-scatter stream. It never sets async_op, ignores a result, and keeps the input
        # until an event behind this call has passed. Only parameters that got a gradient are in the rows, so
        # n changes from call to call.
        with record_function(self._range):
            comm, state, reduction = self._comm, self._state, self._comm.reduction
            state.note_reduction(comm)
            comm.awaits_replicas = comm.replica_layout is not None
            comm.gradient_bits = None
            sections = _quantized_sections(comm, state, output_tensor.numel(), reduction)
            if reduction is None or not sections:
                comm.count_dense(comm.gradient_traffic, output_tensor.nbytes)
                what = f"full-precision gradient reduce-scatter of {comm.group.name}"
                reduce_scatter_dense(output_tensor, input_tensor, group, op, reduce=self._stock, what=what)
                return
            multiplier = reduction_multiplier(op, group, name=comm.group.name, engine="FSDP2")
            nonfinite = comm.sample_gradient(input_tensor, sample_numel=state.gradient_sample_numel)
            start = partial(
                reduction.start,
                input=input_tensor,
                call=comm.reductions,
                multiplier=multiplier,
                nonfinite=nonfinite,
                sections=sections,
            )
            if comm.group.gradients_may_come_late(output_tensor.dtype):
                state.host_reductions.start(start, output_tensor, divisor=comm.group.gradient_divisor)
            else:
                for turn in start(output_tensor):
                    turn()
            comm.gradient_bits = reduction.bits
            comm.reductions += 1


class ReplicaGroup:
    """Represents the process group of HSDP's replicas, over which FSDP2 all-reduces gradients.

    FSDP2 passes it to `torch.distributed.all_reduce`, and not for micro-batches that are only accumulated.
    """

    def __init__(self, comm: FSDPGroupState, state: FSDPModelState, *, stock: dist.ProcessGroup) -> None:
        """Take over from the group itself, which still reduces what is not quantized."""
        self._comm = comm
        self._state = state
        self._stock = stock
        self._range = f"sdp4bit::all_reduce ({comm.group.name})"

    # torch.distributed finds this where the represented group is in its tables of process groups.

    def __eq__(self, other: object) -> bool:
        return other is self or other == self._stock

    def __hash__(self) -> int:
        return hash(self._stock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    @torch.no_grad()
    def allreduce(self, tensors: list[Tensor], opts: Any) -> None:
        """Reduce one tensor [n], this rank's shard of the gradients, over its replicas in place.

        Args:
            opts: with the operation, `reduceOp`; the call is synchronous.
        """
        # On FSDP2's all-reduce stream. FSDP2 keeps the gradients until an event behind this call has passed:
        # PR #140044, regression test PR #180900.
        with record_function(self._range):
            comm, state, all_reduce, (values,) = self._comm, self._state, self._comm.all_reduce, tensors
            state.before_all_reduce(comm)
            comm.gradient_bits, comm.awaits_replicas = None, False
            sections = _quantized_sections(comm, state, values.numel(), all_reduce)
            if all_reduce is None or not sections or not all_reduce.takes(values.numel()):
                if not values.numel():
                    return
                # As a ring does it: twice around, a part of the values at a time.
                comm.count_dense(comm.all_reduce_traffic, round(2 * values.nbytes / self._stock.size()))
                what = f"full-precision gradient all-reduce of {comm.group.name} over replicas"
                with comm_error_context(what, group=self._stock):
                    work = self._stock.allreduce([values], opts)
                    if work is not None:
                        work.wait()
                return
            multiplier = reduction_multiplier(
                opts.reduceOp, self._stock, name=comm.group.name, engine="FSDP2"
            )
            nonfinite = None
            if comm.reduction is None:  # else the reduce-scatter before has sampled this gradient
                nonfinite = comm.sample_gradient(values, sample_numel=state.gradient_sample_numel)
            all_reduce(
                values, call=comm.all_reduces, multiplier=multiplier, nonfinite=nonfinite, sections=sections
            )
            comm.gradient_bits = all_reduce.bits
            comm.all_reduces += 1


def _quantized_sections(
    comm: FSDPGroupState,
    state: FSDPModelState,
    numel: int,
    quantizer: GradientQuantizer | None,
) -> Sequence[Section]:
    """Return the sections of a row that is reduced with few bits; none to leave it dense."""
    config = comm.gradient_config
    if quantizer is None or config is None or state.steps < config.start_step or numel < config.min_numel:
        return ()
    sections = comm.group.sections(numel, unit=quantizer.group_unit, separate=comm.separate_parameters)
    if sections is None:
        state.warn_once(
            "sdp4bit: some parameters got no gradient, and which ones is not known: gradients of modules "
            "in which tensor parallelism splits some parameters and copies others are then reduced in "
            f"full precision. Apply fully_shard to what is not always used by itself ({comm.group.name})"
        )
        return ()
    return sections
