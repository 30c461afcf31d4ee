"""Quantized all-reduce: a quantized reduce-scatter and an all-gather of quantized sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sdp4bit.collectives.chunks import group_unit
from sdp4bit.collectives.plan import AllReducePlan, Plans, is_long_enough, piece_count, plan_all_reduce
from sdp4bit.collectives.reduce_scatter import (
    QuantizedReduceScatter,
    RecordedChunk,
    count_nonfinite,
    upper_halves,
)
from sdp4bit.collectives.scratch import Messages, Records, Scratch
from sdp4bit.collectives.sections import Section, whole_row
from sdp4bit.collectives.streams import pipelined, run
from sdp4bit.collectives.topology import Nodes, Topology
from sdp4bit.collectives.transport import start_all_gather
from sdp4bit.config import GradientConfig
from sdp4bit.profiling import profiler_range
from sdp4bit.quantization import ops
from sdp4bit.quantization.formats import Bits
from sdp4bit.quantization.hadamard import INVERSE_FACTOR
from sdp4bit.quantization.random import KeySeries, KeySource, RoundingKey, Stage, derive_series, key_source
from sdp4bit.quantization.tables import Table, record, stand_in
from sdp4bit.traffic import PLACES, TrafficCounter


def pieces_of(values: Tensor, plan: AllReducePlan, index: int) -> Tensor:
    """View values [m] of a section, contiguous, as pieces [count, length]; see `piece_stride_and_length`."""
    return values.as_strided((plan.count, plan.lengths[index]), (plan.strides[index], 1))


class PieceQuantizer:
    """Quantizes a rank's sum of its piece to a message and restores the pieces of all ranks from messages.

    Every rank restores its own piece from the message too, so that all ranks end with the same bits. With two
    nodes a piece has two messages, whose values are added. The settings are those of the last hop.
    """

    def __init__(
        self, layout: Nodes, *, config: GradientConfig, seed: int, ranks: range, bucket: int
    ) -> None:
        """Create a quantizer; see QuantizedAllReduce for `ranks` and `bucket`."""
        self.count = piece_count(layout)
        """Number of pieces; the rank of row r in the group has piece r % count."""
        self.plans = Plans[AllReducePlan]()
        self._grid, self._config = layout.grid, config
        self._ranks = ranks
        self._seed = seed
        self._bucket = bucket
        between_nodes = layout.nodes > 1
        self.bits = config.inter_bits if between_nodes else config.intra_bits
        """Bits of a value; None for full precision."""
        self._rounding = config.inter_rounding if between_nodes else config.intra_rounding
        self._hadamard = config.hadamard and self.bits is not None

    def plan(self, sections: tuple[Section, ...]) -> AllReducePlan:
        """Return the plan of values that are made up of these sections, made at their first use."""
        return self.plans.of(
            sections, make=lambda: plan_all_reduce(sections, grid=self._grid, config=self._config)
        )

    def quantize(
        self,
        plan: AllReducePlan,
        pieces: Sequence[Tensor],
        out: Sequence[Tensor],
        *,
        row: int,
        moving: Sequence[Tensor] = (),
    ) -> Table:
        """Return the operators that write the message with a rank's pieces of all sections.

        Args:
            pieces: [n] each, fp32, bf16 or fp16.
            out: parts of the message, uint8 [1, nbytes].
            row: row of the rank in the group, for the rounding bits.
            moving: stand-ins of which pieces may be views.
        """
        calls = [
            record(
                ops.hadamard_quantize,
                pieces[i].view(1, 1, -1),
                out=out[i],
                layout=plan.message.layouts[i],
                hadamard=self._hadamard,
                rounding=self._key(section, row),
                skip=None,
                blocks=None,
            )
            for i, section in enumerate(plan.sections)
        ]
        return Table(calls, moving=moving)

    def restore(
        self,
        plan: AllReducePlan,
        messages: Sequence[Tensor],
        taken: Sequence[Tensor],
        *,
        multiplier: float = 1.0,
        moving: Sequence[Tensor] = (),
    ) -> Table:
        """Return the operators that write the pieces of all ranks, times the multiplier, to their places.

        Args:
            messages: parts of the messages, uint8 [ranks, nbytes], in the order of the ranks.
            taken: the sections of the values, [m] each, contiguous: views, or copies.
            moving: stand-ins of which they may be views.
        """
        inverse = multiplier * INVERSE_FACTOR if self._hadamard else multiplier
        calls = [
            # All pieces of a section in one launch, so that its cost does not grow with the ranks.
            record(
                ops.dequantize_reduce_pieces,
                messages[i],
                out=taken[i],
                layout=plan.message.layouts[i],
                pieces=plan.count,
                stride=plan.strides[i],
                hadamard=self._hadamard,
                multiplier=inverse,
                dither=self._series(section),
            )
            for i, section in enumerate(plan.sections)
        ]
        return Table(calls, moving=moving)

    def _series(self, section: Section) -> KeySeries | None:
        """Return the keys with which the dither of all pieces of a section is subtracted in any call."""
        if self._rounding != "dither":
            return None
        step = derive_series(0, 0, rank_step=self._ranks.step).step
        return KeySeries(0, step, source=self._source(section, self._ranks[0]))

    def _key(self, section: Section, row: int) -> RoundingKey | None:
        """Return the key of a rank in any call; None for nearest."""
        if self._rounding == "nearest":
            return None
        # With dither, ranks with the same piece share the key of the first one, so that a receiver derives it
        # once.
        dither, sender = self._rounding == "dither", row // self.count
        source = self._source(section, self._ranks[row % self.count if dither else row])
        return RoundingKey(0, 0, dither=dither, sender=sender, source=source)

    def _source(self, section: Section, rank: int) -> KeySource:
        return key_source(
            self._seed,
            count=section.count,
            number=section.number,
            bucket=self._bucket,
            stage=Stage.GATHER,
            rank=rank,
        )

    def requantized(self, values: Tensor) -> Tensor:
        """Return values [n], fp32, contiguous, as they arrive in a message of the first rank."""
        result = torch.empty_like(values)
        group_size = self._config.inter_group_size if self._grid.nodes > 1 else self._config.intra_group_size
        layout = Section().layout(values.numel(), bits=self.bits, group_size=group_size)
        message = torch.empty(1, layout.nbytes, dtype=torch.uint8, device=values.device)
        key, series = self._key(Section(), 0), self._series(Section())
        key, series = key and key.of_call(0), series and series.of_call(0)
        rows = values.view(1, 1, -1)
        ops.hadamard_quantize(rows, out=message, layout=layout, hadamard=self._hadamard, rounding=key)
        ops.dequantize_reduce_pieces(
            message,
            out=result,
            layout=layout,
            pieces=1,
            stride=0,
            hadamard=self._hadamard,
            multiplier=INVERSE_FACTOR if self._hadamard else 1.0,
            dither=series,
        )
        return result


class RecordedAllReduce(NamedTuple):
    """The operators of an all-reduce, and its buffers, which stay."""

    copies: dict[int, Tensor]
    """Copies of sections whose ranges are apart, by their index."""
    reduction: tuple[RecordedChunk, ...]
    quantize: Table
    message: Messages
    gathered: tuple[Messages, ...]  # as many as the plan has gathers
    restore: Table


class QuantizedAllReduce:
    """Sums tensors over a group of nodes x ranks_per_node ranks; all ranks end with the same bits.

    Both the reduce-scatter and the all-gather are quantized. With two nodes the reduce-scatter stays inside
    each node, see `piece_count`. A world of one changes nothing.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        config: GradientConfig,
        seed: int = 0,
        ranks: range | None = None,
        bucket: int = 0,
        traffic: TrafficCounter | None = None,
        scratch: Scratch | None = None,
        name: str = "",
    ) -> None:
        """Create an all-reduce; sends nothing.

        Args:
            seed: seed of the rounding bits, the same on all ranks.
            ranks: numbers of the members' data, in the order of the topology; part of the key of the rounding
                bits. By default from 0.
            bucket: number of the reduced tensor, also part of the key; used by no other collective.
            traffic: counts the bytes that this rank sends.
            scratch: message buffers, which successive reductions may share.
            name: name of the reduced tensor, for errors.
        """
        self._topology = topology
        self.group_unit = group_unit(config, grid=topology.layout)
        """The least common multiple of the group sizes of all levels."""
        self._traffic = traffic or topology.counter()
        self._scratch = scratch or Scratch()
        name = name or f"group {bucket}"
        layout, ranks = topology.layout, ranks or range(topology.size)
        self._pieces = PieceQuantizer(layout, config=config, seed=seed, ranks=ranks, bucket=bucket)
        reduced_over = topology
        if self._pieces.count < layout.size:
            # Two nodes: each reduces the same pieces, and step 5 adds the sums of both.
            ranks_here = tuple(layout.members("intra")[topology.node])
            node = replace(layout, ranks=ranks_here, nodes=1, blocks=1)
            reduced_over = replace(topology, layout=node, node=0, inter=None, outer=None)
        self._reduction = QuantizedReduceScatter(
            reduced_over,
            config=config,
            seed=seed,
            rank=ranks[topology.row],
            rank_step=ranks.step,
            bucket=bucket,
            traffic=self._traffic,
            scratch=self._scratch,
            name=f"{name} over the replicate dimension",
        )
        self._records = Records[RecordedAllReduce](self._scratch)
        self._range = f"sdp4bit::all_reduce ({name})"
        what = f"quantized gradient all-gather of {name} over the replicate dimension"
        self._what = {level: f"{what}, {place}" for level, place in PLACES.items()}

    @property
    def config(self) -> GradientConfig:
        """The settings of both halves."""
        return self._reduction.config

    @property
    def bits(self) -> Bits:
        """Bits of a gathered value, which are those of the last hop."""
        return self._pieces.bits

    def takes(self, numel: int) -> bool:
        """Return whether this many values are quantized; otherwise the caller uses a plain all-reduce."""
        return is_long_enough(numel, ranks=self._topology.size, config=self.config)

    def __call__(
        self,
        values: Tensor,
        *,
        call: int,
        multiplier: float = 1.0,
        nonfinite: Tensor | None = None,
        sections: tuple[Section, ...] = (),
    ) -> None:
        """Replace values by their sum over all ranks, times the multiplier.

        Steps:

        1. Quantized reduce-scatter. Each rank has the sum of its piece (with two nodes: over its node).
        2. Transform and quantize it to one message.
        3. All-gather of the messages between nodes; with blocks of nodes between blocks, then in the block.
        4. All-gather of the result in the node.
        5. Dequantize all messages, add those of the same piece, and transform back.

        Args:
            values: [n], fp32, bf16 or fp16, contiguous; changed in place.
            call: number of this reduction of the bucket since the start, the same on all ranks; part of the
                key of the rounding bits.
            nonfinite: see QuantizedReduceScatter; counts the messages that this rank sends in step 3.
            sections: sections that make up the values; () for a single one. A rank has a piece of each.
        """
        topology, numel = self._topology, values.numel()
        if topology.size == 1 or not numel:
            if multiplier != 1.0:
                values.mul_(multiplier)
            return
        with profiler_range(self._range):
            plan = self.plan(sections or whole_row(numel))
            recorded = self._records.of(
                *(plan, multiplier, values.dtype),
                device=values.device,
                make=partial(self._record, plan, values, multiplier),
            )
            for i, copy in recorded.copies.items():
                copy.copy_(plan.sections[i].take(values))

            # 1. Reduce-scatter of one piece per section.
            if plan.reduce.hops:
                with profiler_range(self._reduction.range):
                    chunks = self._reduction.run(recorded.reduction, (values,) * 3, call=call)
                    run(pipelined(chunks))
            # The bytes of a ring all-reduce.
            self._traffic.count_plain(round(2 * values.nbytes / topology.size))

            # 2. One message per rank.
            recorded.quantize.run(call, values)
            messages = recorded.message
            if nonfinite is not None:
                nonfinite += count_nonfinite([*map(upper_halves, messages.fields, plan.message.layouts)])

            # 3. and 4. All-gather in the levels of the reduce-scatter, from the outermost one. The messages
            # of a level are put between those that arrived before, so that message r = node * ranks_per_node
            # + local rank is row r, as step 5 expects.
            for gather, gathered in zip(plan.gathers, recorded.gathered, strict=True):
                group, count, size = topology.group(gather.level), gather.copies, gather.peers + 1
                assert group is not None
                blocks = gathered.all.view(count, size, plan.message.nbytes)
                start_all_gather(blocks, messages.all, group, what=self._what[gather.level]).wait()
                self._traffic.count(gather.nbytes, level=gather.level, padding_bytes=gather.padding_bytes)
                messages = gathered

            # 5. Restore all pieces, this rank's own included, from the messages.
            recorded.restore.run(call, values)
            for i, copy in recorded.copies.items():
                plan.sections[i].put(copy, values)

    def _record(self, plan: AllReducePlan, values: Tensor, multiplier: float) -> RecordedAllReduce:
        """Record the operators of all steps; see `__call__`."""
        device, scratch, moving = values.device, self._scratch, stand_in(values)
        apart = {i: each.numel for i, each in enumerate(plan.sections) if len(each.ranges) > 1}
        memory = scratch.values("sections", sum(apart.values()), dtype=values.dtype, device=device)
        copies = dict(zip(apart, memory.split([*apart.values()]), strict=True)) if apart else {}
        taken = [copies[i] if i in copies else each.take(moving) for i, each in enumerate(plan.sections)]

        # 1. Without a hop the pieces are the values themselves.
        own, reduction = taken, tuple[RecordedChunk, ...]()
        if plan.reduce.hops:
            sums = scratch.values("sums", sum(plan.lengths), dtype=torch.float32, device=device)
            own = list(sums.split(plan.lengths))
            chosen = [
                self._reduction.values_of(plan.reduce, pieces_of(each, plan, i), own[i])
                for i, each in enumerate(taken)
            ]
            reduction = self._reduction.record(plan.reduce, chosen, [moving] * 3, device=device)

        # 2. Without slots: a call runs to its end on one stream, so the next one finds all buffers free.
        message, row = scratch.split("gather send", 1, plan.message, device=device), self._topology.row
        quantize = self._pieces.quantize(plan, own, message.fields, row=row, moving=[moving])

        # 3. to 5.
        gathered = tuple(
            scratch.split(f"gather {each.level}", each.copies * (each.peers + 1), plan.message, device=device)
            for each in plan.gathers
        )
        received = (message, *gathered)[-1].fields
        restore = self._pieces.restore(plan, received, taken, multiplier=multiplier, moving=[moving])
        return RecordedAllReduce(copies, reduction, quantize, message, gathered, restore)

    def plan(self, sections: tuple[Section, ...]) -> AllReducePlan:
        """Return the plan of values that are made up of these sections, made at their first use."""
        return self._pieces.plan(sections)

    @property
    def plans(self) -> Plans[AllReducePlan]:
        return self._pieces.plans

    def requantized(self, values: Tensor) -> Tensor:
        """Return these values in fp32 with the quantization errors of both halves.

        The error of each half is measured on the values themselves, and both are added. Applying one half to
        the result of the other would understate the error, because that result lies on the other's grid.

        Args:
            values: [n], a sample of a gradient, contiguous.
        """
        exact = values.float()
        gathered = self._pieces.requantized(exact)
        if not self._reduction.hops:
            return gathered
        return self._reduction.requantized(values).add_(gathered).sub_(exact)
