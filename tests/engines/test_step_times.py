"""What a step took, its exchange, and what full precision would have made of it.

Layers: no process for the arithmetic; real processes over gloo for what is measured, a simulated GPU for what
is not.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from sdp4bit import SDP4BitConfig, TelemetryConfig, quantize_communication
from sdp4bit.engines.step_times import SMALLEST_FOR_RATE, Span, StepTimes
from sdp4bit.traffic import HostTransfer, Traffic, TrafficCounter
from tests.engines.simulated_cuda import simulate
from tests.engines.stream_scenarios import FSDPRun
from tests.engines.stream_simulator import Event
from tests.ranks import on_ranks, run_ranks
from tests.tables import flat
from tests.toy import POLICY, QUANTIZED, Run, build, data_mesh

MEGABYTE = 1e6
SHORT = Span("inter", MEGABYTE, 0, 0.1)


def step(
    *spans: Span,
    seconds: float = 1.0,
    waited: float | None = None,
    quantizing: float | None = None,
    **sent: float,
) -> StepTimes:
    """Return a step; what is not said of its traffic is what its spans sent."""
    levels = ("intra", "inter")
    known = {f"{level}_bytes": sum(s.nbytes for s in spans if s.level == level) for level in levels}
    traffic = Traffic(**{"collectives": len(spans), **known, **sent})
    return StepTimes(
        step=10, seconds=seconds, spans=spans, waited=waited, quantizing=quantizing, sent=traffic
    )


def test_time_in_exchange_counts_what_overlaps_once_and_ends_with_the_step() -> None:
    spans = [
        Span("inter", 1.0, *place)
        for place in ((0.1, 0.3), (0.2, 0.5), (0.7, 0.8), (0.95, 1.2), (0.71, 0.79))
    ]
    assert step(*spans).exchange_seconds == pytest.approx(0.4 + 0.1 + 0.05)


def test_what_was_waited_for_grows_with_the_bytes_and_quantizing_falls_away() -> None:
    """4 MB in 0.4 s are 10 MB/s, 24 MB take 2.4 s; of 1.5 s, 0.4 s were waits and 0.1 s quantizing."""
    times = step(
        Span("inter", 4 * MEGABYTE, 0.0, 0.4),
        seconds=1.5,
        waited=0.4,
        quantizing=0.1,
        plain_inter_bytes=24 * MEGABYTE,
    )
    assert times.rate("inter") == pytest.approx(10 * MEGABYTE)
    assert times.plain_seconds() == pytest.approx((1.0 + 2.4, 1.1 + 2.4))
    assert times.verdict() == "exchange was 27 % of your step; sdp4bit makes a step about 2.3x faster here"
    said = times.describe()
    assert "exchange 27 % (and 0 % of its 400 ms in flight hidden behind computation), quantizing 7 %" in said
    estimate = "Without quantization 3.40 s to 3.50 s, an estimate: 24 MB between nodes instead of 4 MB, at"
    assert f"{estimate} 10 MB/s as measured." in said


def test_the_fastest_large_transfer_gives_the_rate_and_lateness_is_not_multiplied() -> None:
    spans = (
        Span("inter", 4 * MEGABYTE, 0.0, 0.4),
        Span("inter", 4 * MEGABYTE, 0.4, 1.4),  # of which 0.6 s waited for a rank that was late
        Span("inter", SMALLEST_FOR_RATE - 1, 1.4, 1.4001),  # too small to tell
    )
    times = step(*spans, seconds=2.0, waited=1.4001, plain_inter_bytes=48 * MEGABYTE)
    assert times.rate("inter") == pytest.approx(10 * MEGABYTE)
    _, most = times.plain_seconds()
    lateness = 1.4001 - (8 * MEGABYTE + SMALLEST_FOR_RATE - 1) / (10 * MEGABYTE)
    assert most == pytest.approx(0.5999 + 4.8 + lateness)


def test_computation_hides_the_same_share_or_the_same_seconds_and_never_more_than_there_is() -> None:
    """0.3 of 0.4 s were hidden; of 2.4 s, three quarters or 0.3 s; 1.1 s of computing hide no more."""
    transfer = Span("inter", 4 * MEGABYTE, 0.0, 0.4)
    times = step(transfer, seconds=1.2, waited=0.1, plain_inter_bytes=24 * MEGABYTE)
    assert times.plain_seconds() == pytest.approx((1.1 + 2.4 - 1.1, 1.1 + 2.4 - 0.3))
    long = replace(times, seconds=5.0)
    assert long.plain_seconds() == pytest.approx((4.9 + 2.4 / 4, 4.9 + 2.4 - 0.3))
    assert long.verdict().endswith("sdp4bit makes a step about 1.1x to 1.4x faster here")


def test_a_ring_uses_both_levels_at_once() -> None:
    spans = Span("intra", 4 * MEGABYTE, 0.0, 0.1), Span("inter", 2 * MEGABYTE, 0.1, 0.3)
    plain = {"plain_intra_bytes": 10 * MEGABYTE, "plain_inter_bytes": 12 * MEGABYTE}  # 0.25 s and 1.2 s
    times = step(*spans, seconds=1.0, waited=0.3, **plain)
    assert times.plain_seconds() == pytest.approx((1.9, 1.9))


def test_where_waiting_is_not_measured_all_is_hidden_or_nothing() -> None:
    transfer = Span("inter", 4 * MEGABYTE, 0.0, 0.4)
    times = step(transfer, plain_inter_bytes=24 * MEGABYTE)
    assert times.plain_seconds() == pytest.approx((2.4, 1.0 - 0.4 + 2.4))
    assert (
        times.verdict()
        == "exchange was 40 % of your step; sdp4bit makes a step about 2.4x to 3.0x faster here"
    )
    assert (
        "exchange 40 % in flight (how much of it computation hid is not measured on a GPU)."
        in times.describe()
    )
    assert times.timing()["exposed_seconds"] is None


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (step(), "nothing to gain: this rank exchanges nothing"),
        (
            step(Span("inter", 1 * MEGABYTE, 0, 0.03), waited=0.03, plain_inter_bytes=2 * MEGABYTE),
            "exchange was 3 % of your step: little to gain",
        ),
        (
            step(Span("intra", 1 * MEGABYTE, 0, 0.03), waited=0.03, plain_intra_bytes=2 * MEGABYTE),
            "little to gain: all ranks are on one node; exchange was 3 % of your step",
        ),
        (
            step(Span("intra", 1 * MEGABYTE, 0, 0.3), waited=0.3, plain_intra_bytes=4 * MEGABYTE),
            "exchange was 30 % of your step; sdp4bit makes a step about 1.9x faster here",
        ),
        (
            step(SHORT, waited=0.1, quantizing=0.6, plain_inter_bytes=4 * MEGABYTE),
            "exchange was 10 % of your step; sdp4bit makes a step at most 1.3x faster here",
        ),
        (
            step(Span("inter", MEGABYTE, 0, 0.5), waited=0.5),
            "exchange was 50 % of your step; sdp4bit makes a step at least 2.0x slower here: it does not pay",
        ),
        (
            step(Span("inter", 9000.0, 0, 0.1), waited=0.1, plain_inter_bytes=2 * MEGABYTE),
            "exchange was 10 % of your step; its messages are too small to tell what full precision would "
            "take (at most 9 kB between nodes, 262 kB are needed)",
        ),
        (
            step(SHORT, waited=0.1, plain_inter_bytes=MEGABYTE),
            "exchange was 10 % of your step; nothing in it was quantized",
        ),
        (
            step(SHORT, waited=0.1, collectives=9),
            "not measured: most of the exchange was not timed",
        ),
    ],
)  # fmt: skip
def test_every_verdict_is_one_sentence(times: StepTimes, expected: str) -> None:
    assert times.verdict() == expected


def test_a_counter_notes_transfers_and_quantizing_of_measured_steps_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    counter, cpu = TrafficCounter(nodes=2, ranks_per_node=1), torch.device("cpu")

    def exchange() -> None:
        stop = counter.start_quantizing(cpu)
        now[0] += 1.0  # quantize
        timer = counter.start_timer("inter", cpu, nbytes=8)
        now[0] += 0.5  # start it
        timer.end_start()
        inner = counter.start_quantizing(cpu)
        now[0] += 2.0  # something else meanwhile
        timer.begin_wait()
        now[0] += 4.0
        timer()
        inner()
        stop()

    exchange()
    assert counter.take_measured() == ([], None)
    counter.is_measured = True
    exchange()
    assert counter.take_measured() == ([HostTransfer("inter", 8, 8.5, 9.0, 11.0, 15.0)], 3.0)
    assert counter.take_measured() == ([], None)
    assert counter.current_step.inter_seconds == 13.0
    for _ in range(5000):  # an evaluation of any length
        counter.start_timer("inter", cpu, nbytes=8)()
    assert len(counter.take_measured()[0]) == 4096


@on_ranks(2)
def test_a_run_measures_its_own_steps() -> None:
    run = Run(build(), replace(QUANTIZED, telemetry=TelemetryConfig(interval=2)), topology=1)
    run.train(2)
    assert run.comm.stats()["timing"] is None  # the step has not come to its boundary
    assert "Verdict" not in run.comm.explain()
    start = time.perf_counter()
    run.train(2)
    run.evaluate()
    longest = time.perf_counter() - start
    stats = run.comm.stats()
    timing = stats["timing"]
    assert timing is not None and timing["step"] == stats["sampled_step"] == 4
    assert 0 < timing["exposed_seconds"] <= timing["exchange_seconds"] < timing["seconds"] < longest
    assert 0 < timing["quantization_seconds"] < timing["seconds"] - timing["exposed_seconds"]
    assert timing["plain_seconds"] is None and "too small to tell" in timing["verdict"]
    said = run.comm.explain()
    assert timing["verdict"] in flat(said) and max(map(len, said.splitlines())) <= 80
    transfers = sum(c.last_step.collectives for g in run.comm._state.groups for c in g.counters)
    assert len(run.comm._state.step_clock.latest().spans) == transfers  # all of them


@on_ranks(2)
def test_messages_that_are_large_enough_give_an_estimate() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.Linear(2048, 512))
    fully_shard(model, mesh=data_mesh(), mp_policy=POLICY)
    config = SDP4BitConfig(telemetry=TelemetryConfig(interval=1))
    comm = quantize_communication(model, topology=1, config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.ones(2, 1024)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    timing = comm.stats()["timing"]
    least, most = timing["plain_seconds"]
    assert 0 < least <= most and timing["speedup"] == (least / timing["seconds"], most / timing["seconds"])
    assert "an estimate: " in flat(comm.explain())


class ClockedEvent(Event):
    """A second passes between any two timed events; all are over when somebody asks."""

    made = 0

    def __init__(self, *_: Any, enable_timing: bool = False, **__: Any) -> None:
        super().__init__()
        ClockedEvent.made += enable_timing
        self.number = ClockedEvent.made

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: ClockedEvent) -> float:
        return 1000.0 * (other.number - self.number)


def on_a_gpu() -> tuple[Any, str]:
    with simulate(sees_operators=False), mock.patch.object(torch.cuda, "Event", ClockedEvent):
        run = FSDPRun(replace(QUANTIZED, telemetry=TelemetryConfig(interval=2)))
        run.train(3)
        return run.comm.stats()["timing"], run.comm.explain()


def test_on_a_gpu_events_bound_the_step_and_nobody_claims_to_know_what_was_hidden() -> None:
    ((timing, said),) = run_ranks(on_a_gpu, 1)
    assert timing["step"] == 2 and timing["exposed_seconds"] is timing["quantization_seconds"] is None
    assert 0 < timing["exchange_seconds"] < timing["seconds"]
    assert "is not measured on a GPU" in flat(said)
