"""Two-level quantized reduce-scatter, TLq-HS (paper section 3.2, algorithm 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sdp4bit.collectives.errors import PLACES
from sdp4bit.collectives.exchange import GroupExchange, PendingExchange, Use
from sdp4bit.collectives.pipeline import group_unit, slice_places
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import WHOLE, Section, split_messages, whole_row
from sdp4bit.collectives.topology import Topology
from sdp4bit.config import GradientConfig, Rounding
from sdp4bit.profiling import profiler_range
from sdp4bit.quantization import ops
from sdp4bit.quantization.formats import BLOCK, Bits
from sdp4bit.quantization.hadamard import INVERSE_FACTOR
from sdp4bit.quantization.layout import JointLayout, MessageLayout, round_up
from sdp4bit.quantization.random import RoundingKey, Stage, derive_keys, pack_stream
from sdp4bit.traffic import Level, TrafficCounter


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One all-to-all: its ranks and the settings of its messages."""

    level: Level
    stage: Stage
    size: int
    own: int  # index of this rank
    bits: Bits
    group_size: int
    rounding: Rounding

    def layout(self, numel: int, *, parts: int, section: Section = WHOLE) -> MessageLayout:
        return section.layout(numel, bits=self.bits, group_size=self.group_size, parts=parts)


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """One section of the rows to reduce."""

    section: Section
    rows: Tensor  # [size, m], row r for group rank r; contiguous rows, any stride between them
    output: Tensor  # [m], contiguous: receives this rank's row of the sum
    target: Tensor | None = None
    """[n], the row that `finish` copies the output to; None if the output is a view of it."""

    def finish(self) -> None:
        if self.target is not None:
            self.section.put(self.output, self.target)


def _hops(topology: Topology, config: GradientConfig) -> list[Hop]:
    hops = []
    if topology.ranks_per_node > 1:
        hops.append(
            Hop(
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
            Hop(
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
    """Return the key with which the receiver subtracts the dither of all senders, from this row on.

    Args:
        rounding: key with which this rank sends.
    """
    if rounding is None or not rounding.dither:
        return None
    return rounding.at_row(row)._replace(sender=0)


def _at_row(key: RoundingKey | None, row: int) -> RoundingKey | None:
    return key and key.at_row(row)


def _count_nonfinite_groups(values: Tensor, group_size: int) -> Tensor:
    bad = values.isfinite().logical_not_()
    full = bad.numel() // group_size * group_size
    return bad[:full].view(-1, group_size).any(1).sum() + bad[full:].any()


def count_nonfinite(messages: Tensor, layout: MessageLayout) -> Tensor:
    """Return the number of non-finite groups (in full precision: values) in messages, uint8 [m, nbytes]."""
    if layout.format.has_scales:
        numbers = messages[:, layout.scales_offset : layout.payload_bytes].view(torch.bfloat16)
    else:
        numbers = messages[:, : layout.scales_offset].view(torch.float32)
    return numbers.isfinite().logical_not_().sum()


class QuantizedReduceScatter:
    """Reduces rows over a group of nodes x ranks_per_node ranks; each rank receives its own row.

    Several nodes with several ranks each take two levels. Otherwise there is one level, with the intra
    settings inside a node or the inter settings between nodes. A world of one copies.
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
        exchange: GroupExchange | None = None,
        name: str = "",
    ) -> None:
        """Create a reduction; sends nothing.

        Args:
            rank: number of this rank's data, unique among the summed gradients; part of the key of the
                rounding bits.
            rank_step: difference between these numbers for neighbors in the group. Receivers derive the keys
                of their senders from it.
            bucket: number of the parameter group, also part of the key.
            scratch: message buffers, shared with other reductions.
            exchange: transport of messages; by default the topology's process groups.
            name: name of the parameter group, for errors and profiles.
        """
        self.topology = topology
        self.config = config
        self.hops = _hops(self.topology, config)
        # Without a quantizer the transform would only add rounding errors.
        self.hadamard = config.hadamard and any(hop.bits is not None for hop in self.hops)
        last = self.hops[-1] if self.hops else None
        self.exact_own = (
            config.exact_own and last is not None and last.level == "inter" and last.bits is not None
        )
        """Whether this node's part of the sum is not quantized on the hop between nodes."""
        self._seed = seed
        self._rank = rank
        self._rank_step = rank_step
        self.bucket = bucket
        self.traffic = traffic
        self.exchange = exchange or GroupExchange(topology, scratch)
        self.name = name or f"group {bucket}"

    @property
    def bits(self) -> Bits:
        """Bits of a value on the last hop, which is between nodes if there are several nodes."""
        return self.hops[-1].bits

    @property
    def group_unit(self) -> int:
        """The least common multiple of the group sizes of both levels."""
        topology = self.topology
        return group_unit(self.config, nodes=topology.nodes, ranks_per_node=topology.ranks_per_node)

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
        1. Hadamard-transform and quantize each section into one message per rank of the node.
        2. All-to-all in the node.
        3. Dequantize, sum over the node and requantize into one message per other node. Write the own node's
           part of the sum to the output, transformed back.
        4. All-to-all between nodes.
        5. Dequantize, sum over the other nodes, transform back, add to the output.

        Slices overlap: slice i + 1 is in step 2 while slice i is in step 4. At most three are in flight, and
        the result does not depend on their number.

        Args:
            output: [n], fp32, bf16 or fp16.
            input: [size * n] or [size, n] of contiguous rows, row r for group rank r, fp32, bf16 or fp16; not
                changed.
            call: number of this reduction of the bucket since the start, the same on all ranks; part of the
                key of the rounding bits.
            nonfinite: scalar on the device. Adds the number of non-finite quantization groups (with 32 bits:
                values) of the last hop and of the own node.
            sections: sections that make up the row, the same on all ranks; () for a single one.

        Raises:
            ValueError: input is not size times as long as output.
        """
        self._run(
            self.slices(
                output, input, call=call, multiplier=multiplier, nonfinite=nonfinite, sections=sections
            )
        )

    def reduce_parts(self, parts: Sequence[RowPart], *, call: int) -> None:
        """Reduce sections of different rows; see `__call__`."""
        self._run(self.slices_of_parts(parts, call=call))

    def _run(self, slices: Sequence[ReductionSlice]) -> None:
        """Advance every slice in flight by one step, until all have ended."""
        with profiler_range(f"sdp4bit::reduce_scatter ({self.name})"):
            for turn in range(len(slices) + len(self.hops) if slices else 0):
                # Newest slice first, so that its transfer starts before the stream waits for an older one.
                for step in range(len(self.hops) + 1):
                    if 0 <= turn - step < len(slices):
                        slices[turn - step].steps[step]()

    def slices(
        self,
        output: Tensor,
        input: Tensor,
        *,
        call: int,
        multiplier: float = 1.0,
        nonfinite: Tensor | None = None,
        sections: Sequence[Section] = (),
        whole: bool = False,
    ) -> list[ReductionSlice]:
        """Return the slices of a reduction, whose steps the caller runs; see `__call__`.

        The output may be this rank's row of the input.

        Args:
            whole: use one slice. Reductions of several rows may then share message buffers if the caller
                advances each by one step in turn, oldest first.
        """
        topology, numel = self.topology, output.numel()
        if input.numel() != topology.size * numel:
            raise ValueError(
                f"reduce-scatter over {topology.size} ranks needs an input of {topology.size} x {numel} "
                f"values, got {input.numel()}"
            )
        if not self.hops:
            output.copy_(input if multiplier == 1.0 else input * multiplier)
            return []
        rows = input.view(topology.size, numel)
        parts = []
        for section in sections or whole_row(numel):
            is_view = len(section.ranges) == 1
            place = section.take(output) if is_view else output.new_empty(section.numel)
            target = None if is_view else output
            parts.append(RowPart(section=section, rows=section.take(rows), output=place, target=target))
        self.traffic.count_plain(output.nbytes)
        return self.slices_of_parts(parts, call=call, multiplier=multiplier, nonfinite=nonfinite, whole=whole)

    def slices_of_parts(
        self,
        parts: Sequence[RowPart],
        *,
        call: int,
        multiplier: float = 1.0,
        nonfinite: Tensor | None = None,
        whole: bool = False,
    ) -> list[ReductionSlice]:
        """Return the slices of a reduction of sections of different rows; see `slices`."""
        if not parts:
            return []
        lengths = [part.output.numel() for part in parts]
        places = [[(number, slice(0, numel)) for number, numel in enumerate(lengths)]]
        if not whole:
            nodes, ranks_per_node = self.topology.nodes, self.topology.ranks_per_node
            places = slice_places(lengths, config=self.config, nodes=nodes, ranks_per_node=ranks_per_node)
        return [
            ReductionSlice(
                self,
                [(parts[i], there) for i, there in chosen],
                index=index,
                call=call,
                multiplier=multiplier,
                nonfinite=nonfinite,
                overlaps=whole or len(places) > 1,
            )
            for index, chosen in enumerate(places)
        ]

    def rounding_key(self, hop: Hop, call: int, part: RowPart, places: slice) -> RoundingKey | None:
        """Return this rank's key for rounding these places of a section at a hop; None for nearest."""
        if hop.rounding == "nearest":
            return None
        rank, dither = self._rank, hop.rounding == "dither"
        if dither:
            # Senders to the same receiver share the key of the first one, so that the receiver can derive it.
            apart = 1 if hop.level == "intra" else self.topology.ranks_per_node
            rank -= hop.own * apart * self._rank_step
        stream = pack_stream(step=call, bucket=self.bucket, stage=hop.stage, rank=rank)
        keys = derive_keys(self._seed, stream)
        stride = round_up(part.output.numel(), BLOCK)
        return RoundingKey(*keys, first=places.start, row_stride=stride, dither=dither, sender=hop.own)

    def requantized(self, values: Tensor) -> Tensor:
        """Return these values in fp32 as another node receives them through all hops, without a sum.

        Args:
            values: [n], a sample of a gradient, contiguous; quantized as one section.
        """
        numel, first, *rest = values.numel(), *self.hops
        layout, rounding = first.layout(numel, parts=1), self._sample_key(first)
        message = values.new_empty(1, layout.nbytes, dtype=torch.uint8)
        rows = values.view(1, 1, numel)
        ops.hadamard_quantize(rows, out=message, layout=layout, hadamard=self.hadamard, rounding=rounding)
        for hop in rest:
            received, layout = layout, hop.layout(numel, parts=1)
            sent = values.new_empty(1, layout.nbytes, dtype=torch.uint8)
            dither, rounding = as_dither(rounding), self._sample_key(hop)
            ops.dequantize_reduce_quantize(
                message, received=received, out=sent, sent=layout, rounding=rounding, dither=dither
            )
            message = sent
        result = torch.empty(numel, dtype=torch.float32, device=values.device)
        ops.dequantize_reduce_hadamard(
            message,
            out=result,
            layout=layout,
            hadamard=self.hadamard,
            multiplier=INVERSE_FACTOR if self.hadamard else 1.0,
            dither=as_dither(rounding),
        )
        return result

    def _sample_key(self, hop: Hop) -> RoundingKey | None:
        if hop.rounding == "nearest":
            return None
        stream = pack_stream(step=0, bucket=0, stage=hop.stage, rank=0)
        return RoundingKey(*derive_keys(self._seed, stream), dither=hop.rounding == "dither")


class ReductionSlice:
    """Parts of sections that share a message per destination and hop.

    Random bits are indexed by a value's place in its section, so the result does not depend on slicing.
    """

    def __init__(
        self,
        reduction: QuantizedReduceScatter,
        pieces: list[tuple[RowPart, slice]],
        *,
        index: int,
        call: int,
        multiplier: float,
        nonfinite: Tensor | None,
        overlaps: bool,
    ) -> None:
        """Create a slice; see QuantizedReduceScatter.__call__.

        Args:
            index: number of the slice in the row; slices alternate between message buffers.
            overlaps: whether the current stream gets other work before it waits for a transfer.
        """
        self._reduction = reduction
        self._pieces = pieces
        self._index = index
        self._calls = [part.section.call(call) for part, _ in pieces]
        self._multiplier = multiplier
        self._nonfinite = nonfinite
        self._overlaps = overlaps
        self._device = pieces[0][0].rows.device
        self._sums: list[Tensor] = []
        """Sums of the sections in fp32, initialized with the own node's part if that is not sent."""

    @property
    def steps(self) -> tuple[Callable[[], None], ...]:
        """The calls to make, in this order on all ranks; all but the last leave a transfer in flight."""
        # Not an attribute, because the reference cycle would keep the buffers until a garbage collection.
        two_levels = len(self._reduction.hops) > 1
        return (self.send, self.forward, self.finish) if two_levels else (self.send, self.finish)

    def send(self) -> None:
        """Transform and quantize all sections into one message per rank of the first hop; send them."""
        reduction, hop = self._reduction, self._reduction.hops[0]
        nodes, ranks_per_node = reduction.topology.nodes, reduction.topology.ranks_per_node
        sources = []
        for part, places in self._pieces:
            grid = part.rows.unflatten(0, (nodes, ranks_per_node))[..., places]
            sources.append(grid.transpose(0, 1) if hop.level == "intra" else grid)  # by destination
        layout = JointLayout(
            tuple(
                hop.layout(source.shape[2], parts=source.shape[1], section=part.section)
                for source, (part, _) in zip(sources, self._pieces, strict=True)
            )
        )
        sent = self._buffer(hop, "send", layout)
        rounding = self._rounding(hop)
        for i, out in enumerate(split_messages(sent, layout)):
            for others in self._others(hop):
                ops.hadamard_quantize(
                    sources[i][others],
                    out=out[others],
                    layout=layout.layouts[i],
                    hadamard=reduction.hadamard,
                    rounding=_at_row(rounding[i], others.start * layout.layouts[i].parts),
                )
            if self._keeps_own(hop):
                own = sources[i][hop.own, 0].float()
                torch.mul(own, self._multiplier, out=self._add_sum(i))
                out[hop.own].zero_()
        # Free the rows, which are as large as all gradients of the group.
        self._pieces = [(replace(part, rows=part.rows.new_empty(0)), places) for part, places in self._pieces]
        self._start(hop, sent, layout, rounding)

    def forward(self) -> None:
        """Sum over the node and requantize all sections into one message per node; send them."""
        intra, hop = self._reduction.hops
        self._transfer.wait()
        before, dithers = self._layout, self._dithers(intra)
        layout = JointLayout(
            tuple(
                hop.layout(each.numel, parts=1, section=part.section)
                for each, (part, _) in zip(before.layouts, self._pieces, strict=True)
            )
        )
        sent = self._buffer(hop, "send", layout)
        rounding = self._rounding(hop)
        received = split_messages(self._received, before)
        for i, out in enumerate(split_messages(sent, layout)):
            for others in self._others(hop):
                ops.dequantize_reduce_quantize(
                    received[i],
                    received=before.layouts[i],
                    out=out[others],
                    sent=layout.layouts[i],
                    rounding=_at_row(rounding[i], others.start),
                    dither=_at_row(dithers[i], others.start),
                    first_part=others.start,
                )
            if self._keeps_own(hop):
                ops.dequantize_reduce_hadamard(
                    received[i],
                    out=self._add_sum(i),
                    layout=before.layouts[i],
                    hadamard=self._reduction.hadamard,
                    multiplier=self._factor,
                    dither=_at_row(dithers[i], hop.own),
                    part=hop.own,
                )
                out[hop.own].zero_()
        self._start(hop, sent, layout, rounding)

    def finish(self) -> None:
        """Sum the messages of the last hop, transform back, and write the outputs."""
        reduction, exact_own = self._reduction, self._reduction.exact_own
        self._transfer.wait()
        dithers = self._dithers(reduction.hops[-1])
        for i, messages in enumerate(split_messages(self._received, self._layout)):
            (part, places), layout = self._pieces[i], self._layout.layouts[i]
            output = part.output[places]
            total = self._sums[i] if exact_own else output
            if self._nonfinite is not None:
                self._nonfinite += count_nonfinite(messages, layout)
                if exact_own:
                    self._nonfinite += _count_nonfinite_groups(total, layout.group_size)
            ops.dequantize_reduce_hadamard(
                messages,  # the own node's is zero if the total already has its part
                out=total,
                layout=layout,
                hadamard=reduction.hadamard,
                multiplier=self._factor,
                dither=dithers[i],
                accumulate=exact_own,
            )
            if total.dtype != output.dtype:
                output.copy_(total)
            if places.stop == part.output.numel():  # slices end in order
                part.finish()

    @property
    def _factor(self) -> float:
        return self._multiplier * INVERSE_FACTOR if self._reduction.hadamard else self._multiplier

    def _keeps_own(self, hop: Hop) -> bool:
        return self._reduction.exact_own and hop.level == "inter"

    def _others(self, hop: Hop) -> list[slice]:
        """Return the destinations of a hop that get quantized messages."""
        if not self._keeps_own(hop):
            return [slice(0, hop.size)]
        both = slice(0, hop.own), slice(hop.own + 1, hop.size)
        return [each for each in both if each.start < each.stop]

    def _add_sum(self, i: int) -> Tensor:
        """Return the tensor for a section's sum: the output if it is fp32, else a temporary."""
        part, places = self._pieces[i]
        output = part.output[places]
        self._sums.append(
            torch.empty_like(output, dtype=torch.float32) if output.dtype is not torch.float32 else output
        )
        return self._sums[i]

    def _start(self, hop: Hop, sent: Tensor, layout: JointLayout, rounding: list[RoundingKey | None]) -> None:
        """Start the all-to-all of a hop.

        On CUDA it runs on the communicator's stream if other work overlaps it, else on the current one. Both
        buffers belong to the scratch of the current stream, so their next use comes after the wait.
        """
        reduction = self._reduction
        self._layout, self._sent_by = layout, rounding
        self._received = self._buffer(hop, "receive", layout)
        self._transfer: PendingExchange = reduction.exchange.start(
            self._received,
            sent,
            level=hop.level,
            # Concurrent reductions of several groups share process groups. gloo's tags are C ints, and groups
            # 2**15 apart are not reduced at the same time.
            tag=(reduction.bucket % (1 << 15) << 16) + self._index,
            overlaps=self._overlaps,
            what=f"quantized gradient reduce-scatter of {reduction.name}, all-to-all {PLACES[hop.level]}",
        )
        reduction.traffic.count_messages(layout, level=hop.level, peers=hop.size - 1)

    def _buffer(self, hop: Hop, use: Use, layout: JointLayout) -> Tensor:
        return self._reduction.exchange.messages(
            hop.level, use, self._index, nbytes=layout.nbytes, device=self._device
        )

    def _rounding(self, hop: Hop) -> list[RoundingKey | None]:
        pairs = zip(self._calls, self._pieces, strict=True)
        return [self._reduction.rounding_key(hop, call, *piece) for call, piece in pairs]

    def _dithers(self, hop: Hop) -> list[RoundingKey | None]:
        """Return the keys with which the dither of the messages received on a hop is subtracted."""
        pairs = zip(self._sent_by, self._layout.layouts, strict=True)
        return [as_dither(key, row=hop.own * layout.parts) for key, layout in pairs]
