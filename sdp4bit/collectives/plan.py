"""Plans: the hops, chunks and messages of one collective over one row. Without torch.

A plan is made once for a row, its ranks and the settings, and is run in every step. Its bytes, buffers and
kernel launches follow from it. The counters of traffic, `explain()`, `sdp4bit plan` and simulated ranks read
them here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Generic, Literal, NamedTuple, TypeVar

from sdp4bit.collectives.chunks import CHUNKS_UNDER_WAY, cut_into_chunks
from sdp4bit.collectives.sections import Range, Section, common_ranges, other_ranges
from sdp4bit.config import GradientConfig, Rounding, WeightConfig
from sdp4bit.quantization.formats import BLOCK, Bits
from sdp4bit.quantization.layout import MessageLayout, message_layout, round_up
from sdp4bit.traffic import PLACES, Grid, Level, Traffic

MOST_PLANS = 64
"""Plans that a collective keeps. A row's length varies with the parameters that have a gradient."""


@dataclass(frozen=True, eq=False)
class Message:
    """Where the codes and scales of successive fields lie in a buffer; each field is aligned."""

    layouts: tuple[MessageLayout, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.layouts)

    @cached_property
    def padding_bytes(self) -> float:
        """See MessageLayout."""
        return math.fsum(layout.padding_bytes for layout in self.layouts)

    @cached_property
    def places(self) -> tuple[slice, ...]:
        """Byte ranges of the fields."""
        ends = tuple(accumulate(layout.nbytes for layout in self.layouts))
        return tuple(slice(start, end) for start, end in pairwise((0, *ends)))


def one_of_each_format(messages: Iterable[Message]) -> tuple[MessageLayout, ...]:
    """Return a layout of each format in messages, by which a back end is chosen."""
    return tuple({layout.format.name: layout for each in messages for layout in each.layouts}.values())


@dataclass(frozen=True, eq=False)
class Transfer:
    """The messages that a rank sends in one all-to-all or all-gather."""

    kind: Literal["all-to-all", "all-gather"]
    level: Level
    message: Message
    peers: int
    copies: int = 1  # messages to each peer

    @cached_property
    def nbytes(self) -> int:
        return self.message.nbytes * self.copies * self.peers

    @cached_property
    def padding_bytes(self) -> float:
        return self.message.padding_bytes * self.copies * self.peers


def _launches(sections: Sequence[Section], message: Message) -> int:
    """Return the launches of an operator for sections with a field each of a message.

    Sections of a kind share one: of a format and group size, read where they are or by their blocks.
    """
    kinds = {
        (layout.format.name, layout.group_size, len(section.ranges) > 1)
        for section, layout in zip(sections, message.layouts, strict=False)
    }
    return len(kinds)


class Launch(NamedTuple):
    """Launches of one operator."""

    operator: str  # of `quantization.ops`
    launches: int
    values: int  # values of rows that are read or written, or sums that are requantized
    message_bytes: int  # bytes of messages that are read or written
    terms: int = 1  # messages that are added to each value
    bits: Bits = None  # of the messages that are written


class Step(NamedTuple):
    """Kernels of a plan, and the transfers that follow them."""

    launch: Launch
    transfers: tuple[Transfer, ...] = ()


class Plan(ABC):
    """One collective over one row."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The collective, its values and its ranks."""

    @property
    @abstractmethod
    def steps(self) -> tuple[Step, ...]:
        """Kernels and transfers in the order in which they run; those of all chunks together."""

    @property
    @abstractmethod
    def buffer_bytes(self) -> int:
        """Bytes of the message buffers in use at the same time."""

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(each for step in self.steps for each in step.transfers)

    @property
    def launches(self) -> int:
        """Kernels of the library; a transfer has its own."""
        return sum(step.launch.launches for step in self.steps)

    @property
    def sent(self) -> Traffic:
        """The bytes that this rank sends."""
        inside = [each for each in self.transfers if each.level == "intra"]
        between = [each for each in self.transfers if each.level != "intra"]
        return Traffic(
            intra_bytes=sum(each.nbytes for each in inside),
            inter_bytes=sum(each.nbytes for each in between),
            padding_bytes=sum(each.padding_bytes for each in self.transfers),
            collectives=len(self.transfers),
        )

    def __str__(self) -> str:
        lines = [self.title]
        for number, (launch, transfers) in enumerate(self.steps, start=1):
            times = f"{launch.launches} launches" if launch.launches > 1 else "1 launch"
            terms = f", {launch.terms} messages each" if launch.terms > 1 else ""
            lines.append(f"  {number}. {launch.operator}: {times}, {launch.values:,} values{terms}")
            for level in dict.fromkeys(each.level for each in transfers):
                here = [each for each in transfers if each.level == level]
                count = sum(each.peers * each.copies for each in here)
                coded = ", ".join(dict.fromkeys(_coded(one) for each in here for one in each.message.layouts))
                nbytes = sum(each.nbytes for each in here)
                messages = f"{count} messages" if count > 1 else "1 message"
                lines.append(f"     {here[0].kind} {PLACES[level]}: {messages}, {nbytes:,} B, {coded}")
        sent = self.sent
        lines.append(
            f"  sent: {sent.intra_bytes:,.0f} B inside the node, {sent.inter_bytes:,.0f} B between nodes; "
            f"{self.launches} launches; {self.buffer_bytes:,} B of buffers"
        )
        return "\n".join(lines)


def _coded(layout: MessageLayout) -> str:
    name = layout.format.name
    return f"{name}/{layout.group_size}" if layout.format.has_scales else name


P = TypeVar("P", bound=Plan)


class Plans(Generic[P]):
    """The plans of one collective, each made at the first use of a row."""

    def __init__(self) -> None:
        self.last: P | None = None
        """The plan of the last row."""
        self._known: dict[tuple[object, ...], tuple[object, P]] = {}

    def of(self, sections: tuple[Section, ...], *key: object, make: Callable[[], P]) -> P:
        """Return the plan of a row.

        Args:
            sections: those that make up the row. Found by identity: comparing hundreds of them would cost
                more than a plan saves.
            key: the other values that the plan depends on and that may change.
        """
        place = (id(sections), *key)
        known = self._known.get(place)
        if known is None:
            if len(self._known) >= MOST_PLANS:
                self._known.pop(next(iter(self._known)))  # the oldest
            # With the sections, whose identity stays theirs as long as they live.
            known = self._known[place] = sections, make()
        self.last = known[1]
        return known[1]


# -- reduce-scatter ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One all-to-all: its ranks and the settings of its messages."""

    level: Level
    size: int  # ranks that exchange messages
    apart: int  # difference between the group ranks of successive ones
    rows: int  # in a message: those of the receiver and of the ranks that it forwards to
    bits: Bits
    group_size: int
    rounding: Rounding

    def place(self, row: int) -> int:
        """Return the index of a group rank among those that it exchanges messages with."""
        return row // self.apart % self.size

    def layout(self, numel: int, *, parts: int = 1, section: Section | None = None) -> MessageLayout:
        """Return the layout of values of a section."""
        section = section or Section()
        return section.layout(numel, bits=self.bits, group_size=self.group_size, parts=parts)


def hops_of(grid: Grid, config: GradientConfig) -> tuple[Hop, ...]:
    """Return the all-to-alls of a reduction in order; none for a world of one."""
    return tuple(
        Hop(
            level=level,
            size=size,
            apart=grid.apart(level),
            rows=grid.size // (grid.apart(level) * size),
            bits=config.intra_bits if level == "intra" else config.inter_bits,
            group_size=config.intra_group_size if level == "intra" else config.inter_group_size,
            rounding=config.intra_rounding if level == "intra" else config.inter_rounding,
        )
        for level, size in grid.levels.items()
        if size > 1
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Slice:
    """Values of one section in a chunk."""

    index: int  # of the section in the row
    section: Section
    start: int  # number of the first value in the section, a multiple of 32
    numel: int
    stride: int
    """Difference between the numbers of successive rows' values, for the random bits. It is that of the
    section, so that the result does not depend on the chunks."""

    @property
    def is_section(self) -> bool:
        """Whether these are all values of the section."""
        return self.numel == self.section.numel


@dataclass(frozen=True, eq=False, kw_only=True)
class Chunk:
    """Slices of sections that share a message per destination and hop."""

    index: int  # chunks alternate between message buffers
    slices: tuple[Slice, ...]
    transfers: tuple[Transfer, ...]  # one per hop
    overlaps: bool  # whether the current stream gets other work before it waits for a transfer


@dataclass(frozen=True, eq=False, kw_only=True)
class ReducePlan(Plan):
    """A quantized reduce-scatter (paper, algorithm 3)."""

    grid: Grid
    hops: tuple[Hop, ...]
    sections: tuple[Section, ...]
    chunks: tuple[Chunk, ...]
    layouts: tuple[MessageLayout, ...]  # one of each format

    @property
    def title(self) -> str:
        numel, chunks = sum(each.numel for each in self.sections), len(self.chunks)
        text = f"reduce-scatter of rows of {numel:,} values over {self.grid.describe()} ranks"
        return text + (f" in {chunks} chunks" if chunks > 1 else "")

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        if not self.hops:
            return ()
        numel = sum(each.numel for each in self.sections)
        kernels = sum(
            _launches([each.section for each in chunk.slices], chunk.transfers[0].message)
            for chunk in self.chunks
        )
        sent = [tuple(chunk.transfers[i] for chunk in self.chunks) for i in range(len(self.hops))]
        nbytes = [
            hop.size * sum(each.message.nbytes for each in transfers)
            for hop, transfers in zip(self.hops, sent, strict=True)
        ]
        first, last = self.hops[0], self.hops[-1]
        launch = Launch("hadamard_quantize", kernels, numel * self.grid.size, nbytes[0], bits=first.bits)
        steps = [Step(launch, sent[0])]
        for i, (before, hop) in enumerate(pairwise(self.hops), start=1):
            launch = Launch(
                "dequantize_reduce_quantize",
                kernels,
                numel * hop.size * hop.rows,
                nbytes[i - 1] + nbytes[i],
                terms=before.size,
                bits=hop.bits,
            )
            steps.append(Step(launch, sent[i]))
        steps.append(Step(Launch("dequantize_reduce_hadamard", kernels, numel, nbytes[-1], terms=last.size)))
        return tuple(steps)

    @property
    def buffer_bytes(self) -> int:
        """Chunks alternate between buffers, which have the size of the largest chunk's messages.

        Each hop has one to send and one to receive.
        """
        sizes = [hop.size for hop in self.hops]
        used = [
            2 * sum(size * each.message.nbytes for size, each in zip(sizes, chunk.transfers, strict=True))
            for chunk in self.chunks
        ]
        return sum(max(used[turn::CHUNKS_UNDER_WAY], default=0) for turn in range(CHUNKS_UNDER_WAY))


@lru_cache(maxsize=4096)
def plan_reduce(
    sections: tuple[Section, ...], *, grid: Grid, config: GradientConfig, in_one_chunk: bool = False
) -> ReducePlan:
    """Plan the reduction of rows that are made up of these sections, all positive.

    Groups with equal rows share a plan.
    """
    hops = hops_of(grid, config)
    lengths = [section.numel for section in sections]
    cut = [[(index, slice(0, numel)) for index, numel in enumerate(lengths)]] if sections else []
    if not in_one_chunk:
        cut = cut_into_chunks(lengths, config=config, grid=grid)
    chunks = []
    for index, chosen in enumerate(cut):
        slices = tuple(
            Slice(
                index=number,
                section=sections[number],
                start=place.start,
                numel=place.stop - place.start,
                stride=round_up(lengths[number], BLOCK),
            )
            for number, place in chosen
        )
        transfers = tuple(
            Transfer(
                "all-to-all",
                hop.level,
                Message(tuple(hop.layout(p.numel, parts=hop.rows, section=p.section) for p in slices)),
                hop.size - 1,
            )
            for hop in hops
        )
        overlaps = in_one_chunk or len(cut) > 1
        chunks.append(Chunk(index=index, slices=slices, transfers=transfers, overlaps=overlaps))
    layouts = one_of_each_format(each.message for chunk in chunks for each in chunk.transfers)
    return ReducePlan(grid=grid, hops=hops, sections=sections, chunks=tuple(chunks), layouts=layouts)


# -- refresh of a weight replica --------------------------------------------------------------------------


def holds_all_rows(config: WeightConfig, *, grid: Grid) -> bool:
    """Return whether every rank stores every row of the replica."""
    return config.replica == "full" or grid.ranks_per_node == 1


@dataclass(frozen=True, eq=False, kw_only=True)
class RefreshPlan(Plan):
    """A refresh by quantized differences (paper, algorithm 2)."""

    grid: Grid
    rows: int  # of the replica on one rank
    sections: tuple[Section, ...]
    clips: tuple[float, ...]  # of the sections, see `ops.subtract_quantize`
    exact: tuple[Range, ...]  # ranges that are sent as they are, because they hold bits
    message: Message  # a field per section, then one for all exact ranges
    layouts: tuple[MessageLayout, ...]  # one of each format
    inter: Transfer
    intra: Transfer

    @property
    def title(self) -> str:
        numel = sum(each.numel for each in self.sections)
        exact = sum(end - start for start, end in self.exact)
        text = f"refresh of rows of {numel:,} values over {self.grid.describe()} ranks"
        return text + (f", and of {exact:,} values as bits" if exact else "")

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        numel, rows = sum(each.numel for each in self.sections), self.rows
        kernels = _launches(self.sections, self.message)
        bits = self.message.layouts[0].bits if self.message.layouts else None
        transfers = tuple(each for each in (self.inter, self.intra) if each.nbytes)
        return (
            Step(Launch("subtract_quantize", kernels, numel, self.message.nbytes, bits=bits), transfers),
            Step(Launch("dequantize_add", kernels, rows * numel, rows * self.message.nbytes)),
        )

    @property
    def buffer_bytes(self) -> int:
        received = self.grid.size if self.intra.nbytes else 0
        return self.message.nbytes * (1 + self.grid.nodes + received)


def clip_of(section: Section, config: WeightConfig) -> float:
    """Return the clip of a section of weights: none in 8 bits, which fine sections have."""
    return 1.0 if section.is_fine else config.effective_clip


def plan_refresh(
    sections: tuple[Section, ...],
    *,
    grid: Grid,
    config: WeightConfig,
    numel: int,
    ranges: Sequence[Range] | None = None,
    values: Sequence[Range] | None = None,
    value_bytes: int = 2,
) -> RefreshPlan:
    """Plan the refresh of ranges of a row [numel]; its plan has neither sections nor exact ranges if empty.

    Args:
        ranges: ranges of complete parameters that may have changed; None for the entire row.
        values: ranges that hold numbers; the others hold bits. None for the entire row.
        value_bytes: bytes of a value of the replica.
    """
    exact: list[Range] = []
    if values is not None:
        ranges = [(0, numel)] if ranges is None else ranges
        exact = common_ranges(other_ranges(values, numel), ranges)
        ranges = common_ranges(values, ranges)
    if ranges is not None:
        within = (section.within(ranges) for section in sections)
        sections = tuple(section for section in within if section.ranges)
    layouts = [each.layout(each.numel, bits=config.bits, group_size=config.group_size) for each in sections]
    if exact:
        nbytes = sum(end - start for start, end in exact) * value_bytes
        # In words of 32 bits, like a field in full precision.
        layouts.append(message_layout(numel=-(-nbytes // 4), bits=None, group_size=BLOCK))
    grid = replace(grid, blocks=1)  # weights cross nodes in one hop
    message, holds_all = Message(tuple(layouts)), holds_all_rows(config, grid=grid)
    peers = grid.ranks_per_node - 1 if holds_all else 0
    return RefreshPlan(
        grid=grid,
        rows=grid.size if holds_all else grid.nodes,
        sections=sections,
        clips=tuple(clip_of(each, config) for each in sections),
        exact=tuple(exact),
        message=message,
        layouts=one_of_each_format([message]),
        inter=Transfer("all-gather", "inter", message, grid.nodes - 1),
        intra=Transfer("all-gather", "intra", message, peers, grid.nodes),
    )


# -- all-reduce -------------------------------------------------------------------------------------------


def piece_count(grid: Grid) -> int:
    """Return the number of pieces of a tensor in an all-reduce.

    Each rank sums one piece, quantizes the sum and sends it to the others. With two nodes both have the same
    pieces, one per local rank, and exchange the sums of their node. This takes the same bytes and rounds
    gradients to few bits once instead of twice. With N nodes it would take N / 2 times the bytes.
    """
    return grid.ranks_per_node if grid.nodes == 2 else grid.size


def piece_stride_and_length(numel: int, *, pieces: int, unit: int = BLOCK) -> tuple[int, int]:
    """Return the stride and the length of the pieces of a tensor.

    Pieces begin at multiples of `unit`, a multiple of 32, and the last one ends with the tensor. To avoid
    copies and padding, neighbors overlap by fewer than `unit` values per piece. Overlapping values are
    reduced twice, and those of the later piece are the result: a piece ends where the next one begins.
    """
    stride = numel // pieces // unit * unit
    return stride, numel - stride * (pieces - 1)


def is_long_enough(numel: int, *, ranks: int, config: GradientConfig) -> bool:
    """Return whether each rank's part of this many values is long enough to be quantized."""
    return not config.exempts(numel=numel // ranks)


@dataclass(frozen=True, eq=False, kw_only=True)
class AllReducePlan(Plan):
    """A quantized all-reduce: the reduction of a piece per rank, and the gather of the sums."""

    grid: Grid
    sections: tuple[Section, ...]
    count: int  # pieces of each section; see `piece_count`
    strides: tuple[int, ...]  # between the pieces of each section
    lengths: tuple[int, ...]  # of a piece of each section
    reduce: ReducePlan
    message: Message  # a rank's pieces of all sections
    layouts: tuple[MessageLayout, ...]  # one of each format
    gathers: tuple[Transfer, ...]  # from the outermost level

    @property
    def title(self) -> str:
        numel = sum(each.numel for each in self.sections)
        return f"all-reduce of {numel:,} values over {self.grid.describe()} ranks in {self.count} pieces"

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        numel, message = sum(self.lengths), self.message
        kernels = _launches(self.sections, message)
        bits = message.layouts[0].bits if message.layouts else None
        copies = self.grid.size // self.count
        return (
            *self.reduce.steps,
            Step(Launch("hadamard_quantize", kernels, numel, message.nbytes, bits=bits), self.gathers),
            Step(
                Launch(
                    "dequantize_reduce_pieces",
                    kernels,
                    self.count * numel,
                    self.grid.size * message.nbytes,
                    terms=copies,
                )
            ),
        )

    @property
    def buffer_bytes(self) -> int:
        gathered, received = 1, 0
        for each in self.gathers:
            gathered *= each.peers + 1
            received += gathered
        return self.reduce.buffer_bytes + self.message.nbytes * (1 + received)


@lru_cache(maxsize=4096)
def plan_all_reduce(sections: tuple[Section, ...], *, grid: Grid, config: GradientConfig) -> AllReducePlan:
    """Plan the all-reduce of values that are made up of these sections."""
    count = piece_count(grid)
    cut = [piece_stride_and_length(each.numel, pieces=count, unit=each.unit) for each in sections]
    pieces = tuple(
        replace(section, ranges=((0, length),)) for section, (_, length) in zip(sections, cut, strict=True)
    )
    # With two nodes the reduction stays in each of them.
    over = grid if count == grid.size else Grid(nodes=1, ranks_per_node=count)
    is_between = grid.nodes > 1
    bits = config.inter_bits if is_between else config.intra_bits
    group_size = config.inter_group_size if is_between else config.intra_group_size
    message = Message(tuple(each.layout(each.numel, bits=bits, group_size=group_size) for each in pieces))
    gathers, arrived = [], 1
    for level, size in reversed(grid.levels.items()):
        if size > 1:
            gathers.append(Transfer("all-gather", level, message, size - 1, arrived))
        arrived *= size
    return AllReducePlan(
        grid=grid,
        sections=sections,
        count=count,
        strides=tuple(stride for stride, _ in cut),
        lengths=tuple(length for _, length in cut),
        reduce=plan_reduce(pieces, grid=over, config=config),
        message=message,
        layouts=one_of_each_format([message]),
        gathers=tuple(gathers),
    )
