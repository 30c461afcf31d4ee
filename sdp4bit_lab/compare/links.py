"""Time the demo's steps with and without sdp4bit at three rates of the link between its two nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

from sdp4bit.traffic import format_bytes
from sdp4bit_lab.common.files import aligned, note, time_left, wrapped, write_atomically
from sdp4bit_lab.common.launch.link import set_rate
from sdp4bit_lab.common.phases import end_phases, phase, seconds_so_far
from sdp4bit_lab.common.ranks import Ranks, run_on_all_ranks
from sdp4bit_lab.compare.config import DEMO_PROCESSES, DEMO_RANKS_PER_NODE, LinkTimesConfig
from sdp4bit_lab.pretrain.trainer import build_run

RATES = (100, 250, 1000)
"""Mbit/s between the nodes."""
_REPEATS = 2
_WARM_UPS = 2


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """Seconds of the timed steps of plain FSDP2 and of sdp4bit, by rate."""

    seconds: dict[int, tuple[Sequence[float], Sequence[float]]]
    sent: tuple[float, float]
    """Bytes that a node sends in a step."""
    why_calculated: str
    """Why there is no shaped link; "" if the seconds were measured on one."""

    def text(self) -> str:
        """Return a table for 80 columns, with its conditions."""
        rows: list[tuple[str, ...]] = [("a step takes", "plain FSDP2", "sdp4bit", "gain")]
        for rate, (plain, ours) in self.seconds.items():
            gain = f"{median(plain) / median(ours):.2f}x"
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
        sums = (
            f"The bytes of the training below are those of all {DEMO_PROCESSES} ranks, that is, both nodes."
        )
        return "\n".join([*aligned(rows), wrapped([conditions, sums])])


def _milliseconds(seconds: Sequence[float]) -> str:
    low, middle, high = (1000 * part(seconds) for part in (min, median, max))
    return f"{middle:,.0f} ms ({low:,.0f} to {high:,.0f})"


def time_links(config: LinkTimesConfig, *, ranks: Ranks) -> LinkTimes:
    """Time steps with and without sdp4bit, and print and write the table; call on every rank."""
    run = build_run(config.run, ranks=ranks, label="sdp4bit")
    comm, steps = run.loop.model.communication, run.loop.steps()
    started = seconds_so_far()
    phase("training steps to warm up")
    for _ in range(_WARM_UPS):
        last = next(steps)
    with comm.full_precision():
        next(steps)
    ours = last.inter_bytes * DEMO_RANKS_PER_NODE / DEMO_PROCESSES
    sent = ours * last.compression_ratio, ours
    on_link = [0.0 if config.why_calculated else 8e-6 * sum(sent) / rate for rate in RATES]
    rates = RATES[: 1 if config.why_calculated else None]
    seconds: dict[int, tuple[Sequence[float], Sequence[float]]] = {}
    for place, rate in enumerate(rates):
        blocks = sum(2 * last.step_seconds + added for added in on_link[place : len(rates)])
        # The training starts processes again.
        left = 3 * _REPEATS * blocks + 2 * config.steps * last.step_seconds + started
        phase(f"timing steps {'of this machine' if config.why_calculated else f'at {rate} Mbit/s'}")
        if ranks.is_first:
            note(time_left(left))
        if not config.why_calculated and ranks.rank % DEMO_RANKS_PER_NODE == 0:
            set_rate(rate)
        timed = comm.time_steps(lambda: next(steps), repeats=_REPEATS)
        seconds[rate] = tuple(chain(*timed.plain_seconds)), tuple(chain(*timed.quantized_seconds))
    if config.why_calculated:
        measured = seconds[RATES[0]]
        seconds = {
            rate: (_with_link(measured[0], sent[0], rate), _with_link(measured[1], sent[1], rate))
            for rate in RATES
        }
    end_phases()
    comm.remove()
    times = LinkTimes(seconds=seconds, sent=sent, why_calculated=config.why_calculated)
    run_on_all_ranks(lambda: write_atomically(config.out, times.text() + "\n") if ranks.is_first else None)
    return times


def _with_link(seconds: Sequence[float], sent: float, rate: int) -> list[float]:
    return [second + 8e-6 * sent / rate for second in seconds]
