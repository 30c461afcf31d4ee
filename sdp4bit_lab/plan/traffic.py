"""Bytes that one rank sends in a step, by level: exact, from the layouts of the messages, before it runs.

What is counted is what :mod:`sdp4bit.traffic` counts while it runs. Quantized messages are exact; a
collective of the communication library is counted as a ring in rank order, the least that any algorithm
needs, spread evenly over the ranks of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import NamedTuple

from sdp4bit.collectives.pieces import is_long_enough, piece_places
from sdp4bit.collectives.pipeline import group_unit, slice_places
from sdp4bit.collectives.sections import Section, whole_row
from sdp4bit.config import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.quantization.layout import (
    BLOCK,
    SCALE_BYTES,
    JointLayout,
)
from sdp4bit_lab.plan.kernels import Kernel
from sdp4bit_lab.plan.model import ShardedGroup

GATHERED_BYTES = 2
"""Weights are gathered in bf16."""
REDUCED_BYTES = 4
"""Gradients are reduced in fp32."""


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """A data-parallel group: nodes x ranks_per_node."""

    nodes: int
    ranks_per_node: int

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.nodes * self.ranks_per_node


ONE_RANK = RankGrid(nodes=1, ranks_per_node=1)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What one rank sends in one or more collectives, and how their levels follow each other."""

    intra_bytes: float = 0.0
    inter_bytes: float = 0.0
    padding_bytes: float = 0.0
    """The part of both that fills rows up to 32 values and messages up to 16 bytes."""
    collectives: int = 0
    chunks: int | None = None
    """Slices that overlap their two levels; None for a ring, which keeps both levels busy at once."""
    kernels: tuple[Kernel, ...] = ()
    """That quantize and sum, each once per slice."""

    @property
    def moved_bytes(self) -> float:
        """What the quantization kernels read and write."""
        return sum(kernel.nbytes for kernel in self.kernels)

    def times(self, count: int) -> Exchange:
        """Return the same exchange, done several times."""
        scaled = {
            name: getattr(self, name) * count for name in ("intra_bytes", "inter_bytes", "padding_bytes")
        }
        kernels = tuple(kernel.times(count) for kernel in self.kernels)
        return replace(self, **scaled, collectives=self.collectives * count, kernels=kernels)


def ring(row_bytes: float, *, grid: RankGrid) -> Exchange:
    """Return what a ring over all ranks sends to gather, or to reduce, rows of this size."""
    sent, g = row_bytes * (grid.size - 1), grid.ranks_per_node
    if grid.nodes == 1:
        return Exchange(intra_bytes=float(sent), collectives=1)
    return Exchange(intra_bytes=sent * (g - 1) / g, inter_bytes=sent / g, collectives=1)


def message_bytes(layout: JointLayout, *, scale_bytes: int = SCALE_BYTES) -> int:
    """Return the size of a message; scales of another width travel apart, without alignment."""
    if scale_bytes == SCALE_BYTES:
        return layout.nbytes
    return sum(each.scales_offset + each.parts * each.groups * scale_bytes for each in layout.layouts)


def gradient_exchange(
    row_numel: int,
    *,
    grid: RankGrid,
    config: GradientConfig | None,
    dense_bytes: int = REDUCED_BYTES,
    scale_bytes: int = SCALE_BYTES,
    sections: Sequence[Section] = (),
) -> Exchange:
    """Return one reduction of rows of `row_numel` values, quantization having started.

    Args:
        config: None for full precision; so are rows below its min_numel.
        dense_bytes: bytes per value of a reduction in full precision.
        scale_bytes: bytes per scale.
        sections: of a row; () for one.
    """
    if grid.size == 1:
        return Exchange()
    if config is None or row_numel < config.min_numel:
        return ring(row_numel * dense_bytes, grid=grid)
    g, n = grid.ranks_per_node, grid.nodes
    two_levels = g > 1 and n > 1
    intra = inter = padding = 0.0
    kernels: list[Kernel] = []
    parts = sections or whole_row(row_numel)
    slices = slice_places([part.numel for part in parts], config=config, nodes=n, ranks_per_node=g)
    for chosen in slices:
        pieces = [(parts[index], place.stop - place.start) for index, place in chosen]
        # With one level only, its messages carry a row to every rank.
        hops = []
        if g > 1:
            layout = _joint(pieces, bits=config.intra_bits, group_size=config.intra_group_size, parts=n)
            intra += message_bytes(layout, scale_bytes=scale_bytes) * (g - 1)
            padding += layout.padding_bytes * (g - 1)
            hops.append((g, layout))
        if n > 1:
            layout = _joint(pieces, bits=config.inter_bits, group_size=config.inter_group_size)
            inter += message_bytes(layout, scale_bytes=scale_bytes) * (n - 1)
            padding += layout.padding_bytes * (n - 1)
            hops.append((n, layout))
        for index, (_, numel) in enumerate(pieces):
            messages = []
            for count, layout in hops:
                own = layout.layouts[index]
                nbytes = message_bytes(JointLayout((own,)), scale_bytes=scale_bytes)
                messages.append((count, own.bits, nbytes))
            kernels += _reduction_kernels(numel, ranks=grid.size, nodes=n, messages=messages)
    return Exchange(
        intra_bytes=intra,
        inter_bytes=inter,
        padding_bytes=padding,
        collectives=len(slices) * (2 if two_levels else 1),
        chunks=max(1, len(slices)),
        kernels=tuple(kernels),
    )


def _joint(
    pieces: Sequence[tuple[Section, int]], *, bits: int | None, group_size: int, parts: int = 1
) -> JointLayout:
    """Return the layout of a message that carries so many values of each of these sections."""
    return JointLayout(
        tuple(
            section.layout(numel, bits=bits, group_size=group_size, parts=parts) for section, numel in pieces
        )
    )


def all_reduce_exchange(
    numel: int,
    *,
    grid: RankGrid,
    config: GradientConfig | None,
    dense_bytes: int = REDUCED_BYTES,
    sections: Sequence[Section] = (),
) -> Exchange:
    """Return one all-reduce of `numel` values over replicas, quantization having started.

    Args:
        config: None for full precision; so are values of which a rank's part is below its min_numel.
        dense_bytes: bytes per value of a reduction in full precision, which a ring sends twice around.
        sections: of the values; () for one.
    """
    g, n = grid.ranks_per_node, grid.nodes
    if grid.size == 1 or numel == 0:
        return Exchange()
    if config is None or not is_long_enough(numel, ranks=grid.size, config=config):
        return replace(ring(2 * numel * dense_bytes / grid.size, grid=grid), collectives=1)
    pieces = pieces_of(sections or whole_row(numel), ranks=grid.size)
    reduced = gradient_exchange(0, grid=grid, config=replace(config, min_numel=0), sections=pieces)
    layout = gathered_layout(pieces, grid=grid, config=config)
    return replace(
        reduced,
        intra_bytes=reduced.intra_bytes + layout.nbytes * n * (g - 1),
        inter_bytes=reduced.inter_bytes + layout.nbytes * (n - 1),
        padding_bytes=reduced.padding_bytes + layout.padding_bytes * (n - 1 + n * (g - 1)),
        collectives=reduced.collectives + (n > 1) + (g > 1),
        kernels=(
            *reduced.kernels,
            *chain.from_iterable(
                _gather_kernels(each.numel, ranks=grid.size, bits=each.bits, nbytes=each.nbytes)
                for each in layout.layouts
            ),
        ),
    )


def pieces_of(sections: Sequence[Section], *, ranks: int) -> tuple[Section, ...]:
    """Return the sections of a rank's piece of what is all-reduced over so many ranks."""
    found = []
    for section in sections:
        _, length = piece_places(section.numel, ranks=ranks, unit=section.unit)
        found.append(replace(section, ranges=((0, length),)))
    return tuple(found)


def gathered_layout(pieces: Sequence[Section], *, grid: RankGrid, config: GradientConfig) -> JointLayout:
    """Return the layout of the message in which an all-reduce gathers a rank's pieces of the sum."""
    bits, size = config.intra_bits, config.intra_group_size
    if grid.nodes > 1:
        bits, size = config.inter_bits, config.inter_group_size
    return _joint([(piece, piece.numel) for piece in pieces], bits=bits, group_size=size)


def _gather_kernels(numel: int, *, ranks: int, bits: int, nbytes: int) -> tuple[Kernel, Kernel]:
    """Return what is done to the pieces of an all-reduce after their reduction."""
    moved = float(nbytes + REDUCED_BYTES * numel)
    quantize = Kernel(
        operator="hadamard_quantize_4" if bits <= 4 else "hadamard_quantize_8",
        values=float(numel),
        bits=bits,
        nbytes=moved,
    )
    restore = Kernel(
        operator="dequantize_reduce_hadamard",
        values=float(ranks * numel),
        messages=1,
        bits=bits,
        nbytes=ranks * moved,
    )
    return quantize, restore


def _reduction_kernels(
    numel: int, *, ranks: int, nodes: int, messages: list[tuple[int, int, int]]
) -> list[Kernel]:
    """Return what is done to a slice of fp32 rows.

    Args:
        messages: of each hop their number, their bits, and the bytes of one.
    """
    count, bits, nbytes = messages[0]
    kernels = [
        Kernel(
            operator="hadamard_quantize_4" if bits <= 4 else "hadamard_quantize_8",
            values=float(ranks * numel),
            bits=bits,
            nbytes=float(REDUCED_BYTES * ranks * numel + count * nbytes),
        )
    ]
    for (count, _, nbytes), (sent_count, sent_bits, sent_nbytes) in pairwise(messages):
        kernels.append(
            Kernel(
                operator="dequantize_reduce_quantize",
                values=float(nodes * numel),
                messages=count,
                bits=sent_bits,
                nbytes=float(count * nbytes + sent_count * sent_nbytes),
            )
        )
    count, bits, nbytes = messages[-1]
    kernels.append(
        Kernel(
            operator="dequantize_reduce_hadamard",
            values=float(numel),
            messages=count,
            bits=bits,
            nbytes=float(count * nbytes + REDUCED_BYTES * numel),
        )
    )
    return kernels


def weight_refresh(
    row_numel: int, *, grid: RankGrid, config: WeightConfig | None, sections: Sequence[Section] = ()
) -> Exchange:
    """Return the update of the weight replica, once per optimizer step.

    Args:
        sections: of a row; () for one.
    """
    if config is None or grid.size == 1 or row_numel == 0:
        return Exchange()
    g, n = grid.ranks_per_node, grid.nodes
    kernels: tuple[Kernel, ...] = ()
    if config.bits is None:
        nbytes, padding = GATHERED_BYTES * row_numel, 0.0
    else:
        parts = sections or whole_row(row_numel)
        layout = _joint(
            [(part, part.numel) for part in parts], bits=config.bits, group_size=config.group_size
        )
        nbytes, padding = layout.nbytes, layout.padding_bytes
        rows = grid.size if is_full(config, grid=grid) else n
        for each in layout.layouts:
            # The difference is read from two bf16 rows; every row held is read, changed and written.
            row_bytes = 2.0 * GATHERED_BYTES * each.numel + each.nbytes
            kernels += (
                Kernel(
                    operator="subtract_quantize", values=float(each.numel), bits=each.bits, nbytes=row_bytes
                ),
                Kernel(
                    operator="dequantize_add",
                    values=float(rows * each.numel),
                    bits=each.bits,
                    nbytes=rows * row_bytes,
                ),
            )
    inter_copies = n - 1
    intra_copies = n * (g - 1) if is_full(config, grid=grid) else 0
    return Exchange(
        intra_bytes=float(nbytes * intra_copies),
        inter_bytes=float(nbytes * inter_copies),
        padding_bytes=padding * (inter_copies + intra_copies),
        collectives=(inter_copies > 0) + (intra_copies > 0),
        chunks=1,
        kernels=kernels,
    )


def weight_gather(row_numel: int, *, grid: RankGrid, config: WeightConfig | None) -> Exchange:
    """Return one gather of the weights, of which a step has one or two per micro batch."""
    if grid.size == 1:
        return Exchange()
    if config is None:
        return ring(GATHERED_BYTES * row_numel, grid=grid)
    if is_full(config, grid=grid):
        return Exchange()
    sent = GATHERED_BYTES * row_numel * grid.nodes * (grid.ranks_per_node - 1)
    return Exchange(intra_bytes=float(sent), collectives=1, chunks=1)


def is_full(config: WeightConfig, *, grid: RankGrid) -> bool:
    """Return whether every rank holds every row of the replica."""
    return config.replica == "full" or grid.ranks_per_node == 1


def applied_config(config: SDP4BitConfig, *, grid: RankGrid, replicas: RankGrid) -> SDP4BitConfig:
    """Return the settings without what stays in full precision because the ranks are on one node."""
    weights, gradients = config.weights, config.gradients
    if weights is not None and not weights.applies_to(nodes=grid.nodes):
        weights = None
    if gradients is not None and not gradients.applies_to(nodes=max(grid.nodes, replicas.nodes)):
        gradients = None
    return replace(config, weights=weights, gradients=gradients, alerts=None)


class RowSections(NamedTuple):
    """How each use of a row cuts it."""

    reduced: Sequence[Section]
    summed: Sequence[Section]
    """Over replicas."""
    refreshed: Sequence[Section]


@dataclass(frozen=True, kw_only=True)
class GroupTraffic:
    """What one rank sends for one parameter group in a step."""

    name: str
    numel: int
    """Parameters of the group on this model-parallel rank, without padding."""
    row_numel: int
    cut: RowSections
    gradients: Exchange
    all_reduce: Exchange
    """Of gradients, over the replicas of HSDP."""
    refresh: Exchange
    gathers: Exchange

    @property
    def exchanges(self) -> tuple[Exchange, Exchange, Exchange, Exchange]:
        """All of it."""
        return self.gradients, self.all_reduce, self.refresh, self.gathers


def group_traffic(
    group: ShardedGroup,
    *,
    grid: RankGrid,
    config: SDP4BitConfig,
    replicas: RankGrid = ONE_RANK,
    accumulation: int = 1,
    dense_bytes: int = REDUCED_BYTES,
    least_padding: bool = False,
) -> GroupTraffic:
    """Return what a steady step sends for a group: gradients reduced once, after the last micro batch.

    Args:
        grid: the ranks among which the group is sharded.
        replicas: the ranks that hold the same shard, which sum its gradients (HSDP).
        accumulation: micro batches per step; FSDP2 gathers the weights anew for each.
        dense_bytes: bytes per gradient of a reduction in full precision.
        least_padding: parameters are cut along the dimension that pads least, see `least_padded_dim`.
    """
    row = group.row_numel(ranks=grid.size, least_padding=least_padding)
    # A flat buffer stays gathered: every rank holds all weights, so its replica is a full one.
    config = applied_config(config, grid=grid, replicas=replicas)
    weights, gradients = config.weights, config.gradients
    if group.is_flat and weights is not None:
        weights = replace(weights, replica="full")
    gathers = 1 if group.is_flat else accumulation * (2 if group.freed_after_forward else 1)
    cut = row_sections(group, grid=grid, replicas=replicas, config=config, least_padding=least_padding)
    return GroupTraffic(
        name=group.name,
        numel=group.numel,
        row_numel=row,
        cut=cut,
        gradients=gradient_exchange(
            row, grid=grid, config=gradients, dense_bytes=dense_bytes, sections=cut.reduced
        ),
        all_reduce=all_reduce_exchange(
            row, grid=replicas, config=gradients, dense_bytes=dense_bytes, sections=cut.summed
        ),
        refresh=weight_refresh(row, grid=grid, config=weights, sections=cut.refreshed),
        gathers=weight_gather(row, grid=grid, config=weights).times(gathers),
    )


def row_sections(
    group: ShardedGroup,
    *,
    grid: RankGrid,
    replicas: RankGrid,
    config: SDP4BitConfig,
    least_padding: bool = False,
) -> RowSections:
    """Return the sections of a group's row; see `group_traffic`."""
    if group.is_flat or not config.separate_parameters:
        whole = whole_row(group.row_numel(ranks=grid.size, least_padding=least_padding))
        return RowSections(whole, whole, whole)
    gradients = config.gradients or GradientConfig()
    units = [group_unit(gradients, nodes=g.nodes, ranks_per_node=g.ranks_per_node) for g in (grid, replicas)]
    units.append(BLOCK if config.weights is None else config.weights.group_size)
    return RowSections(
        *(group.sections(ranks=grid.size, unit=unit, least_padding=least_padding) for unit in units)
    )
