"""Tensor parallelism: split parameters and the collectives around their use.

`parallelize_module` splits parameters, which stay DTensors so that FSDP2 and checkpoints know their
placement. Arithmetic uses local tensors. Parameters that are equal on all tensor-parallel ranks are never
quantized together with split ones: they would share scales with neighbors that differ between ranks, and
drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

IGNORED_TARGET = -100
"""Targets with this value have no loss, as in torch's cross entropy."""


class SplitLayer(ParallelStyle):
    """Split parameters of a layer over the ranks, along the given dimension of each.

    With split rows of the weight, the input is complete and the output is split. With split columns, or for
    an embedding, partial outputs are summed; each rank adds its part of the bias to its partial sum.
    """

    def __init__(self, *, sums_output: bool, **dims: int) -> None:
        self._sums_output = sums_output
        self._dims = dims

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _split(module, device_mesh, {name: Shard(dim) for name, dim in self._dims.items()})
        group = device_mesh.get_group()
        if self._sums_output:
            module.register_forward_hook(lambda _, __, output: leave(output, group))
        else:
            module.register_forward_pre_hook(lambda _, inputs: (enter(inputs[0], group),))
        return module


def _split(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement]) -> None:
    for name, placement in placements.items():
        whole = module.get_parameter(name)
        # Every rank has the full parameter on meta, so nothing is sent.
        part = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))


def local_part(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def first_row(parameter: Tensor) -> int:
    """Return the index of this rank's first row of a parameter with evenly split rows."""
    if not isinstance(parameter, DTensor):
        return 0
    return int(parameter.device_mesh.get_local_rank()) * int(parameter.to_local().shape[0])


def padded_bias(bias: Tensor, *, width: int) -> Tensor:
    """Return this rank's part of a bias, zero-padded to its position; the bias itself if it is complete."""
    part, start = local_part(bias), first_row(bias)
    if part.shape[0] == width:
        return part
    return F.pad(part, (start, width - start - part.shape[0]))


class _Context(Protocol):
    """State that autograd keeps from forward to backward."""

    group: dist.ProcessGroup
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Enter(torch.autograd.Function):
    """The input is complete on all ranks; each rank has a partial gradient."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None


class _Leave(torch.autograd.Function):
    """The output is the sum of the ranks' partial results; each rank gets the full gradient."""

    @staticmethod
    def forward(_: object, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(_: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x, which is equal on all ranks; backward sums the ranks' gradients."""
    result: Tensor = _Enter.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def leave(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks; backward passes its gradient to all of them."""
    result: Tensor = _Leave.apply(x, group)  # type: ignore[no-untyped-call]
    return result


class _SplitCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of logits that are split over the vocabulary."""

    @staticmethod
    def forward(
        ctx: _Context, logits: Tensor, targets: Tensor, start: int, group: dist.ProcessGroup
    ) -> Tensor:
        largest = logits.max(dim=-1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest[:, None]
        here = (targets >= start) & (targets < start + logits.shape[1])
        column = torch.where(here, targets - start, 0)[:, None]
        of_target = torch.where(here, logits.gather(1, column)[:, 0], 0.0)
        exponentials = logits.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), of_target])
        dist.all_reduce(sums, group=group)
        probabilities = exponentials.div_(sums[0][:, None])
        counted = targets != IGNORED_TARGET
        ctx.save_for_backward(probabilities, column, here, counted)
        return torch.where(counted, sums[0].log() - sums[1], 0.0).sum()

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, column, here, counted = ctx.saved_tensors
        result = probabilities.scatter_add(1, column, -here.to(probabilities.dtype)[:, None])
        return result * (counted * gradients[0])[:, None], None, None, None


def summed_cross_entropy(
    logits: Tensor, targets: Tensor, *, start: int = 0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the fp32 sum of the cross entropies of all targets other than -100.

    Args:
        logits: [n, vocabulary], or with a group this rank's columns, starting at column `start`.
        targets: [n], int64.
        group: ranks that hold the other columns; all return the same.
    """
    if group is None:
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED_TARGET, reduction="sum")
    result: Tensor = _SplitCrossEntropy.apply(logits.float(), targets, start, group)  # type: ignore[no-untyped-call]
    return result


@contextmanager
def random_numbers_of_rank(tensor_rank: int, *, device: torch.device) -> Iterator[None]:
    """Draw different numbers on each tensor-parallel rank inside the block, and equal ones outside.

    The seed comes from the CPU generator, so recomputation and resumed runs repeat the numbers.
    """
    seed = int(torch.randint(1 << 62, (), dtype=torch.int64))
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed + tensor_rank)
        yield


def parameter_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that a gathered parameter is split over, if any."""
    return parameter.device_mesh.get_group() if isinstance(parameter, DTensor) else None


_COLUMN_PARALLEL = SplitLayer(sums_output=False, weight=0, bias=0)
_ROW_PARALLEL = SplitLayer(sums_output=True, weight=1, bias=0)
EMBEDDING_STYLE = SplitLayer(sums_output=True, weight=0)
BLOCK_STYLES: dict[str, ParallelStyle] = {
    "attention.query_key_value": _COLUMN_PARALLEL,
    "attention.projection": _ROW_PARALLEL,
    "feed_forward.expand": _COLUMN_PARALLEL,
    "feed_forward.projection": _ROW_PARALLEL,
}
