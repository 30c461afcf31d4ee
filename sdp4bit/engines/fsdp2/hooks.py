"""The objects that FSDP2 calls to communicate.

FSDP2 makes one of its streams current: all-gather, reduce-scatter or, for HSDP's replicas, all-reduce. Memory
that a hook allocates belongs to that stream, so the caching allocator reuses it there only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.collectives.exchange import all_gather_dense, reduce_scatter_dense
from sdp4bit.collectives.group import GradientQuantizer, reduction_multiplier
from sdp4bit.collectives.sections import Section
from sdp4bit.collectives.work import CompletedWork, DeferredWork
from sdp4bit.engines.fsdp2.events import FSDPModelState, in_backward
from sdp4bit.engines.fsdp2.freshness import NOTHING_DUE, Due, Event
from sdp4bit.engines.fsdp2.group_state import FSDPGroupState
from sdp4bit.engines.fsdp2.torch_internals import Comm
from sdp4bit.observe.measures import sample_gradient


class _Hook:
    def __init__(self, comm: FSDPGroupState, state: FSDPModelState, *, stock: Any) -> None:
        self._comm = comm
        self._state = state
        self._stock = stock


class AllGatherHook(_Hook):
    """Serve FSDP2's all-gather from a replica that a quantized difference updates once per step.

    Groups without a replica use the stock all-gather.
    """

    _stock: Comm

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor to gather to; called on FSDP2's copy-in stream."""
        if self._comm.replica is None:
            return self._stock.allocate(size, dtype=dtype, device=device)
        # A new tensor each time, because `_fill` may give it the storage of the replica, which the next
        # copy-in must not overwrite.
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Write the weights of all ranks to `output_tensor` [ranks * n].

        Args:
            input_tensor: [n], this rank's shard in the gathered dtype; a row of output_tensor.
        """
        with record_function(f"sdp4bit::all_gather ({self._comm.group.name})"):
            if self._comm.replica is None:
                return self._gather_dense(output_tensor, input_tensor, group, async_op=async_op)
            return self._gather_replica(output_tensor, input_tensor, group, async_op=async_op)

    def _gather_dense(self, output: Tensor, row: Tensor, group: dist.ProcessGroup, *, async_op: bool) -> Any:
        comm = self._comm
        if not in_backward():
            self._state.before_unshard(comm)
        # With an int reshard_after_forward, backward gathers over fewer ranks.
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
            row = row.view(comm.group.row_dtype)  # FSDP2 gathers several dtypes as bytes
        if group.size() != comm.layout.size:
            raise ValueError(
                f"{comm.group.name}: gathered over {group.size()} instead of {comm.layout.size} ranks, "
                "because reshard_after_forward became an int after quantize_communication. Use "
                'reshard_after_forward=True and WeightConfig(replica="node")'
            )

        # 1. Decide on the host. Backward uses the weights of its forward, even if an optimizer steps in
        # between.
        due, is_backward = NOTHING_DUE, in_backward()
        if not (is_backward and replica.rows is not None):
            if not is_backward:
                self._state.before_unshard(comm)
            if replica.rows is not None and replica.rows.dtype != row.dtype:
                comm.fresh.apply(Event.RESYNC)
            due = comm.fresh.due()
        # After the decision, which may end the last step and its counts.
        comm.weight_traffic.count_plain(row.nbytes)

        # 2. Read the main shard on the current stream, because the optimizer might write it before a side
        # stream reads it.
        main = None if due.refresh.ranges == "none" else row
        if main is not None and replica.config.bits is not None and comm.group.rounds_weights:
            # Differences need fp32 weights (docs/numerics.md, "Differences of fp32 weights"), as a plain
            # tensor that training may read after inference mode.
            with torch.inference_mode(False):
                main = comm.group.main_shard(torch.float32)
                if comm.group.has_subclasses:
                    # A tensor subclass may begin to gather other values than it holds.
                    main = torch.where(main.to(row.dtype) == row, main, row)

        # 3. Keep the inputs of the refresh alive. It is only queued below and reads memory of other streams.
        # `row` belongs to the copy-in stream and is a view of the output's first storage, which `_fill`
        # drops. A loaded row and a copy of the main shard belong to the compute stream. If they were freed on
        # return, the caching allocator could reuse them too early. FSDP2 keeps the output until its streams
        # wait for the copy-out ("Note: Overlapping all-gather copy-in and all-gather" in
        # _fsdp_param_group.py).
        is_beside = async_op and row.device.type == "cuda"
        kept = (row.untyped_storage(), due.loaded, main if is_beside else None)
        output.read_by_refresh = kept  # type: ignore[attr-defined]

        # 4. Refresh the replica, and fill the output from it.
        if is_beside:
            # Pipeline schedules unshard like this, on the compute stream, which a refresh would delay. The
            # user of the weights waits for the returned work.
            serve = partial(self._refresh_and_fill, output, row, main, due)
            return replica.run_beside(self._state.unshard_stream, serve)
        self._refresh(row, main, due)
        if replica.is_pending and row.device.type == "cpu":
            # On the CPU, transfers continue until FSDP2 needs the weights. On a GPU the streams overlap them.
            return DeferredWork(partial(self._fill, output))
        self._fill(output)
        # FSDP2 records an event after a synchronous call itself.
        return CompletedWork(output.device) if async_op else None

    def _refresh_and_fill(self, output: Tensor, row: Tensor, main: Tensor | None, due: Due) -> None:
        self._refresh(row, main, due)
        self._fill(output)

    @torch.inference_mode(False)  # an evaluation may create the replica that training updates in place
    def _refresh(self, row: Tensor, main: Tensor | None, due: Due) -> None:
        """Start the transfers of a refresh.

        Args:
            row: [n], the main shard in the gathered dtype.
            main: [n], the main shard whose difference is sent.
        """
        comm, replica = self._comm, self._comm.replica
        if due.refresh.kind == "none":
            return
        assert replica is not None
        if due.refresh.is_full:
            replica.start_full_refresh(row if due.loaded is None else due.loaded)
        if main is not None:
            replica.start_quantized_refresh(main, ranges=due.ranges, bits=row)
            comm.refreshes += 1
        # Only now, so that an exception above leaves the refresh due.
        comm.fresh.sent(due, row, nonfinite=replica.nonfinite)
        if due.refresh.is_full:
            self._state.report_full_refresh(comm)

    def _fill(self, output: Tensor) -> None:
        """Fill the output with the weights of all ranks; waits for the refresh."""
        replica = self._comm.replica
        assert replica is not None
        if not replica.is_full:
            # Directly into the output, without a second tensor of its size.
            assert replica.rows is not None
            replica.gather(output.view(replica.rows.dtype))
            return
        replica.wait()
        assert replica.rows is not None
        # FSDP2 copies out of the replica itself, because the output takes over its storage. The stream of the
        # next refresh waits for the compute stream and with it for that copy-out.
        output.set_(replica.rows.view(-1).view(output.dtype))  # type: ignore[call-overload]


class ReduceScatterHook(_Hook):
    """Reduce-scatter FSDP2's gradients in two quantized levels, or with the stock object."""

    _stock: Comm

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor for the input rows or for the result."""
        if self._comm.reduction is None:
            return self._stock.allocate(size, dtype=dtype, device=device)
        # A new tensor each time, because the result may become the storage of the gradients.
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
        # FSDP2 never sets async_op, ignores the result, and keeps the input until an event after this call
        # has passed. Only parameters with a gradient are in the rows, so n varies between calls.
        with record_function(f"sdp4bit::reduce_scatter ({self._comm.group.name})"):
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
            nonfinite = sample_gradient(comm, input_tensor, sample_numel=state.gradient_sample_numel)
            reduction(
                output_tensor,
                input_tensor,
                call=comm.reductions,
                multiplier=multiplier,
                nonfinite=nonfinite,
                sections=sections,
            )
            comm.gradient_bits = reduction.bits
            comm.reductions += 1


class ReplicaGroup(_Hook):
    """A proxy for the process group over which FSDP2 all-reduces gradients of HSDP's replicas.

    FSDP2 passes it to `torch.distributed.all_reduce`, except for micro-batches that are only accumulated.
    """

    _stock: dist.ProcessGroup

    # torch.distributed keeps process groups in dictionaries, so the proxy must be equal to its group.

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
            opts: `reduceOp` is the operation; the call is synchronous.
        """
        # FSDP2 keeps the gradients until an event after this call has passed (PR #140044, regression test
        # PR #180900).
        with record_function(f"sdp4bit::all_reduce ({self._comm.group.name})"):
            comm, state, all_reduce, (values,) = self._comm, self._state, self._comm.all_reduce, tensors
            state.before_all_reduce(comm)
            comm.gradient_bits, comm.awaits_replicas = None, False
            sections = _quantized_sections(comm, state, values.numel(), all_reduce)
            if all_reduce is None or not sections or not all_reduce.takes(values.numel()):
                if not values.numel():
                    return
                # The bytes of a ring all-reduce.
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
            if comm.reduction is None:  # otherwise the reduce-scatter has sampled this gradient
                nonfinite = sample_gradient(comm, values, sample_numel=state.gradient_sample_numel)
            all_reduce(
                values, call=comm.all_reduces, multiplier=multiplier, nonfinite=nonfinite, sections=sections
            )
            comm.gradient_bits = all_reduce.bits
            comm.all_reduces += 1


def _quantized_sections(
    comm: FSDPGroupState, state: FSDPModelState, numel: int, quantizer: GradientQuantizer | None
) -> Sequence[Section]:
    """Return the sections of a row to quantize; none for full precision."""
    config = comm.gradient_config
    if quantizer is None or config is None or state.steps < config.start_step or numel < config.min_numel:
        return ()
    sections = comm.group.gradient_sections(
        numel, unit=quantizer.group_unit, separate=comm.separate_parameters
    )
    if sections is None:
        state.warn_once(
            "sdp4bit: unknown parameters got no gradient. A module in which tensor parallelism splits some "
            "parameters and copies others then reduces its gradients in full precision; apply fully_shard "
            f"separately to its parts that are not always used ({comm.group.name})"
        )
        return ()
    return sections
