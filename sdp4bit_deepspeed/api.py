"""SDP4Bit on DeepSpeed's ZeRO-1 and ZeRO-2, attached to an engine of `deepspeed.initialize`.

DeepSpeed keeps each parameter group in a flat buffer, in which rank r updates row r, and has no hooks for its
collectives. So methods of one optimizer object are replaced, while its classes are unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.errors import call_all, comm_error_context
from sdp4bit.collectives.group import Group, Remarks
from sdp4bit.collectives.sections import Range, merge_ranges, other_ranges, take_ranges
from sdp4bit.collectives.topology import TopologySpec
from sdp4bit.collectives.weights import Due, agree_on_refreshes
from sdp4bit.config import AuditConfig, SDP4BitConfig, as_config
from sdp4bit.engines.agreement import ShardedRows, agree
from sdp4bit.engines.attach import build
from sdp4bit.engines.handle import CommHandle, StateDict
from sdp4bit.engines.loading import check_state, counters_of, load_counters
from sdp4bit.engines.protocol import Undo
from sdp4bit.observe.explain import layout_reason, one_hop_note, one_node_note
from sdp4bit.observe.stats import ModelState
from sdp4bit.quantization.random import check_numbers
from sdp4bit.warn import warn_user

STATE_KEY, FORMAT_VERSION = "sdp4bit", 1  # of the communication state in the optimizer's checkpoint
_OWNER = "sdp4bit on DeepSpeed"


class FlatGroup:
    """The flat buffer of one parameter group; the `Rows` of its group."""

    value_ranges = None  # all values are numbers

    def __init__(self, zero: Any, index: int) -> None:
        self._zero, self._index, self.name = zero, index, f"param_groups[{index}]"
        self.process_group = zero.real_dp_process_group[index]
        self.ranks = tuple(dist.get_process_group_ranks(self.process_group))
        self.device, self.shard_numel = self.weights.device, self.main.numel()
        rank = self.process_group.rank()
        self.own = slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)  # this rank's row
        params, offsets = zero.round_robin_bit16_groups[index], zero.round_robin_bit16_offsets[index]
        self.places: dict[int, Range] = {
            zero.get_param_id(param): (offset, offset + param.numel())
            for param, offset in zip(params, offsets, strict=True)
        }
        """Range of each parameter in the buffer, by DeepSpeed's number of the parameter."""

    @property
    def weights(self) -> Tensor:
        """[ranks * n], looked up for every use because DeepSpeed may move it; parameters are views of it."""
        return cast(Tensor, self._zero.bit16_groups_flat[self._index])

    @property
    def main(self) -> Tensor:
        """[n], the main weights of this rank."""
        return cast(Tensor, self._zero.single_partition_of_fp32_groups[self._index].detach())

    def sample_main(self, ranges: Sequence[Range]) -> Tensor:
        return torch.cat(take_ranges(self.main, ranges)).float()

    def clear_others(self, values: Tensor, numbers: Sequence[int]) -> None:
        """Set values [ranks * n] to zero outside of these parameters."""
        places = merge_ranges(sorted(self.places[number] for number in numbers))
        for start, end in other_ranges(places, values.numel()):
            values[start:end].zero_()


class FlatGroupState(Group):
    """Communication of one flat buffer, which is the replica."""

    view: FlatGroup
    _kept: Tensor | None = None  # this rank's row of the replica, while DeepSpeed overwrites it

    def attach_rows(self) -> None:
        replica = self.weights.replica
        if replica is not None:
            shape = self.layout.nodes, self.layout.ranks_per_node, self.view.shard_numel
            replica.rows = self.view.weights.view(shape)

    @torch.no_grad()
    def keep_row(self) -> None:
        """Keep this rank's row of the replica, which a step of DeepSpeed overwrites by the new weights."""
        self.put_back()  # if an exception has prevented that
        if self.weights.replica is not None:
            self._kept = self.view.weights[self.view.own].clone()

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the row that was kept, if any."""
        if self._kept is not None:
            self.view.weights[self.view.own].copy_(self._kept)
            self._kept = None

    def remarks(self) -> Remarks:
        return Remarks(place="in the flat buffer")


class ZeRO:
    """The engine of one ZeRO optimizer."""

    def __init__(self, handle: DeepSpeedCommHandle, zero: Any) -> None:
        self.zero, self._stock = zero, type(zero)
        self._handle, self._state = handle, handle._state
        self._groups = cast(Sequence[FlatGroupState], self._state.groups)
        self._is_reduced_here = any(group.gradients.reduction is not None for group in self._groups)
        self._is_sent = False  # the weights of a step, on all ranks

    def groups(self) -> Sequence[Group]:
        return self._groups

    def install(self, group: Group) -> Undo:
        """Replace the collectives of the optimizer, with its first group."""
        undo, zero = ExitStack(), self.zero
        if group is self._groups[0]:
            undo.callback(setattr, zero, "reduce_bucket_size", zero.reduce_bucket_size)
            methods: dict[str, Callable[..., Any]] = {"average_tensor": self.reduce_gradients}
            if self._is_reduced_here:
                # One bucket for all gradients. Backward produces them from the last row to the first, so
                # parts of all rows are there only at its end.
                zero.reduce_bucket_size = sum(each.view.weights.numel() for each in self._groups)
                methods["reduce_independent_p_g_buckets_and_remove_grads"] = self.place_gradient
            _replace(zero, undo, **methods)
        cast(FlatGroupState, group).attach_rows()
        group.weights.note_full_refresh()  # the first one: all ranks hold equal parameters
        return undo.close

    def on_step(self, call: Callable[[int], None]) -> Undo:
        undo = ExitStack()
        undo.callback(self._state.on_step(call))
        for method in (self.step, self.state_dict, self.load_state_dict):
            _replace(self.zero, undo, **{method.__name__: method})
        return undo.close

    def send_main_weights(self) -> None:
        """Set the parameters to the main weights of all ranks, as after a step of DeepSpeed."""
        if dist.is_initialized():
            self.zero.update_lp_params()

    def place_gradient(self, param: Any, index: int) -> None:
        """Let DeepSpeed copy a gradient to its place in the row, and not behind the previous gradient."""
        zero = self.zero
        start = sum(group.view.weights.numel() for group in self._groups[:index])
        place, _ = self._groups[index].view.places[zero.get_param_id(param)]
        zero.ipg_buckets[zero.communication_data_type].elements = start + place
        self._stock.reduce_independent_p_g_buckets_and_remove_grads(zero, param, index)

    @torch.no_grad()
    def reduce_gradients(self, tensor: Tensor, dtype: torch.dtype) -> None:
        """Reduce the gradients of a backward in this dtype, each group's in one row per rank."""
        zero, bucket, start = self.zero, self.zero.ipg_buckets[dtype], 0
        if not self._is_reduced_here:
            for index, _, number in bucket.params:
                group, (first, last) = self._groups[index], self._groups[index].view.places[number]
                group.gradients.count_plain(round((last - first) * dtype.itemsize / group.layout.size))
            self._stock.average_tensor(zero, tensor, dtype)
            return
        for index, group in enumerate(self._groups):
            rows, numbers = group.view, [number for i, _, number in bucket.params if i == index]
            end = start + rows.weights.numel()
            if numbers:
                place = bucket.buffer[bucket.index][start:end]
                rows.clear_others(place, numbers)  # because DeepSpeed does not initialize the bucket
                values = place.to(dtype)  # the same tensor, unless gradients are sent in another dtype
                own = values[rows.own]
                self._reduce(group, own, values)
                # Quantization adds noise to zeros, which must not reach the main weights.
                rows.clear_others(values, numbers)
                place[rows.own].copy_(own)
                if zero._use_compact_grad_partition_buffer(index):
                    zero._get_compact_grad_partition_buffer(index).flat_partition.add_(own)
            start = end

    def _reduce(self, group: FlatGroupState, own: Tensor, values: Tensor) -> None:
        def all_reduce() -> None:
            multiplier = 1 / group.layout.size if self.zero.gradient_average else 1.0
            with comm_error_context(f"full-precision reduction of {group.view.name}"):
                dist.all_reduce(values.mul_(multiplier), group=group.view.process_group)

        op = dist.ReduceOp.AVG if self.zero.gradient_average else dist.ReduceOp.SUM
        group.gradients.reduce(own, values, op, plain=all_reduce)

    def step(self, closure: None = None) -> None:
        """Take DeepSpeed's step, but send the differences between weights and their replicas."""
        namespace, self._is_sent = vars(sys.modules[self._stock.__module__]), False
        stock = namespace["all_gather_dp_groups"]
        namespace["all_gather_dp_groups"] = partial(self._gather, stock)
        try:
            for group in self._groups:
                group.keep_row()
            self._stock.step(self.zero, closure)
        finally:
            namespace["all_gather_dp_groups"] = stock
            # After an exception, or if fp16 has overflowed. The next step sends the changes of this one, too.
            for group in self._groups:
                group.put_back()
            # Other ranks may have seen no exception.
            if self._is_sent:
                self._state.end_step()

    @torch.no_grad()
    def _gather(self, stock: Callable[..., None], **arguments: Any) -> None:
        """Refresh the replicas."""
        for group in self._groups:
            group.put_back()
            group.weights.mark_changed()
        agree_on_refreshes([group.weights for group in self._groups])
        try:
            for index, group in enumerate(self._groups):
                row = group.view.weights[group.view.own]
                if group.weights.replica is None:
                    names = "groups_flat", "partitioned_param_groups", "dp_process_group"
                    own = arguments | {name: [arguments[name][index]] for name in names}
                    group.weights.gather_plain(row.nbytes, partial(stock, **own))
                    continue
                group.attach_rows()
                group.weights.traffic.count_plain(row.nbytes)
                group.weights.refresh(group.view.main)
            self._is_sent = True
        finally:
            replicas = [group.weights.replica for group in self._groups]
            call_all([replica.wait for replica in replicas if replica is not None])

    def state_dict(self) -> dict[str, Any]:
        """Return DeepSpeed's state of the optimizer with the communication state."""
        return {**self._stock.state_dict(self.zero), STATE_KEY: self._handle.state_dict()}

    def load_state_dict(self, state_dict_list: Any, *args: Any, **options: Any) -> None:
        """Load both states; a checkpoint without communication state leaves that unchanged."""
        self._stock.load_state_dict(self.zero, state_dict_list, *args, **options)
        # DeepSpeed reads only the entry of this rank, and passes None for a universal checkpoint.
        own = state_dict_list[self.zero.dp_process_group.rank()] if state_dict_list else {}
        if STATE_KEY in own:
            self._handle.load_state_dict(own[STATE_KEY])


def _replace(zero: Any, undo: ExitStack, **methods: Callable[..., Any]) -> None:
    for name, method in methods.items():
        setattr(zero, name, method)
        undo.callback(delattr, zero, name)


def attach(
    engine: Any, *, topology: TopologySpec, config: SDP4BitConfig | str | None, skip: object
) -> DeepSpeedCommHandle:
    """Quantize the communication of a DeepSpeed engine; see `sdp4bit.quantize_communication`."""
    settings, failure = SDP4BitConfig(), None
    flats: list[FlatGroup] = []
    try:
        settings = as_config(config)
        if skip is not None:
            raise ValueError(f"skip={skip!r} names FSDP modules, which DeepSpeed does not have")
        check_engine(engine)
        flats = [FlatGroup(engine.optimizer, index) for index in range(len(engine.optimizer.bit16_groups))]
        check_numbers(buckets=len(flats), ranks=max(len(each.ranks) for each in flats))
    except Exception as caught:  # raising here would leave the other ranks waiting
        failure, flats = caught, []
    rows = [
        ShardedRows(name=f.name, ranks=f.ranks, shard_numel=f.shard_numel, dtypes=(str(f.weights.dtype),))
        for f in flats
    ]
    layouts = agree(
        rows, settings={"engine": "DeepSpeed", "config": settings}, topology=topology, failure=failure
    )
    groups = [FlatGroupState(f, index=i, layout=layouts.shards[f.ranks]) for i, f in enumerate(flats)]
    for group in groups:
        group.gradients.plain_all_reduces = True
        group.weights.unquantized_reason = layout_reason(settings.weights, group.layout)
        group.gradients.unquantized_reason = layout_reason(settings.gradients, group.layout)
    note = one_node_note([(g.weights.unquantized_reason, g.gradients.unquantized_reason) for g in groups])
    quantized = [group.layout for group in groups if not group.gradients.unquantized_reason]
    for each in filter(None, (note, one_hop_note(quantized))):
        warn_user(each, groups[0].layout.ranks)
    if settings.weights is not None:  # every rank holds all weights
        settings = replace(settings, weights=replace(settings.weights, replica="full"))
    state = ModelState(groups, telemetry=settings.telemetry)
    handle = DeepSpeedCommHandle(state, config=settings, note=note, layouts=layouts)
    with handle._attaching() as undo:
        build(groups, layouts=layouts, config=settings, undo=undo)
        zero = ZeRO(handle, engine.optimizer)
        undo.callback(zero.send_main_weights)
        handle._install(zero, undo=undo, watched=groups)
    handle._log_attached()
    return handle


def check_engine(engine: Any) -> None:
    """Raise ValueError for an engine that is not supported."""
    zero, kind = engine.optimizer, type(engine.optimizer).__name__
    if kind != "DeepSpeedZeroOptimizer":
        raise ValueError(
            f"DeepSpeed's optimizer is {kind} (ZeRO stage {engine.zero_optimization_stage()}), but only the "
            "DeepSpeedZeroOptimizer of stages 1 and 2 is supported. Stage 3 keeps no copy of all weights, "
            "which differences need. For stage 1 in bf16, set "
            'data_types={"grad_accum_dtype": "bf16"}'
        )
    inner = type(zero.optimizer).__name__
    unsupported = {
        f"{inner}, which communicates itself": inner.startswith(("Onebit", "ZeroOne")),
        f"{inner}, which needs complete gradients of matrices": "Muon" in inner,
        "offload_optimizer, which updates weights on the host": zero.cpu_offload,
        "mixture-of-experts layers, whose groups have other ranks": zero.has_moe_layers,
        "pipeline parallelism, which reduces gradients elsewhere": engine.pipeline_parallelism,
        "tensor or sequence parallelism, whose copies would drift apart": zero.model_parallel_world_size > 1
        or zero.sequence_parallel_size > 1,
        "overlap_comm=true, because gradients are reduced at the end of backward": zero.overlap_comm,
        "contiguous_gradients=false, because a row is contiguous": not zero.contiguous_gradients,
        "deepcompile=true, which reduces gradients in compiled code": engine.is_deepcompile_enabled(),
        "torch_autocast, which sends gradients in several dtypes": len(zero.ipg_buckets) > 1,
        "an attached handle: call its remove() first": "step" in vars(zero),
    }
    found = [reason for reason, applies in unsupported.items() if applies]
    if found:
        raise ValueError(f"sdp4bit does not support DeepSpeed with {'; '.join(found)}")


class DeepSpeedCommHandle(CommHandle):
    """Quantized communication of a DeepSpeed engine, whose checkpoints include its state."""

    _engine: ZeRO

    def mark_step(self) -> None:
        """Send a change of the main weights that `engine.step()` did not make; call it on all ranks."""
        self.resync()

    def resync(self) -> None:
        self._check_attached()
        self._wait_for_ranks("resync")
        self._refresh_mismatched(self.groups, config=AuditConfig())

    def _refresh_mismatched(self, wrong: Sequence[Group], *, config: AuditConfig) -> Sequence[Group]:
        if wrong:
            self._engine.send_main_weights()
        for group in wrong:
            group.weights.raise_to(Due.FULL)
            group.weights.note_full_refresh()  # which the engine has sent
        return wrong

    def state_dict(self) -> StateDict:
        """Return the counters of the rounding bits, equal on all ranks; the parameters are the replica."""
        self._check_attached()
        return counters_of(self._state, version=FORMAT_VERSION)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a saved state; `engine.load_checkpoint` calls it.

        Raises:
            ValueError: the argument is no state of this library or not of this model; nothing is changed.
        """
        self._check_attached()
        with self._on_all_ranks("load_state_dict"):
            check_state(state_dict, owner=_OWNER, version=FORMAT_VERSION, keys=("steps",))
        load_counters(self._state, state_dict, owner=_OWNER, version=FORMAT_VERSION)
