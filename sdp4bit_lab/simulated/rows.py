"""How FSDP2 would cut a parameter group into rows, one for each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Where one parameter's chunks lie in the rows of its group."""

    name: str
    start: int
    end: int
    """Between them, a chunk of `per_rank` slices of the parameter's first dimension, or fewer and zeros."""
    per_rank: int
    length: int
    """Size of the parameter's first dimension."""

    def chunk(self, tensor: Tensor, rank: int) -> Tensor:
        """View the part of a tensor shaped like the parameter that a rank holds, which may be empty."""
        first = min(rank * self.per_rank, self.length)
        return tensor[first : min(first + self.per_rank, self.length)]


class RowLayout:
    """A parameter group of a model, cut into rows for a number of ranks."""

    def __init__(self, parameters: Mapping[str, Tensor], *, ranks: int) -> None:
        """Cut like FSDP2: every parameter along its first dimension, chunks filled up to equal sizes."""
        self.ranks = ranks
        self.segments: list[Segment] = []
        numel = 0
        for name, parameter in parameters.items():
            length = parameter.shape[0]
            per_rank = -(-length // ranks)
            end = numel + per_rank * (parameter.numel() // length)
            self.segments.append(Segment(name=name, start=numel, end=end, per_rank=per_rank, length=length))
            numel = end
        self.numel = numel
        """Values of a row, padding included."""

    def write_rows(self, tensors: Mapping[str, Tensor], rows: Tensor) -> None:
        """Write the tensors to the rows [ranks, n], in their type; zeros where chunks are filled up."""
        for segment in self.segments:
            tensor, (whole, part) = tensors[segment.name], _split(segment)
            place = rows[:, segment.start : segment.end]
            place[:whole].copy_(tensor[: whole * segment.per_rank].reshape(whole, -1))
            if whole < self.ranks:
                place[whole:].zero_()
            if part:
                last = tensor[whole * segment.per_rank :].reshape(-1)
                place[whole, : last.numel()].copy_(last)

    def read_rows(self, rows: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Read the tensors from the rows [ranks, n], in their own type."""
        for segment in self.segments:
            tensor, (whole, part) = tensors[segment.name], _split(segment)
            place = rows[:, segment.start : segment.end]
            tensor[: whole * segment.per_rank].view(whole, -1).copy_(place[:whole])
            if part:
                last = tensor[whole * segment.per_rank :]
                last.copy_(place[whole, : last.numel()].view(last.shape))

    def read_row(self, row: Tensor, *, rank: int, tensors: Mapping[str, Tensor]) -> None:
        """Read the parts of the tensors that a rank holds from its row [n]."""
        for segment in self.segments:
            chunk = segment.chunk(tensors[segment.name], rank)
            if chunk.numel():
                chunk.copy_(row[segment.start : segment.start + chunk.numel()].view(chunk.shape))

    def row(self, tensors: Mapping[str, Tensor], *, rank: int) -> Tensor:
        """Return a rank's row [n] of tensors shaped like the parameters, in their type."""
        like = next(iter(tensors.values()))
        row = torch.zeros(self.numel, dtype=like.dtype, device=like.device)
        for segment in self.segments:
            chunk = segment.chunk(tensors[segment.name], rank).reshape(-1)
            row[segment.start : segment.start + chunk.numel()].copy_(chunk)
        return row


def _split(segment: Segment) -> tuple[int, int]:
    """Return how many ranks hold a full chunk, and how many slices the next one has."""
    return divmod(segment.length, segment.per_rank)
