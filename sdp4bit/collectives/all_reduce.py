"""Quantized all-reduce: ranks reduce a piece each, quantize their sums again, and send them to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdp4bit.collectives.errors import PLACES
from sdp4bit.collectives.exchange import all_gather_blocks, start_all_gather_rows
from sdp4bit.collectives.pieces import is_long_enough, piece_places
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter, RowPart
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import WHOLE, Section, split_messages, whole_row
from sdp4bit.collectives.topology import NodeLayout, Topology
from sdp4bit.config import GradientConfig
from sdp4bit.quantization import ops
from sdp4bit.quantization.hadamard import INVERSE_FACTOR, Hadamard
from sdp4bit.quantization.layout import JointLayout, MessageLayout
from sdp4bit.quantization.random import RoundingKey, Stage, derive_keys, draw_signs, pack_stream
from sdp4bit.traffic import Level, TrafficCounter


@dataclass(frozen=True, kw_only=True)
class PieceSection:
    """A section of what is reduced, which is a piece of it for each rank."""

    section: Section
    values: Tensor
    """[m], contiguous."""

    def pieces(self, *, ranks: int) -> Tensor:
        """View the values as the pieces of all ranks, [ranks, length]; see piece_places."""
        stride, length = piece_places(self.values.numel(), ranks=ranks, unit=self.section.unit)
        return self.values.as_strided((ranks, length), (stride, 1))


def sections_of(values: Tensor, sections: Sequence[Section]) -> list[PieceSection]:
    """Return the sections of values [n], contiguous; () for one."""
    chosen = sections or whole_row(values.numel())
    return [PieceSection(section=section, values=section.take(values)) for section in chosen]


class PieceQuantizer:
    """The arithmetic of what is gathered: a rank's piece of the sum as a message, for any rank.

    All ranks, the one that has quantized a piece included, take it from the message: they end with the same
    bits. The settings are those of the last hop of the reduction.
    """

    def __init__(
        self, layout: NodeLayout, *, config: GradientConfig, seed: int, ranks: range, bucket: int
    ) -> None:
        """Prepare; nothing is allocated.

        Args:
            ranks, bucket: see QuantizedAllReduce.
        """
        self._layout = layout
        self._ranks = ranks
        self._seed = seed
        self._bucket = bucket
        self.configure(config)

    def configure(self, config: GradientConfig) -> None:
        """Quantize the next pieces with these settings."""
        between_nodes = self._layout.nodes > 1
        self._config = config
        self.bits = config.inter_bits if between_nodes else config.intra_bits
        """Bits of a value; None for full precision."""
        self._group_size = config.inter_group_size if between_nodes else config.intra_group_size
        self._rounding = config.inter_rounding if between_nodes else config.intra_rounding

    def _layout_of(self, piece: Tensor, section: Section) -> MessageLayout:
        return section.layout(piece.numel(), bits=self.bits, group_size=self._group_size)

    def message_layout(self, pieces: Sequence[Tensor], sections: Sequence[PieceSection]) -> JointLayout:
        """Return the layout of the message that carries a rank's pieces of all sections."""
        pairs = zip(pieces, sections, strict=True)
        return JointLayout(tuple(self._layout_of(piece, each.section) for piece, each in pairs))

    def quantize_all(
        self, pieces: Sequence[Tensor], out: Tensor, *, call: int, rank: int, sections: Sequence[PieceSection]
    ) -> None:
        """Write the message that carries a rank's pieces of all sections; see quantize."""
        messages = split_messages(out, self.message_layout(pieces, sections))
        for piece, part, each in zip(pieces, messages, sections, strict=True):
            self.quantize(piece, part, call=call, rank=rank, section=each.section)

    def quantize(self, piece: Tensor, out: Tensor, *, call: int, rank: int, section: Section = WHOLE) -> None:
        """Write the message that carries a piece of a section.

        Args:
            piece: [n], fp32.
            out: uint8 [1, nbytes] of the layout.
            rank: numbers the one whose piece it is, for the rounding bits.
        """
        number = section.call(call)
        ops.hadamard_quantize(
            piece.view(1, 1, -1),
            out=out,
            layout=self._layout_of(piece, section),
            hadamard=self._transform(number),
            rounding=None if self._rounding == "nearest" else self._key(call=number, rank=rank),
        )

    def _key(self, *, call: int, rank: int) -> RoundingKey:
        # The bucket is the all-reduce's own: no weights are rounded by this stage's bits.
        stream = pack_stream(step=call, bucket=self._bucket, stage=Stage.WEIGHT, rank=rank)
        return RoundingKey(*derive_keys(self._seed, stream), dither=self._rounding == "dither")

    def restore(
        self,
        message: Tensor,
        out: Tensor,
        *,
        call: int,
        rank: int,
        multiplier: float = 1.0,
        section: Section = WHOLE,
    ) -> None:
        """Write the piece that a message carries, times the multiplier.

        Args:
            message: uint8 [1, nbytes] of the layout.
            out: [n], fp32, bf16 or fp16, contiguous.
            rank: as its sender had it.
        """
        number = section.call(call)
        hadamard = self._transform(number)
        ops.dequantize_reduce_hadamard(
            message,
            out=out,
            layout=self._layout_of(out, section),
            hadamard=hadamard,
            multiplier=multiplier * INVERSE_FACTOR if hadamard else multiplier,
            dither=self._key(call=number, rank=rank) if self._rounding == "dither" else None,
        )

    def restore_all(
        self,
        messages: Tensor,
        values: Tensor,
        *,
        call: int,
        sections: Sequence[PieceSection],
        multiplier: float = 1.0,
    ) -> None:
        """Write the pieces of all ranks, times the multiplier, to their places.

        Args:
            messages: uint8 [ranks, nbytes], in the order of the ranks.
            values: [n], fp32, bf16 or fp16, contiguous, of which these are the sections.
        """
        of_all = [each.pieces(ranks=self._layout.size) for each in sections]
        layout = self.message_layout([pieces[0] for pieces in of_all], sections)
        for pieces, parts, each in zip(of_all, split_messages(messages, layout), sections, strict=True):
            # One by one, in the order of the ranks: neighbours overlap.
            for part, piece, rank in zip(parts.split(1), pieces.unbind(), self._ranks, strict=True):
                self.restore(part, piece, call=call, rank=rank, multiplier=multiplier, section=each.section)
            each.section.put(each.values, values)

    def _transform(self, call: int) -> Hadamard | None:
        if self.bits is None or not self._config.hadamard:
            return None
        signs = draw_signs(self._seed, step=call, bucket=self._bucket) if self._config.random_signs else 0
        return Hadamard(signs)


class QuantizedAllReduce:
    """Sums tensors over a group of nodes x ranks_per_node ranks; all ranks end with the same bits.

    Both halves are quantized: the reduce-scatter as by QuantizedReduceScatter, and what it leaves each rank
    with, on its way to the others. A world of one changes nothing.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        config: GradientConfig,
        seed: int,
        ranks: range,
        bucket: int,
        traffic: TrafficCounter,
        scratch: Scratch,
        name: str = "",
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            ranks: numbers the members of the topology, in its order, so that no two draw the same rounding
                bits.
            bucket: number of what is reduced, for the same reason; shared with no other collective.
            scratch: message buffers, shared by the reductions that follow each other.
            name: of what is reduced, for errors.
        """
        self._topology = topology
        self._rank = ranks[topology.row]
        self._traffic = traffic
        self._scratch = scratch
        self._name = name or f"group {bucket}"
        self._reduction = QuantizedReduceScatter(
            topology,
            config=config,
            seed=seed,
            rank=self._rank,
            rank_step=ranks.step,
            bucket=bucket,
            traffic=traffic,
            scratch=scratch,
            name=f"{self._name} over replicas",
        )
        self._pieces = PieceQuantizer(topology.layout, config=config, seed=seed, ranks=ranks, bucket=bucket)

    def configure(self, config: GradientConfig) -> None:
        """Do the next reductions with these settings; all ranks change them between the same two."""
        self._reduction.configure(config)
        self._pieces.configure(config)

    @property
    def config(self) -> GradientConfig:
        """The settings of the next reduction."""
        return self._reduction.config

    @property
    def bits(self) -> int | None:
        """Bits of a value that is gathered, which are those of the reduction's last hop."""
        return self._pieces.bits

    @property
    def group_unit(self) -> int:
        """The shortest range of values that divides no quantization group of any hop."""
        return self._reduction.group_unit

    def takes(self, numel: int) -> bool:
        """Return whether so many values are to be quantized, and not left to a plain all-reduce."""
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

        Steps: 1. a quantized reduce-scatter of the pieces, in two levels or one, after which each rank has
        the sum of its own in fp32;  2. transform and quantize it again, one message;  3. all-gather of the
        messages between nodes;  4. all-gather of the result in the node;  5. dequantize all messages, one's
        own too, and transform back.

        Args:
            values: [n], fp32, bf16 or fp16, contiguous; changed in place.
            call: number of this reduction of the bucket since the start, the same on all ranks, for the
                rounding bits and the random signs.
            nonfinite: see QuantizedReduceScatter; of this rank's pieces.
            sections: of the values, which together are all of them; () for one. A rank has a piece of each.
        """
        topology, numel = self._topology, values.numel()
        if topology.size == 1 or not numel:
            if multiplier != 1.0:
                values.mul_(multiplier)
            return
        cut = sections_of(values, sections)
        rows = [each.pieces(ranks=topology.size) for each in cut]
        # The sums lie apart: the rows are read until the last of them is there.
        lengths = [row.shape[1] for row in rows]
        own = torch.empty(sum(lengths), dtype=torch.float32, device=values.device).split(lengths)
        self._reduction.reduce_parts(
            [
                RowPart(section=each.section, rows=row, output=output)
                for each, row, output in zip(cut, rows, own, strict=True)
            ],
            call=call,
            nonfinite=nonfinite,
        )
        # As a ring does it: twice around, a part of the values at a time.
        self._traffic.count_plain(round(2 * values.nbytes / topology.size))
        layout = self._pieces.message_layout(own, cut)
        message = self._scratch.messages("gather send", 1, layout.nbytes, device=values.device)
        self._pieces.quantize_all(own, message, call=call, rank=self._rank, sections=cut)
        messages = self._gather(message, layout)
        self._pieces.restore_all(messages, values, call=call, multiplier=multiplier, sections=cut)

    def _gather(self, message: Tensor, layout: JointLayout) -> Tensor:
        """Return the messages of all ranks, uint8 [ranks, nbytes], of which this rank's is [1, nbytes]."""
        topology, device = self._topology, message.device
        peers = message
        if topology.inter is not None:
            peers = self._scratch.messages("gather inter", topology.nodes, layout.nbytes, device=device)
            others = topology.nodes - 1
            transfer = start_all_gather_rows(peers, message[0], topology.inter, what=self._what("inter"))
            transfer.wait()
            self._traffic.count_messages(layout, level="inter", peers=others)
        if topology.intra is None:
            return peers
        messages = self._scratch.messages("gather intra", topology.size, layout.nbytes, device=device)
        blocks = messages.view(topology.nodes, topology.ranks_per_node, layout.nbytes)
        copies, others = topology.nodes, topology.ranks_per_node - 1
        all_gather_blocks(blocks, peers, topology.intra, what=self._what("intra"))
        self._traffic.count_messages(layout, level="intra", peers=others, copies=copies)
        return messages

    def requantized(self, values: Tensor) -> Tensor:
        """Return, in fp32, these values with the errors that the quantizers of both halves make of them.

        What the first half leaves lies on the grid of the second; the sum over ranks, which the second half
        quantizes, does not. So it is given the values themselves, and the errors are added.

        Args:
            values: [n], a sample of a gradient, contiguous.
        """
        exact = values.float()
        layout = self._pieces.message_layout([exact], sections_of(exact, ()))
        message = torch.empty(1, layout.nbytes, dtype=torch.uint8, device=values.device)
        self._pieces.quantize(exact, message, call=0, rank=self._rank)
        gathered = torch.empty_like(exact)
        self._pieces.restore(message, gathered, call=0, rank=self._rank)
        return self._reduction.requantized(values).add_(gathered).sub_(exact)

    def _what(self, level: Level) -> str:
        return f"quantized gradient all-gather of {self._name} over replicas, {PLACES[level]}"
