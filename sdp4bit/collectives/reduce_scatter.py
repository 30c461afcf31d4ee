"""Quantized reduce-scatter in levels, TLq-HS (paper section 3.2, algorithm 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sdp4bit.collectives.chunks import group_unit
from sdp4bit.collectives.plan import (
    Chunk,
    Hop,
    Message,
    Part,
    Plans,
    ReducePlan,
    Transfer,
    hops_of,
    plan_reduce,
)
from sdp4bit.collectives.scratch import Messages, Scratch
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
from sdp4bit.quantization.random import RoundingKey, Stage, derive_keys, pack_stream
from sdp4bit.traffic import PLACES, Level, TrafficCounter

STAGES: dict[Level, Stage] = {"intra": Stage.INTRA, "inter": Stage.INTER, "outer": Stage.OUTER}
_EXPONENT = 0x7F80
"""The exponent of a bf16 number, or of the upper half of fp32: all ones in NaN and infinities."""


class SectionValues(NamedTuple):
    """Values of a section of the rows to reduce, or of a part of it."""

    rows: Tensor  # [size, m], row r for group rank r; contiguous rows, any stride between them
    output: Tensor  # [m], contiguous: receives this rank's row of the sum
    blocks: Tensor | None = None
    """Places of the values in the rows and the output, if they are longer; see `ops.hadamard_quantize`."""

    def of(self, part: Part) -> SectionValues:
        """Return the values of a part of the section."""
        if part.is_section:
            return self
        rows, output, blocks = self
        if blocks is not None:
            end = part.start + part.numel
            return SectionValues(rows, output, blocks[part.start // BLOCK : -(-end // BLOCK)])
        start, numel = part.start, part.numel
        return SectionValues(rows.narrow(-1, start, numel), output.narrow(0, start, numel))


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
        in_one_chunk: bool = False,
    ) -> list[Running]:
        """Return the reductions of all chunks of a row, for the caller to run; see `__call__`.

        Args:
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
        rows, values = input.view(size, numel), []
        for section in plan.sections:
            if len(section.ranges) == 1:
                values.append(SectionValues(section.take(rows), section.take(output)))
            else:
                blocks = self._scratch.table(section.blocks, device=output.device)
                values.append(SectionValues(rows, output, blocks))
        self.traffic.count_plain(output.nbytes)
        return self.reduce(plan, values, call=call, multiplier=multiplier, nonfinite=nonfinite)

    def reduce(
        self,
        plan: ReducePlan,
        values: Sequence[SectionValues],
        *,
        call: int,
        multiplier: float = 1.0,
        nonfinite: Tensor | None = None,
    ) -> list[Running]:
        """Return the reductions of all chunks of a plan, with the values of its sections."""
        # No variable holds the values of a chunk, so each frees its own.
        return [
            self._reduce_chunk(
                plan,
                chunk,
                [values[part.index].of(part) for part in chunk.parts],
                call=call,
                multiplier=multiplier,
                nonfinite=nonfinite,
            )
            for chunk in plan.chunks
        ]

    def _reduce_chunk(
        self,
        plan: ReducePlan,
        chunk: Chunk,
        values: list[SectionValues],
        *,
        call: int,
        multiplier: float,
        nonfinite: Tensor | None,
    ) -> Running:
        """Reduce values of sections (paper, algorithm 3), which share a message per destination and hop.

        Steps:
        1. Transform and quantize one message per rank of the first hop.
        2. All-to-all in the node, or between nodes if there is no other hop.
        3. For each further hop, between nodes and then between blocks of nodes: sum the received messages,
           requantize one message per rank of the hop; all-to-all.
        4. Sum the messages of the last hop, transform back, and write the output.
        """
        parts, count = chunk.parts, range(len(chunk.parts))
        if not plan.hops:  # a world of one
            for part, each in zip(parts, values, strict=True):
                if each.blocks is None:
                    each.output.copy_(each.rows[0] * multiplier)
                else:
                    part.section.put(part.section.take(each.rows[0]) * multiplier, each.output)
            return
        (hop, *others), last = plan.hops, plan.hops[-1]
        (transfer, *following) = chunk.transfers
        outputs = [each.output for each in values]
        blocks = [each.blocks for each in values]
        device = outputs[0].device
        kernels = ops.backend_of(device, plan.layouts)
        inverse = multiplier * INVERSE_FACTOR if self.hadamard else multiplier
        # Message `own` of the last hop is neither written nor read if the sums begin with `totals`.
        own = self._place[last.level] if self.exact_own else None
        totals = [self._new_total(each, part.numel) for each, part in zip(values, parts, strict=True)]

        # 1. Row r = node * ranks_per_node + local rank. The ranks of the first hop get their own rows and
        # those that they forward, every size-th one.
        sources = [each.rows.unflatten(0, (hop.parts, hop.size)).transpose(0, 1) for each in values]
        sent = self.transport.messages(hop.level, "send", chunk.index, transfer.message, device=device)
        keys = [self._rounding_key(hop, call, part) for part in parts]
        for i in count:
            total = None if others else totals[i]
            if total is not None:
                self._put_own(total, sources[i][self._place[hop.level], 0], parts[i], blocks[i], multiplier)
            kernels.hadamard_quantize(
                sources[i],
                out=sent.parts[i],
                layout=transfer.message.layouts[i],
                hadamard=self.hadamard,
                rounding=keys[i],
                skip=None if others else own,
                blocks=blocks[i],
            )
        # Free the rows, which are as large as all gradients of the group, while the messages are in flight.
        del sources, values

        # 2. Meanwhile other chunks start. They fill the other buffers, or these after this chunk's next step.
        pending, received = self._start(hop, sent, chunk, transfer)
        yield
        pending.wait()

        # 3. Without transforming back, because all hops have the same Hadamard blocks.
        for next_hop, next_transfer in zip(others, following, strict=True):
            dithers = self._dithers(hop, keys)
            sent = self.transport.messages(
                next_hop.level, "send", chunk.index, next_transfer.message, device=device
            )
            keys = [self._rounding_key(next_hop, call, part) for part in parts]
            is_last = next_hop is last
            for i in count:
                kernels.dequantize_reduce_quantize(
                    received.parts[i],
                    received=transfer.message.layouts[i],
                    out=sent.parts[i],
                    sent=next_transfer.message.layouts[i],
                    rounding=keys[i],
                    dither=dithers[i],
                    skip=own if is_last else None,
                    own=totals[i] if is_last else None,
                    hadamard=self.hadamard,
                    multiplier=inverse,
                )
            # `sent` and `received` are the messages of this hop from here on. Those of the hop before may be
            # reused: this stream has read them.
            hop, transfer = next_hop, next_transfer
            pending, received = self._start(hop, sent, chunk, transfer)
            yield
            pending.wait()

        # 4. The own part of the sums is in `totals`, or in its message like the others.
        dithers = self._dithers(hop, keys)
        if nonfinite is not None:
            nonfinite += count_nonfinite(self._numbers(received.parts, totals, transfer.message, own))
        for i in count:
            kernels.dequantize_reduce_hadamard(
                received.parts[i],
                out=outputs[i],
                layout=transfer.message.layouts[i],
                hadamard=self.hadamard,
                multiplier=inverse,
                dither=dithers[i],
                skip=own,
                own=totals[i],
                blocks=blocks[i],
            )

    @staticmethod
    def _put_own(total: Tensor, values: Tensor, part: Part, blocks: Tensor | None, multiplier: float) -> None:
        """Write the own node's part of the sum, if it is this rank's row [n] alone."""
        if blocks is not None:
            values = part.section.take(values).narrow(0, part.start, part.numel)
        torch.mul(values.float(), multiplier, out=total)

    def _new_total(self, values: SectionValues, numel: int) -> Tensor | None:
        """Return fp32 [numel] for the own node's part of the sum: the output itself, if possible.

        None if that part is quantized like the others.
        """
        if not self.exact_own:
            return None
        output = values.output
        if values.blocks is None and output.dtype is torch.float32:
            return output
        return torch.empty(numel, dtype=torch.float32, device=output.device)

    def _numbers(
        self, messages: Sequence[Tensor], totals: Sequence[Tensor | None], message: Message, own: int | None
    ) -> list[Tensor]:
        """Return the upper halves of all numbers that are not finite if a group on the last hop is not."""
        numbers = []
        for each, total, layout in zip(messages, totals, message.layouts, strict=True):
            if total is None or own is None:
                numbers.append(upper_halves(each, layout))
                continue
            others = each[:own], each[own + 1 :]
            numbers += [upper_halves(rows, layout) for rows in others]
            numbers += _largest_of_groups(total, layout.group_size)
        return numbers

    def _start(
        self, hop: Hop, sent: Messages, chunk: Chunk, transfer: Transfer
    ) -> tuple[PendingTransfer, Messages]:
        """Start the all-to-all of a hop; return it with the messages that it receives.

        On CUDA it runs on the communicator's stream if other work overlaps it, else on the current one.
        """
        received = self.transport.messages(
            hop.level, "receive", chunk.index, transfer.message, device=sent.all.device
        )
        pending = self.transport.start(
            received.all,
            sent.all,
            level=hop.level,
            # Concurrent reductions of several groups share process groups. gloo's tags are C ints, and groups
            # 2**15 apart are not reduced at the same time.
            tag=(self.bucket % (1 << 15) << 16) + chunk.index,
            overlaps=chunk.overlaps,
            skips_own=self.exact_own and transfer is chunk.transfers[-1],
            what=self._what[hop.level],
        )
        self.traffic.count(transfer.nbytes, level=hop.level, padding_bytes=transfer.padding_bytes)
        return pending, received

    def _rounding_key(self, hop: Hop, call: int, part: Part) -> RoundingKey | None:
        """Return this rank's key for rounding a part at a hop; None for nearest."""
        if hop.rounding == "nearest":
            return None
        own, rank, dither = self._place[hop.level], self._rank, hop.rounding == "dither"
        if dither:
            # Senders to the same receiver share the key of the first one, so that the receiver can derive it.
            rank -= own * hop.apart * self._rank_step
        step, stage = part.section.call(call), STAGES[hop.level]
        keys = derive_keys(self._seed, pack_stream(step=step, bucket=self.bucket, stage=stage, rank=rank))
        # Bits are indexed by a value's place in its section, so the result does not depend on the chunks.
        return RoundingKey(*keys, first=part.start, row_stride=part.stride, dither=dither, sender=own)

    def _dithers(self, hop: Hop, keys: Sequence[RoundingKey | None]) -> list[RoundingKey | None]:
        """Return the keys with which the dither of the messages received on a hop is subtracted."""
        row = self._place[hop.level] * hop.parts
        return [as_dither(key, row=row) for key in keys]

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
