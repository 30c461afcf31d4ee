"""Two-level quantized reduce-scatter, TLq-HS (paper section 3.2, algorithm 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdp4bit.collectives.errors import PLACES
from sdp4bit.collectives.exchange import GroupExchange, MessageExchange, PendingExchange, Use
from sdp4bit.collectives.pipeline import group_unit, slice_places
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import WHOLE, Section, split_messages, whole_row
from sdp4bit.collectives.topology import Topology
from sdp4bit.config import GradientConfig, Rounding
from sdp4bit.quantization import ops
from sdp4bit.quantization.hadamard import INVERSE_FACTOR, Hadamard
from sdp4bit.quantization.layout import BLOCK, FULL_PRECISION, JointLayout, MessageLayout, round_up
from sdp4bit.quantization.random import RoundingKey, Stage, derive_keys, draw_signs, pack_stream
from sdp4bit.traffic import Level, TrafficCounter


@dataclass(frozen=True, kw_only=True)
class _Hop:
    """One all-to-all: among whom, and what its messages look like."""

    level: Level
    stage: Stage
    size: int
    own: int
    """Number of this rank among them."""
    bits: int | None
    group_size: int
    rounding: Rounding

    def layout(self, numel: int, *, parts: int, section: Section = WHOLE) -> MessageLayout:
        return section.layout(numel, bits=self.bits, group_size=self.group_size, parts=parts)


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """A section of the rows of all ranks that are reduced."""

    section: Section
    rows: Tensor
    """[size, m], row r for group rank r; contiguous rows, any stride between them."""
    output: Tensor
    """[m], contiguous: receives this rank's row of the sum."""
    target: Tensor | None = None
    """[n], a row that the output is copied to at last, if it is not a part of it."""

    def finish(self) -> None:
        """Copy the output to its place."""
        if self.target is not None:
            self.section.put(self.output, self.target)


def _hops(topology: Topology, config: GradientConfig) -> list[_Hop]:
    hops = []
    if topology.ranks_per_node > 1:
        hops.append(
            _Hop(
                level="intra",
                stage=Stage.INTRA,
                size=topology.ranks_per_node,
                own=topology.local_rank,
                bits=config.intra_bits,
                group_size=config.intra_group_size,
                rounding=config.intra_rounding,
            )
        )
    if topology.nodes > 1:
        hops.append(
            _Hop(
                level="inter",
                stage=Stage.INTER,
                size=topology.nodes,
                own=topology.node,
                bits=config.inter_bits,
                group_size=config.inter_group_size,
                rounding=config.inter_rounding,
            )
        )
    return hops


def as_dither(rounding: RoundingKey | None, *, row: int = 0) -> RoundingKey | None:
    """Return the key by which the receiver of rows from this one on takes off the dither of all senders.

    Args:
        rounding: what this rank sends by.
    """
    if rounding is None or not rounding.dither:
        return None
    return rounding._replace(first=rounding.first + row * rounding.row_stride, sender=0)


def count_nonfinite(messages: Tensor, layout: MessageLayout) -> Tensor:
    """Return how many groups of these messages, uint8 [m, nbytes], are not finite; with 32 bits, values."""
    if layout.bits == FULL_PRECISION:
        numbers = messages[:, : layout.scales_offset].view(torch.float32)
    else:
        numbers = messages[:, layout.scales_offset : layout.payload_bytes].view(torch.bfloat16)
    return numbers.isfinite().logical_not_().sum()


class QuantizedReduceScatter:
    """Reduces rows over a group of nodes x ranks_per_node ranks and leaves each rank its own row.

    Two levels if there are several nodes with several ranks each, else one: inside the node with the intra
    settings, or between nodes with the inter settings. A world of one copies.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        config: GradientConfig,
        seed: int,
        rank: int,
        bucket: int,
        traffic: TrafficCounter,
        scratch: Scratch,
        rank_step: int = 1,
        exchange: MessageExchange | None = None,
        name: str = "",
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            rank: numbers those whose gradients are summed, so that no two draw the same rounding bits.
            rank_step: how far apart the numbers of neighbours in the group are; by it ranks know which key
                those share whose dither they take off.
            bucket: number of the parameter group, for the same reason.
            scratch: message buffers, shared by the reductions that follow each other.
            exchange: how messages travel; by default through the topology's process groups.
            name: of the parameter group, for errors.
        """
        self._topology = topology
        self.configure(config)
        self._seed = seed
        self._rank = rank
        self._rank_step = rank_step
        self._bucket = bucket
        self._traffic = traffic
        self._exchange = exchange or GroupExchange(topology, scratch)
        self._what = f"quantized gradient reduce-scatter of {name or f'group {bucket}'}"

    def configure(self, config: GradientConfig) -> None:
        """Do the next reductions with these settings; all ranks change them between the same two."""
        self.config = config
        self._hops = _hops(self._topology, config)
        # Without a quantizer the transform would only add rounding errors.
        self._hadamard = config.hadamard and any(hop.bits is not None for hop in self._hops)
        self._random_signs = config.random_signs and self._hadamard

    def __call__(
        self,
        output: Tensor,
        input: Tensor,
        *,
        call: int,
        multiplier: float = 1.0,
        nonfinite: Tensor | None = None,
        sections: Sequence[Section] = (),
    ) -> None:
        """Reduce rows over all ranks to this rank's row of the sum, times the multiplier.

        Steps, for each slice of a row (`pipeline_chunks`):
        1. Hadamard transform and quantize each section, one message of all sections per rank of the node;
        2. all-to-all in the node;
        3. dequantize, sum over the node, requantize, one message per node;  4. all-to-all between nodes;
        5. dequantize, sum over nodes, inverse transform.
        Hops of different slices overlap: slice i + 1 is in step 2 while slice i is in step 4. The result does
        not depend on the number of slices, of which no more than three are under way at once.

        Args:
            output: [n], fp32, bf16 or fp16.
            input: [size * n] or [size, n] of contiguous rows, row r for group rank r; not changed.
            call: number of this reduction of the bucket since the start, the same on all ranks, for the
                rounding bits and the random signs.
            nonfinite: a scalar on the device, to which the number of quantization groups is added that came
                in with the last hop and are not finite; with 32 bits, the number of such values.
            sections: of a row, which together are all of it; () for one. The same on all ranks.

        Raises:
            ValueError: input is not size times as long as output.
        """
        slices = self.begin(
            output, input, call=call, multiplier=multiplier, nonfinite=nonfinite, sections=sections
        )
        self._run(slices, input.device)

    def reduce_parts(self, parts: Sequence[RowPart], *, call: int, nonfinite: Tensor | None = None) -> None:
        """Reduce sections that are not parts of one row; see a call for the rest."""
        self._run(self.begin_parts(parts, call=call, nonfinite=nonfinite), parts[0].rows.device)

    def _run(self, waiting: list[Iterator[None]], device: torch.device) -> None:
        under_way: list[Iterator[None]] = []
        while waiting or under_way:
            if waiting:
                under_way.insert(0, waiting.pop(0))
            # Newest first: each slice starts its next transfer before an older one is waited for.
            under_way = [reduction for reduction in under_way if next(reduction, _DONE) is not _DONE]

    def begin(
        self,
        output: Tensor,
        input: Tensor,
        *,
        call: int,
        multiplier: float = 1.0,
        nonfinite: Tensor | None = None,
        sections: Sequence[Section] = (),
        whole: bool = False,
    ) -> list[Iterator[None]]:
        """Return the reductions of the slices; each yields whenever a transfer of it is under way.

        The input is read before the first of these, the output written after the last. Arguments and errors
        are those of a call.

        Args:
            whole: there is one slice. Reductions of several rows, a step of each in turn and the oldest
                first, may then share message buffers.
        """
        topology, numel = self._topology, output.numel()
        if input.numel() != topology.size * numel:
            raise ValueError(
                f"reduce-scatter over {topology.size} ranks needs an input of {topology.size} x {numel} "
                f"values, got {input.numel()}"
            )
        if not self._hops:
            output.copy_(input if multiplier == 1.0 else input * multiplier)
            return []
        rows = input.view(topology.size, numel)
        parts = []
        for section in sections or whole_row(numel):
            is_view = len(section.ranges) == 1
            place = section.take(output) if is_view else output.new_empty(section.numel)
            target = None if is_view else output
            parts.append(RowPart(section=section, rows=section.take(rows), output=place, target=target))
        self._traffic.count_plain(numel * input.element_size())
        return self.begin_parts(parts, call=call, multiplier=multiplier, nonfinite=nonfinite, whole=whole)

    def begin_parts(
        self,
        parts: Sequence[RowPart],
        *,
        call: int,
        multiplier: float = 1.0,
        nonfinite: Tensor | None = None,
        whole: bool = False,
    ) -> list[Iterator[None]]:
        """Return the reductions of the slices of sections that are not parts of one row; see begin."""
        if not parts:
            return []
        lengths = [part.output.numel() for part in parts]
        places = [[(number, slice(0, numel)) for number, numel in enumerate(lengths)]]
        if not whole:
            nodes, ranks_per_node = self._topology.nodes, self._topology.ranks_per_node
            places = slice_places(lengths, config=self.config, nodes=nodes, ranks_per_node=ranks_per_node)
        overlaps = whole or len(places) > 1
        return [
            self._reduce_slice(
                index, [(parts[i], there) for i, there in chosen], call, multiplier, nonfinite, overlaps
            )
            for index, chosen in enumerate(places)
        ]

    def requantized(self, values: Tensor) -> Tensor:
        """Return, in fp32, what these values are after passing the quantizers of all hops, unsummed.

        Args:
            values: [n], a sample of a gradient, contiguous; quantized as one section, whatever it holds.
        """
        numel, first, *rest = values.numel(), *self._hops
        layout, hadamard = first.layout(numel, parts=1), self._transform(0)
        message = values.new_empty(1, layout.nbytes, dtype=torch.uint8)
        rounding = self._sample_key(first)
        rows = values.view(1, 1, numel)
        ops.hadamard_quantize(rows, out=message, layout=layout, hadamard=hadamard, rounding=rounding)
        for hop in rest:
            received, layout = layout, hop.layout(numel, parts=1)
            sent = values.new_empty(1, layout.nbytes, dtype=torch.uint8)
            dither, rounding = as_dither(rounding), self._sample_key(hop)
            ops.dequantize_reduce_quantize(
                message, received=received, out=sent, sent=layout, rounding=rounding, dither=dither
            )
            message = sent
        result = torch.empty(numel, dtype=torch.float32, device=values.device)
        factor = INVERSE_FACTOR if hadamard else 1.0
        ops.dequantize_reduce_hadamard(
            message,
            out=result,
            layout=layout,
            hadamard=hadamard,
            multiplier=factor,
            dither=as_dither(rounding),
        )
        return result

    def _sample_key(self, hop: _Hop) -> RoundingKey | None:
        """Return the key for a sample, which is its own sender."""
        if hop.rounding == "nearest":
            return None
        stream = pack_stream(step=0, bucket=0, stage=hop.stage, rank=0)
        return RoundingKey(*derive_keys(self._seed, stream), dither=hop.rounding == "dither")

    @property
    def bits(self) -> int | None:
        """Bits of a value on the last hop, which is the one between nodes if there are several."""
        return self._hops[-1].bits

    @property
    def group_unit(self) -> int:
        """The shortest range of values that divides no quantization group of either level."""
        topology = self._topology
        return group_unit(self.config, nodes=topology.nodes, ranks_per_node=topology.ranks_per_node)

    def _reduce_slice(
        self,
        index: int,
        pieces: list[tuple[RowPart, slice]],
        call: int,
        multiplier: float,
        nonfinite: Tensor | None,
        overlaps: bool,
    ) -> Iterator[None]:
        """Reduce these places of sections; yields whenever a transfer is under way.

        A section's random bits are numbered by its values' places in it, so slicing changes nothing.
        """
        first, *rest = self._hops
        topology, device = self._topology, pieces[0][0].rows.device
        calls = [part.section.call(call) for part, _ in pieces]
        hadamards = [self._transform(number) for number in calls]
        rounding: list[RoundingKey | None] = []
        sources, layouts = [], []
        for part, places in pieces:
            grid = part.rows.unflatten(0, (topology.nodes, topology.ranks_per_node))[..., places]
            by_destination = grid.transpose(0, 1) if first.level == "intra" else grid
            sources.append(by_destination)
            count, numel = by_destination.shape[1:]
            layouts.append(first.layout(numel, parts=count, section=part.section))
        layout = JointLayout(tuple(layouts))
        sent = self._buffer(first, "send", index, layout, device)
        for i, out in enumerate(split_messages(sent, layout)):
            rounding.append(self._rounding(first, calls[i], *pieces[i]))
            ops.hadamard_quantize(
                sources[i], out=out, layout=layouts[i], hadamard=hadamards[i], rounding=rounding[i]
            )
        received, transfer = self._start(first, sent, index, layout, overlaps)
        yield
        transfer.wait()

        came_by = first
        for hop in rest:
            before, messages = layout, split_messages(received, layout)
            layout = JointLayout(
                tuple(
                    hop.layout(each.numel, parts=1, section=part.section)
                    for each, (part, _) in zip(before.layouts, pieces, strict=True)
                )
            )
            sent = self._buffer(hop, "send", index, layout, device)
            for i, out in enumerate(split_messages(sent, layout)):
                dither = as_dither(rounding[i], row=came_by.own * before.layouts[i].parts)
                rounding[i] = self._rounding(hop, calls[i], *pieces[i])
                self._requantize(
                    messages[i],
                    before.layouts[i],
                    out,
                    layout.layouts[i],
                    rounding=rounding[i],
                    dither=dither,
                    place=(pieces[i][0].section.number, pieces[i][1].start),
                )
            came_by = hop
            received, transfer = self._start(hop, sent, index, layout, overlaps)
            yield
            transfer.wait()

        for i, messages_of_part in enumerate(split_messages(received, layout)):
            (part, places), own_layout = pieces[i], layout.layouts[i]
            if nonfinite is not None:
                nonfinite += count_nonfinite(messages_of_part, own_layout)
            ops.dequantize_reduce_hadamard(
                messages_of_part,
                out=part.output[places],
                layout=own_layout,
                hadamard=hadamards[i],
                multiplier=multiplier * INVERSE_FACTOR if hadamards[i] else multiplier,
                dither=as_dither(rounding[i], row=came_by.own * own_layout.parts),
            )
            if places.stop == part.output.numel():  # slices end in the order in which they begin
                part.finish()

    def _requantize(
        self,
        received: Tensor,
        layout: MessageLayout,
        sent: Tensor,
        summed: MessageLayout,
        *,
        rounding: RoundingKey | None,
        dither: RoundingKey | None,
        place: tuple[int, int],
    ) -> None:
        """Write the messages of a sum over the node's messages.

        Args:
            place: number of the section, and of the first value in it.
        """
        ops.dequantize_reduce_quantize(
            received, received=layout, out=sent, sent=summed, rounding=rounding, dither=dither
        )

    def _start(
        self, hop: _Hop, sent: Tensor, index: int, layout: JointLayout, overlaps: bool
    ) -> tuple[Tensor, PendingExchange]:
        received = self._buffer(hop, "receive", index, layout, sent.device)
        transfer = self._exchange.start(
            received,
            sent,
            level=hop.level,
            index=index,
            overlaps=overlaps,
            what=f"{self._what}, all-to-all {PLACES[hop.level]}",
        )
        self._traffic.count_messages(layout, level=hop.level, peers=hop.size - 1)
        return received, transfer

    def _buffer(self, hop: _Hop, use: Use, index: int, layout: JointLayout, device: torch.device) -> Tensor:
        return self._exchange.messages(hop.level, use, index, nbytes=layout.nbytes, device=device)

    def _rounding(self, hop: _Hop, call: int, part: RowPart, places: slice) -> RoundingKey | None:
        if hop.rounding == "nearest":
            return None
        rank, dither = self._rank, hop.rounding == "dither"
        if dither:
            # Ranks whose messages meet share a key, so that their receiver can draw it: that of the first.
            apart = 1 if hop.level == "intra" else self._topology.ranks_per_node
            rank -= hop.own * apart * self._rank_step
        stream = pack_stream(step=call, bucket=self._bucket, stage=hop.stage, rank=rank)
        keys = derive_keys(self._seed, stream)
        stride = round_up(part.output.numel(), BLOCK)
        return RoundingKey(*keys, first=places.start, row_stride=stride, dither=dither, sender=hop.own)

    def _transform(self, call: int) -> Hadamard | None:
        if not self._hadamard:
            return None
        return Hadamard(draw_signs(self._seed, step=call, bucket=self._bucket) if self._random_signs else 0)


_DONE = object()
