"""The objects that FSDP2 calls to communicate.

FSDP2 makes one of its streams current: all-gather, reduce-scatter or, for HSDP, all-reduce. Memory
that a hook allocates belongs to that stream, so the caching allocator reuses it there only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.collectives.gradients import reduction_multiplier
from sdp4bit.collectives.streams import CompletedWork, DeferredWork
from sdp4bit.collectives.transport import all_gather_dense, reduce_scatter_dense
from sdp4bit.engines.fsdp2.events import FSDPModelState, in_backward
from sdp4bit.engines.fsdp2.group import FSDPGroup
from sdp4bit.engines.fsdp2.torch_internals import Comm
from sdp4bit.grad_mode import outside_autograd, without_gradients
from sdp4bit.profiling import profiler_range


class _Hook:
    _what: str  # the collective, for profiles

    def __init__(self, group: FSDPGroup, state: FSDPModelState, *, stock: Any) -> None:
        self._group = group
        self._state = state
        self._stock = stock
        self._range = f"sdp4bit::{self._what} ({group.view.name})"


class AllGatherHook(_Hook):
    """Serve FSDP2's all-gather from a replica that a quantized difference updates once per step.

    Groups without a replica use the stock all-gather.
    """

    _stock: Comm
    _what = "all_gather"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor to gather to; called on FSDP2's copy-in stream."""
        if self._group.weights.replica is None:
            return self._stock.allocate(size, dtype=dtype, device=device)
        # A new tensor each time, because `_fill` may give it the storage of the replica, which the next
        # copy-in must not overwrite.
        return torch.empty(*size, dtype=dtype, device=device)

    @without_gradients
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Write the weights of all ranks to `output_tensor` [ranks * n].

        Args:
            input_tensor: [n], this rank's shard in the gathered dtype; a row of output_tensor.
        """
        with profiler_range(self._range):
            if self._group.weights.replica is None:
                return self._gather_dense(output_tensor, input_tensor, group, async_op=async_op)
            return self._gather_replica(output_tensor, input_tensor, group, async_op=async_op)

    def _gather_dense(
        self, output: Tensor, row: Tensor, torch_group: dist.ProcessGroup, *, async_op: bool
    ) -> Any:
        group = self._group
        if not in_backward():
            self._state.before_unshard(group)
        # With an int reshard_after_forward, backward gathers over fewer ranks.
        is_part = torch_group.size() != group.layout.size
        ranks = dist.get_process_group_ranks(torch_group) if is_part else []
        members = [group.layout.ranks.index(rank) for rank in ranks] or None
        what = f"full-precision weight all-gather of {group.view.name}"
        plain = partial(
            all_gather_dense, output, row, torch_group, gather=self._stock, async_op=async_op, what=what
        )
        return group.weights.gather_plain(row.nbytes, plain, members=members)

    def _gather_replica(
        self, output: Tensor, row: Tensor, torch_group: dist.ProcessGroup, *, async_op: bool
    ) -> Any:
        group, weights, replica = self._group, self._group.weights, self._group.weights.replica
        assert replica is not None
        if row.dtype == torch.uint8 and group.view.row_dtype is not None:
            row = row.view(group.view.row_dtype)  # FSDP2 gathers several dtypes as bytes
        if torch_group.size() != group.layout.size:
            raise ValueError(
                f"{group.view.name}: gathered over {torch_group.size()} instead of {group.layout.size} "
                "ranks, because reshard_after_forward became an int after quantize_communication. Use "
                'reshard_after_forward=True and WeightConfig(replica="node")'
            )

        # 1. Decide on the host. Backward uses the weights of its forward, even if an optimizer steps in
        # between.
        refreshes, is_backward = False, in_backward()
        if not (is_backward and replica.rows is not None):
            if not is_backward:
                self._state.before_unshard(group)
            refreshes = not weights.is_current
        # After the decision, which may end the last step and its counts.
        weights.traffic.count_plain(row.nbytes)

        # 2. Read the main shard on the current stream, because the optimizer might write it before a side
        # stream reads it.
        main = row
        if (
            refreshes
            and weights.sends_difference
            and replica.config.bits is not None
            and group.view.rounds_weights
        ):
            # Differences need fp32 weights (docs/numerics.md, "Differences of fp32 weights"), as a plain
            # tensor that training may read after inference mode.
            main = self._main(row)

        # 3. Keep the inputs of the refresh alive. It is only queued below and reads memory of other streams.
        # `row` belongs to the copy-in stream and is a view of the output's first storage, which `_fill`
        # drops. A loaded row and a copy of the main shard belong to the compute stream. If they were freed on
        # return, the caching allocator could reuse them too early. FSDP2 keeps the output until its streams
        # wait for the copy-out ("Note: Overlapping all-gather copy-in and all-gather" in
        # _fsdp_param_group.py).
        is_beside = async_op and row.device.type == "cuda"
        kept = (row.untyped_storage(), weights.loaded_row, main if is_beside else None)
        output.read_by_refresh = kept  # type: ignore[attr-defined]

        # 4. Refresh the replica, and fill the output from it.
        if is_beside:
            # Pipeline schedules unshard like this, on the compute stream, which a refresh would delay. The
            # user of the weights waits for the returned work.
            serve = partial(self._refresh_and_fill, output, row, main, refreshes)
            return replica.run_beside(self._state.unshard_stream, serve)
        if refreshes:
            self._refresh(row, main)
        if replica.is_pending and row.device.type == "cpu":
            # On the CPU, transfers continue until FSDP2 needs the weights. On a GPU the streams overlap them.
            return DeferredWork(partial(self._fill, output))
        self._fill(output)
        # FSDP2 records an event after a synchronous call itself.
        return CompletedWork(output.device) if async_op else None

    @outside_autograd
    def _main(self, row: Tensor) -> Tensor:
        view = self._group.view
        main = view.main_shard(torch.float32)
        if view.has_subclasses:
            # A tensor subclass may begin to gather other values than it holds.
            main = torch.where(main.to(row.dtype) == row, main, row)
        return main

    def _refresh_and_fill(self, output: Tensor, row: Tensor, main: Tensor, refreshes: bool) -> None:
        if refreshes:
            self._refresh(row, main)
        self._fill(output)

    @outside_autograd  # the checksums of a later forward are compared with those of this one
    def _refresh(self, row: Tensor, main: Tensor) -> None:
        """Start the transfers of the refresh that is due.

        Args:
            row: [n], the main shard in the gathered dtype.
            main: [n], the main shard whose difference is sent.
        """
        group, weights, edits = self._group, self._group.weights, self._group.edits
        assert weights.replica is not None
        is_full, ranges = weights.is_full, edits.ranges()
        weights.refresh(main, row=row, ranges=ranges, in_evaluation=not group.view.module.training)
        edits.note_refresh(row, ranges=ranges, is_full=is_full, nonfinite=weights.replica.nonfinite)
        if is_full:
            self._state.report_full_refresh(group)

    def _fill(self, output: Tensor) -> None:
        """Fill the output with the weights of all ranks; waits for the refresh."""
        replica = self._group.weights.replica
        assert replica is not None
        if not replica.holds_all_rows:
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
    _what = "reduce_scatter"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor for the input rows or for the result."""
        if self._group.gradients.reduction is None:
            return self._stock.allocate(size, dtype=dtype, device=device)
        # A new tensor each time, because the result may become the storage of the gradients.
        return torch.empty(*size, dtype=dtype, device=device)

    @without_gradients
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
        with profiler_range(self._range):
            self._reduce(output_tensor, input_tensor, group, op)

    def _reduce(self, output: Tensor, input: Tensor, torch_group: dist.ProcessGroup, op: object) -> None:
        group = self._group
        self._state.note_reduction(group)
        group.awaits_all_reduce = group.replicate_layout is not None
        plain = partial(self._reduce_dense, output, input, torch_group, op)
        group.gradients.reduce(output, input, op, plain=plain)

    def _reduce_dense(
        self, output: Tensor, input: Tensor, torch_group: dist.ProcessGroup, op: object
    ) -> None:
        what = f"full-precision gradient reduce-scatter of {self._group.view.name}"
        reduce = partial(reduce_scatter_dense, output, input, torch_group, reduce=self._stock, what=what)
        if op == dist.ReduceOp.PREMUL_SUM and dist.get_backend(torch_group) == dist.Backend.GLOO:
            # gloo cannot, but groups that are quantized take FSDP2's divide factor there, too.
            reduce(dist.ReduceOp.SUM)
            output.mul_(reduction_multiplier(op, ranks=torch_group.size(), name=what))
        else:
            reduce(op)


class ReplicateGroup(_Hook):
    """A proxy for the process group over which FSDP2 all-reduces gradients of HSDP.

    FSDP2 passes it to `torch.distributed.all_reduce`, except for micro-batches that are only accumulated.
    """

    _stock: dist.ProcessGroup
    _what = "all_reduce"

    # torch.distributed keeps process groups in dictionaries, so the proxy must be equal to its group.

    def __eq__(self, other: object) -> bool:
        return other is self or other == self._stock

    def __hash__(self) -> int:
        return hash(self._stock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    @without_gradients
    def allreduce(self, tensors: list[Tensor], opts: Any) -> None:
        """Reduce one tensor [n], this rank's shard of the gradients, over the replicate dimension in place.

        Args:
            opts: `reduceOp` is the operation; the call is synchronous.
        """
        # FSDP2 keeps the gradients until an event after this call has passed (PR #140044, regression test
        # PR #180900).
        with profiler_range(self._range):
            group, (values,) = self._group, tensors
            self._state.before_all_reduce(group)
            group.awaits_all_reduce = False
            group.gradients.reduce_in_place(
                values, opts.reduceOp, plain=partial(self._sum, values, opts), run=lambda reduce: reduce()
            )

    def _sum(self, values: Tensor, opts: Any) -> None:
        if not values.numel():
            return
        what = f"full-precision gradient all-reduce of {self._group.view.name} over the replicate dimension"
        with comm_error_context(what, group=self._stock):
            work = self._stock.allreduce([values], opts)
            if work is not None:
                work.wait()
