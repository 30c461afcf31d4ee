"""DeepSpeed's ZeRO-1 and ZeRO-2 as an engine.

DeepSpeed keeps each parameter group in a flat buffer, in which rank r updates row r, and has no hooks for its
collectives. So methods of one optimizer object are replaced, while its classes are unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.collectives.group import Group, Remarks
from sdp4bit.collectives.sections import Range, merge_ranges, other_ranges, take_ranges
from sdp4bit.engines.protocol import Undo
from sdp4bit.observe.measures import sample_gradient
from sdp4bit.observe.stats import ModelState

STATE_KEY = "sdp4bit"  # key of the communication state in the optimizer's part of DeepSpeed's checkpoints


class FlatGroup:
    """The flat buffer of one parameter group; the `Rows` of its group."""

    value_ranges = None  # all values are numbers

    def __init__(self, zero: Any, index: int, *, start: int) -> None:
        self._zero, self._index, self.name = zero, index, f"param_groups[{index}]"
        self.process_group = zero.real_dp_process_group[index]
        self.ranks = tuple(dist.get_process_group_ranks(self.process_group))
        self.device, self.shard_numel = self.weights.device, self.main.numel()
        self.start, self.numel = start, self.weights.numel()  # place in the bucket of all gradients
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
        """[ranks * n]; model parameters are views of it."""
        return self._zero.bit16_groups_flat[self._index]  # type: ignore[no-any-return]

    @property
    def main(self) -> Tensor:
        """[n], the main weights of this rank."""
        return self._zero.single_partition_of_fp32_groups[self._index].detach()  # type: ignore[no-any-return]

    def sample_main(self, ranges: Sequence[Range]) -> Tensor:
        return torch.cat(take_ranges(self.main, ranges)).float()

    def clear_others(self, values: Tensor, numbers: Sequence[int]) -> None:
        """Set values [ranks * n] to zero outside of these parameters."""
        for start, end in other_ranges(merge_ranges(sorted(self.places[n] for n in numbers)), self.numel):
            values[start:end].zero_()


class FlatGroupState(Group):
    """Communication of one flat buffer, which is the replica."""

    group: FlatGroup

    def attach_rows(self) -> None:
        """Look at the buffer again, for every use, because DeepSpeed may move it."""
        if self.replica is not None:
            shape = self.layout.nodes, self.layout.ranks_per_node, self.group.shard_numel
            self.replica.rows = self.group.weights.view(shape)

    def remarks(self) -> Remarks:
        return Remarks(place="in the flat buffer")


class ZeRO:
    """The engine of one ZeRO optimizer."""

    def __init__(
        self,
        zero: Any,
        state: ModelState,
        *,
        save: Callable[[], dict[str, Any]],
        load: Callable[[dict[str, Any]], None],
    ) -> None:
        self.zero, self._stock = zero, type(zero)
        self._state = state
        self._groups: Sequence[FlatGroupState] = state.groups  # type: ignore[assignment]
        self._save, self._load = save, load

    def groups(self) -> Sequence[FlatGroupState]:
        return self._groups

    def install(self, group: Group) -> Undo:
        """Replace the collectives of the optimizer, with its first group."""
        if group is not self._groups[0]:
            return lambda: None
        undo, zero = ExitStack(), self.zero
        if any(each.reduction is not None for each in self._groups):
            # All gradients go into one bucket. Backward produces the rows from the last to the first, so that
            # parts of all rows are complete only at its end.
            undo.callback(setattr, zero, "reduce_bucket_size", zero.reduce_bucket_size)
            zero.reduce_bucket_size = sum(each.view.numel for each in self._groups)
            _replace(zero, "reduce_independent_p_g_buckets_and_remove_grads", self.place_gradient, undo=undo)
            _replace(zero, "average_tensor", self.reduce_gradients, undo=undo)
        for each in self._groups:
            each.attach_rows()
        return undo.close

    def on_step(self, call: Callable[[int], None]) -> Undo:
        undo = ExitStack()
        undo.callback(self._state.on_step(call))
        for method in (self.step, self.state_dict, self.load_state_dict):
            _replace(self.zero, method.__name__, method, undo=undo)
        return undo.close

    def place_gradient(self, param: Any, index: int) -> None:
        """Let DeepSpeed copy a gradient to its place in the row, and not behind the previous gradient."""
        zero, group = self.zero, self._groups[index].group
        bucket = zero.ipg_buckets[zero.communication_data_type]
        bucket.elements = group.start + group.places[zero.get_param_id(param)][0]
        self._stock.reduce_independent_p_g_buckets_and_remove_grads(zero, param, index)

    @torch.no_grad()
    def reduce_gradients(self, _: Tensor, dtype: torch.dtype) -> None:
        """Reduce the gradients of a backward in this dtype, each group's in one row per rank."""
        zero, bucket = self.zero, self.zero.ipg_buckets[dtype]
        for index, group in enumerate(self._groups):
            rows, numbers = group.view, [number for i, _, number in bucket.params if i == index]
            if not numbers:
                continue
            place = bucket.buffer[bucket.index].narrow(0, rows.start, rows.numel)
            rows.clear_others(place, numbers)  # because DeepSpeed does not initialize the bucket
            values = place.to(dtype)  # the same tensor, unless gradients are sent in another dtype
            own = values[rows.own]
            self._reduce(group, own, values)
            # Quantization adds noise to zeros, which must not reach the main weights.
            rows.clear_others(values, numbers)
            place[rows.own].copy_(own)
            if zero._use_compact_grad_partition_buffer(index):
                zero._get_compact_grad_partition_buffer(index).flat_partition.add_(own)

    def _reduce(self, group: FlatGroupState, own: Tensor, values: Tensor) -> None:
        multiplier = 1 / group.layout.size if self.zero.gradient_average else 1.0
        traffic, config, reduction = group.gradient_traffic, group.gradient_config, group.reduction
        if (
            config
            and reduction
            and own.numel() >= config.min_numel
            and self._state.steps >= config.start_step
        ):
            nonfinite = sample_gradient(group, values, sample_numel=self._state.gradient_sample_numel)
            reduction(own, values, call=group.reductions, multiplier=multiplier, nonfinite=nonfinite)
            group.reductions += 1
            group.gradient_bits = reduction.bits
        else:
            group.gradient_bits = None
            values.mul_(multiplier)
            with comm_error_context(f"full-precision reduction of {group.view.name}"):
                dist.all_reduce(values, group=group.view.process_group)
            group.count_dense(traffic, own.nbytes)
            traffic.count_ring(own.nbytes)
        traffic.count_plain(own.nbytes)  # once more, because DeepSpeed all-reduces

    def step(self, closure: None = None) -> None:
        """Take DeepSpeed's step, but send the differences between weights and their replicas."""
        groups = [group for group in self._groups if group.replica is not None]
        # DeepSpeed writes the new weights over this rank's row of the replica.
        kept = [group.view.weights[group.view.own].clone() for group in groups]
        namespace, is_taken = vars(sys.modules[self._stock.__module__]), False
        stock = namespace["all_gather_dp_groups"]

        def gather(**arguments: Any) -> None:
            nonlocal is_taken
            is_taken = True  # with an overflow of fp16, DeepSpeed skips the step
            for group, row in zip(groups, kept, strict=True):
                group.view.weights[group.view.own].copy_(row)
            self._gather(stock, arguments)

        namespace["all_gather_dp_groups"] = gather
        try:
            self._stock.step(self.zero, closure)
        finally:
            namespace["all_gather_dp_groups"] = stock
        if is_taken:
            self._state.end_step()

    @torch.no_grad()
    def _gather(self, stock: Callable[..., None], arguments: dict[str, Any]) -> None:
        for group in self._groups:
            nbytes = group.view.shard_numel * group.view.weights.element_size()
            if group.replica is None:
                names = "groups_flat", "partitioned_param_groups", "dp_process_group"
                stock(**arguments | {name: [arguments[name][group.index]] for name in names})
                group.count_dense(group.weight_traffic, nbytes)
                continue
            group.attach_rows()
            group.weight_traffic.count_plain(nbytes)
            group.replica.start_quantized_refresh(group.view.main)
            group.refreshes += 1
        for group in self._groups:
            if group.replica is not None:
                group.replica.wait()
                # DeepSpeed does not save the padding, which would differ after a resume.
                group.view.clear_others(group.view.weights, [*group.view.places])

    def send_main_weights(self) -> None:
        """Set the parameters to the main weights of all ranks, as after a step of DeepSpeed."""
        self.zero.update_lp_params()

    def state_dict(self) -> dict[str, Any]:
        """Return DeepSpeed's state of the optimizer with the communication state."""
        return {**self._stock.state_dict(self.zero), STATE_KEY: self._save()}

    def load_state_dict(self, state_dict_list: Sequence[dict[str, Any]], *args: Any, **options: Any) -> None:
        """Load both states; a checkpoint without communication state leaves that unchanged."""
        self._stock.load_state_dict(self.zero, state_dict_list, *args, **options)
        if state_dict_list and STATE_KEY in state_dict_list[0]:
            self._load(state_dict_list[0][STATE_KEY])


def _replace(zero: Any, name: str, method: Callable[..., Any], *, undo: ExitStack) -> None:
    setattr(zero, name, method)
    undo.callback(delattr, zero, name)
