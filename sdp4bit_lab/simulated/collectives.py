"""Simulate the collectives of many ranks in one process: the same operators and messages, without transfers.

A sender quantizes each message into its receiver's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sdp4bit.collectives.all_reduce import PieceQuantizer, sections_of
from sdp4bit.collectives.exchange import GroupExchange, PendingExchange, Use
from sdp4bit.collectives.pipeline import Steps, advance
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter, SectionRows
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import Section, split_messages, whole_row
from sdp4bit.collectives.topology import Nodes, Topology, arrange, block_numbers
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


class SimulatedExchange(GroupExchange):
    """All-to-alls of one simulated rank, in memory shared by senders and receivers.

    The ranks of a node share a matrix [receiver, sender, nbytes], which the next node reuses. Ranks with
    equal local rank share a matrix between the nodes of a block, and those with equal place in their block
    one between blocks.
    """

    def __init__(self, topology: Topology, scratch: Scratch, *, bucket: int) -> None:
        super().__init__(topology, scratch)
        self._bucket = bucket

    def messages(self, level: Level, use: Use, index: int, *, nbytes: int, device: torch.device) -> Tensor:
        topology = self._topology
        size, me = topology.layout.levels[level], topology.place(level)
        name = f"bucket {self._bucket} {level} {index} of {topology.row % topology.layout.apart(level)}"
        matrix = self._scratch.messages(name, size * size, nbytes, device=device).view(size, size, nbytes)
        return matrix[:, me] if use == "send" else matrix[me]

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
    ) -> PendingExchange:
        """Return at once, because the peers write messages into place."""
        return PendingExchange([])


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
                    exchange=SimulatedExchange(topology, scratch, bucket=bucket),
                )
            )
        self._under_way: list[tuple[list[Steps], Tensor]] = []
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
        cut = member.cut(row, rows.view(-1), sections=sections)
        self._take(member.chunks(cut, call=call, nonfinite=nonfinite), row)

    def add_sections(self, sections: Sequence[SectionRows], row: Tensor, *, call: int) -> None:
        """Add the next rank's sections; their outputs together form this row."""
        self._take(self._members[len(self._under_way)].chunks(sections, call=call), row)

    def _take(self, chunks: list[Steps], row: Tensor) -> None:
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
        count = self._pieces.count
        cut = sections_of(total, sections)
        lengths = [each.pieces(count).shape[1] for each in cut]
        rows = torch.empty(count, sum(lengths), dtype=torch.float32, device=total.device)
        nbytes = self._pieces.message_layout(rows[0].split(lengths), cut).nbytes
        messages = self._scratch.messages("gather", size, nbytes, device=total.device)

        def quantize(rank: int, pieces: Sequence[Tensor]) -> None:
            message = messages[rank : rank + 1]
            self._pieces.quantize(pieces, message, call=call, row=rank, sections=cut)

        for first, reduction in zip(range(0, size, count), self._reductions, strict=True):
            reduction.abandon()
            if count == 1:
                quantize(first, [each.values for each in sections_of(values[first], sections)])
                continue
            for each, row in zip(values[first : first + count], rows, strict=True):
                parts = [
                    SectionRows(
                        section=part.section, rows=part.pieces(count), output=output, numel=output.numel()
                    )
                    for part, output in zip(sections_of(each, sections), row.split(lengths), strict=True)
                ]
                reduction.add_sections(parts, row, call=call)

            def take(rank: int, row: Tensor, first: int = first) -> None:
                quantize(first + rank, row.split(lengths))

            reduction.finish(take)
        self._pieces.restore(messages, total, call=call, multiplier=multiplier, sections=cut)
        return total


class SimulatedReplica(WeightReplica):
    """Weight replica that is identical on all simulated ranks and stored once, by the caller."""

    def __init__(
        self, layout: Nodes, *, config: WeightConfig, traffic: TrafficCounter, scratch: Scratch
    ) -> None:
        """Prepare without allocating; `traffic` counts one rank's bytes, which are equal for all."""
        layout = replace(layout, blocks=1)  # weights cross nodes in one hop
        topology = Topology(layout=layout, node=0, local_rank=0, intra=None, inter=None)
        super().__init__(topology, config=config, traffic=traffic, scratch=scratch)

    def refresh_fully(self, rows: Tensor, held: Tensor) -> None:
        """Copy rows into the replica, both [ranks, n], contiguous, in the gathered dtype."""
        layout, row_bytes = self._topology.layout, held[0].nbytes
        if rows is not held:
            held.copy_(rows)
        if layout.nodes > 1:
            self._traffic.count_bytes(row_bytes, level="inter", peers=layout.nodes - 1)
        if self.holds_all_rows and layout.ranks_per_node > 1:
            peers = layout.ranks_per_node - 1
            self._traffic.count_bytes(row_bytes * layout.nodes, level="intra", peers=peers)

    def refresh(self, rows: Tensor, held: Tensor, *, sections: Sequence[Section] = ()) -> None:
        """Add the quantized differences from the rows to the replica; sections () is a single one."""
        if self.bits is None:
            self.refresh_fully(rows, held)
            return
        chosen = sections or whole_row(rows.shape[1])
        layout, message = self._topology.layout, self.message_layout(chosen)
        sent = self._scratch.messages("weights", layout.size, message.nbytes, device=rows.device)
        for section, part in zip(chosen, split_messages(sent, message), strict=True):
            main, replica = section.take(rows), section.take(held)
            for rank in range(layout.size):
                self.quantize(main[rank], replica[rank], part[rank], section=section)
            self.apply(part, replica, section=section)
            section.put(replica, held)
        if layout.nodes > 1:
            self._traffic.count_messages(message, level="inter", peers=layout.nodes - 1)
        if self.holds_all_rows and layout.ranks_per_node > 1:
            peers = layout.ranks_per_node - 1
            self._traffic.count_messages(message, level="intra", peers=peers, copies=layout.nodes)

    def count_gather(self, row_bytes: int) -> None:
        """Count a gather of weights inside the node, unless every rank holds all of them."""
        layout = self._topology.layout
        if not self.holds_all_rows:
            peers = layout.ranks_per_node - 1
            self._traffic.count_bytes(row_bytes * layout.nodes, level="intra", peers=peers)
