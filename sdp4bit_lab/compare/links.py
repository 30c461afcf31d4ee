"""Time the demo's steps with and without sdp4bit at three rates of the link between its two nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from sdp4bit.observe.timing import TIMED_STEPS, StepTimes
from sdp4bit.traffic import format_bytes
from sdp4bit_lab.common.files import aligned, note, save_figure, wrapped, write_atomically
from sdp4bit_lab.common.launch.link import set_rate
from sdp4bit_lab.common.progress import console, phase
from sdp4bit_lab.common.ranks import Ranks, broadcast_from_rank0, run_on_all_ranks
from sdp4bit_lab.compare.config import DEMO_PROCESSES, DEMO_RANKS_PER_NODE, LinkTimesConfig
from sdp4bit_lab.pretrain.metrics import StepMetrics
from sdp4bit_lab.pretrain.trainer import build_run

FORMAT = "sdp4bit-links-1"
RATES = (100, 250, 1000)
"""Mbit/s between the nodes."""
_WARM_UPS = 2
_PAIRS = 2, 3
"""Pairs of blocks of steps in the first measurement, and in the one that follows unreliable times."""
_LARGEST_SPREAD = 1.25
"""Largest gain of a pair of blocks over the smallest."""
_LINE = {"plain FSDP2": "#9a9a9a", "sdp4bit": "#0a7a5c"}


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """Seconds of the timed steps of plain FSDP2 and of sdp4bit, by rate."""

    seconds: Mapping[int, tuple[Sequence[float], Sequence[float]]]
    sent: tuple[float, float]
    """Bytes that a node sends in a step."""
    why_calculated: str
    """Why there is no shaped link; "" if the seconds were measured on one."""
    unreliable: Mapping[int, str]
    """Why times are unreliable, by rate."""
    dtype: str
    """--compute-dtype of the demo."""

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> LinkTimes | None:
        """Return the times in a file; None if there is none, or it is damaged."""
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("format") != FORMAT:
                return None
            for name in ("seconds", "unreliable"):
                found[name] = {int(rate): value for rate, value in found[name].items()}
            times = cls(**found)
            times.text()
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        return times

    def gain(self, rate: int) -> float:
        plain, ours = self.seconds[rate]
        return median(plain) / median(ours)

    def line(self, rate: int) -> str:
        """Return the result at one rate."""
        plain, ours = (median(seconds) for seconds in self.seconds[rate])
        times = f"at {rate:,} Mbit/s: {plain:.2f} s, {ours:.2f} s with sdp4bit"
        if rate in self.unreliable:
            return f"{times}, but unreliable ({self.unreliable[rate]})"
        return f"{times}: {self.gain(rate):.1f}x" + " (calculated)" * bool(self.why_calculated)

    def text(self) -> tuple[str, str]:
        """Return a table and its conditions, for 80 columns."""
        rows: list[tuple[str, ...]] = [("a step takes", "plain FSDP2", "sdp4bit", "gain")]
        for rate, (plain, ours) in self.seconds.items():
            gain = "unreliable" if rate in self.unreliable else f"{self.gain(rate):.2f}x"
            rows.append((f"at {rate:,} Mbit/s", _milliseconds(plain), _milliseconds(ours), gain))
        rows.append(("each node sends", *map(format_bytes, self.sent), f"{self.sent[0] / self.sent[1]:.2f}x"))
        conditions = (
            "Measured: medians of warm steps (lowest to highest), 2 nodes of 2 ranks on this machine, "
            "joined by a shaped link."
        )
        if self.why_calculated:
            conditions = (
                "Calculated, not measured: the median warm step (lowest to highest) on this machine, plus "
                f"the bytes of a node over the rate, without overlap ({self.why_calculated})."
            )
        notes = [conditions]
        if self.unreliable:
            why = "; ".join(f"{rate:,} Mbit/s: {reason}" for rate, reason in self.unreliable.items())
            notes.append(f"Unreliable, and measured again by the next `sdp4bit demo`: {why}.")
        return "\n".join(aligned(rows)), wrapped(notes)

    def draw(self, path: Path) -> None:
        """Write a bar chart of the reliable times."""
        from matplotlib.figure import Figure

        shown = [rate for rate in self.seconds if rate not in self.unreliable]
        figure = Figure(figsize=(6.4, 0.4 + 1.1 * len(shown)), layout="constrained")
        for axes, rate in zip(figure.subplots(len(shown), 1, squeeze=False).flat, shown, strict=True):
            medians = [1000 * median(seconds) for seconds in self.seconds[rate]]
            axes.barh([*_LINE], medians, color=[*_LINE.values()], height=0.7)
            axes.invert_yaxis()
            axes.bar_label(axes.containers[0], [f" {value:,.0f} ms" for value in medians])
            axes.set_xlim(0, 1.2 * max(medians))
            how = ", calculated" if self.why_calculated else ""
            title = f"a step at {rate:,} Mbit/s between 2 nodes{how}: {self.gain(rate):.2f}x as fast"
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xticks([])
            axes.spines[["top", "right", "bottom"]].set_visible(False)
        save_figure(figure, path, dpi=150)


def _milliseconds(seconds: Sequence[float]) -> str:
    low, middle, high = (1000 * part(seconds) for part in (min, median, max))
    return f"{middle:,.0f} ms ({low:,.0f} to {high:,.0f})"


def time_links(config: LinkTimesConfig, *, ranks: Ranks) -> LinkTimes:
    """Time steps with and without sdp4bit; call on every rank.

    The times of a rate are printed and written before the next rate is set, so a stopped demo has them.
    """
    run = build_run(config.run, ranks=ranks, label="sdp4bit")
    comm, steps = run.loop.model.communication, run.loop.steps()
    phase("training steps to warm up")
    for _ in range(_WARM_UPS):
        last = next(steps)
    with comm.full_precision():
        next(steps)
    ours = last.inter_bytes * DEMO_RANKS_PER_NODE / DEMO_PROCESSES
    sent = ours * last.compression_ratio, ours
    seconds: dict[int, tuple[Sequence[float], Sequence[float]]] = {}
    unreliable: dict[int, str] = {}
    for rate in RATES[: 1 if config.why_calculated else None]:
        where = "on this machine" if config.why_calculated else f"at {rate} Mbit/s"
        if not config.why_calculated and ranks.rank % DEMO_RANKS_PER_NODE == 0:
            set_rate(rate)
        for pairs in _PAIRS:
            shown = _shown(steps, f"timing steps {where}", count=2 * pairs * (1 + TIMED_STEPS))
            timed = comm.time_steps(partial(next, shown), repeats=pairs)
            seconds[rate] = tuple(chain(*timed.plain_seconds)), tuple(chain(*timed.quantized_seconds))
            reason = broadcast_from_rank0(partial(why_unreliable, timed))
            if not reason:
                break
            if ranks.is_first and pairs != _PAIRS[-1]:
                note(f"this machine is busy ({reason}): times {where} are unreliable, measured again")
        if reason:
            unreliable[rate] = reason
        if not config.why_calculated:
            times = _publish(
                config, seconds=seconds, unreliable=unreliable, sent=sent, rates=[rate], ranks=ranks
            )
    if config.why_calculated:
        measured = seconds[RATES[0]]
        seconds = {
            rate: (_with_link(measured[0], sent[0], rate), _with_link(measured[1], sent[1], rate))
            for rate in RATES
        }
        unreliable = {rate: reason for rate in RATES if reason}
        times = _publish(config, seconds=seconds, unreliable=unreliable, sent=sent, rates=RATES, ranks=ranks)
    comm.remove()
    return times


def _publish(
    config: LinkTimesConfig,
    *,
    seconds: Mapping[int, tuple[Sequence[float], Sequence[float]]],
    unreliable: Mapping[int, str],
    sent: tuple[float, float],
    rates: Sequence[int],
    ranks: Ranks,
) -> LinkTimes:
    """Write all times so far, and print those at `rates`."""
    times = LinkTimes(
        seconds=seconds,
        sent=sent,
        why_calculated=config.why_calculated,
        unreliable=unreliable,
        dtype=config.run.training.compute_dtype,
    )
    run_on_all_ranks(lambda: times.write(config.out) if ranks.is_first else None)
    if ranks.is_first:
        for rate in rates:
            console().print(times.line(rate))
    return times


def why_unreliable(timed: StepTimes) -> str:
    """Describe other work on this machine, or a gain that is not repeatable; "" for reliable times."""
    # The ranks of the demo and its launcher are 5 processes.
    load, most = os.getloadavg()[0], max(os.cpu_count() or 1, DEMO_PROCESSES + 1)
    if load > most + 1:
        return f"load {load:.0f} on {os.cpu_count()} cores"
    low, high = min(timed.ratios), max(timed.ratios)
    return f"gains of {low:.2f} to {high:.2f} in repetitions" if high > _LARGEST_SPREAD * low else ""


def _shown(steps: Iterator[StepMetrics], text: str, *, count: int) -> Iterator[StepMetrics]:
    """Take steps and show their number."""
    for done in range(count):
        phase(text, total=count, done=done)
        yield next(steps)


def _with_link(seconds: Sequence[float], sent: float, rate: int) -> list[float]:
    return [second + 8e-6 * sent / rate for second in seconds]
