"""The objects FSDP2 calls to communicate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.collectives.exchange import all_gather_dense, reduce_scatter_dense
from sdp4bit.collectives.weight_replica import Range, WeightReplica
from sdp4bit.collectives.work import CompletedWork, DeferredWork
from sdp4bit.engines.fsdp2.communication import FSDPCommunication, RefreshKind
from sdp4bit.engines.fsdp2.steps import FSDPModelCommunication, in_backward
from sdp4bit.engines.fsdp2.torch_internals import Comm
from sdp4bit.engines.group import reduction_multiplier

_REDUCTIONS_WITHOUT_STEP = 1000


class AllGatherHook:
    """FSDP2's all-gather, served from a replica that a quantized difference updates once per step."""

    def __init__(self, comm: FSDPCommunication, state: FSDPModelCommunication, *, stock: Comm) -> None:
        """Take over from FSDP2's own object, which still gathers what is not quantized."""
        self._comm = comm
        self._state = state
        self._stock = stock

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor to gather to; with a replica a new one, whose storage may be exchanged."""
        if self._comm.replica is None:
            return self._stock.allocate(size, dtype=dtype, device=device)
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
        comm, row_bytes = self._comm, input_tensor.nbytes
        replica, members = comm.replica, None
        if group.size() != comm.layout.size:
            if replica is not None:
                raise ValueError(
                    f"{comm.group.name}: gathered over {group.size()} instead of {comm.layout.size} ranks; "
                    "an int reshard_after_forward must be set before quantize_communication, and keeps "
                    'weights in full precision: use True and WeightConfig(replica="node")'
                )
            members = [comm.layout.ranks.index(rank) for rank in dist.get_process_group_ranks(group)]
        outside_backward = not in_backward()
        if outside_backward:
            self._state.before_unshard(comm)
        if replica is None:
            comm.count_dense(comm.weight_traffic, row_bytes, members=members)
            what = f"full-precision weight all-gather of {comm.group.name}"
            timer = comm.weight_traffic.start_ring_timer(
                input_tensor.device, row_bytes=row_bytes, members=members
            )
            return all_gather_dense(
                output_tensor,
                input_tensor,
                group,
                gather=self._stock,
                async_op=async_op,
                what=what,
                timer=timer,
            )
        comm.weight_traffic.count_plain(row_bytes)
        # A GPU's current stream is the one to compute on if FSDP2 gathers with async_op, as torch's pipeline
        # schedules do: what is sent then goes beside it.
        is_beside = async_op and input_tensor.device.type == "cuda"
        loaded, main, start = comm.loaded_shard, None, None
        if replica.rows is None or outside_backward:
            with torch.inference_mode(False):
                main, start = self._due_refresh(replica, input_tensor, outside_backward=outside_backward)
        # The refresh is only queued here. It reads the input, a view of memory that FSDP2 allocated for the
        # output on its copy-in stream, or a loaded row or a copy of the main shard from the compute stream;
        # freed on return, they could be overwritten before. FSDP2 keeps the output until its streams have
        # been made to wait for its copy-out (its "Note: Overlapping all-gather copy-in and all-gather"): the
        # output keeps them too.
        read = (input_tensor.untyped_storage(), loaded, main if is_beside else None)
        output_tensor.read_by_refresh = read  # type: ignore[attr-defined]
        if is_beside:

            def serve() -> None:
                self._begin(replica, output_tensor, start)()

            return replica.run_beside(self._state.unshard_stream, serve)
        finish = self._begin(replica, output_tensor, start)
        if replica.is_pending and output_tensor.device.type == "cpu":
            # FSDP2 waits for it when it needs the weights: at once, unless they are prefetched. On a GPU the
            # streams do this.
            return DeferredWork(finish)
        finish()
        return CompletedWork(output_tensor.device) if async_op else None

    def _begin(
        self, replica: WeightReplica, output: Tensor, start: Callable[[], None] | None
    ) -> Callable[[], None]:
        """Start the refresh that is due, if any; return what then fills the output with the replica."""
        if start is not None:
            with torch.inference_mode(False):
                start()
        if not replica.is_full:
            return partial(replica.gather, output)
        assert replica.rows is not None
        output.set_(replica.rows.view(-1))  # type: ignore[call-overload]  # FSDP2 copies out of the replica itself
        return replica.wait

    def _due_refresh(
        self, replica: WeightReplica, row: Tensor, *, outside_backward: bool
    ) -> tuple[Tensor | None, Callable[[], None] | None]:
        """Return the main shard, if its difference has to be sent, and what starts the refresh that is due.

        The main shard is read here, on the current stream: the optimizer may write it before a side stream
        has got so far.
        """
        comm = self._comm
        is_full = comm.resync_wanted or replica.rows is None or replica.rows.dtype != row.dtype
        if is_full and comm.load_undecided:
            self._state.agree_on_loaded_shards(comm)
        main = None
        if comm.changed and outside_backward and (comm.loaded_shard is not None or not is_full):
            # Of the fp32 weights, not of rounded ones: docs/numerics.md, "Differences of fp32 weights".
            is_rounded = comm.group.rounds_weights and replica.bits is not None
            main = comm.group.main_shard(torch.float32) if is_rounded else row
        if not is_full and main is None:
            return None, None
        return main, partial(self._start_refresh, replica, row, main, is_full=is_full)

    def _start_refresh(
        self, replica: WeightReplica, row: Tensor, main: Tensor | None, *, is_full: bool
    ) -> None:
        comm = self._comm
        kind: RefreshKind = "full"
        if is_full:
            loaded, comm.loaded_shard = comm.loaded_shard, None
            replica.start_full_refresh(row if loaded is None else loaded)
            comm.resync_wanted = False
            if loaded is None:
                comm.changed.clear()
        if main is not None:
            ranges = comm.due_ranges()
            replica.start_quantized_refresh(main, call=comm.refreshes, ranges=ranges)
            comm.refreshes += 1
            if not is_full:
                kind = "whole row" if ranges is None else "trained part"
        comm.note_refresh(row, kind=kind)
        self._state.warn_of_full_refreshes(comm)


class ReduceScatterHook:
    """FSDP2's reduce-scatter in two quantized levels."""

    def __init__(self, comm: FSDPCommunication, state: FSDPModelCommunication, *, stock: Comm) -> None:
        """Take over from FSDP2's own object, which still reduces what is never quantized."""
        self._comm = comm
        self._state = state
        self._stock = stock

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor for what is reduced, or for the result."""
        if self._comm.reduction is None:
            return self._stock.allocate(size, dtype=dtype, device=device)
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
        """Reduce `input_tensor` [ranks * n] to this rank's row, `output_tensor` [n].

        Only parameters that got a gradient are in the rows, so n changes from call to call.
        """
        comm, state, numel = self._comm, self._state, output_tensor.numel()
        state.reductions_since_step += 1
        comm.is_reduced = True
        comm.awaits_replicas = comm.replica_layout is not None
        if state.reductions_since_step == _REDUCTIONS_WITHOUT_STEP * len(state.groups):
            state.warn_once(
                f"sdp4bit: {_REDUCTIONS_WITHOUT_STEP} gradient reductions without an optimizer step over "
                "these parameters; unless the optimizer is a torch.optim.Optimizer, call comm.mark_step()"
            )
        comm.gradient_bits = None
        parts = _quantized_parts(comm, state, numel)
        if comm.reduction is None or not parts:
            self._reduce_densely(output_tensor, input_tensor, group, op)
            return
        multiplier = reduction_multiplier(op, group, name=comm.group.name, engine="FSDP2")
        nonfinite = comm.sample_gradient(input_tensor, sample_numel=state.gradient_sample_numel)
        rows = input_tensor.view(group.size(), numel)
        for index, ranges in enumerate(parts):
            if not ranges:
                continue
            with _part_of(output_tensor, rows, ranges) as (reduced, part):
                if reduced.numel() < comm.reduction.config.min_numel:
                    self._reduce_densely(reduced, part.reshape(-1), group, op)
                    continue
                comm.reduction(
                    reduced,
                    part,
                    call=comm.reductions * len(parts) + index,
                    multiplier=multiplier,
                    nonfinite=nonfinite,
                )
                comm.gradient_bits = comm.reduction.bits
        comm.reductions += 1

    def _reduce_densely(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object
    ) -> None:
        traffic = self._comm.gradient_traffic
        self._comm.count_dense(traffic, output_tensor.nbytes)
        what = f"full-precision gradient reduce-scatter of {self._comm.group.name}"
        timer = traffic.start_ring_timer(input_tensor.device, row_bytes=output_tensor.nbytes)
        if self._comm.reduction is None:
            reduce_scatter_dense(output_tensor, input_tensor, group, op, reduce=self._stock, what=what)
        else:
            reduce_scatter_dense(output_tensor, input_tensor, group, op, what=what)
        timer()


class ReplicaGroup:
    """Stands for the process group of HSDP's replicas, over which FSDP2 all-reduces gradients.

    FSDP2 calls `torch.distributed.all_reduce` with it, on its all-reduce stream. There it keeps the gradients
    until the collective is over, and leaves out the reduction of micro-batches that are only accumulated. In
    tables of process groups this is found where the group it stands for is.
    """

    def __init__(
        self, comm: FSDPCommunication, state: FSDPModelCommunication, *, stock: dist.ProcessGroup
    ) -> None:
        """Take over from the group itself, which still reduces what is not quantized."""
        self._comm = comm
        self._state = state
        self._stock = stock

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
        comm, (values,) = self._comm, tensors
        self._state.before_all_reduce()
        comm.gradient_bits, comm.awaits_replicas = None, False
        parts = [] if comm.all_reduce is None else _quantized_parts(comm, self._state, values.numel())
        if comm.all_reduce is None or not parts:
            self._reduce_densely(values, opts)
            return
        multiplier = reduction_multiplier(opts.reduceOp, self._stock, name=comm.group.name, engine="FSDP2")
        nonfinite = None
        if comm.reduction is None:
            nonfinite = comm.sample_gradient(values, sample_numel=self._state.gradient_sample_numel)
        for index, ranges in enumerate(parts):
            if not ranges:
                continue
            with _values_of(values, ranges) as part:
                if not comm.all_reduce.takes(part.numel()):
                    self._reduce_densely(part, opts)
                    continue
                comm.all_reduce(
                    part,
                    call=comm.all_reduces * len(parts) + index,
                    multiplier=multiplier,
                    nonfinite=nonfinite,
                )
                comm.gradient_bits = comm.all_reduce.bits
        comm.all_reduces += 1

    def _reduce_densely(self, values: Tensor, opts: Any) -> None:
        comm = self._comm
        if not values.numel():
            return
        # As a ring does it: twice around, a part of the values at a time.
        row_bytes = round(2 * values.nbytes / self._stock.size())
        comm.count_dense(comm.all_reduce_traffic, row_bytes)
        timer = comm.all_reduce_traffic.start_ring_timer(values.device, row_bytes=row_bytes)
        with comm_error_context(
            f"full-precision gradient all-reduce of {comm.group.name} over replicas", group=self._stock
        ):
            work = self._stock.allreduce([values], opts)
            if work is not None:
                work.wait()
        timer()


def _quantized_parts(comm: FSDPCommunication, state: FSDPModelCommunication, numel: int) -> list[list[Range]]:
    """Return the ranges of a row that are reduced apart from each other; none to leave it dense."""
    config = comm.gradient_config
    if config is None or state.steps < config.start_step:
        return []
    if numel < config.min_numel:
        return []
    parts = comm.gradient_parts(numel)
    if parts is None:
        state.warn_once(
            "sdp4bit: some parameters got no gradient, and which ones is not known: gradients of modules "
            "in which tensor parallelism splits some parameters and copies others are then reduced in "
            f"full precision. Apply fully_shard to what is not always used by itself ({comm.group.name})"
        )
        return []
    longest = max(sum(end - start for start, end in ranges) for ranges in parts)
    return parts if longest >= config.min_numel else []


@contextmanager
def _values_of(tensor: Tensor, ranges: Sequence[Range]) -> Iterator[Tensor]:
    """Inside the block, [m] stands for these ranges of a tensor [n], to be changed in place."""
    if len(ranges) == 1:
        (start, end) = ranges[0]
        yield tensor[start:end]
        return
    pieces = [tensor[start:end] for start, end in ranges]
    part = torch.cat(pieces)
    yield part
    torch._foreach_copy_(pieces, list(part.split([piece.numel() for piece in pieces])))


@contextmanager
def _part_of(output: Tensor, rows: Tensor, ranges: Sequence[Range]) -> Iterator[tuple[Tensor, Tensor]]:
    """Inside the block, [m] and [ranks, m] stand for these ranges of output [n] and of rows [ranks, n]."""
    if len(ranges) == 1:
        (start, end) = ranges[0]
        yield output[start:end], rows[:, start:end]
        return
    part = torch.cat([rows[:, start:end] for start, end in ranges], dim=1)
    reduced = output.new_empty(part.shape[1])
    yield reduced, part
    values = reduced.split([end - start for start, end in ranges])
    for (start, end), each in zip(ranges, values, strict=True):
        output[start:end] = each
