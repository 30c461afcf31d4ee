"""Replica of the weights, kept up to date by quantized differences, qWD (paper section 3.1, algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from sdp4bit.collectives.errors import PLACES
from sdp4bit.collectives.exchange import (
    PendingExchange,
    all_gather_blocks,
    start_all_gather_rows,
)
from sdp4bit.collectives.reduce_scatter import count_nonfinite
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import WHOLE, Range, Section, split_messages, whole_row
from sdp4bit.collectives.topology import Topology
from sdp4bit.collectives.work import CompletedWork, SideStream
from sdp4bit.config import WeightConfig
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import JointLayout, MessageLayout
from sdp4bit.quantization.random import RoundingKey, Stage, derive_keys, pack_stream
from sdp4bit.traffic import Level, TrafficCounter


class QuantizedReplica:
    """The arithmetic of a replica's refresh: what comes before and after the all-gathers, for any rank.

    "difference" sends what has to be added to what is held, "direct" what replaces it.
    """

    def __init__(self, config: WeightConfig, *, seed: int, bucket: int, rank: int) -> None:
        """Prepare; nothing is allocated.

        Args:
            bucket: number of the parameter group, for the rounding bits.
            rank: numbers the shard whose differences are measured.
        """
        self.config = config
        """The settings of the next refresh."""
        self._seed = seed
        self._bucket = bucket
        self._rank = rank

    def configure(self, config: WeightConfig) -> None:
        """Do the next refreshes with these settings; all ranks change them between the same two.

        Raises:
            ValueError: the rows would have to be held by other ranks.
        """
        if config.replica != self.config.replica:
            raise ValueError(f"the replica is {self.config.replica!r} and cannot become {config.replica!r}")
        self.config = config

    @property
    def bits(self) -> int | None:
        """Bits of a value in a quantized refresh; None if no refresh loses anything."""
        return self.config.bits

    @property
    def group_size(self) -> int:
        """Values that share a scale."""
        return self.config.group_size

    @property
    def sends_differences(self) -> bool:
        """Whether a refresh sends what has changed, rather than the weights."""
        return self.config.mode != "direct"

    def message_layout(self, sections: Sequence[Section]) -> JointLayout:
        """Return the layout of the message that carries these sections of a row."""
        return JointLayout(tuple(self._layout_of(section.numel, section) for section in sections))

    def _layout_of(self, numel: int, section: Section) -> MessageLayout:
        return section.layout(numel, bits=self.bits, group_size=self.config.group_size)

    def quantize(
        self, row: Tensor, held: Tensor, out: Tensor, *, call: int, rank: int, section: Section = WHOLE
    ) -> None:
        """Write the message that carries what has to be added to what is held of a section, or to replace it.

        Args:
            row: [n], the section of a rank's main shard, fp32 or in the type that weights are gathered in.
            held: [n], what the replica holds of it.
            out: uint8 [nbytes] of the layout.
            call: number of this refresh of the bucket since the start, for the rounding bits.
        """
        replica = held if self.sends_differences else None
        layout, number = self._layout_of(row.numel(), section), section.call(call)
        rounding = self._dither(layout, call=number, first_rank=rank)
        if self.config.rounding == "stochastic":
            stream = pack_stream(step=number, bucket=self._bucket, stage=Stage.WEIGHT, rank=rank)
            rounding = RoundingKey(*derive_keys(self._seed, stream))
        clip = 1.0 if section.is_fine else self.config.effective_clip
        ops.subtract_quantize(row, replica=replica, out=out, layout=layout, rounding=rounding, clip=clip)

    def apply(
        self,
        messages: Tensor,
        rows: Tensor,
        *,
        call: int,
        first_rank: int = 0,
        step: int = 1,
        section: Section = WHOLE,
    ) -> None:
        """Let row i of a section of a replica follow message i, in place.

        Args:
            messages: uint8 [k, nbytes], message i from rank first_rank + i * step.
            rows: [k, n].
            call: as the senders had it.
        """
        layout = self._layout_of(rows.shape[1], section)
        ops.dequantize_add(
            messages,
            replica=rows,
            layout=layout,
            accumulate=self.sends_differences,
            dither=self._dither(layout, call=section.call(call), first_rank=first_rank, step=step),
        )

    def _dither(
        self, layout: MessageLayout, *, call: int, first_rank: int, step: int = 1
    ) -> RoundingKey | None:
        """Return the key of the messages of every step-th rank: one for all, which numbers their rows."""
        if self.config.rounding != "dither":
            return None
        keys = derive_keys(
            self._seed, pack_stream(step=call, bucket=self._bucket, stage=Stage.WEIGHT, rank=0)
        )
        row = layout.padded_numel
        return RoundingKey(*keys, first=first_rank * row, row_stride=step * row, dither=True)

    def quantized_differences(self, row: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a quantized refresh has to send and what arrives of it, both in fp32; nothing is sent.

        Args:
            row: [n], a part of the main shard, of whole quantization groups: then nearest rounding gives
                what the refresh of a row without sections gives. With sections it is an estimate.
            held: [n], what the replica holds there.
        """
        layout = self._layout_of(row.numel(), WHOLE)
        message = torch.empty(1, layout.nbytes, dtype=torch.uint8, device=row.device)
        received = torch.empty(1, row.numel(), dtype=torch.float32, device=row.device)
        self.quantize(row, held, message[0], call=0, rank=self._rank)
        dither = self._dither(layout, call=0, first_rank=self._rank)
        ops.dequantize_add(message, replica=received, layout=layout, accumulate=False, dither=dither)
        return row.float() - held.float() if self.sends_differences else row.float(), received[0]


class WeightReplica(QuantizedReplica):
    """What the devices hold of a parameter group's weights: bit-identical wherever it is held.

    "full" holds the rows of all ranks on every rank. "node" holds, on local rank j, the rows of the ranks
    with local rank j of every node; together the ranks of a node hold everything once.

    A refresh is started, which sends, and waited for, which applies what has come: transfers of several
    replicas can be under way at once, and other work be done meanwhile.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        config: WeightConfig,
        seed: int,
        rank: int,
        bucket: int,
        traffic: TrafficCounter,
        scratch: Scratch,
        sections: Sequence[Section] = (),
        name: str = "",
    ) -> None:
        """Prepare; nothing is allocated or sent before the first refresh.

        Args:
            sections: of a row, which together are all of it; () for one. The same on all ranks.
            name: of the parameter group, for errors.
        """
        super().__init__(config, seed=seed, bucket=bucket, rank=rank)
        self._topology = topology
        self._traffic = traffic
        self._scratch = scratch
        self._sections = sections
        self._name = name or f"group {bucket}"
        self._pending: Callable[[], None] | None = None
        self._beside: CompletedWork | None = None
        self.rows: Tensor | None = None
        """[nodes, n], or [nodes, ranks_per_node, n] for "full"; None before the first refresh."""
        self.nonfinite = torch.zeros((), dtype=torch.bool)
        """Whether what this rank has sent in the last refresh held NaN or infinity, on the device."""

    def configure(self, config: WeightConfig) -> None:
        """See QuantizedReplica; a refresh that is under way is waited for."""
        if config != self.config:
            self.wait()
        super().configure(config)

    @property
    def is_full(self) -> bool:
        """Whether this rank holds every row."""
        return self.config.replica == "full" or self._topology.ranks_per_node == 1

    @property
    def own_shard(self) -> Tensor:
        """[n], what the devices hold of this rank's own shard."""
        self.wait()
        assert self.rows is not None
        own = self.rows[self._topology.node]
        return own[self._topology.local_rank] if self.is_full else own

    @property
    def is_pending(self) -> bool:
        """Whether a refresh has been started and not waited for; the rows must not be read."""
        return self._pending is not None

    def wait(self) -> None:
        """Finish the refresh that is under way, if any; the ranks of a node call it together.

        On CUDA the current stream waits for what a side stream does with the rows.
        """
        if self._beside is not None:
            self._beside.wait()
        pending, self._pending = self._pending, None
        if pending is not None:
            with torch.no_grad(), torch.inference_mode(False):
                pending()

    def run_beside(self, stream: SideStream, function: Callable[[], None]) -> CompletedWork:
        """Refresh or gather on a side stream, by this function; later uses of the rows wait for it."""
        self._beside = stream.run(function)
        return self._beside

    def start_full_refresh(self, row: Tensor) -> None:
        """Start to send rows in full precision; after wait() the replica equals those of all ranks.

        Steps: 1. all-gather between nodes;  2. "full": all-gather of the result in the node, in wait().

        Args:
            row: [n], what the devices shall hold of this rank's shard, contiguous; unchanged until wait().
        """
        self.wait()
        self.nonfinite = _is_nonfinite(row)
        topology, numel = self._topology, row.numel()
        shape = (topology.nodes, topology.ranks_per_node, numel) if self.is_full else (topology.nodes, numel)
        # Plain tensors even under inference_mode: training updates them in place later.
        with torch.inference_mode(False):
            if self.rows is None or self.rows.shape != shape or self.rows.dtype != row.dtype:
                self.rows = torch.empty(shape, dtype=row.dtype, device=row.device)
            mine = self.rows  # [nodes, n], what comes from this rank's peers between nodes
            if self.is_full:
                alone = topology.intra is None
                mine = self.rows[:, 0] if alone else row.new_empty(topology.nodes, numel)
            transfer = PendingExchange([])
            if topology.inter is None:
                mine[0].copy_(row)
            else:
                peers = topology.nodes - 1
                transfer = start_all_gather_rows(
                    mine, row, topology.inter, what=self._what("full-precision", "inter")
                )
                self._traffic.count_bytes(row.nbytes, level="inter", peers=peers)
        self._pending = partial(self._finish_full, transfer, row, mine)

    def _finish_full(self, transfer: PendingExchange, row: Tensor, mine: Tensor) -> None:
        topology = self._topology
        transfer.wait()
        if self.is_full and topology.intra is not None:
            assert self.rows is not None
            nbytes, peers = row.nbytes * topology.nodes, topology.ranks_per_node - 1
            all_gather_blocks(self.rows, mine, topology.intra, what=self._what("full-precision", "intra"))
            self._traffic.count_bytes(nbytes, level="intra", peers=peers)

    def start_quantized_refresh(
        self, row: Tensor, *, call: int, ranges: Sequence[Range] | None = None
    ) -> None:
        """Start to send what has changed; after wait() the replica has moved by what all ranks have sent.

        Every rank, the owner of a row included, applies the same dequantized difference, so all copies stay
        bit-identical and what rounding left out is part of the next difference.
        Steps: 1. subtract and quantize each section;  2. all-gather of one message between nodes; and in
        wait() 3. "full": all-gather of the messages in the node;  4. dequantize and add each section.

        Args:
            row: [n], this rank's main shard.
            call: number of this refresh of the bucket since the start, for the rounding bits.
            ranges: ranges of the row that may have changed, the same on all ranks; None for all of it.
        """
        self.wait()
        assert self.rows is not None
        if self.bits is None:
            self.start_full_refresh(row.to(self.rows.dtype))
            return
        self.nonfinite = torch.zeros((), dtype=torch.bool, device=row.device)
        if self.rows.dtype == torch.float16:
            # Finite weights and differences may sum to more than fp16 holds; bf16 has fp32's range.
            self.nonfinite = _is_nonfinite(row.to(torch.float16))
        sections = self._sections or whole_row(row.numel())
        if ranges is not None:
            within = [section.within(ranges) for section in sections]
            sections = [section for section in within if section.ranges]
        if sections:
            self._pending = self._start_differences(row, call, sections)

    def _start_differences(self, row: Tensor, call: int, sections: Sequence[Section]) -> Callable[[], None]:
        """Return what finishes the refresh of these sections."""
        assert self.rows is not None
        topology, device = self._topology, row.device
        layout = self.message_layout(sections)
        replicas = [section.take(self.rows) for section in sections]

        slot = self._scratch.take_slot()
        name = f"inter receive {slot}"
        messages = self._scratch.messages(name, topology.nodes, layout.nbytes, device=device)
        own = self._scratch.messages(f"send {slot}", 1, layout.nbytes, device=device)
        for section, replica, out in zip(sections, replicas, split_messages(own, layout), strict=True):
            held = replica[topology.node, topology.local_rank] if self.is_full else replica[topology.node]
            self.quantize(section.take(row), held, out[0], call=call, rank=self._rank, section=section)
        for part, out in zip(layout.layouts, split_messages(own, layout), strict=True):
            self.nonfinite |= count_nonfinite(out, part) > 0
        transfer = PendingExchange([])
        if topology.inter is None:
            messages.copy_(own)
        else:
            peers = topology.nodes - 1
            transfer = start_all_gather_rows(
                messages, own[0], topology.inter, what=self._what("quantized", "inter")
            )
            self._traffic.count_messages(layout, level="inter", peers=peers)

        def finish() -> None:
            transfer.wait()
            self._apply_all(messages, sections, replicas, layout, call)
            self._scratch.free_slot(slot)

        return finish

    def _apply_all(
        self,
        messages: Tensor,
        sections: Sequence[Section],
        replicas: Sequence[Tensor],
        layout: JointLayout,
        call: int,
    ) -> None:
        """Add the differences of this rank's peers between nodes and, to a full replica, of all ranks."""
        topology = self._topology
        first, step = self._rank - topology.node * topology.ranks_per_node, topology.ranks_per_node
        if self.is_full and topology.intra is not None:
            first, step = 0, 1
            messages = self._gather_messages(messages, layout)
        assert self.rows is not None
        for section, replica, part in zip(sections, replicas, split_messages(messages, layout), strict=True):
            rows = replica.view(-1, replica.shape[-1]) if step == 1 else replica
            self.apply(part, rows, call=call, first_rank=first, step=step, section=section)
            section.put(replica, self.rows)

    def _gather_messages(self, messages: Tensor, layout: JointLayout) -> Tensor:
        """Return the messages of all ranks, uint8 [ranks, nbytes], from this rank's [nodes, nbytes]."""
        topology = self._topology
        assert topology.intra is not None
        gathered = self._scratch.messages(
            "intra receive", topology.size, layout.nbytes, device=messages.device
        )
        # In the order of the rows, so that one launch applies all of them.
        blocks = gathered.view(topology.nodes, topology.ranks_per_node, layout.nbytes)
        copies, peers = topology.nodes, topology.ranks_per_node - 1
        all_gather_blocks(blocks, messages, topology.intra, what=self._what("quantized", "intra"))
        self._traffic.count_messages(layout, level="intra", peers=peers, copies=copies)
        return gathered

    def gather(self, output: Tensor) -> None:
        """Gather the rows of all ranks to `output` [size * n], from the ranks of this node.

        Only for a replica that is spread over the node; one collective inside the node.
        """
        topology = self._topology
        self.wait()
        assert self.rows is not None and not self.is_full and topology.intra is not None
        blocks = output.view(topology.nodes, topology.ranks_per_node, -1)
        nbytes, peers = self.rows.nbytes, topology.ranks_per_node - 1
        all_gather_blocks(blocks, self.rows, topology.intra, what=self._what("replica", "intra"))
        self._traffic.count_bytes(nbytes, level="intra", peers=peers)

    def _what(self, kind: str, level: Level) -> str:
        return f"{kind} weight all-gather of {self._name}, {PLACES[level]}"


def _is_nonfinite(row: Tensor) -> Tensor:
    if not row.numel():
        return torch.zeros((), dtype=torch.bool, device=row.device)
    largest: Tensor = torch.linalg.vector_norm(row, math.inf)
    return largest.isfinite().logical_not()
