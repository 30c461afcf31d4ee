"""What was sent: bytes per level, what full precision would have sent instead, and the time it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch

from sdp4bit.quantization.layout import MessageLayout

Level = Literal["intra", "inter"]
"""Inside a node, or between nodes."""

_MOST_PENDING = 256


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
        self.times_device = False
        """Transfers on a GPU are bound by timed events from now on; elsewhere the host's clock times all."""
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

    def start_timer(self, level: Level, device: torch.device) -> Callable[[], None]:
        """Return what is to be called when a transfer that starts now has been waited for.

        On a GPU, if `times_device`, events on the current streams bound it, which are read when they have
        passed.
        """
        if device.type == "cuda":
            if not self.times_device:
                return _do_nothing
            begin, end, events = _recorded_event(), torch.cuda.Event(enable_timing=True), self._current_events

            def stop_device() -> None:
                end.record()
                events.add(level, begin, end)

            return stop_device
        started, traffic = time.perf_counter(), self._current

        def stop_host() -> None:
            traffic.add_seconds(level, time.perf_counter() - started)

        return stop_host

    def start_ring_timer(self, device: torch.device) -> Callable[[], None]:
        """Return what is to be called after a collective that the communication library performs."""
        return self.start_timer("intra" if self._nodes == 1 else "inter", device)

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

    def _ring(self, row_bytes: int, members: Sequence[int] | None) -> tuple[float, float]:
        size, between = self._nodes * self._ranks_per_node, self._nodes if self._nodes > 1 else 0
        if members is not None:
            nodes = [rank // self._ranks_per_node for rank in members]
            size, between = len(nodes), sum(a != b for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True))
        sent = row_bytes * (size - 1)
        return sent * (size - between) / size, sent * between / size


def _do_nothing() -> None:
    pass


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
