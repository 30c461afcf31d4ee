"""SDP4Bit on Megatron-Core: one call after DDP and the distributed optimizer are created.

Megatron-Core has no hooks for its data-parallel collectives. So methods are replaced on individual bucket
groups and optimizers, while its classes and modules are unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from sdp4bit.collectives.streams import has_one_queue
from sdp4bit.collectives.topology import Nodes, TopologySpec
from sdp4bit.config import SDP4BitConfig, as_config
from sdp4bit.engines.agreement import ShardedRows, agree
from sdp4bit.quantization.random import check_numbers
from sdp4bit.warn import warn_user
from sdp4bit_megatron.buckets import (
    REPLICATED_DTYPES,
    MegatronBucket,
    find_buckets,
    tensor_parallel_group,
)
from sdp4bit_megatron.guards import MARK, check_chunks, distributed_optimizers
from sdp4bit_megatron.handle import MegatronCommHandle
from sdp4bit_megatron.objects import Chunk, Optimizer


def quantize_communication(
    model_chunks: Sequence[Chunk],
    optimizer: Any,
    config: SDP4BitConfig | str | None = None,
    *,
    topology: TopologySpec = "auto",
) -> MegatronCommHandle:
    """Quantize the data-parallel communication of Megatron-Core from the next step on.

    Call it on every rank after `get_megatron_optimizer` and before the first forward, before or after a
    checkpoint is loaded. Repeating the call returns the same handle.

    Args:
        model_chunks: all DistributedDataParallel chunks of this rank that the optimizer updates; [] on ranks
            without a part of the model.
        optimizer: the result of `get_megatron_optimizer` for them; None without chunks.
        config: settings or the name of a preset; None uses the default. Every rank holds the replica, which
            is Megatron's parameter buffer, so `weights.replica` only decides whether weights are quantized
            inside one node, as on FSDP2.
        topology: the ranks of each node: "auto" (by host name), ranks of the job per node, or an
            (inter, intra) mesh of the data-parallel group. A tuple of one of the first two and the nodes per
            block, such as (8, 32), reduces gradients in three levels.

    Raises:
        ValueError: the model, the optimizer, their versions or the settings are not supported, or settings
            differ between ranks. All ranks raise the same error, and nothing has been changed.
        TypeError: an argument has an unsupported type; the same on every rank.
        RuntimeError: torch.distributed is not initialized.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "sdp4bit_megatron.quantize_communication needs torch.distributed: call init_process_group first"
        )
    settings = SDP4BitConfig()
    chunks: list[Chunk] = []
    optimizers: list[Optimizer] = []
    buckets: list[MegatronBucket] = []
    existing: MegatronCommHandle | None = None
    failure = None
    try:
        settings = as_config(config)
        chunks = list(model_chunks) if isinstance(model_chunks, list | tuple) else [cast(Chunk, model_chunks)]
        if chunks or optimizer is not None:
            check_chunks(chunks)
            optimizers = distributed_optimizers(optimizer)
        buckets = find_buckets(chunks, optimizers)
        existing = _existing_handle(buckets, optimizers, settings, topology)
        for bucket in buckets:
            _check_bucket(bucket)
        # One more, because tied embeddings have a number of their own.
        check_numbers(buckets=len(buckets) + 1, ranks=max((len(b.ranks) for b in buckets), default=0))
    except Exception as caught:  # raising here would leave the other ranks waiting
        failure, buckets = caught, []
    rows = [
        ShardedRows(
            name=b.name,
            ranks=b.ranks,
            shard_numel=b.shard_numel,
            dtypes=(str(b.param_dtype), str(b.gradients.dtype)),
        )
        for b in buckets
    ]
    layouts = agree(
        rows,
        settings={"config": settings, "model_chunks": "attached already" if existing else "not attached yet"},
        topology=topology,
        failure=failure,
    )
    if existing is not None:
        return existing
    _warn(chunks, buckets, layouts.shards)
    return MegatronCommHandle(
        chunks, optimizers=optimizers, buckets=buckets, layouts=layouts, config=settings, topology=topology
    )


def _existing_handle(
    buckets: Sequence[MegatronBucket],
    optimizers: Sequence[Optimizer],
    config: SDP4BitConfig,
    topology: object,
) -> MegatronCommHandle | None:
    """Return the handle that all of these are attached to; None if none is attached."""
    targets = [*(bucket.bucket_group for bucket in buckets), *optimizers]
    handles = [vars(target).get(MARK) for target in targets]
    marked = {id(handle): handle for handle in handles if handle is not None}
    if not marked:
        return None
    (handle, *others) = marked.values()
    if others or any(h is None and _is_attachable(t) for h, t in zip(handles, targets, strict=True)):
        raise ValueError("some of these model chunks are attached already: call remove() on their handle")
    assert isinstance(handle, MegatronCommHandle)
    if (handle.config, repr(handle.topology)) != (config, repr(topology)):
        raise ValueError(
            f"attached already with {handle.config!r}, topology={handle.topology!r}: call remove() on that "
            "handle before attaching with other settings"
        )
    return handle


def _is_attachable(target: object) -> bool:
    group = getattr(target, "intra_distributed_optimizer_instance_group", None)
    return group is not None and bool(group.size() > 1)


def _check_bucket(bucket: MegatronBucket) -> None:
    if bucket.param_dtype not in (*REPLICATED_DTYPES, torch.float32):
        raise ValueError(
            f"{bucket.name} holds {bucket.param_dtype} parameters, but only bf16 and fp16 can be quantized: "
            "train in bf16 or fp16 (params_dtype) without fp8 or fp4 parameters"
        )


def _warn(
    chunks: Sequence[Chunk], buckets: Sequence[MegatronBucket], layouts: dict[tuple[int, ...], Nodes]
) -> None:
    ranks = [rank for layout in layouts.values() for rank in layout.ranks]
    one_queue = any(has_one_queue(bucket.device) for bucket in buckets)
    if one_queue and tensor_parallel_group(chunks[0]) is None:
        warn_user(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 serializes all streams of a GPU, so transfers delay "
            "computation. Megatron-Core needs it for tensor parallelism, which this model does not use. "
            "Unset it before CUDA is initialized, unless you need it for context parallelism",
            ranks,
        )
    if all(layout.size == 1 for layout in layouts.values()):
        warn_user("the data-parallel groups have one rank each, so nothing is sent or quantized", ranks)
    if any(bucket.gradients.dtype == torch.float16 for bucket in buckets):
        warn_user(
            "gradients are reduced in fp16 and may overflow before they are quantized; set "
            "grad_reduce_in_fp32=True",
            ranks,
        )
