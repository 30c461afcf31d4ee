"""Weight replica that quantized differences keep up to date, qWD (paper section 3.1, algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sdp4bit.collectives.plan import Plans, RefreshPlan, clip_of, holds_all_rows, plan_refresh
from sdp4bit.collectives.scratch import Messages, Records, Scratch
from sdp4bit.collectives.sections import WHOLE, Range, Section, whole_row
from sdp4bit.collectives.streams import CompletedWork, Running, SideStream, run
from sdp4bit.collectives.topology import Topology
from sdp4bit.collectives.transport import PendingTransfer, start_all_gather
from sdp4bit.config import WeightConfig
from sdp4bit.grad_mode import outside_autograd
from sdp4bit.profiling import profiler_range
from sdp4bit.quantization import ops
from sdp4bit.quantization.formats import Bits
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.tables import Table, record, stand_in
from sdp4bit.traffic import PLACES, Level, TrafficCounter

_finish = outside_autograd(run)


class RecordedRefresh(NamedTuple):
    """The operators of a refresh by differences, and its buffers, which stay."""

    subtract: Table
    add: Table
    buffers: tuple[Messages, Messages, Messages | None]
    """This rank's message, those of its peers between nodes, and "full": those of all ranks."""


class WeightReplica:
    """Copy of a parameter group's weights, bit-identical on all ranks that store it.

    "full" stores the rows of all ranks on every rank. "node" stores, on local rank j, the rows of local rank
    j of every node, so that the ranks of a node store each row once.

    Starting a refresh sends, and wait() applies the received messages. In between, transfers of several
    replicas may be in flight while other work runs.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        config: WeightConfig,
        traffic: TrafficCounter | None = None,
        scratch: Scratch | None = None,
        sections: tuple[Section, ...] = (),
        values: Sequence[Range] | None = None,
        name: str = "a group",
    ) -> None:
        """Create a replica; the first refresh allocates and sends.

        Args:
            traffic: counts the bytes that this rank sends.
            scratch: message buffers, which replicas may share.
            sections: sections that make up a row, the same on all ranks; () for a single one.
            values: ranges of a row that hold numbers. The others hold bits, which are sent as they are. None
                for the entire row.
            name: name of the parameter group, for errors and profiles.

        Raises:
            ValueError: the topology has blocks of nodes.
        """
        if topology.layout.blocks > 1:
            raise ValueError(
                f"a weight replica is gathered between all {topology.nodes} nodes at once, but the topology "
                f"has {topology.layout.blocks} blocks of nodes: create one without nodes per block for it"
            )
        self.config = config
        self._topology = topology
        self._traffic = traffic or topology.counter()
        self._scratch = scratch or Scratch()
        self._sections = sections
        self._values = values
        self._name = name
        self.holds_all_rows = holds_all_rows(config, grid=topology.layout)
        """Whether this rank stores every row."""
        self.plans = Plans[RefreshPlan]()
        self._records = Records[RecordedRefresh](self._scratch)
        self._refresh_range = f"sdp4bit::weight_refresh ({name})"
        self._refresh: Running | None = None  # in flight
        self._is_unfinished = False  # from the start of a refresh until all of it has been applied
        self._slot: int | None = None  # of the message buffers; kept if an exception interrupts a refresh
        self._beside: CompletedWork | None = None
        self.rows: Tensor | None = None
        """[nodes, n], or [nodes, ranks_per_node, n] for "full"; None before the first refresh."""
        self.nonfinite = torch.zeros((), dtype=torch.bool)
        """Whether the values that this rank sent in the last refresh held NaN or infinity, on the device."""

    @property
    def bits(self) -> Bits:
        """Bits of a value in a quantized refresh; None if refreshes are exact."""
        return self.config.bits

    @property
    def sends_differences(self) -> bool:
        return self.config.mode == "difference"

    @property
    def own_shard(self) -> Tensor:
        """[n], the replica of this rank's own shard."""
        self.wait()
        assert self.rows is not None
        return self._own(self.rows)

    def _own(self, rows: Tensor) -> Tensor:
        own = rows[self._topology.node]
        return own[self._topology.local_rank] if self.holds_all_rows else own

    @property
    def is_pending(self) -> bool:
        """Whether a refresh is in flight, so that the rows must not be read."""
        return self._refresh is not None

    @property
    def is_torn(self) -> bool:
        """Whether an exception has interrupted a refresh, so that ranks may hold different rows."""
        return self._is_unfinished and self._refresh is None

    def wait(self) -> None:
        """Finish the refresh in flight, if any; collective over the node.

        On CUDA the current stream also waits for uses of the rows on a side stream.
        """
        # The side stream may still read or write the rows. Its event stays, for other streams that use them.
        if self._beside is not None:
            self._beside.wait()
        # Taken first, so that an exception leaves a torn replica.
        refresh, self._refresh = self._refresh, None
        if refresh is not None:
            _finish(refresh)
            self._is_unfinished = False

    @outside_autograd  # no inference tensors, because training updates the rows in place
    def _start(self, refresh: Running) -> None:
        self._is_unfinished = True
        next(refresh)
        # Only now: an exception above leaves a torn replica, and no refresh to wait for.
        self._refresh = refresh

    def run_beside(self, stream: SideStream, function: Callable[[], None]) -> CompletedWork:
        """Run a refresh or gather on a side stream; later uses of the rows wait for it."""
        self._beside = stream.run(function)
        return self._beside

    def start_full_refresh(self, row: Tensor, *, ranges: Sequence[Range] | None = None) -> None:
        """Start sending rows in full precision; after wait() the replica equals the rows of all ranks.

        Args:
            row: [n], the next replica of this rank's shard, contiguous; must not change until wait().
            ranges: ranges of the row that may have changed, the same on all ranks; None for the entire row.
        """
        self.wait()
        self._start(self._send_rows(row, ranges))

    def _send_rows(self, row: Tensor, ranges: Sequence[Range] | None) -> Running:
        """Send rows in full precision.

        Steps:
        1. All-gather between nodes.
        2. "full": all-gather of the result in the node.
        3. If only ranges were sent, copy them to their places.
        """
        topology, numel = self._topology, row.numel()
        self.nonfinite = self._is_nonfinite(row)
        shape = (
            (topology.nodes, topology.ranks_per_node, numel)
            if self.holds_all_rows
            else (topology.nodes, numel)
        )
        with profiler_range(f"sdp4bit::full_refresh ({self._name})"):
            rows = self.rows
            if rows is None or rows.shape != shape or rows.dtype != row.dtype:
                rows, ranges = torch.empty(shape, dtype=row.dtype, device=row.device), None
                self.rows = rows
            target = rows
            if ranges is not None:
                row = torch.cat([row[start:end] for start, end in ranges])
                target = row.new_empty(*shape[:-1], row.numel())

            # 1. The rows of this rank's peers between nodes, [nodes, n].
            peers = target
            if self.holds_all_rows:
                alone = topology.intra is None
                peers = target[:, 0] if alone else row.new_empty(topology.nodes, row.numel())
            transfer = PendingTransfer([])
            if topology.inter is None:
                peers[0].copy_(row)
            else:
                what = self._what("full-precision", "inter")
                transfer = start_all_gather(peers[None], row[None], topology.inter, what=what)
                self._traffic.count(row.nbytes * (topology.nodes - 1), level="inter")
        # This frame keeps the row alive while the transfer reads it.
        yield
        transfer.wait()

        # 2. Node by node, so that ranks end in the order of the group.
        if self.holds_all_rows and topology.intra is not None:
            what = self._what("full-precision", "intra")
            start_all_gather(target, peers, topology.intra, what=what).wait()
            nbytes = row.nbytes * topology.nodes * (topology.ranks_per_node - 1)
            self._traffic.count(nbytes, level="intra")

        # 3. Without ranges the target is the replica.
        if ranges is not None:
            for (start, end), part in zip(ranges, target.split([b - a for a, b in ranges], -1), strict=True):
                rows[..., start:end] = part

    def start_quantized_refresh(
        self, row: Tensor, *, ranges: Sequence[Range] | None = None, as_gathered: Tensor | None = None
    ) -> None:
        """Start sending quantized differences of all ranks, which wait() adds to the replica.

        Every rank, the owner of a row included, applies the same dequantized difference. So all copies stay
        bit-identical, and the rounding error is part of the next difference.

        Args:
            row: [n], this rank's main shard.
            ranges: ranges of the row that may have changed, the same on all ranks; None for the entire row.
            as_gathered: [n], the main shard in the gathered dtype, for the ranges that hold bits of other
                dtypes; by default `row`.
        """
        self.wait()
        assert self.rows is not None
        if row.numel() != self.rows.shape[-1]:
            raise ValueError(
                f"{self._name}: a row of {row.numel()} values refreshes a replica of {self.rows.shape[-1]}"
            )
        if self.bits is None:
            if ranges is None or ranges:
                self.start_full_refresh(row.to(self.rows.dtype), ranges=ranges)
            return
        self.nonfinite = torch.zeros((), dtype=torch.bool, device=row.device)
        if self.rows.dtype == torch.float16:
            # A finite weight plus a finite difference may overflow fp16, but not bf16.
            self.nonfinite = self._is_nonfinite(row.to(torch.float16))
        plan = self.plan(row.numel(), ranges)
        if plan.message.layouts:
            as_gathered = row if as_gathered is None else as_gathered
            self._start(self._send_differences(plan, row, as_gathered, self.rows, self.nonfinite))

    def plan(self, numel: int, ranges: Sequence[Range] | None = None) -> RefreshPlan:
        """Return the plan of these ranges of a row, made at their first use."""
        assert self.rows is not None
        sections, value_bytes = self._sections or whole_row(numel), self.rows.element_size()
        return self.plans.of(
            sections,
            value_bytes,
            ranges if ranges is None else tuple(ranges),
            make=lambda: plan_refresh(
                sections,
                grid=self._topology.layout.grid,
                config=self.config,
                numel=numel,
                ranges=ranges,
                values=self._values,
                value_bytes=value_bytes,
            ),
        )

    def _send_differences(
        self, plan: RefreshPlan, row: Tensor, as_gathered: Tensor, rows: Tensor, nonfinite: Tensor
    ) -> Running:
        """Send quantized differences (paper, algorithm 2), with a table of `_record` for steps 1 and 4.

        Steps:
        1. Subtract and quantize each section; append the exact ranges, which hold bits.
        2. All-gather of one message between nodes.
        3. "full": all-gather of the messages in the node.
        4. Dequantize and add each section; copy the bits.
        """
        topology, message = self._topology, plan.message
        with profiler_range(self._refresh_range):
            # 1. Transfers of several replicas may be in flight on this stream, so each takes a slot.
            if self._slot is None:
                self._slot = self._scratch.take_slot()
            # Ranges that are apart are copied, unless operators find their blocks.
            copied = [each for each in plan.sections if len(each.ranges) > 1 and not each.is_in_place]
            copies = [each.take(rows) for each in copied]
            recorded = self._records.of(
                *(plan, self._slot, row.dtype, rows.dtype, rows.stride()),
                device=row.device,
                make=partial(self._record, plan, row, rows, nonfinite, copies),
            )
            own, messages, gathered = recorded.buffers
            recorded.subtract.run(0, row, rows, nonfinite, *[each.take(row) for each in copied], *copies)
            if plan.exact:
                as_gathered = as_gathered.to(rows.dtype)
                bits = torch.cat([as_gathered[start:end] for start, end in plan.exact]).view(torch.uint8)
                own.fields[-1][0, : bits.numel()] = bits

            # 2. Message i is that of this rank's peer on node i.
            pending = PendingTransfer([])
            if topology.inter is None:
                messages.all.copy_(own.all)
            else:
                what = self._what("quantized", "inter")
                pending = start_all_gather(messages.all[None], own.all, topology.inter, what=what)
                self._traffic.count(plan.inter.nbytes, level="inter", padding_bytes=plan.inter.padding_bytes)
        # The transfer reads the message alone. The caller may have copied the main shard to pass it.
        del row, as_gathered
        yield

        with profiler_range(self._refresh_range):
            pending.wait()
            # 3. In the order of the rows, so that one launch applies all messages. This stream reads them
            # before it waits for another replica, so all replicas share the buffer.
            if gathered is not None:
                blocks = gathered.all.view(topology.nodes, topology.ranks_per_node, message.nbytes)
                what = self._what("quantized", "intra")
                assert topology.intra is not None
                start_all_gather(blocks, messages.all, topology.intra, what=what).wait()
                self._traffic.count(plan.intra.nbytes, level="intra", padding_bytes=plan.intra.padding_bytes)

            # 4. The owner's row, too, changes by its message and not by the exact difference.
            recorded.add.run(0, rows, *copies)
            for section, copy in zip(copied, copies, strict=True):
                section.put(copy, rows)
            if plan.exact:
                target, at = rows.view(-1, rows.shape[-1]), 0
                received = (gathered or messages).fields[-1].view(rows.dtype)
                for start, end in plan.exact:
                    target[:, start:end] = received[:, at : at + end - start]
                    at += end - start
            # After an exception the slot stays taken, because peers may still write to its buffers.
            assert self._slot is not None
            self._scratch.free_slot(self._slot)
            self._slot = None

    def _record(
        self, plan: RefreshPlan, row: Tensor, rows: Tensor, nonfinite: Tensor, copies: Sequence[Tensor]
    ) -> RecordedRefresh:
        """Record the operators of steps 1 and 4; see `_send_differences`."""
        topology, device, message, differs = self._topology, row.device, plan.message, self.sends_differences
        main, held, flag = map(stand_in, (row, rows, nonfinite))
        mains = [stand_in(each.new_empty(each.shape[-1:], dtype=row.dtype)) for each in copies]
        helds = [stand_in(each) for each in copies]
        own = self._scratch.split(f"send {self._slot}", 1, message, device=device)
        name = f"inter receive {self._slot}"
        messages = self._scratch.split(name, topology.nodes, message, device=device)
        gathered = None
        if self.holds_all_rows and topology.intra is not None:
            gathered = self._scratch.split("intra receive", topology.size, message, device=device)
        applied = (gathered or messages).fields
        subtract, add, apart = [], [], iter(zip(mains, helds, strict=True))
        for i, section in enumerate(plan.sections):
            table, source, replica = None, main, held
            if section.is_in_place:
                table = self._scratch.table(section.blocks, device=device)
            elif len(section.ranges) > 1:
                source, replica = next(apart)
            else:
                source, replica = section.take(main), section.take(held)
            subtract.append(
                record(
                    ops.subtract_quantize,
                    source,
                    replica=self._own(replica) if differs else None,
                    out=own.fields[i][0],
                    layout=message.layouts[i],
                    clip=plan.clips[i],
                    blocks=table,
                    nonfinite=flag,
                )
            )
            add.append(
                record(
                    ops.dequantize_add,
                    applied[i],
                    replica=replica.view(-1, replica.shape[-1]),
                    layout=message.layouts[i],
                    accumulate=differs,
                    blocks=table,
                )
            )
        return RecordedRefresh(
            Table(subtract, moving=[main, held, flag, *mains, *helds]),
            Table(add, moving=[held, *helds]),
            (own, messages, gathered),
        )

    def gather(self, output: Tensor) -> None:
        """Gather the rows of all ranks, [size * n] in their order, from the replicas of this node.

        Finishes a pending refresh first.

        Raises:
            ValueError: the output has another size or dtype than the replica.
        """
        topology = self._topology
        self.wait()
        assert self.rows is not None
        numel = topology.size * self.rows.shape[-1]
        if output.numel() != numel or output.dtype != self.rows.dtype:
            # Else the ranks would send messages of other sizes than they expect, and gloo would abort.
            raise ValueError(
                f"{self._name}: the replica has {numel} values of {self.rows.dtype}, but the output has "
                f"{output.numel()} of {output.dtype}: the first refresh decides the dtype of a replica"
            )
        if self.holds_all_rows:
            output.copy_(self.rows.view(-1))
            return
        assert topology.intra is not None
        # Row r = node * ranks_per_node + local rank, straight from the replica: no tensor besides the output.
        blocks = output.view(topology.nodes, topology.ranks_per_node, -1)
        with profiler_range(f"sdp4bit::weight_gather ({self._name})"):
            what = self._what("replica", "intra")
            start_all_gather(blocks, self.rows, topology.intra, what=what).wait()
        self._traffic.count(self.rows.nbytes * (topology.ranks_per_node - 1), level="intra")

    def quantize(self, row: Tensor, replica: Tensor, out: Tensor, *, section: Section = WHOLE) -> None:
        """Quantize a section's difference from its replica, or the section itself with mode="direct".

        Args:
            row: [n], the section of a rank's main shard, fp32 or in the gathered dtype.
            replica: [n], its replica.
            out: uint8 [nbytes] of the layout.
        """
        ops.subtract_quantize(
            row,
            replica=replica if self.sends_differences else None,
            out=out,
            layout=self._layout_of(row.numel(), section),
            clip=clip_of(section, self.config),
        )

    def apply(self, messages: Tensor, rows: Tensor, *, section: Section = WHOLE) -> None:
        """Apply messages, uint8 [k, nbytes], to the rows [k, n] of a section of a replica in place."""
        layout = self._layout_of(rows.shape[1], section)
        ops.dequantize_add(messages, replica=rows, layout=layout, accumulate=self.sends_differences)

    def _layout_of(self, numel: int, section: Section) -> MessageLayout:
        return section.layout(numel, bits=self.bits, group_size=self.config.group_size)

    def quantized_differences(self, row: Tensor, replica: Tensor) -> tuple[Tensor, Tensor]:
        """Return the difference of a refresh before and after rounding, both fp32; sends nothing.

        Args:
            row: [n], a part of the main shard made of complete quantization groups. The result equals a
                refresh of a row without sections and estimates one with sections.
            replica: [n], its replica.
        """
        layout = self._layout_of(row.numel(), WHOLE)
        message = torch.empty(1, layout.nbytes, dtype=torch.uint8, device=row.device)
        received = torch.empty(1, row.numel(), dtype=torch.float32, device=row.device)
        self.quantize(row, replica, message[0])
        ops.dequantize_add(message, replica=received, layout=layout, accumulate=False)
        return row.float() - replica.float() if self.sends_differences else row.float(), received[0]

    def _what(self, kind: str, level: Level) -> str:
        return f"{kind} weight all-gather of {self._name}, {PLACES[level]}"

    def _is_nonfinite(self, row: Tensor) -> Tensor:
        """Return whether the values of a row [n] include NaN or infinity, a bool scalar."""
        ranges = [(0, row.numel())] if self._values is None else self._values
        largest = [torch.linalg.vector_norm(row[start:end], math.inf) for start, end in ranges if start < end]
        if not largest:
            return torch.zeros((), dtype=torch.bool, device=row.device)
        return torch.stack(largest).isfinite().all().logical_not()
