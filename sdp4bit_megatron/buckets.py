"""Read-only views of Megatron-Core's buckets and its distributed optimizer.

A bucket is a range of a model chunk's contiguous parameter and gradient buffers, divided evenly over the
data-parallel ranks. Rank r holds and updates the fp32 main weights of row r.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from sdp4bit.collectives.sections import Range
from sdp4bit_megatron.objects import Bucket, BucketGroup, Buffer, Chunk, ModelConfig, Optimizer

REPLICATED_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of parameters with fp32 main weights, from which they can be refreshed."""


def class_names(value: object) -> list[str]:
    """Return the names of a value's class and its bases, to recognize Megatron-Core without an import."""
    return [base.__name__ for base in type(value).__mro__]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A range of a row with the fp32 main weights that the optimizer updates."""

    start: int
    end: int
    main: Tensor


class MegatronBucket:
    """One bucket of parameters and gradients that are gathered and reduced together."""

    value_ranges = None

    def __init__(
        self, *, name: str, buffer: Buffer, bucket: Bucket, group: BucketGroup, is_expert: bool
    ) -> None:
        self.name = name
        self.bucket_group = group  # Megatron's bucket group, which starts this bucket's collectives
        self.is_expert = is_expert
        self.optimizer: Optimizer | None = None
        """The distributed optimizer that updates this bucket's weights."""
        self.pieces: list[Piece] = []  # this rank's main weights of its row, in order
        self._buffer = buffer
        self.record = bucket  # Megatron's object of this bucket

    @property
    def process_group(self) -> ProcessGroup:
        return self.bucket_group.intra_distributed_optimizer_instance_group

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self.process_group))

    @property
    def weights(self) -> Tensor:
        """[ranks * n], the parameters; model parameters are views of it."""
        return self.record.param_data

    @property
    def gradients(self) -> Tensor:
        """[ranks * n]."""
        return self.record.grad_data

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def param_dtype(self) -> torch.dtype:
        return self._buffer.param_dtype

    @property
    def shard_numel(self) -> int:
        """Values of one rank's row, Megatron's padding included."""
        return self.gradients.numel() // len(self.ranks)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.record.params_list)

    def range_of(self, param: nn.Parameter) -> Range:
        """Return a parameter's range in the bucket."""
        start, end, _ = self._buffer.param_index_map[param]
        return start - self.record.offset, end - self.record.offset

    def read_main(self, row: Tensor) -> None:
        """Write this rank's main weights to `row` [n], with zeros as padding."""
        end = 0
        for piece in self.pieces:
            row[end : piece.start].zero_()
            row[piece.start : piece.end].copy_(piece.main.detach())
            end = piece.end
        row[end:].zero_()

    def sample_main(self, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Return these ranges of this rank's main weights, concatenated, in fp32."""
        total = sum(end - start for start, end in ranges)
        sample = torch.zeros(total, dtype=torch.float32, device=self.weights.device)
        at = 0
        for start, end in ranges:
            for piece in self.pieces:
                first, last = max(start, piece.start), min(end, piece.end)
                if first < last:
                    values = piece.main.detach()[first - piece.start : last - piece.start]
                    sample[at + first - start : at + last - start].copy_(values, non_blocking=True)
            at += end - start
        return sample


def find_buckets(chunks: Sequence[Chunk], optimizers: Sequence[Optimizer]) -> list[MegatronBucket]:
    """Return the buckets of all model chunks, dense ones first, with the optimizers' shards.

    Raises:
        ValueError: a bucket has no optimizer, or an optimizer belongs to other model chunks.
    """
    buckets = list(_buckets(chunks))
    for optimizer in optimizers:
        # Not in the loop over pieces, because this rank may have no piece of a bucket.
        for record in (record for buffer in optimizer.buffers for record in buffer.buckets):
            bucket = next((b for b in buckets if b.record is record), None)
            if bucket is None:
                raise ValueError(
                    "the optimizer updates buckets that are not in model_chunks: pass all of its model chunks"
                )
            bucket.optimizer = optimizer
        for bucket, piece in _pieces(buckets, optimizer):
            bucket.pieces.append(piece)
    for bucket in buckets:
        bucket.pieces.sort(key=lambda piece: piece.start)
        if bucket.optimizer is None:
            raise ValueError(
                f"no distributed optimizer updates {bucket.name}: pass the optimizer that "
                "get_megatron_optimizer returned for these model chunks"
            )
    return buckets


def _buckets(chunks: Sequence[Chunk]) -> Iterator[MegatronBucket]:
    for kind in ("", "expert_parallel_"):
        for number, chunk in enumerate(chunks):
            groups = getattr(chunk, f"{kind}bucket_groups")
            for buffer in getattr(chunk, f"{kind}buffers"):
                prefix = f"chunk{number}." + ("expert." if kind else "")
                dtype = str(buffer.param_dtype).removeprefix("torch.")
                for index, bucket in enumerate(buffer.buckets):
                    yield MegatronBucket(
                        name=f"{prefix}{dtype}.{index}",
                        buffer=buffer,
                        bucket=bucket,
                        group=next(g for g in groups if any(each is bucket for each in g.buckets)),
                        is_expert=bool(kind),
                    )


def _pieces(
    buckets: Sequence[MegatronBucket], optimizer: Optimizer
) -> Iterator[tuple[MegatronBucket, Piece]]:
    """Yield this rank's part of every 16-bit parameter."""
    pairs = zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
    for params, mains in pairs:
        for param, main in zip(params, mains, strict=True):
            buffer, _, index = optimizer.model_param_gbuf_map[param]
            record = optimizer.buffers[buffer].buckets[index]
            bucket = next(bucket for bucket in buckets if bucket.record is record)
            record_range = optimizer._get_model_param_range_map(param)["gbuf_world_in_bucket"]
            first = bucket.process_group.rank() * bucket.shard_numel
            yield bucket, Piece(start=record_range.start - first, end=record_range.end - first, main=main)


def replicated_ranges(bucket: MegatronBucket, replicated: Sequence[nn.Parameter]) -> list[list[Range]]:
    """Return the ranges of every rank's row with parameters that tensor-parallel ranks hold in copies."""
    chosen = {id(param) for param in replicated}
    ranges = sorted(bucket.range_of(param) for param in bucket.parameters if id(param) in chosen)
    numel = bucket.shard_numel
    rows: list[list[Range]] = []
    for rank in range(len(bucket.ranks)):
        first, last = rank * numel, (rank + 1) * numel
        cut = [(max(start, first) - first, min(end, last) - first) for start, end in ranges]
        rows.append([(start, end) for start, end in cut if start < end])
    return rows


def tensor_parallel_group(chunk: Chunk) -> ProcessGroup | None:
    """Return the chunk's tensor-parallel group; None for a single rank."""
    group = cast("ProcessGroup | None", getattr(chunk, "tp_group", None))
    return group if group is not None and group.size() > 1 else None


def pipeline_group(chunks: Sequence[Chunk]) -> ProcessGroup | None:
    """Return this rank's pipeline-parallel group; None for a single stage."""
    group = getattr(chunks[0], "pp_group", None) if chunks else None
    return group if isinstance(group, ProcessGroup) and group.size() > 1 else None


def replicated_parameters(params: Sequence[nn.Parameter], group: ProcessGroup) -> list[nn.Parameter]:
    """Return the parameters with equal copies on all tensor-parallel ranks; collective over the group.

    Megatron marks divided parameters. Unmarked parameters whose values differ are excluded too.
    """
    candidates = [param for param in params if not getattr(param, "tensor_model_parallel", False)]
    if not candidates:
        return []
    sums = torch.stack([_bit_sum(param.detach()) for param in candidates])
    low, high = sums.clone(), sums
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    return [param for param, equal in zip(candidates, (low == high).tolist(), strict=True) if equal]


def sums_over_tensor_parallel(config: ModelConfig, name: str, param: nn.Parameter) -> bool:
    """Return whether Megatron itself sums a copied parameter's gradients over tensor-parallel ranks."""
    if config.sequence_parallel and getattr(param, "sequence_parallel", False):
        return True
    is_head_norm = "q_layernorm" in name or "k_layernorm" in name
    return bool(getattr(config, "qk_layernorm", False)) and is_head_norm


def _bit_sum(values: Tensor) -> Tensor:
    return values.reshape(-1).view(torch.int16).sum(dtype=torch.int64)
