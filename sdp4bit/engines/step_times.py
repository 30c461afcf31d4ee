"""How long a step and its exchange took, and an estimate of what full precision would have made of it.

A step is measured from its boundary to the next one. On a CPU the host's clock says when each transfer
started, since when somebody did nothing but wait for it, and when the wait was over. On a GPU events bound
step and transfers, and are read when they have passed; that computation waited is not seen there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch

from sdp4bit.traffic import (
    DeviceTransfer,
    HostTransfer,
    Level,
    MeasuredTransfer,
    Traffic,
    format_bytes,
    recorded_event,
)

SMALLEST_FOR_RATE = 1 << 18
"""Bytes of a transfer, from which on its time tells the rate of a hop: below, latency does."""
_PAYS = 1.1
"""Times that a step must become shorter by to be worth a word."""
_HOPS: dict[Level, str] = {"inter": "between nodes", "intra": "inside a node"}


class StepTiming(TypedDict):
    """What is reported of the last measured step's time on this rank."""

    step: int
    seconds: float
    """From its boundary to the next."""
    exchange_seconds: float
    """In which at least one transfer was under way, from its start to the end of the wait for it."""
    exposed_seconds: float | None
    """Of these, in which the step did nothing but wait; None where it is not measured (GPUs)."""
    quantization_seconds: float | None
    """Of quantized exchanges without their waits; None where it is not measured (GPUs)."""
    plain_seconds: tuple[float, float] | None
    """What the step would have taken without quantization, least and most; an estimate."""
    speedup: tuple[float, float] | None
    """These over `seconds`."""
    verdict: str


class Span(NamedTuple):
    """A transfer, in seconds since the step began."""

    level: Level
    nbytes: float
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """A measured step of this rank."""

    step: int
    seconds: float
    spans: Sequence[Span]
    waited: float | None
    """Seconds in which the host did nothing but wait for a transfer; None where it does not wait."""
    quantizing: float | None
    """Seconds of quantized exchanges without their waits; None if unknown."""
    sent: Traffic

    @property
    def exchange_seconds(self) -> float:
        """Seconds in which at least one transfer was under way."""
        total, reached = 0.0, 0.0
        for start, end in sorted((span.start, span.end) for span in self.spans):
            total += max(0.0, min(end, self.seconds) - max(start, reached))
            reached = max(reached, end)
        return total

    @property
    def is_timed(self) -> bool:
        """Whether most collectives were timed: not those that the engine starts by itself, nor too many."""
        return 2 * len(self.spans) >= self.sent.collectives

    def rate(self, level: Level) -> float | None:
        """Return the bytes per second of a level's fastest transfer; None if all were too small to tell.

        The fastest waits for nobody: a rank that comes to a transfer early measures the others' lateness.
        """
        rates = [
            span.nbytes / (span.end - span.start)
            for span in self.spans
            if span.level == level and span.nbytes >= SMALLEST_FOR_RATE and span.end > span.start
        ]
        return max(rates, default=None)

    def plain_seconds(self) -> tuple[float, float] | None:
        """Return what the step would have taken without quantization, least and most, as an estimate.

        The bytes of the full-precision exchange pass at the measured rates; a ring keeps both levels busy at
        once, a quantized exchange uses one after the other. What its transfers took beyond their bytes, the
        others' lateness and latency, stays. On a CPU, at least, quantizing falls away and computation hides
        the same share of the exchange as now; at most, summing and copying in full precision takes as long
        as quantizing, and computation hides the same seconds. On a GPU it hides all of it, or nothing.

        Returns:
            None if the transfers were too small to tell, or not timed.
        """
        sent, in_flight = self.sent, self.exchange_seconds
        bytes_of: dict[Level, tuple[float, float]] = {
            "intra": (sent.intra_bytes, sent.plain_intra_bytes),
            "inter": (sent.inter_bytes, sent.plain_inter_bytes),
        }
        rates = {level: self.rate(level) for level in bytes_of}
        unknown = [max(bytes_of[level]) for level, rate in rates.items() if rate is None]
        known = {level: rate for level, rate in rates.items() if rate is not None}
        if not known or not self.is_timed or max(unknown, default=0.0) >= SMALLEST_FOR_RATE:
            return None
        ours = sum(bytes_of[level][0] / rate for level, rate in known.items())
        plain = max(bytes_of[level][1] / rate for level, rate in known.items())
        plain += max(0.0, in_flight - ours)
        if self.waited is None:
            hidden, exposed = max(self.seconds, plain), self.seconds - in_flight + plain
            return min(hidden, exposed), max(hidden, exposed)
        quantizing, hidden = self.quantizing or 0.0, max(0.0, in_flight - self.waited)
        computing = max(0.0, self.seconds - self.waited - quantizing)
        same_share = min(computing, plain * hidden / in_flight)
        least = computing + max(0.0, plain - same_share)
        most = computing + quantizing + max(0.0, plain - hidden)
        return min(least, most), max(least, most)

    def timing(self) -> StepTiming:
        """Return what `stats()` reports."""
        plain = self.plain_seconds()
        return {
            "step": self.step,
            "seconds": self.seconds,
            "exchange_seconds": self.exchange_seconds,
            "exposed_seconds": self.waited,
            "quantization_seconds": self.quantizing,
            "plain_seconds": plain,
            "speedup": None if plain is None else (plain[0] / self.seconds, plain[1] / self.seconds),
            "verdict": self.verdict(),
        }

    def verdict(self) -> str:
        """Return one sentence: what part of the step exchange was, and what sdp4bit makes of the step."""
        sent, plain = self.sent, self.plain_seconds()
        if not sent.collectives:
            return "nothing to gain: this rank exchanges nothing"
        if not self.is_timed:
            return "not measured: most of the exchange was not timed"
        exchange = f"exchange was {_share(self._exchange, self.seconds)} of your step"
        if (sent.intra_bytes, sent.inter_bytes) == (sent.plain_intra_bytes, sent.plain_inter_bytes):
            return f"{exchange}; nothing in it was quantized"
        is_one_node = not sent.inter_bytes and not sent.plain_inter_bytes
        if plain is None:
            if is_one_node:
                return f"little to gain: all ranks are on one node; {exchange}"
            largest = max((span.nbytes for span in self.spans if span.level == "inter"), default=0.0)
            return (
                f"{exchange}; its messages are too small to tell what full precision would take (at most "
                f"{format_bytes(largest)} between nodes, {format_bytes(SMALLEST_FOR_RATE)} are needed)"
            )
        least, most = (each / self.seconds for each in plain)
        if most * _PAYS < 1:
            return f"{exchange}; sdp4bit makes a step at least {1 / most:.1f}x slower here: it does not pay"
        if most >= _PAYS:
            return f"{exchange}; sdp4bit makes a step {_times(least, most)} faster here"
        if is_one_node:
            return f"little to gain: all ranks are on one node; {exchange}"
        return f"{exchange}: little to gain"

    @property
    def _exchange(self) -> float:
        """Seconds that count as the step's part: those it waited, or all where that is not measured."""
        return self.exchange_seconds if self.waited is None else self.waited

    def describe(self) -> str:
        """Return what `explain()` says of the step: its parts, the estimate, and the verdict."""
        in_flight, seconds = self.exchange_seconds, self.seconds
        text = f"Step {self.step} took {_time(seconds)} on this rank"
        if self.sent.collectives and self.is_timed:
            text += f": exchange {_share(self._exchange, seconds)}"
            if self.waited is None:
                text += " in flight (how much of it computation hid is not measured on a GPU)"
            else:
                hidden = _share(max(0.0, in_flight - self.waited), in_flight)
                text += f" (and {hidden} of its {_time(in_flight)} in flight hidden behind computation)"
            if self.quantizing is not None:
                text += f", quantizing {_share(self.quantizing, seconds)}"
        return f"{text}. {self._estimate()}Verdict: {self.verdict()}."

    def _estimate(self) -> str:
        plain, sent = self.plain_seconds(), self.sent
        if plain is None or sent.compression_ratio == 1.0:
            return ""
        pairs: dict[Level, tuple[float, float]] = {
            "inter": (sent.plain_inter_bytes, sent.inter_bytes),
            "intra": (sent.plain_intra_bytes, sent.intra_bytes),
        }
        rates = {level: self.rate(level) for level in pairs}
        reasons = [
            f"{format_bytes(pairs[level][0])} {_HOPS[level]} instead of {format_bytes(pairs[level][1])}, at "
            f"{format_bytes(rate)}/s"
            for level, rate in rates.items()
            if rate is not None
        ]
        least, most = map(_time, plain)
        amount = most if least == most else f"{least} to {most}"
        return f"Without quantization {amount}, an estimate: {' and '.join(reasons)} as measured. "


class StepClock:
    """Times measured steps; a GPU's are known when it has done them, which nobody waits for."""

    def __init__(self, device: torch.device | None) -> None:
        """Measure nothing yet; without a device, ever."""
        self._device = device
        self._begun: float | torch.cuda.Event | None = None
        self._step = 0
        self._under_way: _DeviceStep | None = None
        self._latest: StepTimes | None = None

    def begin(self, step: int) -> None:
        """Begin to time a step, at a boundary."""
        self._step = step
        if self._device is not None:
            self._begun = recorded_event() if self._device.type == "cuda" else time.perf_counter()

    def end(
        self, transfers: Iterable[MeasuredTransfer], *, step: int, sent: Traffic, quantizing: float | None
    ) -> None:
        """End the step that was begun, if it is this one: a load may have changed the count since."""
        begun, self._begun = self._begun, None
        if step != self._step:
            return
        if isinstance(begun, float):
            on_host = [each for each in transfers if isinstance(each, HostTransfer)]
            self._latest = StepTimes(
                step=step,
                seconds=time.perf_counter() - begun,
                spans=[Span(t.level, t.nbytes, t.start - begun, t.end - begun) for t in on_host],
                waited=sum(t.exposed_seconds for t in on_host),
                quantizing=quantizing,
                sent=sent,
            )
        elif begun is not None:
            on_device = [each for each in transfers if isinstance(each, DeviceTransfer)]
            self._under_way = _DeviceStep(step, begun, recorded_event(), on_device, sent)

    def latest(self) -> StepTimes | None:
        """Return the last measured step whose times are known."""
        if self._under_way is not None and self._under_way.is_over():
            self._latest, self._under_way = self._under_way.times(), None
        return self._latest


class _DeviceStep(NamedTuple):
    """A step that a GPU has been given."""

    step: int
    begin: torch.cuda.Event
    end: torch.cuda.Event
    transfers: Sequence[DeviceTransfer]
    sent: Traffic

    def is_over(self) -> bool:
        return self.end.query() and all(transfer.end.query() for transfer in self.transfers)

    def times(self) -> StepTimes:
        spans = [
            Span(t.level, t.nbytes, self._since_begin(t.start), self._since_begin(t.end))
            for t in self.transfers
        ]
        return StepTimes(
            step=self.step,
            seconds=self._since_begin(self.end),
            spans=spans,
            waited=None,
            quantizing=None,
            sent=self.sent,
        )

    def _since_begin(self, event: torch.cuda.Event) -> float:
        return float(self.begin.elapsed_time(event)) / 1000


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _times(least: float, most: float) -> str:
    low, high = f"{least:.1f}x", f"{most:.1f}x"
    if low == high:
        return f"about {high}"
    return f"about {low} to {high}" if least > 1 else f"at most {high}"
