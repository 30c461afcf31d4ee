"""The objects FSDP2 calls to communicate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.collectives.exchange import all_gather_dense, reduce_scatter_dense
from sdp4bit.collectives.sections import Section
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.collectives.work import CompletedWork, DeferredWork
from sdp4bit.engines.fsdp2.group_state import FSDPCommunication
from sdp4bit.engines.fsdp2.observers import in_backward
from sdp4bit.engines.fsdp2.refresh import Event, FSDPModelCommunication, Refresh
from sdp4bit.engines.fsdp2.torch_internals import Comm
from sdp4bit.engines.group import reduction_multiplier
from sdp4bit.engines.measures import GradientQuantizer


class AllGatherHook:
    """FSDP2's all-gather, served from a replica that a quantized difference updates once per step."""

    def __init__(self, comm: FSDPCommunication, state: FSDPModelCommunication, *, stock: Comm) -> None:
        """Take over from FSDP2's own object, which still gathers groups without a replica."""
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
        comm, replica = self._comm, self._comm.replica
        members = self._members(group)
        outside_backward = not in_backward()
        if outside_backward:
            self._state.before_unshard(comm)
        if replica is None:
            return self._gather_densely(output_tensor, input_tensor, group, async_op, members)
        comm.weight_traffic.count_plain(input_tensor.nbytes)
        with torch.inference_mode(False):
            refresh = self._due_refresh(replica, input_tensor, outside_backward=outside_backward)
            # Read on the current stream: the optimizer may write the main shard before a side stream gets
            # there.
            main = self._main_shard(replica, input_tensor) if refresh.ranges != "none" else None
        loaded = comm.loaded_shard
        # A GPU's current stream is the one that computes if FSDP2 gathers with async_op, as torch's pipeline
        # schedules do: the refresh then goes beside it, on a stream of its own.
        is_beside = async_op and input_tensor.device.type == "cuda"
        # The refresh is only queued below. It reads the input, a view of memory that FSDP2 allocated for the
        # output on its copy-in stream, or a loaded row or a copy of the main shard from the compute stream.
        # Freed on return, they could be overwritten first. FSDP2 keeps the output until its streams wait for
        # its copy-out (its "Note: Overlapping all-gather copy-in and all-gather"): the output keeps them too.
        read = (input_tensor.untyped_storage(), loaded, main if is_beside else None)
        output_tensor.read_by_refresh = read  # type: ignore[attr-defined]
        if is_beside:
            serve = partial(self._serve, replica, output_tensor, input_tensor, loaded, main, refresh)
            return replica.run_beside(self._state.unshard_stream, serve)
        self._refresh(replica, input_tensor, loaded, main, refresh)
        if replica.is_pending and output_tensor.device.type == "cpu":
            # FSDP2 waits for it when it needs the weights: at once, unless they are prefetched. On a GPU the
            # streams do this.
            return DeferredWork(partial(self._fill, replica, output_tensor))
        self._fill(replica, output_tensor)
        return CompletedWork(output_tensor.device) if async_op else None

    def _members(self, group: dist.ProcessGroup) -> list[int] | None:
        """Return the places in the layout of the ranks that gather; None for all."""
        comm = self._comm
        if group.size() == comm.layout.size:
            return None
        if comm.replica is not None:
            raise ValueError(
                f"{comm.group.name}: gathered over {group.size()} instead of {comm.layout.size} ranks; "
                "an int reshard_after_forward must be set before quantize_communication, and keeps "
                'weights in full precision: use True and WeightConfig(replica="node")'
            )
        return [comm.layout.ranks.index(rank) for rank in dist.get_process_group_ranks(group)]

    def _gather_densely(
        self,
        output: Tensor,
        row: Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
        members: list[int] | None,
    ) -> Any:
        self._comm.count_dense(self._comm.weight_traffic, row.nbytes, members=members)
        return all_gather_dense(
            output,
            row,
            group,
            gather=self._stock,
            async_op=async_op,
            what=f"full-precision weight all-gather of {self._comm.group.name}",
        )

    def _due_refresh(self, replica: WeightReplica, row: Tensor, *, outside_backward: bool) -> Refresh:
        """Take the refresh that the state of the group asks for."""
        if not outside_backward and replica.rows is not None:
            return self._comm.apply(Event.GATHER_IN_BACKWARD)
        if replica.rows is not None and replica.rows.dtype != row.dtype:
            self._comm.apply(Event.RESYNC)
        return self._comm.apply(Event.GATHER)

    def _main_shard(self, replica: WeightReplica, row: Tensor) -> Tensor:
        """Return the main shard [n] whose difference is sent."""
        # Of the fp32 weights, not of rounded ones: docs/numerics.md, "Differences of fp32 weights".
        is_rounded = self._comm.group.rounds_weights and replica.bits is not None
        return self._comm.group.main_shard(torch.float32) if is_rounded else row

    def _serve(
        self,
        replica: WeightReplica,
        output: Tensor,
        row: Tensor,
        loaded: Tensor | None,
        main: Tensor | None,
        refresh: Refresh,
    ) -> None:
        """Refresh the replica and fill the output, all on the current stream."""
        self._refresh(replica, row, loaded, main, refresh)
        self._fill(replica, output)

    @torch.inference_mode(False)
    def _refresh(
        self,
        replica: WeightReplica,
        row: Tensor,
        loaded: Tensor | None,
        main: Tensor | None,
        refresh: Refresh,
    ) -> None:
        """Start the transfers of a refresh.

        Args:
            row: [n], the main shard in the type that is gathered.
            loaded: [n], the row of a checkpoint.
            main: [n], the main shard whose difference is sent.
        """
        if refresh.kind == "none":
            return
        comm = self._comm
        if refresh.is_full:
            replica.start_full_refresh(row if loaded is None else loaded)
        if main is not None:
            replica.start_quantized_refresh(main, call=comm.refreshes, ranges=comm.ranges_of(refresh))
            comm.refreshes += 1
        comm.note_refresh(row, refresh=refresh)
        self._state.warn_of_full_refreshes(comm)

    def _fill(self, replica: WeightReplica, output: Tensor) -> None:
        """Fill the output with the weights of all ranks, and wait for the refresh."""
        if not replica.is_full:
            replica.gather(output)
            return
        replica.wait()
        assert replica.rows is not None
        output.set_(replica.rows.view(-1))  # type: ignore[call-overload]  # FSDP2 copies out of the replica itself


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
        state.note_reduction(comm)
        comm.awaits_replicas = comm.replica_layout is not None
        comm.gradient_bits = None
        sections = _quantized_sections(comm, state, numel, comm.reduction)
        if comm.reduction is None or not sections:
            self._reduce_densely(output_tensor, input_tensor, group, op)
            return
        multiplier = reduction_multiplier(op, group, name=comm.group.name, engine="FSDP2")
        nonfinite = comm.sample_gradient(input_tensor, sample_numel=state.gradient_sample_numel)
        comm.reduction(
            output_tensor,
            input_tensor,
            call=comm.reductions,
            multiplier=multiplier,
            nonfinite=nonfinite,
            sections=sections,
        )
        comm.gradient_bits = comm.reduction.bits
        comm.reductions += 1

    def _reduce_densely(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object
    ) -> None:
        traffic = self._comm.gradient_traffic
        self._comm.count_dense(traffic, output_tensor.nbytes)
        what = f"full-precision gradient reduce-scatter of {self._comm.group.name}"
        if self._comm.reduction is None:
            reduce_scatter_dense(output_tensor, input_tensor, group, op, reduce=self._stock, what=what)
        else:
            reduce_scatter_dense(output_tensor, input_tensor, group, op, what=what)


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
        self._state.before_all_reduce(self._comm)
        comm.gradient_bits, comm.awaits_replicas = None, False
        sections = _quantized_sections(comm, self._state, values.numel(), comm.all_reduce)
        if comm.all_reduce is None or not sections or not comm.all_reduce.takes(values.numel()):
            self._reduce_densely(values, opts)
            return
        multiplier = reduction_multiplier(opts.reduceOp, self._stock, name=comm.group.name, engine="FSDP2")
        nonfinite = None
        if comm.reduction is None:
            nonfinite = comm.sample_gradient(values, sample_numel=self._state.gradient_sample_numel)
        comm.all_reduce(
            values, call=comm.all_reduces, multiplier=multiplier, nonfinite=nonfinite, sections=sections
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
        with comm_error_context(
            f"full-precision gradient all-reduce of {comm.group.name} over replicas", group=self._stock
        ):
            work = self._stock.allreduce([values], opts)
            if work is not None:
                work.wait()


def _quantized_sections(
    comm: FSDPCommunication,
    state: FSDPModelCommunication,
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
