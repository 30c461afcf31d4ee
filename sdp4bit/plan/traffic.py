"""Bytes that one rank sends in a step, by level: exact, from the layouts of the messages, before it runs.

What is counted is what :mod:`sdp4bit.traffic` counts while it runs. Quantized messages are exact; a
collective of the communication library is counted as a ring in rank order, the least that any algorithm
needs, spread evenly over the ranks of a node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from sdp4bit.collectives.capacity import room_for
from sdp4bit.collectives.pieces import is_long_enough, piece_places
from sdp4bit.collectives.pipeline import slice_lengths
from sdp4bit.config import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.plan.kernels import Kernel
from sdp4bit.plan.model import ShardedGroup
from sdp4bit.quantization.layout import (
    FULL_PRECISION,
    SCALE_BYTES,
    MessageLayout,
    message_layout,
)

GATHERED_BYTES = 2
"""Weights are gathered in bf16."""
LOSSLESS_BITS = 2.5
"""Bits per weight that lossless weights are taken to cost: an assumption, near the mean over a run whose rate
decays from 3e-4. They cost 3 to 4 at higher rates and below 1 at 1e-5 (docs/numerics.md)."""
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


def message_bytes(layout: MessageLayout, *, scale_bytes: int = SCALE_BYTES) -> int:
    """Return the size of a message; scales of another width travel apart, without alignment."""
    if scale_bytes == SCALE_BYTES:
        return layout.nbytes
    return layout.scales_offset + layout.parts * layout.groups * scale_bytes


def gradient_exchange(
    row_numel: int,
    *,
    grid: RankGrid,
    config: GradientConfig | None,
    dense_bytes: int = REDUCED_BYTES,
    scale_bytes: int = SCALE_BYTES,
) -> Exchange:
    """Return one reduction of rows of `row_numel` values, quantization having started.

    Args:
        config: None for full precision; so are rows below its min_numel.
        dense_bytes: bytes per value of a reduction in full precision.
        scale_bytes: bytes per scale.
    """
    if grid.size == 1:
        return Exchange()
    if config is None or row_numel < config.min_numel:
        return ring(row_numel * dense_bytes, grid=grid)
    g, n = grid.ranks_per_node, grid.nodes
    intra_bits, inter_bits = config.intra_bits or FULL_PRECISION, config.inter_bits or FULL_PRECISION
    two_levels = g > 1 and n > 1
    intra = inter = padding = 0.0
    kernels: list[Kernel] = []
    slices = slice_lengths(row_numel, config=config, nodes=n, ranks_per_node=g)
    for numel in slices:
        # With one level only, its messages carry a row to every rank.
        messages = []
        if g > 1:
            layout = message_layout(numel=numel, bits=intra_bits, group_size=config.intra_group_size, parts=n)
            nbytes = message_bytes(layout, scale_bytes=scale_bytes)
            intra += nbytes * (g - 1)
            padding += layout.padding_bytes * (g - 1)
            messages.append((g, intra_bits, nbytes))
        if n > 1:
            layout = message_layout(numel=numel, bits=inter_bits, group_size=config.inter_group_size)
            nbytes = message_bytes(layout, scale_bytes=scale_bytes)
            inter += nbytes * (n - 1)
            padding += layout.padding_bytes * (n - 1)
            messages.append((n, inter_bits, nbytes))
        kernels += _reduction_kernels(numel, ranks=grid.size, nodes=n, messages=messages)
    return Exchange(
        intra_bytes=intra,
        inter_bytes=inter,
        padding_bytes=padding,
        collectives=len(slices) * (2 if two_levels else 1),
        chunks=max(1, len(slices)),
        kernels=tuple(kernels),
    )


def all_reduce_exchange(
    numel: int, *, grid: RankGrid, config: GradientConfig | None, dense_bytes: int = REDUCED_BYTES
) -> Exchange:
    """Return one all-reduce of `numel` values over replicas, quantization having started.

    Args:
        config: None for full precision; so are values of which a rank's part is below its min_numel.
        dense_bytes: bytes per value of a reduction in full precision, which a ring sends twice around.
    """
    g, n = grid.ranks_per_node, grid.nodes
    if grid.size == 1 or numel == 0:
        return Exchange()
    if config is None or not is_long_enough(numel, ranks=grid.size, config=config):
        return replace(ring(2 * numel * dense_bytes / grid.size, grid=grid), collectives=1)
    _, length = piece_places(numel, ranks=grid.size)
    reduced = gradient_exchange(length, grid=grid, config=replace(config, min_numel=0))
    layout = gathered_layout(length, grid=grid, config=config)
    return replace(
        reduced,
        intra_bytes=reduced.intra_bytes + layout.nbytes * n * (g - 1),
        inter_bytes=reduced.inter_bytes + layout.nbytes * (n - 1),
        padding_bytes=reduced.padding_bytes + layout.padding_bytes * (n - 1 + n * (g - 1)),
        collectives=reduced.collectives + (n > 1) + (g > 1),
        kernels=(
            *reduced.kernels,
            *_gather_kernels(length, ranks=grid.size, bits=layout.bits, nbytes=layout.nbytes),
        ),
    )


def gathered_layout(piece: int, *, grid: RankGrid, config: GradientConfig) -> MessageLayout:
    """Return the layout of the message in which an all-reduce gathers a rank's piece of the sum."""
    bits, size = config.intra_bits, config.intra_group_size
    if grid.nodes > 1:
        bits, size = config.inter_bits, config.inter_group_size
    return message_layout(numel=piece, bits=bits or FULL_PRECISION, group_size=size)


def _gather_kernels(numel: int, *, ranks: int, bits: int | None, nbytes: int) -> tuple[Kernel, Kernel]:
    """Return what is done to the pieces of an all-reduce after their reduction."""
    moved = float(nbytes + REDUCED_BYTES * numel)
    quantize = Kernel(
        operator="hadamard_quantize_4" if bits == 4 else "hadamard_quantize_8",
        values=float(numel),
        nbytes=moved,
    )
    restore = Kernel(
        operator="dequantize_reduce_hadamard",
        values=float(ranks * numel),
        messages=1,
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


def weight_refresh(row_numel: int, *, grid: RankGrid, config: WeightConfig | None) -> Exchange:
    """Return the update of the weight replica, once per optimizer step."""
    if config is None or grid.size == 1 or row_numel == 0:
        return Exchange()
    g, n = grid.ranks_per_node, grid.nodes
    kernels: tuple[Kernel, ...] = ()
    if config.is_lossless:
        # On the CPU only, and not by a kernel that is timed here.
        nbytes, padding, kernels = lossless_bytes(row_numel), 0.0, ()
    elif config.bits is None:
        nbytes, padding = GATHERED_BYTES * row_numel, 0.0
    else:
        layout = message_layout(numel=row_numel, bits=config.bits, group_size=config.group_size)
        nbytes, padding = layout.nbytes, layout.padding_bytes
        rows = grid.size if is_full(config, grid=grid) else n
        # The difference is read from two bf16 rows; every row held is read, changed and written.
        row_bytes = 2.0 * GATHERED_BYTES * row_numel + nbytes
        kernels = (
            Kernel(operator="subtract_quantize", values=float(row_numel), bits=config.bits, nbytes=row_bytes),
            Kernel(
                operator="dequantize_add",
                values=float(rows * row_numel),
                bits=config.bits,
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


def lossless_bytes(row_numel: int) -> int:
    """Return the size of a message of lossless weights at the bits per weight that are assumed."""
    return room_for(int(row_numel * LOSSLESS_BITS / 8), numel=row_numel)


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


@dataclass(frozen=True, kw_only=True)
class GroupTraffic:
    """What one rank sends for one parameter group in a step."""

    name: str
    numel: int
    """Parameters of the group on this model-parallel rank, without padding."""
    row_numel: int
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
    weights = config.weights
    if group.is_flat and weights is not None:
        weights = replace(weights, replica="full")
    if weights is not None and not weights.saves_bytes(nodes=grid.nodes):
        weights = None
    gathers = 1 if group.is_flat else accumulation * (2 if group.freed_after_forward else 1)
    return GroupTraffic(
        name=group.name,
        numel=group.numel,
        row_numel=row,
        gradients=gradient_exchange(row, grid=grid, config=config.gradients, dense_bytes=dense_bytes),
        all_reduce=all_reduce_exchange(row, grid=replicas, config=config.gradients, dense_bytes=dense_bytes),
        refresh=weight_refresh(row, grid=grid, config=weights),
        gathers=weight_gather(row, grid=grid, config=weights).times(gathers),
    )
