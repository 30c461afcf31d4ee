"""Alerts and the fallback on Megatron-Core: who moves together, which bytes follow, and what is saved.

Layer: real Megatron-Core in 4 and 8 processes over gloo, through `fake_cuda`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp4bit import Alert, AlertConfig, GradientConfig, SDP4BitConfig, TelemetryConfig
from sdp4bit.engines.megatron.alerts import check_watchable
from sdp4bit.quantization.layout import MessageLayout
from tests.engines.megatron.runs import FP16, MICROBATCHES, MOE, MegatronRun, load, save
from tests.engines.megatron.test_training import assert_equal_in, replicated
from tests.ranks import on_ranks, run_ranks
from tests.tables import explained, flat

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")

PRELOAD = ["tests.engines.megatron.imports"]

UP_AND_DOWN = AlertConfig(
    action="fallback",
    gradient_error=0.36,
    weight_error=0.02,
    weight_drift=None,
    calm_ratio=0.9,
    calm_samples=1,
)
"""4-bit weights are above the threshold from the first sample on, 8-bit ones are not."""
FALLBACK = SDP4BitConfig(
    # Outliers are what the Hadamard transform is for: without it they spoil their neighbours.
    gradients=GradientConfig(min_numel=0, hadamard=False),
    telemetry=TelemetryConfig(interval=2),
    alerts=UP_AND_DOWN,
)


@contextmanager
def outliers_in(comm: Any) -> Iterator[None]:
    """Inside the block, every 131st value of a bucket's gradients is large on this rank.

    Not too large: outliers that are most of a gradient cost little.
    """

    def add(gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[::131] += 20 * gradient.float().square().mean().sqrt().to(gradient.dtype)
        return spoilt

    hooks = [parameter.register_hook(add) for parameter in comm.group.parameters]
    yield
    for hook in hooks:
        hook.remove()


def moves(alerts: list[Alert]) -> list[tuple[int, str, str]]:
    return [(alert.step, alert.measure, alert.change) for alert in alerts]


# -- up, down, resume -----------------------------------------------------------------------------------

UP, DOWN = "gradients int8/int4 -> int8", "calm, gradients int8 -> int8/int4"
WEIGHTS_UP = "weights int4 -> int8"


def check_fallback(options: dict[str, Any]) -> list[Alert]:
    """One bucket's gradients and all buckets' weights go up; the gradients come back; a resume repeats it."""
    options = {"ddp": {"bucket_size": 10_000}, **options}
    run = MegatronRun(FALLBACK, **options)
    heard: list[Alert] = []
    run.comm.on_alert(heard.append)
    comms = run.comm._state.groups
    comm = comms[-1]
    with outliers_in(comm):
        run.train(2)
    before = run.comm._state.last_traffic(comm).inter_bytes
    assert flat(run.comm.explain()).count("int8/2048") == len(comms)
    line = explained(run.comm.explain())[comm.group.name]
    assert "intra int8/128, inter int8/128, since step 2 (alert: gradient error" in line
    assert flat(run.comm.explain()).count("inter int8/128") == 1
    saved = save(run)  # with overlap, before the new weights are sent, which then are so in 8 bits
    with outliers_in(comm):
        run.train(1)
    n = comm.group.shard_numel
    moved = [
        MessageLayout(numel=n, bits=8, group_size=size).nbytes
        - MessageLayout(numel=n, bits=4, group_size=size).nbytes
        for size in (128, 2048)
    ]
    # The decision of step 2, counted once for all buckets: 8 fp32 numbers each, twice around a ring of four.
    decision = len(comms) * 2 * 8 * 4 / 4 * 3 / 2 if comm is comms[0] else 0
    assert run.comm._state.last_traffic(comm).inter_bytes - before == sum(moved) + decision
    run.train(1)
    alerts = run.comm.alerts()
    losses = run.train(1).finish()
    assert heard == alerts == run.comm.alerts()
    assert {alert.group for alert in alerts if alert.measure == "gradient_error"} == {comm.group.name}
    assert flat(run.comm.explain()).count("since step") == len(comms)
    assert {group["weight_bits"] for group in run.comm.group_stats()} == {8}

    again = MegatronRun(FALLBACK, seed=7, **options)
    load(again, saved)
    assert again.comm.state_dict()["fallback"].keys() == {f"stage0.{c.group.name}" for c in comms}
    assert flat(again.comm.explain()).count("since step 2") == len(comms) + 1
    for _ in range(2 * MICROBATCHES):
        next(again.data)
    with outliers_in(again.comm._state.groups[-1]):
        again.train(1)
    assert again.train(2).finish() == losses[2:]
    assert all(map(torch.equal, again.weights(), run.weights()))
    assert again.comm.alerts() == alerts[-1:] and again.comm.state_dict() == run.comm.state_dict()

    run.comm.remove()
    run.train(1)
    assert run.comm.alerts() == alerts
    return alerts


def check_all() -> dict[str, list[Alert]]:
    return {
        "data": check_fallback({"overlap": True}),
        "pipeline": check_tied_embedding({}),
        "tensor": check_tensor_parallelism({}),
    }


def assert_moves(results: list[list[Alert]]) -> None:
    """The alerts of `check_fallback` on all ranks."""
    assert all(alerts == results[0] for alerts in results)
    ups = {move for move in moves(results[0]) if move[0] == 2}
    assert ups == {(2, "gradient_error", UP), (2, "weight_error", WEIGHTS_UP)}
    assert moves(results[0])[len(results[0]) - 1 :] == [(4, "gradient_error", DOWN)]


# -- who moves together ---------------------------------------------------------------------------------


def check_tied_embedding(options: dict[str, Any]) -> list[Alert]:
    """Outliers on the last stage move the first stage's copy too, and nothing else there."""
    run = MegatronRun(FALLBACK, pp=2, topology=1, overlap=True, **options)
    last = run.state.is_pipeline_last_stage(ignore_virtual=True)
    (comm,) = (comm for comm in run.comm._state.groups if comm.group.has_tied_embedding)
    (tied,) = comm.group.parameters
    with outliers_in(comm) if last else nullcontext():
        run.train(3).finish()
    alerts = run.comm.alerts()
    raised = {alert.group: alert for alert in alerts if alert.measure == "gradient_error"}
    assert list(raised) == [comm.group.name]
    assert {alert.group for alert in alerts} == {each.group.name for each in run.comm._state.groups}
    assert {alert.step for alert in alerts} == {2}
    stages = run.state.get_pipeline_model_parallel_group()
    assert_equal_in(stages, {"tied": tied.detach().clone()}, at_least=1)
    own: list[Any] = [None, None]
    dist.all_gather_object(own, (run.comm.state_dict()["fallback"], comm.reduction.bits), group=stages)
    assert own[0] == own[1] and own[0][1] == 8
    assert sorted(own[0][0])[:1] == ["stage0.chunk0.bfloat16.0"] and "tied embedding" in own[0][0]
    resumed = MegatronRun(FALLBACK, pp=2, topology=1, overlap=True, **options)
    load(resumed, save(run))
    assert flat(resumed.comm.explain()).count("since step 2") == 1 + len(run.comm._state.groups)
    return [raised[comm.group.name]]


def check_tensor_parallelism(options: dict[str, Any]) -> list[Alert]:
    """Outliers on one tensor-parallel rank move both; what both hold in full stays equal throughout."""
    climbing = replace(UP_AND_DOWN, weight_error=1e-6)
    run = MegatronRun(replace(FALLBACK, alerts=climbing), tp=2, **options)
    exact = flat(run.comm.explain()).count("exact (equal under TP)")
    assert exact == len(run.comm._state.groups)
    spoilt = run.state.get_tensor_model_parallel_rank() == 1
    with outliers_in(run.comm._state.groups[0]) if spoilt else nullcontext():
        run.train(2)
    assert "int8/2048" in flat(run.comm.explain())
    run.train(4)
    peers = run.state.get_tensor_model_parallel_group()
    run.finish()
    assert "full precision, in the parameter buffer, since step 4" in flat(run.comm.explain())
    assert "exact" not in flat(run.comm.explain())
    assert_equal_in(peers, replicated(run), at_least=8)
    alerts: list[Alert] = run.comm.alerts()
    return alerts


def test_buckets_move_on_all_ranks_that_must_round_alike() -> None:
    results = run_ranks(check_all, 4)
    assert_moves([result["data"] for result in results])
    values = {(a.step, a.value, a.change) for result in results for a in result["pipeline"]}
    assert len(values) == 1
    tensor = [result["tensor"] for result in results]
    assert all(alerts == tensor[0] for alerts in tensor)
    assert UP.replace("int8/int4", "int4") in [alert.change for alert in tensor[0]]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_fallback_with_and_without_overlap(overlap: bool) -> None:
    assert_moves(run_ranks(check_fallback, 4, {"overlap": overlap, "overlap_gather": False}))


# -- all kinds of parallelism at once -------------------------------------------------------------------


def check_everything() -> list[Alert]:
    options: dict[str, Any] = {"pp": 2, "tp": 2, "topology": 1, "overlap": True, "chunks": 2, "layers": 4}
    run = MegatronRun(FALLBACK, **options)
    (comm,) = (comm for comm in run.comm._state.groups if comm.group.has_tied_embedding)
    spoilt = dist.get_rank() == dist.get_world_size() - 1
    with outliers_in(comm) if spoilt else nullcontext():
        run.train(5).finish()
    assert comm.reduction.bits == 8
    assert_equal_in(run.state.get_tensor_model_parallel_group(), replicated(run), at_least=8)
    (tied,) = comm.group.parameters
    stages = run.state.get_pipeline_model_parallel_group()
    assert_equal_in(stages, {"tied": tied.detach().clone()}, at_least=1)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, run.comm.state_dict())
    assert all(state == everybody[0] for state in everybody)
    alerts: list[Alert] = run.comm.alerts()
    return alerts


@pytest.mark.slow
def test_tensor_and_pipeline_parallelism_with_virtual_stages() -> None:
    results = run_ranks(check_everything, 8)
    for stage in (results[:4], results[4:]):
        assert stage[0] and all(alerts == stage[0] for alerts in stage)


# -- what is not watched, and what is not measured ------------------------------------------------------


def skipped_steps() -> None:
    """A step that overflows is neither counted nor measured."""
    run = MegatronRun(FALLBACK, topology=1, **FP16)
    taken = 0
    for _ in range(14):
        run.backward()
        alerts = len(run.comm.alerts())
        if run.step():
            taken += 1
        else:
            assert len(run.comm.alerts()) == alerts
    assert 2 <= taken < 14
    changes = [alert for alert in run.comm.alerts() if alert.measure == "weight_error"]
    assert changes and {alert.step for alert in changes} == {2}
    assert not [alert for alert in run.comm.alerts() if alert.measure == "nonfinite_groups"]


def unwatched_buckets() -> None:
    """Expert buckets and fp32 buckets have no alerts; with experts the others' are taken before they move."""
    for options in ({"transformer": MOE}, {"fp32_norm": True}):
        run = MegatronRun(FALLBACK, topology=1, **options)
        replicas = [comm for comm in run.comm._state.groups if comm.replica is not None]
        unsent: list[bool] = []
        run.comm.on_alert(
            lambda _, replicas=replicas, unsent=unsent: unsent.extend(c.is_changed for c in replicas)
        )
        run.train(3).finish()
        assert unsent and all(unsent)
        watched = {comm.group.name for comm in run.comm._state.groups if comm.replica is not None}
        assert len(watched) < len(run.comm._state.groups)
        assert {alert.group for alert in run.comm.alerts()} == watched
        assert run.comm.stats()["weight_drift"] > 0 and run.comm.stats()["steps"] == 3


def refusals() -> None:
    run = MegatronRun(replace(FALLBACK, alerts=None), topology=1)
    assert run.comm.alerts() == [] and "fallback" not in run.comm.state_dict()
    good = run.comm.state_dict()
    bad: Any
    for bad in ([], {"stage0.chunk0.bfloat16.0": "high"}):
        with pytest.raises(ValueError, match="fallback should be a dictionary of lists of numbers"):
            run.comm.load_state_dict({**good, "fallback": bad})
    warned = MegatronRun(replace(FALLBACK, alerts=replace(UP_AND_DOWN, action="warn")), topology=1)
    plain = MegatronRun(replace(FALLBACK, alerts=None), topology=1).train(3).finish()
    assert warned.train(3).finish() == plain and warned.comm.alerts()
    assert "since step" not in flat(warned.comm.explain()) and "fallback" not in warned.comm.state_dict()
    one, other = (
        SimpleNamespace(optimizer=object(), is_expert=False, has_tied_embedding=False) for _ in range(2)
    )
    with pytest.raises(ValueError, match="set overlap_param_gather_with_optimizer_step=False"):
        check_watchable(run.chunks, [one, other])  # type: ignore[list-item]


@pytest.mark.slow
@on_ranks(2)
def test_skipped_steps_unwatched_buckets_and_refusals() -> None:
    skipped_steps()
    unwatched_buckets()
    refusals()
