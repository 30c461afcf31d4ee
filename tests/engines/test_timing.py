"""Training steps timed with and without quantization: each is a valid step, and nothing is restored.

Layers: no process for the arithmetic; real processes over gloo.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sdp4bit import SDP4BitConfig, WeightConfig
from sdp4bit.engines.fsdp2.hooks import AllGatherHook
from sdp4bit.observe import timing as module
from sdp4bit.observe.timing import StepTimes, time_steps
from tests.ranks import on_ranks, run_ranks
from tests.toy import IDENTITY, LOSSLESS, QUANTIZED, Run, build, loss_of

BLOCK = 1 + module.TIMED_STEPS


def test_medians_the_ratio_and_its_spread() -> None:
    times = StepTimes(quantized_seconds=((1.0, 3.0), (2.0, 2.0)), plain_seconds=((6.0, 2.0), (3.0, 3.0)))
    assert (times.quantized, times.plain) == (2.0, 3.0)
    assert times.ratios == (2.0, 1.5) and times.ratio == 1.75
    said = (
        "2.00 s a step with quantization, 3.00 s without: 1.75x as fast, 1.50 to 2.00 over 2 pairs of blocks"
    )
    assert str(times) == said


def trained(config: SDP4BitConfig | None, *, topology: int = 1, hybrid: bool = False) -> list[float]:
    """Return the losses and the weights of a step, as many as time_steps takes, and 2 more."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")) if hybrid else None
    run = Run(build(mesh=mesh), config, topology=topology).train(1)
    if run.comm is None:
        run.train(2 * BLOCK)
    else:
        run.comm.time_steps(lambda: run.train(1), repeats=1)
    return run.train(2).finish()


@on_ranks(2)
def test_without_quantizers_timed_steps_train_as_plain_fsdp2_does() -> None:
    """A stale replica, a lost step or a hook left out would change the losses that follow."""
    plain = trained(None)
    for config in (IDENTITY, replace(IDENTITY, weights=WeightConfig(bits=None, replica="full"))):
        assert trained(config) == plain, config


@pytest.mark.slow
@on_ranks(4)
def test_with_replicas_too() -> None:
    assert trained(LOSSLESS, topology=2, hybrid=True) == trained(None, topology=2, hybrid=True)


def counted_steps() -> dict[str, Any]:
    """Return whether each step has sent by the hooks, and what is known of the run afterwards."""
    run = Run(build(), QUANTIZED, topology=1).train(1)
    sent = []

    def step() -> None:
        before = run.comm.stats()["total"]["collectives"]
        run.train(1)
        sent.append(run.comm.stats()["total"]["collectives"] > before)

    reductions = [comm.gradients.reductions for comm in run.comm.groups]
    times = run.comm.time_steps(step, repeats=2)
    counted = [comm.gradients.reductions - n for comm, n in zip(run.comm.groups, reductions, strict=True)]
    refreshes = run.comm.stats()["full_refreshes"]
    run.train(1)
    return {
        "sent": sent,
        "times": times,
        "reductions": counted,
        "refreshes": (refreshes, run.comm.stats()["full_refreshes"]),
    }


@pytest.mark.gloo
def test_blocks_take_turns_and_all_ranks_are_told_the_slowest_rank_s_time() -> None:
    one, other = run_ranks(counted_steps, 2)
    assert one["sent"] == other["sent"] == ([True] * BLOCK + [False] * BLOCK) * 2
    times = one["times"]
    assert times == other["times"]
    for blocks in (times.quantized_seconds, times.plain_seconds):
        assert [len(block) for block in blocks] == [module.TIMED_STEPS] * 2
        assert all(seconds > 0 for block in blocks for seconds in block)
    assert one["reductions"] == [2 * BLOCK] * 4
    # One refresh per group when the second quantized block begins, and one after the last plain block.
    assert one["refreshes"] == (4, 8)


@on_ranks(2)
def test_the_slowest_rank_counts() -> None:
    """Steps take rank + 1 seconds, by a clock that nothing else moves."""
    now = [0.0]

    def step() -> None:
        now[0] += 1.0 + dist.get_rank()

    with mock.patch.object(module.time, "perf_counter", side_effect=lambda: now[0]):
        times = time_steps(step, repeats=1, full_precision=nullcontext, device=None)
    slowest = ((2.0,) * module.TIMED_STEPS,)
    assert times == StepTimes(quantized_seconds=slowest, plain_seconds=slowest)


@on_ranks(2)
def test_an_exception_leaves_the_model_quantized() -> None:
    run = Run(build(), LOSSLESS, topology=1)
    taken = []

    def step() -> None:
        taken.append(run.train(1))
        if len(taken) == BLOCK + 1:  # in full precision
            raise KeyError("of the step")

    with pytest.raises(KeyError, match="of the step"):
        run.comm.time_steps(step)
    hooks = [comm.view.comms.all_gather for comm in run.comm.groups]
    assert all(isinstance(hook, AllGatherHook) for hook in hooks)
    plain = Run(build(), None).train(BLOCK + 3)
    assert run.train(2).finish() == plain.finish()


@on_ranks(2)
def test_what_time_steps_refuses() -> None:
    run = Run(build(), QUANTIZED, topology=1)
    for repeats in (0, -1):
        with pytest.raises(ValueError, match=f"at least 1 repeat, got repeats={repeats}"):
            run.comm.time_steps(lambda: run.train(1), repeats=repeats)
    with pytest.raises(TypeError, match="needs a function that runs one training step, got 3"):
        run.comm.time_steps(3)

    def nested(*_: object) -> None:
        with pytest.raises(RuntimeError, match="during forward or backward"):
            run.comm.time_steps(lambda: None)
        seen.append(True)

    seen: list[bool] = []
    hook = run.model.blocks[0].register_forward_hook(nested)
    output = loss_of(run.model, next(run.data))
    hook.remove()
    output.register_hook(nested)
    output.backward()
    assert len(seen) == 2
    run.comm.remove()
    with pytest.raises(RuntimeError, match="has been removed"):
        run.comm.time_steps(lambda: run.train(1))


# full_precision()


def switched(config: SDP4BitConfig | None, *, quantized_first: int) -> list[float]:
    """Return the losses and the weights of steps; two are inside full_precision(), if there is a handle."""
    run = Run(build(), config, topology=1).train(quantized_first)
    if run.comm is None:
        return run.train(4).finish()
    reductions = [comm.gradients.reductions for comm in run.comm.groups]
    with run.comm.full_precision():
        assert "inside full_precision()" in run.comm.explain(full=True)
        run.train(1)
        with run.comm.full_precision():
            pass
        run.train(1)
        with pytest.raises(RuntimeError, match=r"inside full_precision\(\): call it outside"):
            run.comm.time_steps(lambda: run.train(1))
    assert [comm.gradients.reductions for comm in run.comm.groups] == reductions
    assert "inside full_precision()" not in run.comm.explain(full=True)
    run.evaluate()
    for comm in run.comm.groups:
        if comm.weights.replica is not None:
            assert torch.equal(comm.weights.replica.own_shard, comm.view.gathered_shard())
    return run.train(2).finish()


@on_ranks(2)
def test_full_precision_steps_are_those_of_plain_fsdp2() -> None:
    assert switched(QUANTIZED, quantized_first=0)[:2] == switched(None, quantized_first=0)[:2]
    assert switched(IDENTITY, quantized_first=1) == switched(None, quantized_first=1)
    switched(QUANTIZED, quantized_first=1)


@on_ranks(2)
def test_a_handle_that_is_removed_inside_full_precision_leaves_plain_fsdp2() -> None:
    run = Run(build(), QUANTIZED, topology=1)
    stock = [comm.view for comm in run.comm.groups]
    with run.comm.full_precision():
        run.train(1)
        run.comm.remove()
    assert not any(isinstance(group.comms.all_gather, AllGatherHook) for group in stock)
    with pytest.raises(RuntimeError, match="has been removed"), run.comm.full_precision():
        pass
    assert run.train(2).losses == Run(build(), None).train(3).losses
