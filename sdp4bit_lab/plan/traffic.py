"""Count the bytes that one rank sends per step and level, from the layouts of the messages.

:mod:`sdp4bit.traffic` counts the same bytes during training. Quantized messages are exact. Collectives of the
communication library count as rings in rank order, the minimum of any algorithm, spread evenly over the ranks
of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sdp4bit.collectives.pieces import is_long_enough, piece_count, piece_stride_and_length
from sdp4bit.collectives.pipeline import CHUNKS_UNDER_WAY, cut_into_chunks, group_unit
from sdp4bit.collectives.sections import Section, whole_row
from sdp4bit.config import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.quantization.formats import BLOCK, Bits
from sdp4bit.quantization.layout import JointLayout
from sdp4bit.traffic import ALONE, Grid, Level
from sdp4bit_lab.plan.devices import Work
from sdp4bit_lab.plan.latency import Call, Kind
from sdp4bit_lab.plan.model import ShardedGroup

GATHERED_BYTES = 2
"""Weights are gathered in bf16."""
REDUCED_BYTES = 4
"""Gradients are summed in fp32, and by default also reduced in fp32."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Bytes and calls of one rank in one or more collectives."""

    intra_bytes: float = 0.0
    inter_bytes: float = 0.0
    padding_bytes: float = 0.0
    """Part of both byte counts that pads rows to 32 values and messages to 16 bytes."""
    calls: tuple[Call, ...] = ()
    chunks: int | None = None
    """Chunks whose two hops overlap; None for a ring, which keeps both levels busy at once."""
    work: tuple[Work, ...] = ()
    """Quantization kernels."""
    buffer_bytes: int = 0
    """Message buffers in use at the same time."""

    @property
    def collectives(self) -> int:
        return sum(call.times for call in self.calls)

    @property
    def moved_bytes(self) -> float:
        """Device memory traffic of the quantization kernels."""
        return sum(work.moved_bytes for work in self.work)


def ring(row_bytes: float, *, grid: Grid, kind: Kind = "gather", times: int = 1) -> Exchange:
    """Return `times` collectives over all ranks that gather or reduce rows of `row_bytes`.

    An all-reduce sends each row twice.
    """
    rows = 2 * row_bytes if kind == "all-reduce" else row_bytes
    sent, g = times * rows * (grid.size - 1), grid.ranks_per_node
    calls = (Call(kind=kind, grid=grid, times=times),)
    if grid.nodes == 1:
        return Exchange(intra_bytes=float(sent), calls=calls)
    return Exchange(intra_bytes=sent * (g - 1) / g, inter_bytes=sent / g, calls=calls)


def _message(
    pieces: Sequence[tuple[Section, int]], *, bits: Bits, group_size: int, rows: int = 1
) -> JointLayout:
    """Return the layout of a message of `rows` rows with the given number of values per section."""
    layouts = (section.layout(n, bits=bits, group_size=group_size, parts=rows) for section, n in pieces)
    return JointLayout(tuple(layouts))


def _send(messages: Sequence[tuple[Level, JointLayout, int]], *, kind: Kind, grid: Grid) -> Exchange:
    """Return the exchange of messages: level, layout and number of copies of each collective."""
    intra, inter, outer = grid.levels.values()
    over = {
        "intra": Grid(nodes=1, ranks_per_node=intra),
        "inter": Grid(nodes=inter, ranks_per_node=1),
        "outer": Grid(nodes=outer, ranks_per_node=1, blocks=outer),  # a communicator of its own
    }

    def nbytes(*levels: Level) -> float:
        return float(sum(layout.nbytes * copies for level, layout, copies in messages if level in levels))

    return Exchange(
        intra_bytes=nbytes("intra"),
        inter_bytes=nbytes("inter", "outer"),
        padding_bytes=sum(layout.padding_bytes * copies for _, layout, copies in messages),
        calls=tuple(Call(kind=kind, grid=over[hop]) for hop, _, copies in messages if copies > 0),
    )


def gradient_exchange(
    row_numel: int,
    *,
    grid: Grid,
    config: GradientConfig | None,
    dense_bytes: int = REDUCED_BYTES,
    sections: Sequence[Section] = (),
) -> Exchange:
    """Return one reduction of rows of `row_numel` values, after the start step of quantization.

    Args:
        config: None for full precision, which also applies to rows below its min_numel.
        dense_bytes: bytes per value of the rows.
        sections: sections of the row; () for one.
    """
    if grid.size == 1 or not (row_numel or sections):
        return Exchange()
    if config is None or row_numel < config.min_numel:
        return ring(row_numel * dense_bytes, grid=grid, kind="reduce")
    hops = [(level, size) for level, size in grid.levels.items() if size > 1]
    # Rows in a message: those of the receiver and of the ranks that it forwards to.
    rows_in = {level: grid.size // (grid.apart(level) * size) for level, size in hops}
    parts = sections or whole_row(row_numel)
    lengths = [part.numel for part in parts]
    messages: list[tuple[Level, JointLayout, int]] = []
    buffers, sent = [], dict.fromkeys(rows_in, 0)
    for chosen in cut_into_chunks(lengths, config=config, grid=grid):
        pieces = [(parts[index], place.stop - place.start) for index, place in chosen]
        in_use = 0
        for level, size in hops:
            bits, group_size = _settings(config, level)
            layout = _message(pieces, bits=bits, group_size=group_size, rows=rows_in[level])
            messages.append((level, layout, size - 1))
            sent[level] += size * layout.nbytes
            in_use += size * layout.nbytes
        buffers.append(2 * in_use)
    # Chunks alternate between the buffers, which have the size of the largest chunk's messages.
    turns = [buffers[turn::CHUNKS_UNDER_WAY] for turn in range(CHUNKS_UNDER_WAY)]
    # Each hop has a kernel in front that writes its messages, and the next kernel reads them.
    rows, values = dense_bytes * grid.size * sum(lengths), sum(lengths)
    (first, _), (last, senders) = hops[0], hops[-1]
    work = [_quantize(rows + sent[first], bits=_settings(config, first)[0], values=values * grid.size)]
    for (before, received), (level, size) in pairwise(hops):
        work.append(
            Work(
                operator="reduce and requantize",
                moved_bytes=float(sent[before] + sent[level]),
                values=size * rows_in[level] * values,
                messages=received,
            )
        )
    moved = float(REDUCED_BYTES * values + sent[last])
    work.append(Work(operator="reduce", moved_bytes=moved, values=values, messages=senders))
    return replace(
        _send(messages, kind="all-to-all", grid=grid),
        chunks=max(1, len(buffers)),
        work=tuple(work),
        buffer_bytes=sum(max(turn) for turn in turns if turn),
    )


def _settings(config: GradientConfig, level: Level) -> tuple[Bits, int]:
    """Return the bits and the group size of a level."""
    if level == "intra":
        return config.intra_bits, config.intra_group_size
    return config.inter_bits, config.inter_group_size


def _quantize(moved: float, *, bits: Bits, values: int) -> Work:
    fits_4 = bits is not None and bits != 8
    return Work(
        operator="quantize to 4 bits" if fits_4 else "quantize to 8 bits", moved_bytes=moved, values=values
    )


def all_reduce_exchange(
    numel: int,
    *,
    grid: Grid,
    config: GradientConfig | None,
    dense_bytes: int = REDUCED_BYTES,
    sections: Sequence[Section] = (),
) -> Exchange:
    """Return one all-reduce of `numel` values over replicas; arguments as for `gradient_exchange`.

    Uses full precision if a rank's part is below min_numel.
    """
    g, n, b = grid.ranks_per_node, grid.nodes, grid.blocks
    if grid.size == 1 or numel == 0:
        return Exchange()
    if config is None or not is_long_enough(numel, ranks=grid.size, config=config):
        return ring(numel * dense_bytes / grid.size, grid=grid, kind="all-reduce")
    count = piece_count(grid)
    pieces = []
    for section in sections or whole_row(numel):
        _, length = piece_stride_and_length(section.numel, pieces=count, unit=section.unit)
        pieces.append(replace(section, ranges=((0, length),)))
    over = grid if count == grid.size else Grid(nodes=1, ranks_per_node=g)
    reduced = gradient_exchange(
        0, grid=over, config=replace(config, min_numel=0), dense_bytes=dense_bytes, sections=pieces
    )
    # The summed pieces are gathered between blocks of nodes, between nodes, then inside each node.
    bits, group_size = _settings(config, "inter" if n > 1 else "intra")
    layout = _message([(piece, piece.numel) for piece in pieces], bits=bits, group_size=group_size)
    copies: dict[Level, int] = {"outer": b - 1, "inter": b * (n // b - 1), "intra": n * (g - 1)}
    gathered = _send([(level, layout, count) for level, count in copies.items()], kind="gather", grid=grid)
    values = sum(piece.numel for piece in pieces)
    restored = float(grid.size * layout.nbytes + REDUCED_BYTES * count * values)
    return Exchange(
        intra_bytes=reduced.intra_bytes + gathered.intra_bytes,
        inter_bytes=reduced.inter_bytes + gathered.inter_bytes,
        padding_bytes=reduced.padding_bytes + gathered.padding_bytes,
        calls=reduced.calls + gathered.calls,
        chunks=reduced.chunks,
        work=(
            *reduced.work,
            _quantize(layout.nbytes + REDUCED_BYTES * values, bits=bits, values=values),
            Work(operator="reduce", moved_bytes=restored, values=count * values, messages=1),
        ),
        buffer_bytes=reduced.buffer_bytes
        + layout.nbytes * (1 + b * (b > 1) + n * (n > 1) + grid.size * (g > 1)),
    )


def weight_refresh(
    row_numel: int, *, grid: Grid, config: WeightConfig | None, sections: Sequence[Section] = ()
) -> Exchange:
    """Return one refresh of the weight replica, once per step; sections () is a single one."""
    if config is None or grid.size == 1 or row_numel == 0:
        return Exchange()
    grid = replace(grid, blocks=1)  # weights cross nodes in one hop
    g, n = grid.ranks_per_node, grid.nodes
    gathers_all = is_full(config, grid=grid) and g > 1
    intra_copies = n * (g - 1) if gathers_all else 0
    if config.bits is None:
        return Exchange(
            intra_bytes=float(GATHERED_BYTES * row_numel * intra_copies),
            inter_bytes=float(GATHERED_BYTES * row_numel * (n - 1)),
            calls=tuple(
                Call(kind="gather", grid=over)
                for over in (replace(grid, ranks_per_node=1), replace(grid, nodes=1))[: 1 + gathers_all]
                if over.size > 1
            ),
            chunks=1,
        )
    parts = [(part, part.numel) for part in sections or whole_row(row_numel)]
    layout = _message(parts, bits=config.bits, group_size=config.group_size)
    rows = grid.size if gathers_all else n
    # Two bf16 rows are read for the difference; each row of the replica is read and written.
    moved = float((1 + rows) * (2 * GATHERED_BYTES * row_numel + layout.nbytes))
    return replace(
        _send([("inter", layout, n - 1), ("intra", layout, intra_copies)], kind="gather", grid=grid),
        chunks=1,
        work=(Work(operator="weights", moved_bytes=moved, values=(1 + rows) * row_numel),),
        buffer_bytes=layout.nbytes * (1 + n + (grid.size if gathers_all else 0)),
    )


def weight_gather(row_numel: int, *, grid: Grid, config: WeightConfig | None, times: int = 1) -> Exchange:
    """Return `times` gathers of the weights; a step has one or two per micro batch."""
    if grid.size == 1:
        return Exchange()
    if config is None:
        return ring(GATHERED_BYTES * row_numel, grid=grid, times=times)
    if is_full(config, grid=grid):
        return Exchange()
    sent = GATHERED_BYTES * row_numel * grid.nodes * (grid.ranks_per_node - 1)
    calls = (Call(kind="gather", grid=Grid(nodes=1, ranks_per_node=grid.ranks_per_node), times=times),)
    return Exchange(intra_bytes=float(sent * times), calls=calls, chunks=1)


def is_full(config: WeightConfig, *, grid: Grid) -> bool:
    """Return whether every rank has every row of the replica."""
    return config.replica == "full" or grid.ranks_per_node == 1


@dataclass(frozen=True, kw_only=True)
class GroupTraffic:
    """Exchanges of one rank and parameter group in a step."""

    group: ShardedGroup
    row_numel: int
    trained_numel: int
    """Trained values among row_numel."""
    weights: WeightConfig | None
    """Settings that apply on these ranks; None for full precision."""
    gradients: Exchange
    all_reduce: Exchange
    """All-reduce of gradients over the replicas of HSDP."""
    refresh: Exchange
    gathers: Exchange
    gathers_in_backward: bool
    """Whether half of the gathers are in backward."""

    @property
    def exchanges(self) -> tuple[Exchange, Exchange, Exchange, Exchange]:
        return self.gradients, self.all_reduce, self.refresh, self.gathers


def group_traffic(
    group: ShardedGroup,
    *,
    grid: Grid,
    config: SDP4BitConfig,
    replicas: Grid = ALONE,
    accumulation: int = 1,
    dense_bytes: int = REDUCED_BYTES,
    least_padding: bool = False,
) -> GroupTraffic:
    """Return a group's traffic in a steady-state step, with one gradient reduction after the last micro
    batch.

    Args:
        grid: ranks that shard the group.
        replicas: ranks with the same shard, which sum its gradients (HSDP).
        accumulation: micro batches per step; FSDP2 gathers the weights again for each.
        dense_bytes: bytes per gradient in the rows that are reduced.
        least_padding: shard parameters along the dimension with the least padding, see `least_padded_dim`.
    """
    row, trained = (
        group.row_numel(ranks=grid.size, least_padding=least_padding, trained_only=only)
        for only in (False, True)
    )
    weights, gradients = config.weights, config.gradients
    if weights is not None and not weights.applies_to(nodes=grid.nodes):
        weights = None
    if gradients is not None and not gradients.applies_to(nodes=max(grid.nodes, replicas.nodes)):
        gradients = None
    if group.is_flat and weights is not None:
        # A flat buffer stays gathered, so its replica is full.
        weights = replace(weights, replica="full")

    def sections(unit: int, *, is_refresh: bool = False) -> tuple[Section, ...]:
        if not config.separate_parameters or group.is_flat:
            return whole_row(trained)
        cut = group.refreshed_sections if is_refresh else group.sections
        return cut(ranks=grid.size, unit=unit, least_padding=least_padding)

    # The sections of a row differ for its reduction, its sum over replicas, and its refresh.
    reduced, summed = (
        sections(group_unit(gradients or GradientConfig(), grid=each)) for each in (grid, replicas)
    )
    refreshed = sections(BLOCK if weights is None else weights.group_size, is_refresh=True)
    is_freed = group.freed_after_forward and not group.is_flat
    gathers = 1 if group.is_flat else accumulation * (2 if is_freed else 1)
    return GroupTraffic(
        group=group,
        row_numel=row,
        trained_numel=trained,
        weights=weights,
        gradients=gradient_exchange(
            trained, grid=grid, config=gradients, dense_bytes=dense_bytes, sections=reduced
        ),
        all_reduce=all_reduce_exchange(
            trained, grid=replicas, config=gradients, dense_bytes=dense_bytes, sections=summed
        ),
        refresh=weight_refresh(trained, grid=grid, config=weights, sections=refreshed),
        gathers=weight_gather(row, grid=grid, config=weights, times=gathers),
        gathers_in_backward=is_freed,
    )
