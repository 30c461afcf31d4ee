"""A refresh of a weight replica that loses nothing: the entropy-coded change of 16-bit weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sdp4bit.collectives.capacity import Capacity, room_for
from sdp4bit.collectives.errors import PLACES
from sdp4bit.collectives.exchange import PendingExchange, all_gather_blocks, start_all_gather_rows
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import Topology
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import message_layout
from sdp4bit.quantization.lossless import (
    MANTISSA_BITS,
    DamagedMessageError,
    Header,
    read_header,
)
from sdp4bit.quantization.lossless_layout import (
    message_parts,
)
from sdp4bit.traffic import Level, TrafficCounter


class LosslessCoding:
    """What the lossless refreshes of one replica have come to on this rank."""

    def __init__(self) -> None:
        self._capacities: dict[int, Capacity] = {}
        self.bits_per_weight: float | None = None
        """What this rank's part of the last refresh came to, headers included and padding left out; None
        before the first."""
        self.late_values = 0
        """Values of this rank that did not fit and came in a message of their own, since the start."""
        self.further_rounds = 0
        """Refreshes, or parts of them, that took a second message, since the start."""
        self._bytes = self._values = 0

    def capacity(self, part: int) -> Capacity:
        """Return the capacity of the messages of a part of the row."""
        return self._capacities.setdefault(part, Capacity())

    def begin(self) -> None:
        """Begin a refresh."""
        self._bytes = self._values = 0

    def note_sent(self, header: Header, *, is_further: bool) -> None:
        """Take note of a message that this rank has written."""
        self._bytes += header.used
        self._values += 0 if is_further else header.numel
        self.late_values += header.late
        if self._values:
            self.bits_per_weight = 8 * self._bytes / self._values

    def describe(self) -> str:
        """Return what is to be said of it in a table, as text."""
        if self.bits_per_weight is None:
            return ""
        text = f", {self.bits_per_weight:.2f} bits/weight"
        differences = message_layout(numel=self._values, bits=4, group_size=2048).nbytes
        if self._bytes > differences:
            text += f" (4-bit differences: {8 * differences / self._values:.2f})"
        if self.further_rounds:
            text += f", {self.late_values:,} values late in {self.further_rounds} further messages"
        return text


def check_dtype(dtype: torch.dtype, device: torch.device, *, name: str) -> None:
    """Raise ValueError unless weights gathered in this type on this device can be sent losslessly."""
    if device.type != "cpu":
        raise ValueError(
            f'{name}: WeightConfig(mode="lossless") has no kernels for {device.type} yet, only for the CPU. '
            'Use mode="difference", or weights=None for plain gathers'
        )
    if dtype not in MANTISSA_BITS:
        raise ValueError(
            f'{name} is gathered in {dtype}; WeightConfig(mode="lossless") sends the change of bf16 or fp16 '
            "weights: use MixedPrecisionPolicy(param_dtype=torch.bfloat16), or weights=None"
        )


class LosslessExchange:
    """The messages of one part of a row, to all ranks that hold it."""

    def __init__(
        self,
        topology: Topology,
        *,
        coding: LosslessCoding,
        scratch: Scratch,
        traffic: TrafficCounter,
        is_full: bool,
        name: str,
    ) -> None:
        """Prepare.

        Args:
            is_full: every rank holds all rows, rather than those of its peers between nodes.
            name: of the parameter group, for errors.
        """
        self._topology = topology
        self._coding = coding
        self._scratch = scratch
        self._traffic = traffic
        self._is_full = is_full
        self._name = name

    def start(self, row: Tensor, replica: Tensor, *, part: int) -> Callable[[], None]:
        """Start to send a row's change; return what finishes the refresh, on all ranks of a node together.

        Steps: 1. encode;  2. all-gather of one message between nodes; and in what is returned 3. for full
        replicas, all-gather of the messages in the node;  4. check and decode;  5. if a message had no room
        for everything, as all its receivers see, the same once more for the rest, in messages of its size.

        Args:
            row: [n], what the replica shall hold of this rank's shard; unchanged until then.
            replica: [nodes, n], or [nodes, ranks_per_node, n] if full; changed in place.
            part: number of this part of the group's row, the same on all ranks.
        """
        capacity = self._coding.capacity(part).nbytes(row.numel())
        apply = self._send(row, replica, capacity, is_further=False)

        def finish() -> None:
            headers = apply()
            self._coding.capacity(part).note([header.needed for header in headers], numel=row.numel())
            if any(header.late for header in headers):
                self._coding.further_rounds += 1
                room = room_for_rest(headers, numel=row.numel())
                self._send(row, replica, room, is_further=True)()

        return finish

    def _send(
        self, row: Tensor, replica: Tensor, capacity: int, *, is_further: bool
    ) -> Callable[[], list[Header]]:
        topology, device = self._topology, row.device
        held = replica[topology.node, topology.local_rank] if self._is_full else replica[topology.node]
        slot = self._scratch.take_slot()
        messages = self._scratch.messages(f"inter receive {slot}", topology.nodes, capacity, device=device)
        own = self._scratch.messages(f"send {slot}", 1, capacity, device=device)[0]
        ops.encode_change(row, held=held, out=own)
        header = read_header(own)
        self._coding.note_sent(header, is_further=is_further)
        padding = capacity - header.used
        transfer = PendingExchange([])
        if topology.inter is None:
            messages[0].copy_(own)
        else:
            peers = topology.nodes - 1
            transfer = start_all_gather_rows(messages, own, topology.inter, what=self._what("inter"))
            self._traffic.count_bytes(capacity, level="inter", peers=peers, padding=padding)

        def apply() -> list[Header]:
            transfer.wait()
            headers = self._apply(messages, replica)
            self._scratch.free_slot(slot)
            return headers

        return apply

    def _apply(self, messages: Tensor, replica: Tensor) -> list[Header]:
        """Decode the messages of this rank's peers between nodes and, to a full replica, of all ranks."""
        topology, ranks = self._topology, self._topology.layout.ranks
        if not self._is_full or topology.intra is None:
            rows = replica[:, 0] if self._is_full else replica
            return self._decode(messages, rows, senders=ranks[topology.local_rank :: topology.ranks_per_node])
        capacity = messages.shape[1]
        gathered = self._scratch.messages("intra receive", topology.size, capacity, device=messages.device)
        blocks = gathered.view(topology.nodes, topology.ranks_per_node, capacity)
        padding = sum(capacity - read_header(message).used for message in messages)
        nbytes, peers = capacity * topology.nodes, topology.ranks_per_node - 1
        all_gather_blocks(blocks, messages, topology.intra, what=self._what("intra"))
        self._traffic.count_bytes(nbytes, level="intra", peers=peers, padding=padding)
        return self._decode(gathered, replica.view(topology.size, -1), senders=ranks)

    def _decode(self, messages: Tensor, rows: Tensor, *, senders: Sequence[int]) -> list[Header]:
        return decode_from(messages, rows, senders=senders, name=self._name)

    def _what(self, level: Level) -> str:
        return f"lossless weight all-gather of {self._name}, {PLACES[level]}"


def room_for_rest(headers: Sequence[Header], *, numel: int) -> int:
    """Return the size of messages that have room for all that these had none for.

    It follows from their headers, since blocks are coded apart from each other.
    """
    rest = max(header.needed - header.used for header in headers)
    return room_for(message_parts(numel) + rest + 8, numel=numel)


def decode_from(messages: Tensor, rows: Tensor, *, senders: Sequence[int], name: str) -> list[Header]:
    """Decode message i, of rank senders[i], to row i; return the headers.

    Raises:
        DamagedMessageError: a message is not what its sender wrote; with its rank.
    """
    try:
        ops.decode_change(messages, rows=rows)
    except DamagedMessageError as error:
        raise DamagedMessageError(
            error.index,
            error.reason,
            message=f"the lossless weights of {name} from rank {senders[error.index]} are damaged: "
            f"{error.reason}. Bits have changed in memory or on the way; resume from a checkpoint",
        ) from error
    return [read_header(message) for message in messages]
