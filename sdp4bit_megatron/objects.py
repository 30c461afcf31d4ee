"""Protocols of the Megatron-Core objects that the integration uses; `guards` checks these attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from sdp4bit_megatron.staged import JointWork


class Waitable(Protocol):
    """The handle of an asynchronous collective."""

    def wait(self) -> object:
        """Wait for the collective."""


class Bucket(Protocol):
    """A range of a model chunk's buffers whose parameters are gathered and reduced together."""

    param_data: Tensor  # [ranks * n]; model parameters are views of it
    grad_data: Tensor  # [ranks * n]
    params_list: Sequence[nn.Parameter]
    offset: int


class Buffer(Protocol):
    """Contiguous memory for parameters and gradients of one dtype of a model chunk."""

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
    """The optimizer's range of values."""

    start: int
    end: int


def relied_on(kind: type) -> tuple[str, ...]:
    """Return the attributes of a Megatron-Core class that this library uses."""
    return tuple(kind.__annotations__)
