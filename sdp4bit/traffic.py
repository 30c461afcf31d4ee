"""What was sent: bytes per level, what full precision would have sent instead, and the time it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple

import torch

from sdp4bit.quantization.layout import MessageLayout

Level = Literal["intra", "inter"]
"""Inside a node, or between nodes."""

_MOST_PENDING = 256
_MOST_MEASURED = 4096
"""Transfers of one counter; a step with twice as many is not judged."""


@dataclass
class Traffic:
    """Bytes that one rank sent, by level.

    Messages between the ranks of one node are intra, others inter. Quantized messages are counted exactly.
    A collective that the communication library performs by itself is counted as a ring in rank order sends
    it, the least that any algorithm needs, spread evenly over the ranks of a node. Seconds are not compared.
    """

    intra_bytes: float = 0.0
    inter_bytes: float = 0.0
    padding_bytes: float = 0.0
    """The part of both that carries no values: rows filled to 32 values, messages to 16 bytes."""
    plain_intra_bytes: float = 0.0
    plain_inter_bytes: float = 0.0
    """What plain FSDP2 would have sent at the same calls (fp32 gradients or as reduced, bf16 weights)."""
    collectives: int = 0
    intra_seconds: float = field(default=0.0, compare=False)
    inter_seconds: float = field(default=0.0, compare=False)
    """From the start of each transfer to the end of the wait for it, summed: transfers overlap each other and
    computation. The library's own collectives over several nodes count as inter. On a GPU of those steps only
    that are timed."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def compression_ratio(self) -> float:
        """Plain bytes over sent bytes, between nodes; inside the node if there is only one."""
        if self.plain_inter_bytes or self.inter_bytes:
            plain, sent = self.plain_inter_bytes, self.inter_bytes
        else:
            plain, sent = self.plain_intra_bytes, self.intra_bytes
        if sent:
            return plain / sent
        return float("inf") if plain else 1.0

    @property
    def exchange_seconds(self) -> float:
        """Seconds of both levels."""
        return self.intra_seconds + self.inter_seconds

    def add_seconds(self, level: Level, seconds: float) -> None:
        """Add the time of a transfer of this level."""
        if level == "intra":
            self.intra_seconds += seconds
        else:
            self.inter_seconds += seconds

    def as_dict(self) -> dict[str, int]:
        """Return the sent bytes, rounded to whole ones, by name."""
        return {
            "intra_bytes": round(self.intra_bytes),
            "inter_bytes": round(self.inter_bytes),
            "padding_bytes": round(self.padding_bytes),
            "collectives": self.collectives,
        }


def format_bytes(count: float) -> str:
    """Return a byte count in decimal units, with three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


class HostTransfer(NamedTuple):
    """A transfer of a measured step, in seconds of `time.perf_counter`."""

    level: Level
    nbytes: float
    """That this rank sent."""
    start: float
    started: float
    """Until then the host was busy with starting it."""
    waited_from: float
    """Since then the host did nothing but wait for it."""
    end: float

    @property
    def exposed_seconds(self) -> float:
        """In which the host did nothing else."""
        return self.started - self.start + self.end - self.waited_from


class DeviceTransfer(NamedTuple):
    """A transfer of a measured step on a GPU, between two timed events."""

    level: Level
    nbytes: float
    """That this rank sent."""
    start: torch.cuda.Event
    end: torch.cuda.Event


MeasuredTransfer = HostTransfer | DeviceTransfer


class TransferTimer:
    """Is called when a transfer has been waited for; this one measures nothing."""

    def end_start(self) -> None:
        """Note that the transfer is under way, and that the caller may do something else."""

    def begin_wait(self) -> None:
        """Note that the caller has nothing else to do from now on."""

    def __call__(self) -> None:
        """Note that the transfer has been waited for."""


class _HostTimer(TransferTimer):
    """Times a transfer by the host's clock."""

    def __init__(self, traffic: Traffic, level: Level) -> None:
        self._traffic = traffic
        self._level = level
        self._start = time.perf_counter()

    def __call__(self) -> None:
        self._traffic.add_seconds(self._level, time.perf_counter() - self._start)


class _MeasuredHostTimer(_HostTimer):
    """Also notes since when the host had nothing else to do."""

    def __init__(self, counter: TrafficCounter, traffic: Traffic, level: Level, nbytes: float) -> None:
        super().__init__(traffic, level)
        self._counter = counter
        self._nbytes = nbytes
        self._started = self._waited_from = self._start

    def end_start(self) -> None:
        self._started = self._waited_from = time.perf_counter()

    def begin_wait(self) -> None:
        self._waited_from = time.perf_counter()

    def __call__(self) -> None:
        end = time.perf_counter()
        self._traffic.add_seconds(self._level, end - self._start)
        self._counter.note(
            HostTransfer(self._level, self._nbytes, self._start, self._started, self._waited_from, end)
        )


class _DeviceTimer(TransferTimer):
    """Times a transfer by events on the streams that are current when it starts and ends."""

    def __init__(self, counter: TrafficCounter, events: _EventTimes, level: Level, nbytes: float) -> None:
        self._counter = counter
        self._events = events
        self._level = level
        self._nbytes = nbytes
        self._start, self._end = recorded_event(), torch.cuda.Event(enable_timing=True)

    def __call__(self) -> None:
        self._end.record()
        self._events.add(self._level, self._start, self._end)
        self._counter.note(DeviceTransfer(self._level, self._nbytes, self._start, self._end))


_UNTIMED = TransferTimer()


class _EventTimes:
    """Transfers of one step on a GPU whose times are not known yet."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._pending: list[tuple[Level, torch.cuda.Event, torch.cuda.Event]] = []
        self.are_any = False
        """A transfer of the step was timed."""

    def add(self, level: Level, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Note a transfer between these events."""
        self.are_any = True
        self._pending.append((level, start, end))
        if len(self._pending) > _MOST_PENDING:
            self.collect()

    def collect(self) -> None:
        """Add the times of what the device has done to the step's traffic; nobody waits for the rest."""
        still: list[tuple[Level, torch.cuda.Event, torch.cuda.Event]] = []
        for level, start, end in self._pending:
            if end.query():
                self._traffic.add_seconds(level, start.elapsed_time(end) / 1000)
            else:
                still.append((level, start, end))
        self._pending = still


class TrafficCounter:
    """Counts what one rank of nodes x ranks_per_node sends, in total and from optimizer step to step."""

    def __init__(self, *, nodes: int, ranks_per_node: int) -> None:
        self._nodes = nodes
        self._ranks_per_node = ranks_per_node
        self._total = Traffic()
        self._current, self._last = Traffic(), Traffic()
        self.is_measured = False
        """What is sent from now on is noted transfer by transfer; on a GPU it is not timed otherwise."""
        self._transfers: list[MeasuredTransfer] = []
        self._exposed_seconds = 0.0
        self._quantizing_seconds: float | None = None
        self._is_quantizing = False
        self._current_events = _EventTimes(self._current)
        self._timed: tuple[Traffic, _EventTimes] | None = None

    @property
    def total(self) -> Traffic:
        """Everything sent so far, the unfinished step included."""
        return self._total + self._current

    @property
    def current_step(self) -> Traffic:
        """What was sent since the last optimizer step; see last_step for its seconds."""
        if self._current_events.are_any:
            self._current_events.collect()
            return self._current
        return self._with_timed_seconds(self._current)

    @property
    def last_step(self) -> Traffic:
        """What was sent between the last two optimizer steps; on a GPU, seconds are the last timed step's."""
        return self._with_timed_seconds(self._last)

    def _with_timed_seconds(self, traffic: Traffic) -> Traffic:
        if self._timed is None:
            return traffic
        timed, events = self._timed
        events.collect()
        return replace(traffic, intra_seconds=timed.intra_seconds, inter_seconds=timed.inter_seconds)

    def end_step(self) -> None:
        """Let the unfinished step be the last step."""
        if self._current_events.are_any:
            self._timed = (self._current, self._current_events)
        self._total = self._total + self._current
        self._last, self._current = self._current, Traffic()
        self._current_events = _EventTimes(self._current)

    def start_timer(self, level: Level, device: torch.device, *, nbytes: float) -> TransferTimer:
        """Return what is to be called when a transfer that starts now has been waited for.

        On a GPU, in a measured step, events on the current streams bound it, which are read when they have
        passed.

        Args:
            nbytes: that this rank sends.
        """
        if device.type == "cuda":
            return _DeviceTimer(self, self._current_events, level, nbytes) if self.is_measured else _UNTIMED
        if self.is_measured:
            return _MeasuredHostTimer(self, self._current, level, nbytes)
        return _HostTimer(self._current, level)

    def start_ring_timer(
        self, device: torch.device, *, row_bytes: float, members: Sequence[int] | None = None
    ) -> TransferTimer:
        """Return what is to be called after a collective that the communication library performs.

        Args:
            row_bytes, members: see count_ring.
        """
        intra, inter = self._ring(row_bytes, members)
        level: Level = "intra" if self._nodes == 1 else "inter"
        return self.start_timer(level, device, nbytes=intra if level == "intra" else inter)

    def start_quantizing(self, device: torch.device) -> Callable[[], None]:
        """Return what is to be called when a quantized exchange that starts now has come to its end.

        In a measured step, what it does besides waiting for transfers counts as quantizing, by the host's
        clock: on a GPU nothing is measured. Of exchanges inside of each other the outermost counts.
        """
        if not self.is_measured or self._is_quantizing or device.type == "cuda":
            return _do_nothing
        self._is_quantizing = True
        started, exposed = time.perf_counter(), self._exposed_seconds

        def stop() -> None:
            self._is_quantizing = False
            spent = time.perf_counter() - started - (self._exposed_seconds - exposed)
            self._quantizing_seconds = (self._quantizing_seconds or 0.0) + spent

        return stop

    def note(self, transfer: MeasuredTransfer) -> None:
        """Note a transfer of a measured step, up to a number: an evaluation may lie in it."""
        if len(self._transfers) < _MOST_MEASURED:
            self._transfers.append(transfer)
        if isinstance(transfer, HostTransfer):
            self._exposed_seconds += transfer.exposed_seconds

    def take_measured(self) -> tuple[list[MeasuredTransfer], float | None]:
        """Return the transfers noted since the last call, and the seconds of quantizing; None if unknown."""
        taken = self._transfers, self._quantizing_seconds
        self._transfers, self._quantizing_seconds, self._exposed_seconds = [], None, 0.0
        return taken

    def count_messages(self, layout: MessageLayout, *, level: Level, peers: int, copies: int = 1) -> None:
        """Count `copies` messages of this layout to each of `peers` ranks of the level."""
        self.count_bytes(layout.nbytes * copies, level=level, peers=peers)
        self._current.padding_bytes += layout.padding_bytes * copies * peers

    def count_bytes(self, nbytes: int, *, level: Level, peers: int, padding: int = 0) -> None:
        """Count `nbytes` to each of `peers` ranks of the level ("intra" or "inter"), padding among them."""
        if level == "intra":
            self._current.intra_bytes += nbytes * peers
        else:
            self._current.inter_bytes += nbytes * peers
        self._current.padding_bytes += padding * peers
        self._current.collectives += 1

    def count_plain(self, row_bytes: int, members: Sequence[int] | None = None) -> None:
        """Count what plain FSDP2 would have sent here, a ring of rows of this size; see count_ring."""
        intra, inter = self._ring(row_bytes, members)
        self._current.plain_intra_bytes += intra
        self._current.plain_inter_bytes += inter

    def count_ring(self, row_bytes: int, members: Sequence[int] | None = None) -> None:
        """Count a collective of the communication library's own, over rows of this size.

        Args:
            members: ranks that took part, in order; None for all.
        """
        intra, inter = self._ring(row_bytes, members)
        self._current.intra_bytes += intra
        self._current.inter_bytes += inter
        self._current.collectives += 1

    def _ring(self, row_bytes: float, members: Sequence[int] | None) -> tuple[float, float]:
        size, between = self._nodes * self._ranks_per_node, self._nodes if self._nodes > 1 else 0
        if members is not None:
            nodes = [rank // self._ranks_per_node for rank in members]
            size, between = len(nodes), sum(a != b for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True))
        sent = row_bytes * (size - 1)
        return sent * (size - between) / size, sent * between / size


def _do_nothing() -> None:
    pass


def recorded_event() -> torch.cuda.Event:
    """Return a timed event that the current stream has just been given."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
