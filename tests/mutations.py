"""Ways of breaking the communication. A test that claims to train like plain FSDP2 fails under each of them.

The oracles in `toy.py` pass their checks to `check_that_mutations_are_noticed`, which does nothing in a
usual run. `pytest --mutations` selects the tests marked `like_plain`, and breaks the communication of each
scenario in every way; `test_mutations.py` runs it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.gradients import Gradients, reduction_multiplier
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.engines.ddp.hook import DDPCommState
from sdp4bit.engines.fsdp2.hooks import ReduceScatterHook, ReplicateGroup
from sdp4bit.quantization import ops

Fired = list[str]
"""An entry for every call that was broken; whoever breaks communication checks that there is one."""


# -- gradients ----------------------------------------------------------------------------------------


def keep_own(reduced: Tensor, own: Tensor, group: Any) -> None:
    """No reduction: every rank keeps its own gradient."""
    reduced.copy_(own)


def take_first_rank(reduced: Tensor, own: Tensor, group: Any) -> None:
    """Every rank gets the result of the first one."""
    dist.broadcast(reduced, group=group, group_src=0)


def add_noise(reduced: Tensor, own: Tensor, group: Any) -> None:
    """Add noise of the gradient's size, the same on all ranks, so that replicas stay equal."""
    generator = torch.Generator().manual_seed(reduced.numel())
    noise = torch.randn(reduced.shape, generator=generator, dtype=torch.float32)
    reduced += noise * reduced.float().norm() / math.sqrt(max(1, reduced.numel()))


def scale(reduced: Tensor, own: Tensor, group: Any) -> None:
    """Multiply by 4, which AdamW hides."""
    reduced.mul_(4)


def roll(reduced: Tensor, own: Tensor, group: Any) -> None:
    """Shift all values by one place."""
    reduced.copy_(reduced.roll(1))


FIRST_ROW = "rank 0's row everywhere"
GRADIENTS: dict[str, Callable[[Tensor, Tensor, Any], None]] = {
    "the rank's own row only": keep_own,
    FIRST_ROW: take_first_rank,
    "+100 % noise": add_noise,
    "times 4": scale,
    "rolled by one value": roll,
}


def _gradient_seams(name: str, fired: Fired) -> Iterator[tuple[type, str, Callable[..., Any]]]:
    mutate = GRADIENTS[name]

    def apply(reduced: Tensor, own: Tensor, group: Any, *, is_shared: bool = False) -> None:
        if group.size() > 1 and reduced.numel():
            fired.append(name)
            if is_shared and mutate is take_first_rank:
                reduced.copy_(own)  # all ranks hold the same sum: the first one's addend instead
            mutate(reduced, own.to(reduced.dtype), group)

    def own_row(input: Tensor, op: object, group: Any) -> Tensor:
        """The mean or sum of a gradient that all ranks would share with this one."""
        multiplier = reduction_multiplier(op, ranks=group.size(), name="mutation") * group.size()
        return input.view(group.size(), -1)[group.rank()] * multiplier

    scatter, all_reduce, average = (
        ReduceScatterHook.__call__,
        ReplicateGroup.allreduce,
        DDPCommState.average,
    )

    def reduce_scatter(
        self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        own = own_row(input_tensor, op, group)
        result = scatter(self, output_tensor, input_tensor, group, op, async_op)
        apply(output_tensor, own, group)
        return result

    def reduce_replicas(self: Any, tensors: list[Tensor], opts: Any) -> None:
        (values,) = tensors
        group = self._stock
        own = values * reduction_multiplier(opts.reduceOp, ranks=group.size(), name="mutation") * group.size()
        all_reduce(self, tensors, opts)
        apply(values, own, group, is_shared=True)

    def reduce_bucket(self: Any, bucket: Any) -> Any:
        own = bucket.buffer().clone()
        future = average(self, bucket)
        apply(future.wait(), own, dist.group.WORLD, is_shared=True)
        return future

    yield ReduceScatterHook, "__call__", reduce_scatter
    yield ReplicateGroup, "allreduce", reduce_replicas
    yield DDPCommState, "average", reduce_bucket

    megatron = sys.modules.get("sdp4bit_megatron.patches")
    if megatron is None:
        return
    patch_of_group = megatron.GroupPatch
    find, reduce, reduce_in_steps = patch_of_group._of, Gradients.reduce, Gradients.reduce_in_steps
    groups: dict[Gradients, Any] = {}  # of Megatron's buckets, which are found before they are reduced

    def find_bucket(self: Any, *args: Any) -> Any:
        bucket = find(self, *args)
        groups[bucket.gradients] = bucket.view.process_group
        return bucket

    def reduce_buffer(self: Any, output: Tensor, input: Tensor, op: object, **options: Any) -> Any:
        if self not in groups or options:  # FSDP2's, or Megatron's own reduction
            return reduce(self, output, input, op, **options)
        own = own_row(input, op, groups[self])
        reduce(self, output, input, op)
        apply(output, own, groups[self])
        return None

    def reduce_buffer_in_steps(self: Any, output: Tensor, input: Tensor, op: object) -> Iterator[None]:
        own = own_row(input, op, groups[self])
        yield from reduce_in_steps(self, output, input, op)
        apply(output, own, groups[self])

    yield patch_of_group, "_of", find_bucket
    yield Gradients, "reduce", reduce_buffer
    yield Gradients, "reduce_in_steps", reduce_buffer_in_steps


# -- weights ------------------------------------------------------------------------------------------

PREVIOUS, FIRST_RANK, TWICE = (
    "the replica of the previous step",
    "rank 0's main weights",
    "a message that is applied twice",
)
WEIGHTS = (PREVIOUS, FIRST_RANK, TWICE)


def _weight_seams(name: str, fired: Fired) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    start, apply = WeightReplica.start_quantized_refresh, ops.dequantize_add
    refreshed: list[WeightReplica] = []

    def start_unless_first(self: WeightReplica, row: Tensor, **options: Any) -> None:
        if any(each is self for each in refreshed):
            start(self, row, **options)
        else:
            refreshed.append(self)
            fired.append(name)

    def start_with_first_rank(self: WeightReplica, row: Tensor, **options: Any) -> None:
        row = row.clone()
        for group in (self._topology.intra, self._topology.inter):
            if group is not None:
                fired.append(name)
                dist.broadcast(row, group=group, group_src=0)
        start(self, row, **options)

    @wraps(apply)  # with the name and the arguments by which it is recorded
    def apply_twice(messages: Tensor, *, accumulate: bool, **options: Any) -> None:
        apply(messages, accumulate=accumulate, **options)
        if accumulate:
            fired.append(name)
            apply(messages, accumulate=accumulate, **options)

    if name == TWICE:
        yield ops, "dequantize_add", apply_twice
    else:
        wrapped = start_unless_first if name == PREVIOUS else start_with_first_rank
        yield WeightReplica, "start_quantized_refresh", wrapped


# -- the search ---------------------------------------------------------------------------------------

ALL = (*GRADIENTS, *WEIGHTS)
_searches = False


def search() -> None:
    """Let every oracle of this process look for mutations that it does not notice."""
    global _searches
    _searches = True


@contextmanager
def broken(name: str) -> Iterator[Fired]:
    """Break the communication inside the block in one of the ways of `ALL`."""
    fired: Fired = []
    seams = _gradient_seams if name in GRADIENTS else _weight_seams
    with ExitStack() as stack:
        for owner, method, replacement in list(seams(name, fired)):
            stack.enter_context(patch.object(owner, method, replacement))
        yield fired


def check_that_mutations_are_noticed(
    claim: str, *checks: Callable[[], object], harmless: Sequence[str] = ()
) -> None:
    """Run the checks of a claim with broken communication, on all ranks: for each mutation one must fail.

    Does nothing unless `search` has been called.

    Args:
        claim: its name, for the error.
        checks: each trains again and raises an AssertionError if the result is not as it must be.
        harmless: mutations that change nothing in this claim; that none of them is noticed is checked, too.
    """
    if not _searches:
        return
    survivors = []
    for name in ALL:
        is_noticed = False
        for check in checks:
            seen: list[Any] = [None] * dist.get_world_size()
            with groups_released():
                dist.all_gather_object(seen, attempt(name, check))
            is_noticed = any(seen)
            if is_noticed:
                break
        if is_noticed == (name in harmless):
            survivors.append(f"{name} (listed as harmless)" if is_noticed else name)
    if survivors:
        raise AssertionError(f"{claim} does not notice: {', '.join(survivors)}")


@contextmanager
def groups_released() -> Iterator[None]:
    """Destroy the process groups that are created inside the block, which have threads of their own."""
    groups: list[Any] = []
    create = dist.new_group

    def create_and_note(*args: Any, **options: Any) -> Any:
        groups.append(create(*args, **options))
        return groups[-1]

    with patch.object(dist, "new_group", create_and_note):
        yield
    for group in groups:
        with suppress(ValueError):  # the check has destroyed it
            dist.destroy_process_group(group)


def attempt(name: str, check: Callable[[], object]) -> bool:
    """Return whether a check of a claim fails with a mutation, and not for another reason."""
    with broken(name) as fired:
        try:
            check()
        except AssertionError:
            return bool(fired)
    return False
