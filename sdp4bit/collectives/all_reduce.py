"""Quantized all-reduce: a quantized reduce-scatter and an all-gather of quantized sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sdp4bit.collectives.errors import PLACES
from sdp4bit.collectives.exchange import all_gather_blocks
from sdp4bit.collectives.pieces import is_long_enough, piece_count, piece_stride_and_length
from sdp4bit.collectives.pipeline import group_unit, pipelined, run
from sdp4bit.collectives.reduce_scatter import (
    QuantizedReduceScatter,
    SectionRows,
    count_nonfinite,
    upper_halves,
)
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import Section, split_messages, whole_row
from sdp4bit.collectives.topology import Nodes, Topology
from sdp4bit.config import GradientConfig
from sdp4bit.profiling import profiler_range
from sdp4bit.quantization import ops
from sdp4bit.quantization.formats import Bits
from sdp4bit.quantization.hadamard import INVERSE_FACTOR
from sdp4bit.quantization.layout import JointLayout, MessageLayout
from sdp4bit.quantization.random import RoundingKey, Stage, derive_keys, derive_series, pack_stream
from sdp4bit.traffic import Level, TrafficCounter


@dataclass(frozen=True, kw_only=True)
class SectionValues:
    """A section of the reduced tensor, which is cut into one piece per rank."""

    section: Section
    values: Tensor  # [m], contiguous

    def pieces(self, count: int) -> Tensor:
        """View the values as pieces [count, length]; see `piece_stride_and_length`."""
        stride, length = piece_stride_and_length(self.values.numel(), pieces=count, unit=self.section.unit)
        return self.values.as_strided((count, length), (stride, 1))


def sections_of(values: Tensor, sections: Sequence[Section]) -> list[SectionValues]:
    """Return the sections of values [n], contiguous; () for a single one."""
    chosen = sections or whole_row(values.numel())
    return [SectionValues(section=section, values=section.take(values)) for section in chosen]


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
        self._ranks = ranks
        self._seed = seed
        self._bucket = bucket
        between_nodes = layout.nodes > 1
        self.bits = config.inter_bits if between_nodes else config.intra_bits
        """Bits of a value; None for full precision."""
        self._group_size = config.inter_group_size if between_nodes else config.intra_group_size
        self._rounding = config.inter_rounding if between_nodes else config.intra_rounding
        self._hadamard = config.hadamard and self.bits is not None

    def message_layout(self, pieces: Sequence[Tensor], sections: Sequence[SectionValues]) -> JointLayout:
        """Return the layout of the message that carries a rank's pieces of all sections."""
        return JointLayout(
            tuple(
                each.section.layout(piece.numel(), bits=self.bits, group_size=self._group_size)
                for piece, each in zip(pieces, sections, strict=True)
            )
        )

    def quantize(
        self, pieces: Sequence[Tensor], out: Tensor, *, call: int, row: int, sections: Sequence[SectionValues]
    ) -> None:
        """Write the message that carries a rank's pieces of all sections.

        Args:
            pieces: [n] each, fp32, bf16 or fp16.
            out: uint8 [1, nbytes] of the layout.
            row: row of the rank in the group, for the rounding bits.
        """
        layout = self.message_layout(pieces, sections)
        for piece, part, message, each in zip(
            pieces, layout.layouts, split_messages(out, layout), sections, strict=True
        ):
            key = None if self._rounding == "nearest" else self._key(each.section.call(call), row)
            rows = piece.view(1, 1, -1)
            ops.hadamard_quantize(rows, out=message, layout=part, hadamard=self._hadamard, rounding=key)

    def restore(
        self,
        messages: Tensor,
        values: Tensor,
        *,
        call: int,
        sections: Sequence[SectionValues],
        multiplier: float = 1.0,
    ) -> None:
        """Write the pieces of all ranks, times the multiplier, to their places.

        Args:
            messages: uint8 [ranks, nbytes], in the order of the ranks.
            values: [n], fp32, bf16 or fp16, contiguous; the sections are parts of it.
        """
        of_all = [each.pieces(self.count) for each in sections]
        layout = self.message_layout([pieces[0] for pieces in of_all], sections)
        for pieces, part, parts, each in zip(
            of_all, layout.layouts, split_messages(messages, layout), sections, strict=True
        ):
            self._restore(
                parts,
                out=each.values,
                layout=part,
                call=each.section.call(call),
                pieces=self.count,
                stride=pieces.stride(0),
                multiplier=multiplier,
            )
            each.section.put(each.values, values)

    def _restore(
        self,
        messages: Tensor,
        *,
        out: Tensor,
        layout: MessageLayout,
        call: int,
        pieces: int,
        stride: int,
        multiplier: float,
    ) -> None:
        """Write all pieces of a section in one launch, so that its cost does not grow with the ranks."""
        stream = self._stream(call, self._ranks[0])
        is_dither, step = self._rounding == "dither", self._ranks.step
        ops.dequantize_reduce_pieces(
            messages,
            out=out,
            layout=layout,
            pieces=pieces,
            stride=stride,
            hadamard=self._hadamard,
            multiplier=multiplier * INVERSE_FACTOR if self._hadamard else multiplier,
            dither=derive_series(self._seed, stream, rank_step=step) if is_dither else None,
        )

    def _stream(self, call: int, rank: int) -> int:
        return pack_stream(step=call, bucket=self._bucket, stage=Stage.GATHER, rank=rank)

    def _key(self, call: int, row: int) -> RoundingKey:
        is_dither, sender, rank = self._rounding == "dither", row // self.count, self._ranks[row]
        if is_dither:
            # Ranks with the same piece share the key of the first one, so that a receiver derives it once.
            rank = self._ranks[row % self.count]
        keys = derive_keys(self._seed, self._stream(call, rank))
        return RoundingKey(*keys, dither=is_dither, sender=sender)

    def requantized(self, values: Tensor) -> Tensor:
        """Return values [n], fp32, contiguous, as they arrive in a message of the first rank."""
        whole = sections_of(values, ())
        layout = self.message_layout([values], whole)
        message = torch.empty(1, layout.nbytes, dtype=torch.uint8, device=values.device)
        self.quantize([values], message, call=0, row=0, sections=whole)
        result = torch.empty_like(values)
        self._restore(
            message, out=result, layout=layout.layouts[0], call=0, pieces=1, stride=0, multiplier=1.0
        )
        return result


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
        self._traffic = traffic or topology.counter()
        self._scratch = scratch or Scratch()
        self._name = name or f"group {bucket}"
        layout, ranks = topology.layout, ranks or range(topology.size)
        self._pieces = PieceQuantizer(layout, config=config, seed=seed, ranks=ranks, bucket=bucket)
        reduced_over = topology
        if self._pieces.count < layout.size:
            # Two nodes: each reduces the same pieces, and step 5 adds the sums of both.
            node = replace(layout, ranks=tuple(layout.members("intra")[topology.node]), nodes=1)
            reduced_over = replace(topology, layout=node, node=0, inter=None)
        self._reduction = QuantizedReduceScatter(
            reduced_over,
            config=config,
            seed=seed,
            rank=ranks[topology.row],
            rank_step=ranks.step,
            bucket=bucket,
            traffic=self._traffic,
            scratch=self._scratch,
            name=f"{self._name} over the replicate dimension",
        )

    @property
    def config(self) -> GradientConfig:
        """The settings of both halves."""
        return self._reduction.config

    @property
    def bits(self) -> Bits:
        """Bits of a gathered value, which are those of the last hop."""
        return self._pieces.bits

    @property
    def group_unit(self) -> int:
        """The least common multiple of the group sizes of all hops."""
        return group_unit(self.config, grid=self._topology.layout)

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
        sections: Sequence[Section] = (),
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
        topology, numel, device = self._topology, values.numel(), values.device
        if topology.size == 1 or not numel:
            if multiplier != 1.0:
                values.mul_(multiplier)
            return
        with profiler_range(f"sdp4bit::all_reduce ({self._name})"):
            # 1. Reduce-scatter of one piece per section.
            cut = sections_of(values, sections)
            own: Sequence[Tensor] = [each.values for each in cut]
            if self._reduction.hops:
                rows = [each.pieces(self._pieces.count) for each in cut]
                lengths = [row.shape[1] for row in rows]
                own = torch.empty(sum(lengths), dtype=torch.float32, device=device).split(lengths)
                chosen = [
                    SectionRows(section=each.section, rows=row, output=output, numel=output.numel())
                    for each, row, output in zip(cut, rows, own, strict=True)
                ]
                with profiler_range(f"sdp4bit::reduce_scatter ({self._reduction.name})"):
                    run(pipelined(self._reduction.chunks(chosen, call=call)))
            # The bytes of a ring all-reduce.
            self._traffic.count_plain(round(2 * values.nbytes / topology.size))

            # 2. One message per rank. Without slots: this call runs to its end on one stream, so the
            # next one finds all buffers free.
            layout = self._pieces.message_layout(own, cut)
            messages = self._scratch.messages("gather send", 1, layout.nbytes, device=device)
            self._pieces.quantize(own, messages, call=call, row=topology.row, sections=cut)
            if nonfinite is not None:
                sent = split_messages(messages, layout)
                nonfinite += count_nonfinite([*map(upper_halves, sent, layout.layouts)])

            # 3. and 4. All-gather in the levels of the reduce-scatter, from the outermost one. The messages
            # of a level are put between those that arrived before, so that message r = node * ranks_per_node
            # + local rank is row r, as step 5 expects.
            for level, size in reversed(topology.layout.levels.items()):
                group = topology.group(level)
                if group is None:
                    continue
                count = len(messages)
                gathered = self._scratch.messages(
                    f"gather {level}", count * size, layout.nbytes, device=device
                )
                blocks, what = gathered.view(count, size, layout.nbytes), self._what(level)
                all_gather_blocks(blocks, messages, group, what=what)
                self._traffic.count_messages(layout, level=level, peers=size - 1, copies=count)
                messages = gathered

            # 5. Restore all pieces, this rank's own included, from the messages.
            self._pieces.restore(messages, values, call=call, multiplier=multiplier, sections=cut)

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

    def _what(self, level: Level) -> str:
        return f"quantized gradient all-gather of {self._name} over the replicate dimension, {PLACES[level]}"
