"""Cut parameter groups into one row per rank, like FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RowParam:
    """Position of one parameter's shards in the rows of its group."""

    name: str
    start: int
    end: int
    """Between start and end: `per_rank` slices of the first dimension, or fewer and zeros."""
    per_rank: int
    length: int
    """Size of the parameter's first dimension."""

    def shard(self, tensor: Tensor, rank: int) -> Tensor:
        """View a rank's part of a tensor with the parameter's shape; may be empty."""
        first = min(rank * self.per_rank, self.length)
        return tensor[first : min(first + self.per_rank, self.length)]


class RowLayout:
    """Rows of a parameter group."""

    def __init__(self, parameters: Mapping[str, Tensor], *, ranks: int) -> None:
        """Split every parameter along its first dimension, and pad shards to equal sizes."""
        self.ranks = ranks
        self.params: list[RowParam] = []
        numel = 0
        for name, parameter in parameters.items():
            length = parameter.shape[0]
            per_rank = -(-length // ranks)
            end = numel + per_rank * (parameter.numel() // length)
            self.params.append(RowParam(name=name, start=numel, end=end, per_rank=per_rank, length=length))
            numel = end
        self.numel = numel
        """Values in a row, including padding."""

    def write_rows(self, tensors: Mapping[str, Tensor], rows: Tensor) -> None:
        """Write the tensors into the rows [ranks, n], cast to their dtype, with zeros as padding."""
        for param in self.params:
            tensor, (whole, part) = tensors[param.name], _split(param)
            place = rows[:, param.start : param.end]
            place[:whole].copy_(tensor[: whole * param.per_rank].reshape(whole, -1))
            if whole < self.ranks:
                place[whole:].zero_()
            if part:
                last = tensor[whole * param.per_rank :].reshape(-1)
                place[whole, : last.numel()].copy_(last)

    def read_rows(self, rows: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Read the tensors from the rows [ranks, n], cast to the tensors' dtype."""
        for param in self.params:
            tensor, (whole, part) = tensors[param.name], _split(param)
            place = rows[:, param.start : param.end]
            tensor[: whole * param.per_rank].view(whole, -1).copy_(place[:whole])
            if part:
                last = tensor[whole * param.per_rank :]
                last.copy_(place[whole, : last.numel()].view(last.shape))

    def read_row(self, row: Tensor, *, rank: int, tensors: Mapping[str, Tensor]) -> None:
        """Read a rank's parts of the tensors from its row [n]."""
        for param in self.params:
            shard = param.shard(tensors[param.name], rank)
            if shard.numel():
                shard.copy_(row[param.start : param.start + shard.numel()].view(shard.shape))

    def row(self, tensors: Mapping[str, Tensor], *, rank: int) -> Tensor:
        """Return a rank's row [n] of tensors with the parameters' shapes."""
        like = next(iter(tensors.values()))
        row = torch.zeros(self.numel, dtype=like.dtype, device=like.device)
        for param in self.params:
            shard = param.shard(tensors[param.name], rank).reshape(-1)
            row[param.start : param.start + shard.numel()].copy_(shard)
        return row


def _split(param: RowParam) -> tuple[int, int]:
    """Return the number of ranks with a full shard, and the slices of the next rank."""
    return divmod(param.length, param.per_rank)
