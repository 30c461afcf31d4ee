"""Replacements for methods of individual bucket groups and optimizers of Megatron-Core.

The stock methods still run for their scaling, checks, hooks and order. Only their collective for a quantized
bucket is skipped, and the quantized one runs when they return.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from sdp4bit.collectives.errors import call_all
from sdp4bit.collectives.streams import SideStream
from sdp4bit.collectives.weights import agree_on_refreshes
from sdp4bit.engines.handle import StateDict
from sdp4bit_megatron.communication import BucketState, MegatronModelState
from sdp4bit_megatron.guards import GROUP_METHODS, MARK, OPTIMIZER_METHODS
from sdp4bit_megatron.objects import BucketGroup, Optimizer, Waitable
from sdp4bit_megatron.staged import JointWork, StagedCollectives

STATE_KEY = "sdp4bit"  # key of the communication state in the optimizer's entry of Megatron's checkpoints

_ABSENT = object()
Method = Callable[..., Any]  # a method or function of Megatron-Core, which is untyped


class Patch:
    """Replaces methods on one object, not on its class, until remove()."""

    def __init__(self, target: object, methods: Mapping[str, Method]) -> None:
        self._target = target
        self._methods = methods
        self._stock: dict[str, Method] = {name: getattr(target, name) for name in methods}
        self._previous: dict[str, object] = {}

    def install(self, handle: object) -> None:
        """Replace the methods and mark the object as attached to the handle."""
        self._previous = {name: vars(self._target).get(name, _ABSENT) for name in (MARK, *self._methods)}
        vars(self._target).update({MARK: handle, **self._methods})

    def remove(self) -> None:
        for name, previous in self._previous.items():
            if previous is _ABSENT:
                vars(self._target).pop(name, None)
            else:
                vars(self._target)[name] = previous


@contextmanager
def _collective(target: object, method: str, stand_in: Method) -> Iterator[Method]:
    """Replace the collective of the method's module inside the block; yield the stock function."""
    namespace = inspect.unwrap(getattr(type(target), method)).__globals__
    name = GROUP_METHODS[method][1]
    stock = namespace[name]
    namespace[name] = stand_in
    try:
        yield stock
    finally:
        namespace[name] = stock


class GroupPatch(Patch):
    """Replaces the collectives of one bucket group."""

    def __init__(
        self,
        group: BucketGroup,
        groups: Sequence[BucketState],
        *,
        state: MegatronModelState,
        weight_stream: SideStream,
        gradient_stream: SideStream,
        staged: StagedCollectives | None,
    ) -> None:
        """Create a patch; `install` applies it.

        Args:
            staged: runs the reductions that Megatron overlaps; None runs them on the gradient stream.
        """
        super().__init__(group, {name: getattr(self, name) for name in GROUP_METHODS})
        self.group = group
        self.buckets = groups
        self._state = state
        self._weight_stream = weight_stream
        self._gradient_stream = gradient_stream
        self._staged = staged

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduce gradients of quantized buckets to this rank's row in two levels."""
        wanted: list[tuple[BucketState, Tensor, Tensor, object]] = []

        def reduce_scatter(
            output: Tensor, input: Tensor, op: object, group: object, async_op: bool = False
        ) -> Any:
            bucket = self._of(input, "reduces gradients in")
            if bucket.gradients.is_quantized(output.numel()):
                wanted.append((bucket, output, input, op))
                return None
            plain = partial(stock, output, input, op=op, group=group, async_op=async_op)
            return bucket.gradients.reduce(output, input, op, plain=plain)

        with _collective(self.group, "start_grad_sync", reduce_scatter) as stock:
            self._stock["start_grad_sync"](force_all_reduce=force_all_reduce)
        if wanted and self._staged is not None and self.group.grad_reduce_handle is not None:
            works = [
                self._staged.start(bucket.gradients.reduce_in_steps(output, input, op))
                for bucket, output, input, op in wanted
            ]
            self.group.grad_reduce_handle = JointWork(self.group.grad_reduce_handle, *works)
        elif wanted:
            reductions = [
                partial(bucket.gradients.reduce, output, input, op) for bucket, output, input, op in wanted
            ]
            work = self._gradient_stream.run(partial(call_all, reductions))
            self.group.grad_reduce_handle = _after(self.group.grad_reduce_handle, work)

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Refresh parameters of quantized buckets if their main weights have changed.

        Otherwise send nothing, so that forced syncs before evaluation or a checkpoint do not change the run.
        """
        wanted: list[BucketState] = []

        def all_gather(output: Tensor, input: Tensor, group: object, async_op: bool = False) -> Any:
            bucket = self._of(output, "gathers parameters into")
            if bucket.weights.replica is not None:
                if not bucket.weights.is_current:
                    wanted.append(bucket)
                return None
            return bucket.weights.gather_plain(
                input.nbytes, partial(stock, output, input, group=group, async_op=async_op)
            )

        with _collective(self.group, "start_param_sync", all_gather) as stock:
            self._stock["start_param_sync"](force_sync=force_sync)
        if wanted:
            work = self._weight_stream.run(partial(call_all, [bucket.refresh for bucket in wanted]))
            self.group.param_gather_handle = _after(self.group.param_gather_handle, work)

    def finish_pending(self) -> None:
        if self.group.param_gather_handle is not None:
            self.group.param_gather_handle.wait()
            self.group.param_gather_handle = None

    def _of(self, tensor: Tensor, what: str) -> BucketState:
        """Return the bucket of a buffer.

        Raises:
            RuntimeError: there is none. The stock collective would then send outdated parameters.
        """
        for bucket in self.buckets:
            if tensor is bucket.view.weights or tensor is bucket.view.gradients:
                return bucket
        names = ", ".join(bucket.view.name for bucket in self.buckets)
        raise RuntimeError(
            f"sdp4bit: Megatron-Core {what} a buffer ({tensor.dtype} {list(tensor.shape)}) that belongs to "
            f"no bucket of this bucket group ({names}). Call "
            "remove() before buffers are replaced, and attach again afterwards"
        )


def _after(stock: Waitable | JointWork | None, work: Waitable) -> JointWork | None:
    """Return a handle for both works; without a stock handle Megatron does not wait, so wait here."""
    if stock is None:
        work.wait()
        return None
    return JointWork(stock, work)


class OptimizerPatch(Patch):
    """Replaces one distributed optimizer's copy of main weights into model weights."""

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[BucketState],
        *,
        state: MegatronModelState | None,
        save: Callable[[], StateDict],
        load: Callable[[StateDict], None],
    ) -> None:
        """Create a patch; `install` applies it.

        Args:
            groups: the buckets that the optimizer updates.
            state: counts its steps; None if another optimizer's steps are counted.
            save, load: access the communication state, for the optimizer's state dict.
        """
        super().__init__(
            optimizer, {name: getattr(self, name.removeprefix("_")) for name in OPTIMIZER_METHODS}
        )
        self._optimizer = optimizer
        self._buckets = groups
        self._state = state
        self._save = save
        self._load = load
        self.steps = 0  # updates of the main weights by this optimizer
        quantized = {
            id(param) for group in groups if group.weights.replica for param in group.view.parameters
        }
        pairs = zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
        self._copied: list[tuple[list[nn.Parameter], list[Tensor]]] = []
        """The parameters that are still copied and their main weights, by group."""
        for params, mains in pairs:
            kept = [pair for pair in zip(params, mains, strict=True) if id(pair[0]) not in quantized]
            self._copied.append(([param for param, _ in kept], [main for _, main in kept]))

    def copy_main_params_to_model_params(self) -> None:
        """Copy only unquantized parameters, because the old values of the others are the replica.

        Megatron calls this after every step that was not skipped.
        """
        optimizer = self._optimizer
        groups = optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups
        optimizer.model_float16_groups = [params for params, _ in self._copied]
        optimizer.shard_fp32_from_float16_groups = [mains for _, mains in self._copied]
        try:
            self._stock["_copy_main_params_to_model_params"]()
        finally:
            optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups = groups
        self.mark_changed()
        self.steps += 1
        if self._state is not None:
            self._state.count(self.steps)

    def mark_changed(self) -> None:
        """Record the end of a step, so that the next parameter sync sends the differences of all buckets.

        Collective over the data-parallel ranks.
        """
        agree_on_refreshes([group.weights for group in self._buckets])
        for group in self._buckets:
            for counter in group.counters:
                counter.end_step()
            group.weights.mark_changed()

    def state_dict(self) -> StateDict:
        """Return the optimizer's state with the communication state in the entry that every format saves."""
        state: StateDict = self._stock["state_dict"]()
        state["optimizer"][STATE_KEY] = self._save()
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load both states; a checkpoint without communication state leaves that unchanged."""
        saved = state_dict["optimizer"].get(STATE_KEY)
        self._stock["load_state_dict"](state_dict)
        if saved is not None:
            self._load(saved)
