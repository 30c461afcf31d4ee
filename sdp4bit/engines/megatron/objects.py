"""Protocols of the Megatron-Core objects that the integration uses; Megatron-Core is not imported.

`guards` checks that they have these attributes. Tested with Megatron-Core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from sdp4bit.collectives.work import JointWork


class Waitable(Protocol):
    """The handle of an asynchronous collective."""

    def wait(self) -> object:
        """Wait for it."""
        ...


class Bucket(Protocol):
    """A range of the buffers of a model chunk, whose parameters are gathered and reduced together."""

    param_data: Tensor
    """[ranks * n], the parameters; model parameters are views of it."""
    grad_data: Tensor
    """[ranks * n], the gradients."""
    params_list: Sequence[nn.Parameter]
    offset: int


class Buffer(Protocol):
    """Parameters and gradients of one type of a model chunk, as contiguous memory."""

    buckets: Sequence[Bucket]
    param_dtype: torch.dtype
    param_index_map: Mapping[nn.Parameter, tuple[int, int, int]]


class BucketGroup(Protocol):
    """Buckets whose collectives start together."""

    buckets: Sequence[Bucket]
    ddp_config: DDPConfig
    grad_reduce_handle: Waitable | JointWork | None
    intra_distributed_optimizer_instance_group: ProcessGroup
    param_gather_dispatched: bool
    param_gather_handle: Waitable | JointWork | None


class DDPConfig(Protocol):
    """Megatron's DistributedDataParallelConfig."""

    use_distributed_optimizer: bool
    overlap_grad_reduce: bool


class ModelConfig(Protocol):
    """Megatron's TransformerConfig."""

    sequence_parallel: bool


class Chunk(Protocol):
    """A model chunk in DistributedDataParallel."""

    config: ModelConfig
    ddp_config: DDPConfig
    bucket_groups: Sequence[BucketGroup]
    expert_parallel_bucket_groups: Sequence[BucketGroup]
    modules: Callable[[], Iterator[nn.Module]]
    parameters: Callable[[], Iterator[nn.Parameter]]
    named_parameters: Callable[[], Iterator[tuple[str, nn.Parameter]]]


class Optimizer(Protocol):
    """The distributed optimizer."""

    buffers: Sequence[Buffer]
    model_float16_groups: list[list[nn.Parameter]]
    shard_fp32_from_float16_groups: list[list[Tensor]]
    model_param_gbuf_map: Mapping[nn.Parameter, tuple[int, object, int]]
    _get_model_param_range_map: Callable[[nn.Parameter], Mapping[str, Range]]


class Range(Protocol):
    """A range of values, as the optimizer records it."""

    start: int
    end: int


def relied_on(kind: type) -> tuple[str, ...]:
    """Return the attributes that this library uses of Megatron-Core's objects of a kind."""
    return tuple(kind.__annotations__)
