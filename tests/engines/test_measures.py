"""What is measured while training: how well, when, on which ranks, and that nobody waits for it.

Layers: no process for the arithmetic and the outputs; real processes over gloo for the rest.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp4bit import GradientConfig, SDP4BitConfig, TelemetryConfig, WeightConfig
from sdp4bit.collectives.reduce_scatter import count_nonfinite, upper_halves
from sdp4bit.observe.measures import Telemetry, sample_ranges, squared_norms, total_measures
from sdp4bit.quantization import reference
from sdp4bit.quantization.layout import message_layout
from tests.collectives.built import reduce_scatter_of
from tests.ranks import fake_world, on_ranks, run_ranks
from tests.toy import QUANTIZED, Run, build, loss_of

WHOLE_ROWS = TelemetryConfig(interval=2, sample_numel=1 << 20)


def test_a_sample_is_of_whole_groups_and_about_as_long_as_asked_for():
    for numel, sample, unit in itertools.product(
        (1, 32, 2048, 2049, 100_000, 1_000_003), (1, 4096, 10_000, 1 << 21), (32, 128, 2048)
    ):
        ranges = sample_ranges(numel, sample_numel=sample, unit=unit)
        assert 1 <= len(ranges) <= 8
        assert all(start % unit == 0 and end % unit == 0 for start, end in ranges) or ranges == [(0, numel)]
        assert ranges[-1][1] <= numel
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
        taken = sum(end - start for start, end in ranges)
        assert taken == numel if sample >= numel else taken <= max(sample, unit)
        assert taken >= min(numel, sample) / 2 - 8 * unit
        assert ranges[-1][1] > numel / 2 or sample < 2 * unit  # not the beginning only


def test_what_is_not_finite_is_counted_by_groups_or_by_values():
    values = torch.randn(1, 1, 160)
    values[..., 40], values[..., 130], values[..., 131] = math.nan, math.inf, -math.inf
    for bits, expected in ((4, 2), (8, 2), (32, 3)):
        layout = message_layout(numel=160, bits=bits, group_size=64)
        message = torch.empty(1, layout.nbytes, dtype=torch.uint8)
        reference.encode(values, message, layout, None)
        assert count_nonfinite([upper_halves(message, layout)]) == expected


def test_totals_weigh_groups_by_their_squares_and_leave_out_what_is_not_finite():
    nan = math.nan
    squares = torch.tensor(
        [[1, 4, 1, 16, 0, 0, 0], [3, 12, nan, nan, 9, 36, 2], [nan, nan, nan, nan, nan, nan, nan]],
        dtype=torch.float64,
    )
    assert total_measures(squares) == {
        "gradient_error": 0.5, "weight_error": 0.25, "weight_drift": 0.5, "nonfinite_groups": 2,
    }  # fmt: skip
    assert total_measures(squares[2:])["weight_drift"] is None
    telemetry = Telemetry(TelemetryConfig(interval=5), ["a", "b", "c"])
    assert [step for step in range(12) if telemetry.is_due(step)] == [5, 10]
    assert not any(Telemetry(None, []).is_due(step) for step in range(12))
    assert telemetry.step is None and telemetry.by_group()["a"]["weight_error"] is None
    telemetry.publish(squares, step=5)
    groups = telemetry.by_group()
    assert list(groups) == ["a", "b", "c"] and telemetry.step == 5
    assert (groups["a"]["gradient_error"], groups["a"]["weight_drift"]) == (0.5, 0.0)
    assert (groups["b"]["weight_error"], groups["b"]["nonfinite_groups"]) == (None, 2)
    assert {groups["c"][name] for name in ("gradient_error", "weight_error", "weight_drift")} == {None}


def test_squares_of_a_sample_are_those_of_the_row() -> None:
    """Totals weigh groups by their size, whatever part of each was sampled."""
    exact, received = torch.tensor([3.0, 0.0, 4.0, 0.0]), torch.tensor([3.0, 1.0, 4.0, 2.0])
    small = received.double() * 1e-30, exact.double() * 1e-30
    for values, numel, expected in (
        ((received, exact), 4, [5.0, 25.0]),
        ((received, exact), 12, [15.0, 75.0]),
        (small, 4, [5e-60, 25e-60]),
    ):
        found = [each.item() for each in squared_norms(*values, numel=numel)]
        assert found == pytest.approx(expected, rel=1e-9, abs=0.0)


def test_an_error_has_the_steps_of_all_hops() -> None:
    """Each hop quantizes once more: by 15 levels in groups of 128, or by 255, which is 16 times as fine."""
    values, errors = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0)), {}
    for bits in itertools.product((4, 8), repeat=2):
        config = GradientConfig(intra_bits=bits[0], inter_bits=bits[1], intra_group_size=128)
        with fake_world(4, rank=0):
            reduction, _ = reduce_scatter_of(2, 2, config)
            errors[bits] = float((reduction.requantized(values) - values).norm() / values.norm())
    assert errors[8, 8] < 0.02 < min(errors[4, 8], errors[8, 4])
    # Of two steps that know nothing of each other, the squares add up.
    assert errors[4, 4] == pytest.approx(math.hypot(errors[4, 8], errors[8, 4]), rel=0.1)


@on_ranks(2)
def test_what_is_measured_before_a_refresh_is_what_it_does() -> None:
    """The drift and the error measured before a refresh are those that it leaves and makes."""
    # Samples are quantized as one section.
    config = replace(QUANTIZED, telemetry=WHOLE_ROWS, separate_parameters=False)
    run = Run(build(), config, topology=1).train(3)
    comm = run.comm
    assert comm.stats()["sampled_step"] == 2
    run.train(1)
    now = comm.measure()  # the optimizer has stepped, nothing has been sent
    run.evaluate()
    stats = comm.stats()
    assert stats["sampled_step"] == stats["steps"] == 4
    assert now["weight_error"] == pytest.approx(stats["weight_error"], rel=1e-9)
    assert now["pending"] > stats["weight_drift"] > 0
    for measured in (now, comm.measure()):
        assert measured["weight_drift"] == pytest.approx(stats["weight_drift"], rel=1e-9)
    assert comm.measure()["pending"] == 0
    # Uniform rounding to 15 levels of groups of 128.
    assert 0.02 < stats["gradient_error"] < 0.4
    assert comm.measure()["gradient_error"] == stats["gradient_error"]

    groups = comm.group_stats()
    assert [group["name"] for group in groups] == [each.view.name for each in comm.groups]
    for key in ("intra_bytes", "inter_bytes"):
        assert sum(group[key] for group in groups) == pytest.approx(stats["last_step"][key], abs=4)
    for group in groups:
        assert (group["weight_bits"], group["gradient_bits"], group["nonfinite_groups"]) == (4, 4, 0)
        assert 0 < group["weight_drift"] < group["weight_error"] < 0.5
        assert group["compression_ratio"] > 2


def steps_of_listener() -> list[Any]:
    """Return of each call the step, the step that was measured last, and the collectives of this step."""
    run = Run(build(), replace(QUANTIZED, telemetry=TelemetryConfig(interval=2)), topology=1)
    state, seen = run.comm._state, []

    def listener(step: int) -> None:
        sent = sum(
            t.current_step.collectives for g in state.groups for t in (g.weights.traffic, g.gradients.traffic)
        )
        seen.append((step, state.telemetry.step, sent))
        dist.barrier()  # all ranks are here at once

    state.step_listeners.append(listener)
    run.train(2)
    run.evaluate(torch.inference_mode)
    run.evaluate()
    run.train(3)
    return seen


@pytest.mark.gloo
def test_listeners_are_called_at_every_step_boundary_on_all_ranks_before_anything_is_sent() -> None:
    for seen in run_ranks(steps_of_listener, 2):
        assert seen == [(1, None, 0), (2, 2, 0), (3, 2, 0), (4, 4, 0)]


@on_ranks(2)
def test_measured_steps_give_the_same_losses() -> None:
    plain, measured = (
        Run(build(), replace(QUANTIZED, telemetry=telemetry), topology=1).train(2)
        for telemetry in (None, TelemetryConfig(interval=1))
    )
    assert plain.finish() == measured.finish()
    assert (plain.comm.stats()["sampled_step"], measured.comm.stats()["sampled_step"]) == (None, 2)


def check_nonfinite() -> tuple[list[int], list[int], dict[str, Any]]:
    run = Run(build(), replace(QUANTIZED, separate_parameters=False), clip=None)
    run.train(2)
    loss = loss_of(run.model, next(run.data))
    (loss * (math.nan if dist.get_rank() == 3 else 1.0)).backward()
    run.step()
    run.evaluate()
    groups = run.comm.group_stats()
    scales = [
        message_layout(numel=each.view.shard_numel, bits=4, group_size=128).groups for each in run.comm.groups
    ]
    return [group["nonfinite_groups"] for group in groups], scales, run.comm.stats()


@pytest.mark.gloo
def test_groups_that_are_not_finite_are_counted_where_they_arrive() -> None:
    for rank, (counts, scales, stats) in enumerate(run_ranks(check_nonfinite, 4)):
        assert stats["nonfinite_groups"] == sum(counts)
        # One message comes from each node, and rank 3's node sends no finite one of the first block's shard;
        # the last rank's row may end with padding, which is.
        assert counts[1] == scales[1] if rank == 0 else 0 < counts[1] <= scales[1]
        assert (stats["gradient_error"] is None) == (rank == 3)


@on_ranks(2)
def test_a_gradient_between_two_measured_steps_that_is_not_finite_is_counted() -> None:
    """Also if the loop skips its step, and once only."""
    run = Run(build(), replace(QUANTIZED, telemetry=TelemetryConfig(interval=2)), topology=1).train(2)
    (loss_of(run.model, next(run.data)) * math.nan).backward()
    run.optimizer.zero_grad()
    run.train(2).evaluate()
    assert run.comm.stats()["sampled_step"] == 4 and run.comm.stats()["nonfinite_groups"] > 0
    run.train(2).evaluate()
    assert run.comm.stats()["sampled_step"] == 6 and run.comm.stats()["nonfinite_groups"] == 0


@on_ranks(2)
def test_what_is_not_quantized_has_no_error_and_nothing_is_measured_where_it_is_switched_off() -> None:
    run = Run(build(), SDP4BitConfig(weights=None)).train(1)
    run.evaluate()
    stats = run.comm.stats()
    assert stats["sampled_step"] is None and stats["gradient_error"] is None
    assert stats["last_step"]["intra_bytes"] > 0
    dense = WeightConfig(bits=None, replica="full")
    mixed = SDP4BitConfig(weights=dense, gradients=GradientConfig(min_numel=1 << 20), telemetry=WHOLE_ROWS)
    run = Run(build(), mixed).train(2)
    run.evaluate()
    for group in run.comm.group_stats():
        assert (group["weight_bits"], group["gradient_bits"]) == (None, None)
        assert (group["weight_error"], group["gradient_error"]) == (None, None)
        assert 0 < group["weight_drift"] < 2**-8  # what rounding to bf16 leaves
