"""Two-level quantized reduce-scatter, TLq-HS (paper section 3.2, algorithm 3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sdp4bit.collectives.errors import PLACES
from sdp4bit.collectives.exchange import GroupExchange, MessageExchange, PendingExchange, Use
from sdp4bit.collectives.pipeline import group_unit, slice_lengths
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import Topology
from sdp4bit.config import GradientConfig, Rounding
from sdp4bit.quantization import ops
from sdp4bit.quantization.hadamard import INVERSE_FACTOR, Hadamard
from sdp4bit.quantization.layout import BLOCK, FULL_PRECISION, MessageLayout, message_layout, round_up
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
    bits: int
    group_size: int
    rounding: Rounding

    def layout(self, numel: int, *, parts: int) -> MessageLayout:
        return message_layout(numel=numel, bits=self.bits, group_size=self.group_size, parts=parts)


def _hops(topology: Topology, config: GradientConfig) -> list[_Hop]:
    hops = []
    if topology.ranks_per_node > 1:
        hops.append(
            _Hop(
                level="intra",
                stage=Stage.INTRA,
                size=topology.ranks_per_node,
                own=topology.local_rank,
                bits=config.intra_bits or FULL_PRECISION,
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
                bits=config.inter_bits or FULL_PRECISION,
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
        self._hadamard = config.hadamard and any(hop.bits != FULL_PRECISION for hop in self._hops)
        self._random_signs = config.random_signs and self._hadamard

    def __call__(
        self,
        output: Tensor,
        input: Tensor,
        *,
        call: int,
        multiplier: float = 1.0,
        nonfinite: Tensor | None = None,
    ) -> None:
        """Reduce rows over all ranks to this rank's row of the sum, times the multiplier.

        Steps, for each slice of a row (`pipeline_chunks`):
        1. Hadamard transform, quantize, one message per rank of the node;  2. all-to-all in the node;
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

        Raises:
            ValueError: input is not size times as long as output.
        """
        stop = self._traffic.start_quantizing(input.device)
        waiting = self.begin(output, input, call=call, multiplier=multiplier, nonfinite=nonfinite)
        under_way: list[Iterator[None]] = []
        while waiting or under_way:
            if waiting:
                under_way.insert(0, waiting.pop(0))
            # Newest first: each slice starts its next transfer before an older one is waited for.
            under_way = [reduction for reduction in under_way if next(reduction, _DONE) is not _DONE]
        stop()

    def begin(
        self,
        output: Tensor,
        input: Tensor,
        *,
        call: int,
        multiplier: float = 1.0,
        nonfinite: Tensor | None = None,
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
        self._traffic.count_plain(numel * input.element_size())
        rows = input.view(topology.nodes, topology.ranks_per_node, numel)
        slices = [slice(0, numel)] if whole else self._slices(numel)
        overlaps = whole or len(slices) > 1
        return [
            self._reduce_slice(index, places, output, rows, call, multiplier, nonfinite, overlaps)
            for index, places in enumerate(slices)
        ]

    def requantized(self, values: Tensor) -> Tensor:
        """Return, in fp32, what these values are after passing the quantizers of all hops, unsummed.

        Args:
            values: [n], a sample of a gradient, contiguous.
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
        bits = self._hops[-1].bits
        return None if bits == FULL_PRECISION else bits

    @property
    def group_unit(self) -> int:
        """The shortest range of values that divides no quantization group of either level."""
        topology = self._topology
        return group_unit(self.config, nodes=topology.nodes, ranks_per_node=topology.ranks_per_node)

    def _slices(self, numel: int) -> list[slice]:
        """Cut a row; see slice_lengths."""
        nodes, ranks_per_node = self._topology.nodes, self._topology.ranks_per_node
        lengths = slice_lengths(numel, config=self.config, nodes=nodes, ranks_per_node=ranks_per_node)
        return [slice(end - n, end) for n, end in zip(lengths, accumulate(lengths), strict=True)]

    def _reduce_slice(
        self,
        index: int,
        places: slice,
        output: Tensor,
        rows: Tensor,
        call: int,
        multiplier: float,
        nonfinite: Tensor | None,
        overlaps: bool,
    ) -> Iterator[None]:
        """Reduce rows[..., places] into output[places]; yields whenever a transfer is under way.

        A row's random bits are numbered by its values' places in the whole row, so slicing changes nothing.
        """
        first, *rest = self._hops
        numel, hadamard = places.stop - places.start, self._transform(call)
        numbering = {"first": places.start, "row_stride": round_up(output.numel(), BLOCK)}
        part = rows[..., places]  # [nodes, ranks_per_node, numel]
        by_destination = part.transpose(0, 1) if first.level == "intra" else part

        layout = first.layout(numel, parts=by_destination.shape[1])
        sent = self._buffer(first, "send", index, layout, rows)
        rounding = self._rounding(first, call, **numbering)
        ops.hadamard_quantize(by_destination, out=sent, layout=layout, hadamard=hadamard, rounding=rounding)
        received, transfer = self._start(first, sent, index, layout, overlaps)
        yield
        transfer.wait()

        came_by = first
        for hop in rest:
            summed = hop.layout(numel, parts=1)
            sent = self._buffer(hop, "send", index, summed, rows)
            dither = as_dither(rounding, row=came_by.own * layout.parts)
            rounding = self._rounding(hop, call, **numbering)
            self._requantize(received, layout, sent, summed, rounding=rounding, dither=dither, places=places)
            came_by, layout = hop, summed
            received, transfer = self._start(hop, sent, index, layout, overlaps)
            yield
            transfer.wait()

        if nonfinite is not None:
            nonfinite += count_nonfinite(received, layout)
        factor = multiplier * INVERSE_FACTOR if hadamard else multiplier
        ops.dequantize_reduce_hadamard(
            received,
            out=output[places],
            layout=layout,
            hadamard=hadamard,
            multiplier=factor,
            dither=as_dither(rounding, row=came_by.own * layout.parts),
        )

    def _requantize(
        self,
        received: Tensor,
        layout: MessageLayout,
        sent: Tensor,
        summed: MessageLayout,
        *,
        rounding: RoundingKey | None,
        dither: RoundingKey | None,
        places: slice,
    ) -> None:
        """Write the messages of a sum over the node's messages, whose values have these places in a row."""
        ops.dequantize_reduce_quantize(
            received, received=layout, out=sent, sent=summed, rounding=rounding, dither=dither
        )

    def _start(
        self, hop: _Hop, sent: Tensor, index: int, layout: MessageLayout, overlaps: bool
    ) -> tuple[Tensor, PendingExchange]:
        received = self._buffer(hop, "receive", index, layout, sent)
        peers = hop.size - 1
        timer = self._traffic.start_timer(hop.level, sent.device, nbytes=layout.nbytes * peers)
        transfer = self._exchange.start(
            received,
            sent,
            level=hop.level,
            index=index,
            overlaps=overlaps,
            what=f"{self._what}, all-to-all {PLACES[hop.level]}",
        ).timed_by(timer)
        self._traffic.count_messages(layout, level=hop.level, peers=peers)
        return received, transfer

    def _buffer(self, hop: _Hop, use: Use, index: int, layout: MessageLayout, like: Tensor) -> Tensor:
        return self._exchange.messages(hop.level, use, index, nbytes=layout.nbytes, device=like.device)

    def _rounding(self, hop: _Hop, call: int, *, first: int, row_stride: int) -> RoundingKey | None:
        if hop.rounding == "nearest":
            return None
        rank, dither = self._rank, hop.rounding == "dither"
        if dither:
            # Ranks whose messages meet share a key, so that their receiver can draw it: that of the first.
            apart = 1 if hop.level == "intra" else self._topology.ranks_per_node
            rank -= hop.own * apart * self._rank_step
        stream = pack_stream(step=call, bucket=self._bucket, stage=hop.stage, rank=rank)
        keys = derive_keys(self._seed, stream)
        return RoundingKey(*keys, first=first, row_stride=row_stride, dither=dither, sender=hop.own)

    def _transform(self, call: int) -> Hadamard | None:
        if not self._hadamard:
            return None
        return Hadamard(draw_signs(self._seed, step=call, bucket=self._bucket) if self._random_signs else 0)


_DONE = object()
