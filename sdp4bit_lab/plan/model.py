"""Divide a GPT's parameters into the groups that data parallelism gathers and reduces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from sdp4bit.collectives.sections import CutParam, Section, cut_row, merge_ranges
from sdp4bit.quantization.layout import round_up
from sdp4bit_lab.common.settings import option, require, require_at_least
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig
from sdp4bit_lab.pretrain.model.cards import VOCABULARY_MULTIPLE, CardName, ModelShape

Shape = tuple[int, ...]

MEGATRON_ALIGNMENT = 128
"""Megatron-Core pads buckets to multiples of this and of the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class PlanModelConfig(ModelConfig):
    """The GPT to plan for: a preset, with single sizes replaced."""

    model_card: Annotated[CardName, option("preset", "model-card")] = "1.3B"
    """Model sizes, and defaults for sequence length, micro batch size and vocabulary."""
    vocabulary: Annotated[int | None, option("vocab-size")] = None
    """Vocabulary size. Default: the preset's."""
    sequence_length: Annotated[int | None, option("seq-length", "sequence-length")] = None
    """Tokens per sequence. Default: the preset's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "vocabulary", "sequence_length")
        require(self.dropout == 0, "--dropout changes neither bytes nor operations: remove it")

    @property
    def tokens(self) -> int:
        return self.sequence_length or self.card.sequence_length

    def padded_shape(self, *, tensor_parallel: int) -> ModelShape:
        """Return the sizes, with the vocabulary padded to 128 rows per tensor-parallel rank."""
        vocabulary = round_up(self.vocabulary or self.card.vocabulary, VOCABULARY_MULTIPLE * tensor_parallel)
        return self.shape(vocabulary=vocabulary, sequence_length=self.tokens)


@dataclass(frozen=True, kw_only=True)
class ShardedGroup:
    """Parameters that are gathered and reduced together, with their shapes on one model-parallel rank."""

    name: str
    shapes: tuple[Shape, ...]
    freed_after_forward: bool = True
    """Whether backward gathers the weights again."""
    is_flat: bool = False
    """One buffer divided into equal rows, as in Megatron-Core, instead of FSDP2's split along a dimension."""
    frozen: frozenset[int] = frozenset()
    """Indices in `shapes` of parameters that are gathered but not trained."""

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def row_numel(self, *, ranks: int, least_padding: bool = False, trained_only: bool = False) -> int:
        """Return the number of values in one rank's row, padding included.

        Args:
            least_padding: shard each parameter along :func:`least_padded_dim` instead of dimension 0.
            trained_only: exclude frozen parameters.
        """
        if self.is_flat:
            return round_up(self.numel, math.lcm(ranks, MEGATRON_ALIGNMENT)) // ranks
        parts = enumerate(self._parts(ranks, least_padding))
        return sum(part for place, part in parts if not (trained_only and place in self.frozen))

    def _parts(self, ranks: int, least_padding: bool) -> list[int]:
        return [_part(shape, ranks, least_padding) for shape in self.shapes]

    def sections(self, *, ranks: int, unit: int, least_padding: bool = False) -> tuple[Section, ...]:
        """Return the sections of a row of trained parameters; see `cut_row`."""
        parameters = [
            CutParam(numel=part, is_fine=len(self.shapes[place]) <= 1, number=place)
            for place, part in enumerate(self._parts(ranks, least_padding))
            if place not in self.frozen
        ]
        return cut_row(parameters, unit=unit, count=len(self.shapes))

    def refreshed_sections(
        self, *, ranks: int, unit: int, least_padding: bool = False
    ) -> tuple[Section, ...]:
        """Return the trained parts of a full row's sections, whose differences are sent."""
        ends = list(itertools.accumulate(self._parts(ranks, least_padding), initial=0))
        places = enumerate(itertools.pairwise(ends))
        trained = merge_ranges([each for place, each in places if place not in self.frozen])
        sections = replace(self, frozen=frozenset()).sections(
            ranks=ranks, unit=unit, least_padding=least_padding
        )
        return tuple(part for part in (each.within(trained) for each in sections) if part.ranges)


def _part(shape: Shape, ranks: int, least_padding: bool) -> int:
    dim = least_padded_dim(shape, ranks=ranks) if least_padding else 0
    return -(-shape[dim] // ranks) * math.prod(shape[:dim] + shape[dim + 1 :])


def least_padded_dim(shape: Sequence[int], *, ranks: int) -> int:
    """Return the dimension to shard along: 0, unless only another one divides evenly.

    FSDP2 splits dimension 0 into equal parts and pads the last ones: 1024 rows on 4096 ranks are sent as
    4096. `fully_shard(..., shard_placement_fn=...)` accepts another dimension that the number of ranks
    divides.
    """
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def gpt_groups(
    shape: ModelShape,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    freed_after_forward: bool = True,
) -> tuple[ShardedGroup, ...]:
    """Return the FSDP2 groups of the first pipeline stage, which has the most parameters: one per block, and
    one for the rest.

    Parameters shared by tensor-parallel ranks have groups of their own. So do those at the ends of a
    pipeline.

    Raises:
        SettingError: the parallel sizes do not divide the model.
    """
    for flag, parts, name, count in (
        ("--tp", tensor_parallel, "hidden size", shape.hidden),
        ("--tp", tensor_parallel, "padded vocabulary", shape.vocabulary),
        ("--pp", pipeline_parallel, "number of layers", shape.layers),
    ):
        require(count % parts == 0, f"{flag} {parts} does not divide the {name}, {count}")
    is_split = tensor_parallel > 1
    h, part = shape.hidden, shape.hidden // tensor_parallel
    norms: tuple[Shape, ...] = ((h,),) * 4
    matrices: tuple[Shape, ...] = (
        *((3 * part, h), (3 * part,)),
        *((h, part), (part,)),
        *((4 * part, h), (4 * part,)),
        *((h, 4 * part), (part,)),
    )
    groups = []
    for layer in range(shape.layers // pipeline_parallel):
        if is_split:
            groups.append(ShardedGroup(name=f"blocks.{layer}.norms", shapes=norms))
        shapes = matrices if is_split else norms + matrices
        groups.append(
            ShardedGroup(name=f"blocks.{layer}", shapes=shapes, freed_after_forward=freed_after_forward)
        )
    tokens: tuple[Shape, ...] = ((shape.vocabulary // tensor_parallel, h),)
    ends: tuple[Shape, ...] = ((shape.positions, h),)
    if pipeline_parallel == 1:
        ends += ((h,), (h,))
    if is_split or pipeline_parallel > 1:
        groups.append(ShardedGroup(name="ends", shapes=ends))
    else:
        tokens += ends
    # FSDP2 keeps the root's weights from forward to backward.
    groups.append(ShardedGroup(name="(root)", shapes=tokens, freed_after_forward=False))
    return tuple(groups)


def with_adapters(groups: Sequence[ShardedGroup], *, rank: int) -> tuple[ShardedGroup, ...]:
    """Freeze the groups and add LoRA matrices after each matrix and bias of a block, as peft does."""
    adapted = []
    for group in groups:
        shapes: list[Shape] = []
        frozen: list[int] = []
        adapters: list[Shape] = []
        for shape in group.shapes:
            if len(shape) == 2 and group.name.startswith("blocks."):
                shapes += adapters
                adapters = [(rank, shape[1]), (shape[0], rank)]
            frozen.append(len(shapes))
            shapes.append(shape)
        adapted.append(replace(group, shapes=(*shapes, *adapters), frozen=frozenset(frozen)))
    return tuple(adapted)


def flat_buffer(groups: Sequence[ShardedGroup]) -> tuple[ShardedGroup, ...]:
    """Return the same parameters as one flat buffer, gathered once per step."""
    numel = sum(group.numel for group in groups)
    return (ShardedGroup(name="buffer", shapes=((numel,),), freed_after_forward=False, is_flat=True),)
