"""Parameters of a GPT as data parallelism sees them: shapes per FSDP2 group, after model-parallel cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sdp4bit.collectives.sections import RowParameter, Section, cut_row
from sdp4bit.quantization.layout import round_up
from sdp4bit_lab.pretrain.model.cards import ModelShape

Shape = tuple[int, ...]

MEGATRON_ALIGNMENT = 128
"""Megatron-Core ends its buckets at multiples of this and of the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class GPTSize:
    """What the cost of a GPT depends on."""

    name: str
    layers: int
    hidden: int
    vocabulary: int
    """Rows of the embedding, padding included."""
    positions: int
    flops_per_sequence: float
    """Floating-point operations of forward and backward over one sequence, by the whole model."""

    @classmethod
    def of(cls, shape: ModelShape, *, name: str, sequence_length: int) -> GPTSize:
        """Return the sizes of a model that is trained on sequences of this length."""
        return cls(
            name=name,
            layers=shape.layers,
            hidden=shape.hidden,
            vocabulary=shape.vocabulary,
            positions=shape.positions,
            flops_per_sequence=shape.flops_per_sample(sequence_length),
        )

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, embeddings tied."""
        h = self.hidden
        return self.layers * (12 * h**2 + 13 * h) + (self.vocabulary + self.positions + 2) * h


@dataclass(frozen=True, kw_only=True)
class ShardedGroup:
    """Parameters that are gathered and reduced together, as one rank of a model-parallel group has them."""

    name: str
    shapes: tuple[Shape, ...]
    freed_after_forward: bool = True
    """Whether backward gathers the weights again."""
    is_flat: bool = False
    """One buffer cut into equal rows, as Megatron-Core does, instead of FSDP2's cut along a dimension."""

    @property
    def numel(self) -> int:
        """Parameters, without padding."""
        return sum(math.prod(shape) for shape in self.shapes)

    def row_numel(self, *, ranks: int, least_padding: bool = False) -> int:
        """Return the values of one rank's row, padding included.

        Args:
            least_padding: each parameter is cut along :func:`least_padded_dim` instead of dimension 0.
        """
        if self.is_flat:
            return round_up(self.numel, math.lcm(ranks, MEGATRON_ALIGNMENT)) // ranks
        return sum(_part(shape, ranks, least_padding) for shape in self.shapes)

    def sections(self, *, ranks: int, unit: int, least_padding: bool = False) -> tuple[Section, ...]:
        """Return the sections of a row in which every parameter is quantized apart; see `cut_row`."""
        parameters = [
            RowParameter(numel=_part(shape, ranks, least_padding), is_fine=len(shape) <= 1, number=number)
            for number, shape in enumerate(self.shapes)
        ]
        return cut_row(parameters, unit=unit, count=len(parameters))


def _part(shape: Shape, ranks: int, least_padding: bool) -> int:
    dim = least_padded_dim(shape, ranks=ranks) if least_padding else 0
    return -(-shape[dim] // ranks) * math.prod(shape[:dim] + shape[dim + 1 :])


def least_padded_dim(shape: Sequence[int], *, ranks: int) -> int:
    """Return the dimension to shard a parameter along: 0, unless only another one is divided evenly.

    FSDP2 cuts dimension 0 into equal parts and fills the last ones up: 1024 rows on 4096 ranks are sent as
    4096. Other dimensions may be chosen with `fully_shard(..., shard_placement_fn=...)` if the number of
    ranks divides them.
    """
    if shape[0] % ranks:
        for dim in range(1, len(shape)):
            if shape[dim] % ranks == 0:
                return dim
    return 0


def gpt_groups(
    size: GPTSize,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    freed_after_forward: bool = True,
) -> tuple[ShardedGroup, ...]:
    """Return the FSDP2 groups of the first pipeline stage, which has the most parameters: a group per block,
    and one for the rest.

    Under tensor parallelism the parameters that all its ranks have alike are in groups of their own, under
    pipeline parallelism those at the ends.

    Raises:
        ValueError: the model cannot be cut like this.
    """
    for what, count, parts in (
        ("hidden size", size.hidden, tensor_parallel),
        ("padded vocabulary", size.vocabulary, tensor_parallel),
        ("layers", size.layers, pipeline_parallel),
    ):
        if count % parts:
            raise ValueError(f"{what} of {size.name}, {count}, cannot be divided by {parts}")
    h, part = size.hidden, size.hidden // tensor_parallel
    norms: tuple[Shape, ...] = ((h,),) * 4
    matrices: tuple[Shape, ...] = (
        *((3 * part, h), (3 * part,)),
        *((h, part), (part,)),
        *((4 * part, h), (4 * part,)),
        *((h, 4 * part), (part,)),
    )
    split = tensor_parallel > 1
    groups = []
    for layer in range(size.layers // pipeline_parallel):
        if split:
            groups.append(ShardedGroup(name=f"blocks.{layer}.norms", shapes=norms))
        groups.append(
            ShardedGroup(
                name=f"blocks.{layer}",
                shapes=matrices if split else norms + matrices,
                freed_after_forward=freed_after_forward,
            )
        )
    ends: tuple[Shape, ...] = ((size.positions, h),)
    if pipeline_parallel == 1:
        ends += ((h,), (h,))
    tokens: tuple[Shape, ...] = ((size.vocabulary // tensor_parallel, h),)
    if split or pipeline_parallel > 1:
        groups.append(ShardedGroup(name="ends", shapes=ends))
    else:
        tokens += ends
    # FSDP2 keeps the root's weights from forward to backward.
    groups.append(ShardedGroup(name="(root)", shapes=tokens, freed_after_forward=False))
    return tuple(groups)


def flat_buffer(groups: Sequence[ShardedGroup]) -> tuple[ShardedGroup, ...]:
    """Return the same parameters as one flat buffer, gathered once a step."""
    numel = sum(group.numel for group in groups)
    return (ShardedGroup(name="buffer", shapes=((numel,),), freed_after_forward=False, is_flat=True),)
