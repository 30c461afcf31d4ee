"""Quantized reduce-scatter in levels, TLq-HS (paper section 3.2, algorithm 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sdp4bit.collectives.chunks import group_unit
from sdp4bit.collectives.plan import (
    Chunk,
    Hop,
    Plans,
    ReducePlan,
    Slice,
    Transfer,
    hops_of,
    plan_reduce,
)
from sdp4bit.collectives.scratch import Messages, Records, Scratch
from sdp4bit.collectives.sections import Section, whole_row
from sdp4bit.collectives.streams import Running, pipelined, run
from sdp4bit.collectives.topology import Topology
from sdp4bit.collectives.transport import PendingTransfer, Transport
from sdp4bit.config import GradientConfig
from sdp4bit.profiling import profiler_range
from sdp4bit.quantization import ops
from sdp4bit.quantization.formats import BF16, BLOCK, Bits
from sdp4bit.quantization.hadamard import INVERSE_FACTOR
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import (
    RoundingKey,
    Stage,
    derive_keys,
    key_source,
    pack_stream,
)
from sdp4bit.quantization.tables import Table, record, stand_in
from sdp4bit.traffic import PLACES, Level, TrafficCounter

STAGES: dict[Level, Stage] = {"intra": Stage.INTRA, "inter": Stage.INTER, "outer": Stage.OUTER}
_EXPONENT = 0x7F80
"""The exponent of a bf16 number, or of the upper half of fp32: all ones in NaN and infinities."""


class SectionValues(NamedTuple):
    """Values of a section of the rows to reduce, or of a part of it."""

    rows: Tensor  # [size, m], row r for group rank r; contiguous rows, any stride between them
    output: Tensor  # [m], contiguous: receives this rank's row of the sum
    own: Tensor  # [m], contiguous: this rank's own row, or memory for the sums of its node
    blocks: Tensor | None = None
    """Places of the values in the tensors above, if they are longer; see `ops.hadamard_quantize`."""

    def of(self, part: Slice) -> SectionValues:
        """Return the values of a part of the section."""
        if part.is_section:
            return self
        *tensors, blocks = self
        if blocks is not None:
            end = part.start + part.numel
            return self._replace(blocks=blocks[part.start // BLOCK : -(-end // BLOCK)])
        return SectionValues(*[each.narrow(-1, part.start, part.numel) for each in tensors])


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
    numbers = messages[:, : layout.scales_offset].view(torch.int16)
    return numbers if layout.format is BF16 else numbers[:, 1::2]


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


class Exchange(NamedTuple):
    """An all-to-all between buffers that stay."""

    start: Callable[[], PendingTransfer]
    received: Messages
    level: Level
    nbytes: int
    padding_bytes: float


class RecordedChunk(NamedTuple):
    """The operators of a chunk: step 1, and per hop its all-to-all with the operators that follow it."""

    chunk: Chunk
    quantize: Table
    exchanges: tuple[tuple[Exchange, Table], ...]
    own_multiplier: float  # of the own part of the sum, before the last step


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
        transport: Transport | None = None,
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
            transport: moves the messages; by default the topology's process groups do.
            name: name of the parameter group, for errors and profiles.
        """
        self.topology = topology
        self.config = config
        self.group_unit = group_unit(config, grid=topology.layout)
        """The least common multiple of the group sizes of all levels."""
        self.hops = hops_of(topology.layout, config)
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
        self.transport = transport or Transport(topology, self._scratch)
        self.name = name or f"group {bucket}"
        self.plans = Plans[ReducePlan]()
        self._records = Records[tuple[RecordedChunk, ...]](self._scratch)
        # This rank's index among those that it exchanges messages with.
        self._place = {hop.level: hop.place(topology.row) for hop in self.hops}
        self.range = f"sdp4bit::reduce_scatter ({self.name})"
        what = f"quantized gradient reduce-scatter of {self.name}, all-to-all"
        self._what = {hop.level: f"{what} {PLACES[hop.level]}" for hop in self.hops}

    @property
    def bits(self) -> Bits:
        """Bits of a value on the last hop, which is between nodes if there are several nodes."""
        return self.hops[-1].bits

    def plan(self, sections: tuple[Section, ...], *, in_one_chunk: bool = False) -> ReducePlan:
        """Return the plan of rows that are made up of these sections, made at their first use."""
        return self.plans.of(
            sections,
            in_one_chunk,
            make=lambda: plan_reduce(
                sections, grid=self.topology.layout.grid, config=self.config, in_one_chunk=in_one_chunk
            ),
        )

    def __call__(
        self,
        output: Tensor,
        input: Tensor,
        *,
        call: int,
        multiplier: float = 1.0,
        nonfinite: Tensor | None = None,
        sections: tuple[Section, ...] = (),
    ) -> None:
        """Reduce rows over all ranks to this rank's row of the sum, times the multiplier.

        The row is reduced in chunks (`pipeline_chunks`), each in the steps of `_run_chunk`. At most one
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
        with profiler_range(self.range):
            chunks = self.chunks(
                output, input, call=call, multiplier=multiplier, nonfinite=nonfinite, sections=sections
            )
            run(pipelined(chunks))

    def chunks(
        self,
        output: Tensor,
        input: Tensor,
        *,
        call: int,
        multiplier: float = 1.0,
        nonfinite: Tensor | None = None,
        sections: tuple[Section, ...] = (),
        own: Tensor | None = None,
        in_one_chunk: bool = False,
    ) -> list[Running]:
        """Return the reductions of all chunks of a row, for the caller to run; see `__call__`.

        Args:
            own: [n], a copy of this rank's row of the input, which may then be overwritten after the first
                step; may be `output`. None if the input stays.
            in_one_chunk: Reductions of several rows may then share message buffers if the caller advances
                each by one step in turn, oldest first.
        """
        size, numel = self.topology.size, output.numel()
        if input.numel() != size * numel:
            raise ValueError(
                f"reduce-scatter over {size} ranks needs an input of {size} x {numel} values, got "
                f"{input.numel()}"
            )
        plan = self.plan(sections or whole_row(numel), in_one_chunk=in_one_chunk)
        rows = input.view(size, numel)
        self.traffic.count_plain(output.nbytes)
        if not plan.hops:  # a world of one
            output.copy_(rows[0] * multiplier)
            return []
        # The exact own part of the sum is this rank's row, or the sum over its node.
        if len(plan.hops) > 1:
            own = output if output.dtype is torch.float32 else self._own_row(output)
        elif own is None:
            own = rows[self._place[plan.hops[0].level]]
        recorded = self._records.of(
            *(plan, multiplier, rows.dtype, rows.stride(), output.dtype, own.dtype),
            device=output.device,
            make=partial(self._record_row, plan, rows, output, own, multiplier),
        )
        return self.run(recorded, (rows, output, own), call=call, nonfinite=nonfinite)

    def _own_row(self, output: Tensor) -> Tensor:
        """Return fp32 memory for the sums of the own node, if the output is less precise."""
        numel = output.numel() if self.exact_own else 0
        return self._scratch.values("own", numel, dtype=torch.float32, device=output.device)

    def _record_row(
        self, plan: ReducePlan, rows: Tensor, output: Tensor, own: Tensor, multiplier: float
    ) -> tuple[RecordedChunk, ...]:
        device, moving = output.device, [stand_in(each) for each in (rows, output, own)]
        values = []
        for section in plan.sections:
            if len(section.ranges) == 1:
                values.append(SectionValues(*map(section.take, moving)))
            else:
                table = self._scratch.table(section.blocks, device=device)
                values.append(SectionValues(*moving)._replace(blocks=table))
        return self.record(plan, values, moving, multiplier=multiplier, device=device)

    def values_of(self, plan: ReducePlan, rows: Tensor, output: Tensor) -> SectionValues:
        """Return the values of a section that is reduced from rows [size, m] to an fp32 output [m]."""
        return SectionValues(
            rows, output, output if len(plan.hops) > 1 else rows[self._place[plan.hops[0].level]]
        )

    def record(
        self,
        plan: ReducePlan,
        values: Sequence[SectionValues],
        moving: Sequence[Tensor],
        *,
        device: torch.device,
        multiplier: float = 1.0,
    ) -> tuple[RecordedChunk, ...]:
        """Record the operators of all chunks of a plan, with the values of its sections.

        Args:
            moving: the stand-ins of the rows, the output and the own row, of which values may be views.
        """
        of = partial(self._record_chunk, plan.hops, moving=moving, multiplier=multiplier, device=device)
        return tuple(of(each, [values[part.index].of(part) for part in each.slices]) for each in plan.chunks)

    def _record_chunk(
        self,
        hops: Sequence[Hop],
        chunk: Chunk,
        values: Sequence[SectionValues],
        *,
        moving: Sequence[Tensor],
        multiplier: float,
        device: torch.device,
    ) -> RecordedChunk:
        """Record the operators of a chunk (paper, algorithm 3): one table for each step of `_run_chunk`.

        All parts share a message per destination and hop.
        """
        parts, count = chunk.slices, range(len(chunk.slices))
        (hop, *others), last = hops, hops[-1]
        (transfer, *following) = chunk.transfers
        inverse = multiplier * INVERSE_FACTOR if self.hadamard else multiplier
        # Message `skip` of the last hop is neither written nor read if the own part of the sum is exact.
        skip = self._place[last.level] if self.exact_own else None
        exact = [each.own if self.exact_own else None for each in values]

        # 1. Row r = node * ranks_per_node + local rank. The ranks of the first hop get their own rows and
        # those that they forward, every size-th one.
        sent = self.transport.messages(hop.level, "send", chunk.index, transfer.message, device=device)
        keys = [self._rounding_key(hop, part) for part in parts]
        quantize = [
            record(
                ops.hadamard_quantize,
                values[i].rows.unflatten(0, (hop.rows, hop.size)).transpose(0, 1),
                out=sent.fields[i],
                layout=transfer.message.layouts[i],
                hadamard=self.hadamard,
                rounding=keys[i],
                skip=None if others else skip,
                blocks=values[i].blocks,
            )
            for i in count
        ]

        # 3. Without transforming back, because all hops have the same Hadamard blocks.
        exchanges = []
        for next_hop, next_transfer in zip(others, following, strict=True):
            exchange = self._exchange(hop, sent, chunk, transfer)
            sent = self.transport.messages(
                next_hop.level, "send", chunk.index, next_transfer.message, device=device
            )
            dithers, keys = keys, [self._rounding_key(next_hop, part) for part in parts]
            is_last = next_hop is last
            requantize = [
                record(
                    ops.dequantize_reduce_quantize,
                    exchange.received.fields[i],
                    received=transfer.message.layouts[i],
                    out=sent.fields[i],
                    sent=next_transfer.message.layouts[i],
                    rounding=keys[i],
                    dither=self._dither(hop, dithers[i]),
                    skip=skip if is_last else None,
                    own=exact[i] if is_last else None,
                    blocks=values[i].blocks if is_last and self.exact_own else None,
                    hadamard=self.hadamard,
                    multiplier=inverse,
                )
                for i in count
            ]
            exchanges.append((exchange, Table(requantize, moving=moving[1:])))
            # `sent` are the messages of this hop from here on.
            hop, transfer = next_hop, next_transfer

        # 4. The own part of the sum is the rank's own row, or with several hops the output of step 3.
        exchange = self._exchange(hop, sent, chunk, transfer)
        reduce = [
            record(
                ops.dequantize_reduce_hadamard,
                exchange.received.fields[i],
                out=values[i].output,
                layout=transfer.message.layouts[i],
                hadamard=self.hadamard,
                multiplier=inverse,
                dither=self._dither(hop, keys[i]),
                skip=skip,
                own=exact[i],
                own_multiplier=1.0 if others else multiplier,
                blocks=values[i].blocks,
            )
            for i in count
        ]
        exchanges.append((exchange, Table(reduce, moving=moving[1:])))
        own_multiplier = 1.0 if others else multiplier
        return RecordedChunk(chunk, Table(quantize, moving=moving[:1]), tuple(exchanges), own_multiplier)

    def run(
        self,
        recorded: tuple[RecordedChunk, ...],
        moving: Sequence[Tensor] = (),
        *,
        call: int,
        nonfinite: Tensor | None = None,
    ) -> list[Running]:
        """Return the reductions of all chunks that were recorded, for the tensors that move."""
        # No variable holds the rows, so each reduction frees its own.
        return [
            self._run_chunk(chunk, moving[:1], moving[1:], call=call, nonfinite=nonfinite)
            for chunk in recorded
        ]

    def _run_chunk(
        self,
        recorded: RecordedChunk,
        rows: Sequence[Tensor],
        written: Sequence[Tensor],
        *,
        call: int,
        nonfinite: Tensor | None,
    ) -> Running:
        """Reduce values of sections (paper, algorithm 3), with a table of `_record_chunk` per step.

        Steps:
        1. Transform and quantize one message per rank of the first hop.
        2. All-to-all in the node, or between nodes if there is no other hop.
        3. For each further hop, between nodes and then between blocks of nodes: sum the received messages,
           requantize one message per rank of the hop; all-to-all.
        4. Sum the messages of the last hop, transform back, add the own part, and write the output.
        """
        # 1.
        recorded.quantize.run(call, *rows)
        # Free the rows, which are as large as all gradients of the group, while the messages are in flight.
        del rows
        for exchange, table in recorded.exchanges:
            # 2. Meanwhile other chunks start. They fill the other buffers, or these after this chunk's next
            # step: this stream has read them.
            pending = exchange.start()
            self.traffic.count(exchange.nbytes, level=exchange.level, padding_bytes=exchange.padding_bytes)
            yield
            pending.wait()
            # 3. and 4.
            if nonfinite is not None and exchange is recorded.exchanges[-1][0]:
                nonfinite += count_nonfinite(self._numbers(recorded, written[-1]))
            table.run(call, *written)

    def _numbers(self, recorded: RecordedChunk, own: Tensor) -> list[Tensor]:
        """Return the upper halves of all numbers that are not finite if a group on the last hop is not."""
        exchange, _ = recorded.exchanges[-1]
        layouts = recorded.chunk.transfers[-1].message.layouts
        place, numbers = self._place[exchange.level], []
        for part, each, layout in zip(recorded.chunk.slices, exchange.received.fields, layouts, strict=True):
            if not self.exact_own:
                numbers.append(upper_halves(each, layout))
                continue
            others = each[:place], each[place + 1 :]
            numbers += [upper_halves(rows, layout) for rows in others]
            total = part.section.take(own).narrow(0, part.start, part.numel).float()
            numbers += _largest_of_groups(total * recorded.own_multiplier, layout.group_size)
        return numbers

    def _exchange(self, hop: Hop, sent: Messages, chunk: Chunk, transfer: Transfer) -> Exchange:
        """Return the all-to-all of a hop, between buffers that stay."""
        received = self.transport.messages(
            hop.level, "receive", chunk.index, transfer.message, device=sent.all.device
        )
        start = partial(
            self.transport.start,
            received.all,
            sent.all,
            level=hop.level,
            # Concurrent reductions of several groups share process groups. gloo's tags are C ints, and groups
            # 2**15 apart are not reduced at the same time.
            tag=(self.bucket % (1 << 15) << 16) + chunk.index,
            # On CUDA it runs on the communicator's stream if other work overlaps it, else on the current one.
            overlaps=chunk.overlaps,
            skips_own=self.exact_own and transfer is chunk.transfers[-1],
            what=self._what[hop.level],
        )
        return Exchange(start, received, hop.level, transfer.nbytes, transfer.padding_bytes)

    def _rounding_key(self, hop: Hop, part: Slice) -> RoundingKey | None:
        """Return this rank's key for rounding a part at a hop in any call; None for nearest."""
        if hop.rounding == "nearest":
            return None
        own, rank, dither = self._place[hop.level], self._rank, hop.rounding == "dither"
        if dither:
            # Senders to the same receiver share the key of the first one, so that the receiver can derive it.
            rank -= own * hop.apart * self._rank_step
        section = part.section
        source = key_source(
            self._seed,
            count=section.count,
            number=section.number,
            bucket=self.bucket,
            stage=STAGES[hop.level],
            rank=rank,
        )
        # Bits are indexed by a value's place in its section, so the result does not depend on the chunks.
        return RoundingKey(
            0, 0, first=part.start, row_stride=part.stride, dither=dither, sender=own, source=source
        )

    def _dither(self, hop: Hop, rounding: RoundingKey | None) -> RoundingKey | None:
        """Return the key with which the dither of the messages received on a hop is subtracted."""
        return as_dither(rounding, row=self._place[hop.level] * hop.rows)

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
        stream = pack_stream(step=0, bucket=0, stage=STAGES[hop.level], rank=0)
        return RoundingKey(*derive_keys(self._seed, stream), dither=hop.rounding == "dither")
