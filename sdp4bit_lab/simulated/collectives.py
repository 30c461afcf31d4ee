"""Simulate the collectives of many ranks in one process: the same operators and messages, without transfers.

A sender quantizes each message into its receiver's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sdp4bit.collectives.all_reduce import PieceQuantizer, pieces_of
from sdp4bit.collectives.plan import Message, ReducePlan, plan_refresh
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.scratch import Messages, Scratch
from sdp4bit.collectives.sections import Range, Section, whole_row
from sdp4bit.collectives.streams import Running, advance
from sdp4bit.collectives.topology import Nodes, Topology, arrange, block_numbers
from sdp4bit.collectives.transport import PendingTransfer, Transport, Use
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.traffic import Level, TrafficCounter


def simulated_layout(ranks: int, *, ranks_per_node: int, nodes_per_block: int | None = None) -> Nodes:
    """Return the layout of ranks 0 .. ranks - 1, node by node.

    Raises:
        ValueError: the ranks do not fill the nodes, or the nodes the blocks.
    """
    labels = [rank // ranks_per_node for rank in range(ranks)]
    block_of = None if nodes_per_block is None else block_numbers(labels, nodes_per_block=nodes_per_block)
    return arrange(range(ranks), labels, block_of=block_of)


class SimulatedTransport(Transport):
    """All-to-alls of one simulated rank, in memory shared by senders and receivers.

    The ranks of a node share a matrix [receiver, sender, nbytes], which the next node reuses. Ranks with
    equal local rank share a matrix between the nodes of a block, and those with equal place in their block
    one between blocks.
    """

    def __init__(self, topology: Topology, scratch: Scratch, *, bucket: int) -> None:
        super().__init__(topology, scratch)
        self._bucket = bucket

    def messages(
        self, level: Level, use: Use, index: int, message: Message, *, device: torch.device
    ) -> Messages:
        topology = self._topology
        size, me = topology.layout.levels[level], topology.place(level)
        name = f"bucket {self._bucket} {level} {index} of {topology.row % topology.layout.apart(level)}"
        matrix = self._scratch.messages(name, size * size, message.nbytes, device=device)
        matrix = matrix.view(size, size, message.nbytes)
        mine = matrix[:, me] if use == "send" else matrix[me]
        return Messages(mine, tuple(mine[:, place] for place in message.places))

    def start(
        self,
        received: Tensor,
        sent: Tensor,
        *,
        level: Level,
        tag: int,
        overlaps: bool,
        skips_own: bool,
        what: str,
    ) -> PendingTransfer:
        """Return at once, because the peers write messages into place."""
        return PendingTransfer([])


class SimulatedReduceScatter:
    """Reduce the rows of simulated ranks like QuantizedReduceScatter does between processes, bit for bit.

    Ranks contribute one after another. Only the messages of a rank are kept; once a node or a block is
    complete, its messages to others and its part of the sums.
    """

    def __init__(
        self,
        layout: Nodes,
        *,
        config: GradientConfig,
        seed: int,
        bucket: int,
        traffic: TrafficCounter,
        scratch: Scratch,
        first_rank: int = 0,
    ) -> None:
        """Prepare without allocating.

        Args:
            traffic: counts the bytes of one rank; all send the same.
            scratch: memory for messages, which buckets may share.
            first_rank: global number of the first rank, for the rounding bits.
        """
        self._layout = layout
        self._scratch = scratch
        uncounted = TrafficCounter(layout)
        self._members = []
        for rank in range(layout.size):
            node, local_rank = divmod(rank, layout.ranks_per_node)
            topology = Topology(layout=layout, node=node, local_rank=local_rank, intra=None, inter=None)
            self._members.append(
                QuantizedReduceScatter(
                    topology,
                    config=config,
                    seed=seed,
                    rank=first_rank + rank,
                    bucket=bucket,
                    traffic=uncounted if rank else traffic,
                    scratch=scratch,
                    transport=SimulatedTransport(topology, scratch, bucket=bucket),
                )
            )
        self._under_way: list[tuple[list[Running], Tensor]] = []
        self._sums: Tensor | None = None

    def add(
        self, rows: Tensor, *, call: int, nonfinite: Tensor | None = None, sections: Sequence[Section] = ()
    ) -> None:
        """Add the next rank's rows, one per destination rank.

        Args:
            rows: [ranks, n], fp32; may be overwritten afterwards.
            call: number of this reduction of the bucket, for the rounding bits.
            nonfinite: counts incoming groups that are not finite, as in QuantizedReduceScatter.
            sections: sections of a row, identical for all ranks; () for one.
        """
        rank = len(self._under_way)
        if self._sums is None or self._sums.shape != rows.shape or self._sums.device != rows.device:
            self._sums = torch.empty_like(rows)
        row, member = self._sums[rank], self._members[rank]
        row.copy_(rows[rank])  # before the rows are overwritten
        chunks = member.chunks(
            row, rows.view(-1), call=call, nonfinite=nonfinite, sections=tuple(sections), own=row
        )
        self._take(chunks, row)

    def add_pieces(self, plan: ReducePlan, pieces: Sequence[Tensor], row: Tensor, *, call: int) -> None:
        """Add the next rank's pieces of all sections, [count, m] each; their sums together form this row."""
        member, lengths = self._members[len(self._under_way)], [each.shape[-1] for each in pieces]
        sections = [
            member.values_of(plan, each, output)
            for each, output in zip(pieces, row.split(lengths), strict=True)
        ]
        recorded = member.record(plan, sections, (), device=row.device)
        self._take(member.run(recorded, call=call), row)

    def _take(self, chunks: list[Running], row: Tensor) -> None:
        """Send the next rank's messages; if it completes a node or a block, also those of the next hop."""
        self._under_way.append((advance(chunks), row))
        for hop in self.of_rank_0.hops[1:]:
            if len(self._under_way) % hop.apart == 0:
                for member, _ in self._under_way[-hop.apart :]:
                    advance(member)

    def abandon(self) -> None:
        """Forget the ranks that an exception has left under way."""
        self._under_way.clear()

    def finish(self, take: Callable[[int, Tensor], None]) -> None:
        """Pass every rank's row [n] of the sum to take(rank, row), which must copy it."""
        under_way, self._under_way = self._under_way, []
        assert len(under_way) == self._layout.size
        for rank, (chunks, row) in enumerate(under_way):
            advance(chunks)
            take(rank, row)

    @property
    def of_rank_0(self) -> QuantizedReduceScatter:
        """Rank 0's part of the reduction, whose settings apply to all."""
        return self._members[0]


class SimulatedAllReduce:
    """Sum the tensors of simulated ranks like QuantizedAllReduce does between processes, bit for bit."""

    def __init__(
        self, layout: Nodes, *, config: GradientConfig, seed: int, bucket: int, scratch: Scratch
    ) -> None:
        """Prepare without allocating; buckets may share the scratch memory."""
        self._layout = layout
        self._scratch = scratch
        ranks = range(layout.size)
        self._pieces = PieceQuantizer(layout, config=config, seed=seed, ranks=ranks, bucket=bucket)
        members = ranks[: self._pieces.count]
        reduced_over = layout
        if len(members) < layout.size:
            reduced_over = simulated_layout(len(members), ranks_per_node=len(members))
        # One reduction, or with two nodes one in each.
        self._reductions = [
            SimulatedReduceScatter(
                reduced_over,
                config=config,
                seed=seed,
                bucket=bucket,
                traffic=TrafficCounter(layout),
                scratch=scratch,
                first_rank=first,
            )
            for first in ranks[:: len(members)]
        ]

    def __call__(
        self,
        values: Sequence[Tensor],
        *,
        call: int,
        multiplier: float = 1.0,
        sections: Sequence[Section] = (),
    ) -> Tensor:
        """Return the result of each rank.

        Args:
            values: values of each rank, [n] of one dtype, contiguous.
            call: number of this reduction of the bucket, for the rounding bits.
            sections: sections of the values; () for one.
        """
        size, total = self._layout.size, torch.empty_like(values[0])
        if size == 1 or not total.numel():
            return values[0] * multiplier
        plan = self._pieces.plan(tuple(sections) or whole_row(total.numel()))
        count, lengths = plan.count, plan.lengths
        rows = torch.empty(count, sum(lengths), dtype=torch.float32, device=total.device)
        messages = self._scratch.split("gather", size, plan.message, device=total.device)

        def quantize(rank: int, pieces: Sequence[Tensor]) -> None:
            out = [part[rank : rank + 1] for part in messages.fields]
            self._pieces.quantize(plan, pieces, out, row=rank).run(call)

        for first, reduction in zip(range(0, size, count), self._reductions, strict=True):
            reduction.abandon()
            if count == 1:
                quantize(first, [section.take(values[first]) for section in plan.sections])
                continue
            for each, row in zip(values[first : first + count], rows, strict=True):
                taken = [section.take(each) for section in plan.sections]
                pieces = [pieces_of(mine, plan, i) for i, mine in enumerate(taken)]
                reduction.add_pieces(plan.reduce, pieces, row, call=call)

            def take(rank: int, row: Tensor, first: int = first) -> None:
                quantize(first + rank, row.split(lengths))

            reduction.finish(take)
        taken = [section.take(total) for section in plan.sections]
        self._pieces.restore(plan, messages.fields, taken, multiplier=multiplier).run(call)
        for section, each in zip(plan.sections, taken, strict=True):
            section.put(each, total)
        return total


class SimulatedReplica(WeightReplica):
    """Weight replica that is identical on all simulated ranks and stored once, by the caller."""

    def __init__(
        self,
        layout: Nodes,
        *,
        config: WeightConfig,
        traffic: TrafficCounter,
        scratch: Scratch,
        sections: tuple[Section, ...] = (),
    ) -> None:
        """Prepare without allocating; `traffic` counts one rank's bytes, which are equal for all."""
        layout = replace(layout, blocks=1)  # weights cross nodes in one hop
        topology = Topology(layout=layout, node=0, local_rank=0, intra=None, inter=None)
        super().__init__(topology, config=config, traffic=traffic, scratch=scratch, sections=sections)

    def start_full_refresh(self, row: Tensor, *, ranges: Sequence[Range] | None = None) -> None:
        """Set the replica to the rows of all ranks [ranks, n], in the gathered dtype."""
        held, layout = self._held(), self._topology.layout
        if row is not held:
            held.copy_(row)
        row_bytes = held[0].nbytes
        if layout.nodes > 1:
            self._traffic.count(row_bytes * (layout.nodes - 1), level="inter")
        if self.holds_all_rows and layout.ranks_per_node > 1:
            peers = layout.ranks_per_node - 1
            self._traffic.count(row_bytes * layout.nodes * peers, level="intra")

    def start_quantized_refresh(
        self, row: Tensor, *, ranges: Sequence[Range] | None = None, as_gathered: Tensor | None = None
    ) -> None:
        """Add the quantized differences of the rows of all ranks [ranks, n] to the replica."""
        held = self._held()
        if self.bits is None:
            self.start_full_refresh(row)
            return
        plan = plan_refresh(
            self._sections or whole_row(row.shape[1]),
            grid=self._topology.layout.grid,
            config=self.config,
            numel=row.shape[1],
        )
        ranks, device = range(self._topology.size), row.device
        sent = self._scratch.split("weights", len(ranks), plan.message, device=device)
        for section, part in zip(plan.sections, sent.fields, strict=True):
            main, replica = section.take(row), section.take(held)
            for rank in ranks:
                self.quantize(main[rank], replica[rank], part[rank], section=section)
            self.apply(part, replica, section=section)
            section.put(replica, held)
        for each in (plan.inter, plan.intra):
            if each.nbytes:
                self._traffic.count(each.nbytes, level=each.level, padding_bytes=each.padding_bytes)

    def _held(self) -> Tensor:
        """Return the rows [ranks, n], which the caller has set."""
        assert self.rows is not None
        return self.rows

    def count_gather(self, row_bytes: int) -> None:
        """Count a gather of weights inside the node, unless every rank holds all of them."""
        layout = self._topology.layout
        if not self.holds_all_rows:
            peers = layout.ranks_per_node - 1
            self._traffic.count(row_bytes * layout.nodes * peers, level="intra")
