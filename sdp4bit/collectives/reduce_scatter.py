"""Quantized reduce-scatter in levels, TLq-HS (paper section 3.2, algorithm 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sdp4bit.collectives.errors import PLACES
from sdp4bit.collectives.exchange import GroupExchange, PendingExchange, Use
from sdp4bit.collectives.pipeline import Steps, cut_into_chunks, group_unit, pipelined, run
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import WHOLE, Section, split_messages, whole_row
from sdp4bit.collectives.topology import Topology
from sdp4bit.config import GradientConfig, Rounding
from sdp4bit.profiling import profiler_range
from sdp4bit.quantization import ops
from sdp4bit.quantization.formats import BLOCK, Bits
from sdp4bit.quantization.hadamard import INVERSE_FACTOR
from sdp4bit.quantization.layout import JointLayout, MessageLayout, joint_layout, round_up
from sdp4bit.quantization.random import RoundingKey, Stage, derive_keys, pack_stream
from sdp4bit.traffic import Level, TrafficCounter

STAGES: dict[Level, Stage] = {"intra": Stage.INTRA, "inter": Stage.INTER, "outer": Stage.OUTER}
_EXPONENT = 0x7F80
"""The exponent of a bf16 number, or of the upper half of fp32: all ones in NaN and infinities."""


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One all-to-all: its ranks and the settings of its messages."""

    level: Level
    stage: Stage
    size: int
    own: int  # index of this rank
    apart: int  # difference between the group ranks of successive members
    parts: int  # rows in a message: those of the receiver and of the ranks that it forwards to
    bits: Bits
    group_size: int
    rounding: Rounding

    def layout(self, numel: int, *, parts: int = 1, section: Section = WHOLE) -> MessageLayout:
        return section.layout(numel, bits=self.bits, group_size=self.group_size, parts=parts)


@dataclass(frozen=True, kw_only=True)
class SectionRows:
    """Values of one section of the rows to reduce."""

    section: Section
    rows: Tensor  # [size, m], row r for group rank r; contiguous rows, any stride between them
    output: Tensor  # [m], contiguous: receives this rank's row of the sum
    numel: int  # values of the section
    first: int = 0  # number of the first value in the section
    blocks: Tensor | None = None
    """Places of the values in the rows and the output, if they are longer; see `ops.hadamard_quantize`."""

    def within(self, places: slice) -> SectionRows:
        """Return the values of these places of the section, which begin at a multiple of 32."""
        numel, first, rows, output, blocks = (
            places.stop - places.start,
            places.start,
            self.rows,
            self.output,
            self.blocks,
        )
        if numel == self.numel:
            return self
        if blocks is None:
            rows, output = rows[..., places], output[places]
        else:
            blocks = blocks[first // BLOCK : -(-places.stop // BLOCK)]
        return replace(self, rows=rows, output=output, numel=numel, first=first, blocks=blocks)

    def new_total(self) -> Tensor:
        """Return fp32 [numel] for the own node's part of the sum: the output itself, if possible."""
        if self.blocks is None and self.output.dtype is torch.float32:
            return self.output
        return torch.empty(self.numel, dtype=torch.float32, device=self.output.device)


def _hops(topology: Topology, config: GradientConfig) -> list[Hop]:
    """Return the all-to-alls in order; none for a world of one."""
    layout, hops = topology.layout, []
    for level, size in layout.levels.items():
        is_inside, apart = level == "intra", layout.apart(level)
        hop = Hop(
            level=level,
            stage=STAGES[level],
            size=size,
            own=topology.place(level),
            apart=apart,
            parts=layout.size // (apart * size),
            bits=config.intra_bits if is_inside else config.inter_bits,
            group_size=config.intra_group_size if is_inside else config.inter_group_size,
            rounding=config.intra_rounding if is_inside else config.inter_rounding,
        )
        hops += [hop] if size > 1 else []
    return hops


def as_dither(rounding: RoundingKey | None, *, row: int = 0) -> RoundingKey | None:
    """Return the key with which the receiver subtracts the dither of all senders, from this row on.

    Args:
        rounding: key with which this rank sends.
    """
    if rounding is None or not rounding.dither:
        return None
    return rounding.at_row(row)._replace(sender=0)


def upper_halves(messages: Tensor, layout: MessageLayout) -> Tensor:
    """View the upper 16 bits of the scales (in full precision: values) of messages, uint8 [m, nbytes]."""
    if layout.format.has_scales:
        return messages[:, layout.scales_offset : layout.payload_bytes].view(torch.int16)
    return messages[:, : layout.scales_offset].view(torch.int16)[:, 1::2]


def _largest_of_groups(values: Tensor, group_size: int) -> list[Tensor]:
    """Return the upper 16 bits of the largest magnitude of each group of fp32 values [n]."""
    full = values.numel() // group_size * group_size
    groups = [values[:full].view(-1, group_size), values[full:].view(1, -1)]
    norms = [torch.linalg.vector_norm(each, math.inf, dim=1) for each in groups if each.numel()]
    return [each.view(torch.int16)[1::2] for each in norms]


def count_nonfinite(upper: Sequence[Tensor]) -> Tensor:
    """Return the number of NaN and infinities among fp32 or bf16 numbers, by their upper 16 bits in int16."""
    exponents = torch.cat([each.flatten() for each in upper]) & _EXPONENT
    return (exponents == _EXPONENT).sum()


class QuantizedReduceScatter:
    """Reduces rows over a group of nodes x ranks_per_node ranks; each rank receives its own row.

    Several nodes with several ranks each take two levels, and three if the nodes form blocks. Otherwise there
    is one level, with the intra settings inside a node or the inter settings between nodes. A world of one
    copies.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        config: GradientConfig,
        seed: int = 0,
        rank: int | None = None,
        rank_step: int = 1,
        bucket: int = 0,
        traffic: TrafficCounter | None = None,
        scratch: Scratch | None = None,
        exchange: GroupExchange | None = None,
        name: str = "",
    ) -> None:
        """Create a reduction; sends nothing.

        Args:
            seed: seed of the rounding bits, the same on all ranks.
            rank: number of this rank's data, unique among the summed gradients; part of the key of the
                rounding bits. By default its index in the topology.
            rank_step: difference between these numbers for neighbors in the group. Receivers derive the keys
                of their senders from it.
            bucket: number of the parameter group, also part of the key.
            traffic: counts the bytes that this rank sends.
            scratch: message buffers, which reductions may share.
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
            config.exact_own and last is not None and last.level != "intra" and last.bits is not None
        )
        """Whether the part of the sum of this node, or of its block, is not quantized on the last hop."""
        self._seed = seed
        self._rank = topology.row if rank is None else rank
        self._rank_step = rank_step
        self.bucket = bucket
        self.traffic = traffic or topology.counter()
        self._scratch = scratch or Scratch()
        self.exchange = exchange or GroupExchange(topology, self._scratch)
        self.name = name or f"group {bucket}"

    @property
    def bits(self) -> Bits:
        """Bits of a value on the last hop, which is between nodes if there are several nodes."""
        return self.hops[-1].bits

    @property
    def group_unit(self) -> int:
        """The least common multiple of the group sizes of all levels."""
        return group_unit(self.config, grid=self.topology.layout)

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

        The row is reduced in chunks (`pipeline_chunks`), each in the steps of `_reduce_chunk`. At most one
        more than there are hops is in flight, and the result does not depend on their number.

        Args:
            output: [n], fp32, bf16 or fp16; may be this rank's row of the input.
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
        with profiler_range(f"sdp4bit::reduce_scatter ({self.name})"):
            # No variable holds the sections of the rows, so each chunk frees its own.
            chunks = self.chunks(
                self.cut(output, input, sections=sections),
                call=call,
                multiplier=multiplier,
                nonfinite=nonfinite,
            )
            run(pipelined(chunks))

    def cut(self, output: Tensor, input: Tensor, *, sections: Sequence[Section] = ()) -> list[SectionRows]:
        """Return the sections of the rows to reduce; see `__call__`."""
        size, numel = self.topology.size, output.numel()
        if input.numel() != size * numel:
            raise ValueError(
                f"reduce-scatter over {size} ranks needs an input of {size} x {numel} values, got "
                f"{input.numel()}"
            )
        rows = input.view(size, numel)
        cut = []
        for section in sections or whole_row(numel):
            chosen, place, blocks = rows, output, None
            if len(section.ranges) == 1:
                chosen, place = section.take(rows), section.take(output)
            else:
                blocks = self._scratch.table(section.blocks, device=output.device)
            cut.append(
                SectionRows(section=section, rows=chosen, output=place, numel=section.numel, blocks=blocks)
            )
        self.traffic.count_plain(output.nbytes)
        return cut

    def chunks(
        self,
        sections: Sequence[SectionRows],
        *,
        call: int,
        multiplier: float = 1.0,
        nonfinite: Tensor | None = None,
        whole: bool = False,
    ) -> list[Steps]:
        """Return the reductions of all chunks of sections, of one row or of several, for the caller to run.

        Args:
            whole: use one chunk. Reductions of several rows may then share message buffers if the caller
                advances each by one step in turn, oldest first.
        """
        if not sections:
            return []
        lengths = [each.numel for each in sections]
        places = [[(number, slice(0, numel)) for number, numel in enumerate(lengths)]]
        if not whole:
            places = cut_into_chunks(lengths, config=self.config, grid=self.topology.layout)
        return [
            self._reduce_chunk(
                [sections[i].within(there) for i, there in chosen],
                strides=[round_up(lengths[i], BLOCK) for i, _ in chosen],
                index=index,
                call=call,
                multiplier=multiplier,
                nonfinite=nonfinite,
                overlaps=whole or len(places) > 1,
            )
            for index, chosen in enumerate(places)
        ]

    def _reduce_chunk(
        self,
        sections: Sequence[SectionRows],
        *,
        strides: Sequence[int],
        index: int,
        call: int,
        multiplier: float,
        nonfinite: Tensor | None,
        overlaps: bool,
    ) -> Steps:
        """Reduce values of sections (paper, algorithm 3), which share a message per destination and hop.

        Steps:
        1. Transform and quantize one message per rank of the first hop.
        2. All-to-all in the node, or between nodes if there is no other hop.
        3. For each further hop, between nodes and then between blocks of nodes: sum the received messages,
           requantize one message per rank of the hop; all-to-all.
        4. Sum the messages of the last hop, transform back, and write the output.

        Args:
            strides: differences between the numbers of rows for the random bits, one per section.
            index: number of the chunk in the row; chunks alternate between message buffers.
            overlaps: whether the current stream gets other work before it waits for a transfer.
        """
        if not self.hops:  # a world of one
            for each in sections:
                if each.blocks is None:
                    each.output.copy_(each.rows[0] * multiplier)
                else:
                    each.section.put(each.section.take(each.rows[0]) * multiplier, each.output)
            return
        (hop, *others), last = self.hops, self.hops[-1]
        inverse = multiplier * INVERSE_FACTOR if self.hadamard else multiplier
        device = sections[0].output.device
        # Message `own` of the last hop is neither written nor read if the sums begin with `totals`.
        own = last.own if self.exact_own else None
        totals: list[Tensor | None] = [each.new_total() if self.exact_own else None for each in sections]

        # 1. Row r = node * ranks_per_node + local rank. The ranks of the first hop get their own rows and
        # those that they forward, every size-th one.
        sources = [each.rows.unflatten(0, (hop.parts, hop.size)).transpose(0, 1) for each in sections]
        layout = self._layout(hop, sections)
        sent = self._buffer(hop, "send", layout, index=index, device=device)
        keys = [self._rounding_key(hop, call, *each) for each in zip(sections, strides, strict=True)]
        for i, messages in enumerate(split_messages(sent, layout)):
            total = None if others else totals[i]
            if total is not None:
                values = sources[i][hop.own, 0]
                if sections[i].blocks is not None:
                    at = sections[i].first
                    values = sections[i].section.take(values)[at : at + sections[i].numel]
                torch.mul(values.float(), multiplier, out=total)
            ops.hadamard_quantize(
                sources[i],
                out=messages,
                layout=layout.layouts[i],
                hadamard=self.hadamard,
                rounding=keys[i],
                skip=None if others else own,
                blocks=sections[i].blocks,
            )
        # Free the rows, which are as large as all gradients of the group, while the messages are in flight.
        sections = [replace(each, rows=each.rows.new_empty(0)) for each in sections]
        del sources

        # 2. Meanwhile other chunks start. They fill the other buffers, or these after this chunk's next step.
        transfer, received = self._start(hop, sent, layout, index=index, overlaps=overlaps)
        yield
        transfer.wait()

        # 3. Without transforming back, because all hops have the same Hadamard blocks.
        for following in others:
            arrived, before = split_messages(received, layout), layout.layouts
            dithers = self._dithers(hop, keys, layout)
            hop = following
            layout = self._layout(hop, sections)
            sent = self._buffer(hop, "send", layout, index=index, device=device)
            keys = [self._rounding_key(hop, call, *each) for each in zip(sections, strides, strict=True)]
            for i, messages in enumerate(split_messages(sent, layout)):
                ops.dequantize_reduce_quantize(
                    arrived[i],
                    received=before[i],
                    out=messages,
                    sent=layout.layouts[i],
                    rounding=keys[i],
                    dither=dithers[i],
                    skip=own if hop is last else None,
                    own=totals[i] if hop is last else None,
                    hadamard=self.hadamard,
                    multiplier=inverse,
                )
            # `sent` and `received` are the messages of this hop from here on. Those of the hop before may be
            # reused: this stream has read them.
            transfer, received = self._start(hop, sent, layout, index=index, overlaps=overlaps)
            yield
            transfer.wait()

        # 4. The own part of the sums is in `totals`, or in its message like the others.
        arrived, dithers = split_messages(received, layout), self._dithers(hop, keys, layout)
        if nonfinite is not None:
            nonfinite += count_nonfinite(self._numbers(arrived, totals, layout))
        for i, messages in enumerate(arrived):
            ops.dequantize_reduce_hadamard(
                messages,
                out=sections[i].output,
                layout=layout.layouts[i],
                hadamard=self.hadamard,
                multiplier=inverse,
                dither=dithers[i],
                skip=own,
                own=totals[i],
                blocks=sections[i].blocks,
            )

    def _layout(self, hop: Hop, sections: Sequence[SectionRows]) -> JointLayout:
        """Return the layout of a hop's messages."""
        return joint_layout(
            tuple(hop.layout(each.numel, parts=hop.parts, section=each.section) for each in sections)
        )

    def _numbers(
        self, messages: Sequence[Tensor], totals: Sequence[Tensor | None], layout: JointLayout
    ) -> list[Tensor]:
        """Return the upper halves of all numbers that are not finite if a group on the last hop is not."""
        numbers, own = [], self.hops[-1].own
        for each, total, part in zip(messages, totals, layout.layouts, strict=True):
            if total is None:
                numbers.append(upper_halves(each, part))
                continue
            others = each[:own], each[own + 1 :]
            numbers += [upper_halves(rows, part) for rows in others]
            numbers += _largest_of_groups(total, part.group_size)
        return numbers

    def _buffer(self, hop: Hop, use: Use, layout: JointLayout, *, index: int, device: torch.device) -> Tensor:
        """Return messages [size, nbytes] from the scratch of the current stream.

        That stream waits for the transfer before it uses them again.
        """
        return self.exchange.messages(hop.level, use, index, nbytes=layout.nbytes, device=device)

    def _start(
        self, hop: Hop, sent: Tensor, layout: JointLayout, *, index: int, overlaps: bool
    ) -> tuple[PendingExchange, Tensor]:
        """Start the all-to-all of a hop; return it with the messages that it receives.

        On CUDA it runs on the communicator's stream if other work overlaps it, else on the current one.
        """
        received = self._buffer(hop, "receive", layout, index=index, device=sent.device)
        transfer = self.exchange.start(
            received,
            sent,
            level=hop.level,
            # Concurrent reductions of several groups share process groups. gloo's tags are C ints, and groups
            # 2**15 apart are not reduced at the same time.
            tag=(self.bucket % (1 << 15) << 16) + index,
            overlaps=overlaps,
            skips_own=self.exact_own and hop is self.hops[-1],
            what=f"quantized gradient reduce-scatter of {self.name}, all-to-all {PLACES[hop.level]}",
        )
        self.traffic.count_messages(layout, level=hop.level, peers=hop.size - 1)
        return transfer, received

    def _rounding_key(self, hop: Hop, call: int, section: SectionRows, stride: int) -> RoundingKey | None:
        """Return this rank's key for rounding a section at a hop; None for nearest."""
        if hop.rounding == "nearest":
            return None
        rank, dither = self._rank, hop.rounding == "dither"
        if dither:
            # Senders to the same receiver share the key of the first one, so that the receiver can derive it.
            rank -= hop.own * hop.apart * self._rank_step
        step = section.section.call(call)
        keys = derive_keys(self._seed, pack_stream(step=step, bucket=self.bucket, stage=hop.stage, rank=rank))
        # Bits are indexed by a value's place in its section, so the result does not depend on the chunks.
        return RoundingKey(*keys, first=section.first, row_stride=stride, dither=dither, sender=hop.own)

    @staticmethod
    def _dithers(
        hop: Hop, keys: Sequence[RoundingKey | None], layout: JointLayout
    ) -> list[RoundingKey | None]:
        """Return the keys with which the dither of the messages received on a hop is subtracted."""
        pairs = zip(keys, layout.layouts, strict=True)
        return [as_dither(key, row=hop.own * one.parts) for key, one in pairs]

    def requantized(self, values: Tensor) -> Tensor:
        """Return these values in fp32 as another node receives them through all hops, without a sum.

        Args:
            values: [n], a sample of a gradient, contiguous; quantized as one section.
        """
        numel, first, *rest = values.numel(), *self.hops
        layout, rounding = first.layout(numel), self._sample_key(first)
        message = values.new_empty(1, layout.nbytes, dtype=torch.uint8)
        rows = values.view(1, 1, numel)
        ops.hadamard_quantize(rows, out=message, layout=layout, hadamard=self.hadamard, rounding=rounding)
        for hop in rest:
            received, layout = layout, hop.layout(numel)
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
