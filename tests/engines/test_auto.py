"""How training goes on while settings are tried and after one is chosen. Layer: real processes over gloo."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import sdp4bit
from sdp4bit import Auto, GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.engines import auto as module
from sdp4bit.engines.fsdp2.hooks import AllGatherHook
from tests.engines.ddp.test_hook import DDPRun
from tests.engines.fsdp2.jobs import Job
from tests.engines.fsdp2.test_parallelism import TensorParallelRun
from tests.engines.test_search import CHOICE_AFTER, SMALL
from tests.ranks import first_rank_warns, on_ranks, run_ranks
from tests.toy import IDENTITY, LOSSLESS, QUANTIZED, Run, adamw, build, loss_of


def settings(**options: Any) -> Auto:
    return replace(SMALL, recheck_steps=None, **options)


def without_quantizers(*, hybrid: bool = False) -> Auto:
    # HSDP shards inside a node, whose replica quantizes nothing unless every rank holds it.
    lossless = replace(LOSSLESS, weights=WeightConfig(bits=None, replica="full"))
    return settings(candidates=("plain", lossless if hybrid else LOSSLESS, IDENTITY))


def trained(config: Any, steps: int, *, topology: int = 1, hybrid: bool = False) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")) if hybrid else None
    run = Run(build(mesh=mesh), config, topology=topology).train(steps)
    if config is not None:
        candidates = run.comm._search.medians()
        assert len(candidates) == len(config.candidates), candidates
    return run.finish()


@on_ranks(2)
def test_without_quantizers_every_block_trains_as_plain_fsdp2_does() -> None:
    assert trained(without_quantizers(), 32) == trained(None, 32)


@pytest.mark.slow
@on_ranks(4)
def test_with_replicas_too() -> None:
    auto = without_quantizers(hybrid=True)
    assert trained(auto, 32, topology=2, hybrid=True) == trained(None, 32, topology=2, hybrid=True)


@on_ranks(2)
def test_without_quantizers_every_block_trains_as_ddp_does() -> None:
    exact = SDP4BitConfig(gradients=GradientConfig(intra_bits=None, inter_bits=None, min_numel=0))
    found = []
    for config in (settings(candidates=("plain", exact)), None):
        run = DDPRun(config)
        for _ in range(24):
            run.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        found.append(run.losses)
        if config is not None:
            assert run.state.stats()["auto"]["is_chosen"] and len(run.state.stats()["auto"]["seconds"]) == 2
    assert found[0] == found[1]


def train_timed(run: Run | Job, seconds: Mapping[str, float], steps: int) -> None:
    """Train; steps take the seconds of their candidates, and a tenth more on rank 1."""
    now = 0.0
    with mock.patch.object(module.time, "perf_counter", side_effect=lambda: now):
        for _ in range(steps):
            now += seconds[run.comm.stats()["auto"]["candidate"]] * (1 + dist.get_rank() / 10)
            run.train(1)


@on_ranks(2)
def test_the_choice_is_reported_and_trains_as_its_settings_do() -> None:
    run = Run(build(), settings(), topology=1)
    said = "auto still measures, now with plain: the model communicates as without sdp4bit"
    assert run.comm.explain() == said
    handler = mock.Mock(level=logging.WARNING)
    logging.getLogger("sdp4bit").addHandler(handler)
    train_timed(run, {"plain": 4.0, "bf16-wire": 2.0, "sdp4bit": 1.0}, CHOICE_AFTER)
    logging.getLogger("sdp4bit").removeHandler(handler)
    said = "chose sdp4bit after 26 steps (plain 4.40 s, bf16-wire 2.20 s, sdp4bit 1.10 s a step)"
    logged = [call.args[0].getMessage() for call in handler.handle.call_args_list]
    assert logged == [f"auto {said}"] * (dist.get_rank() == 0)
    stats = run.comm.stats()["auto"]
    assert stats["candidate"] == "sdp4bit" and stats["is_chosen"]
    assert stats["seconds"] == pytest.approx({"plain": 4.4, "bf16-wire": 2.2, "sdp4bit": 1.1})
    assert run.comm.config == SDP4BitConfig()
    assert all(group.weights.replica is not None for group in run.comm.groups)
    run.train(1)
    # As text on one line, because explain() wraps it.
    assert "auto chose sdp4bit (plain 4.40 s" in " ".join(run.comm.explain().split())
    assert run.comm.stats()["compression_ratio"] > 4


@on_ranks(2)
def test_a_choice_of_plain_frees_the_replicas_and_calls_nothing_of_ours() -> None:
    run = Run(build(), settings(), topology=1)
    train_timed(run, {"plain": 1.0, "bf16-wire": 2.0, "sdp4bit": 4.0}, CHOICE_AFTER)
    assert run.comm.stats()["auto"]["candidate"] == "plain" and "; auto chose plain (" in repr(run.comm)
    assert not any(isinstance(group.view.comms.all_gather, AllGatherHook) for group in run.comm.groups)
    assert all(group.weights.replica is None and not group.gradients.quantizers for group in run.comm.groups)
    with run.comm.full_precision():
        run.train(1)
    with pytest.raises(RuntimeError, match="quantization is off"):
        run.comm.time_steps(lambda: run.train(1))
    run.train(1).finish()


@pytest.mark.slow
@on_ranks(2)
def test_a_given_choice_trains_as_the_settings_alone() -> None:
    for name in ("sdp4bit", "bf16-wire", "plain"):
        alone = None if name == "plain" else name
        given = Run(build(), Auto(choice=name), topology=1).train(3)
        assert given.comm.stats()["auto"] == {"candidate": name, "is_chosen": True, "seconds": {}}
        assert given.finish() == Run(build(), alone, topology=1).train(3).finish()


@on_ranks(2)
def test_on_one_node_plain_is_left() -> None:
    with first_rank_warns("all parameter groups have their ranks on one node"):
        run = Run(build(), "auto", topology=2)
    assert run.train(2).finish() == Run(build(), None).train(2).finish()
    assert "only plain is left" in run.comm.explain()


def save_and_resume(folder: str, seconds: Mapping[str, float], before: int, resumes: str | None) -> None:
    run = Job(settings(), topology=1)
    train_timed(run, seconds, before)
    run.save(folder, comm=run.comm)
    resumed = [Job(settings(), topology=1, at=before).load(folder, comm=when) for when in ("before", "after")]
    if resumes is None:
        assert not resumed[0].comm.stats()["auto"]["is_chosen"]
        train_timed(resumed[0], seconds, CHOICE_AFTER)
        assert resumed[0].comm.stats()["auto"]["is_chosen"]
        return
    expected = run.train(3)
    for each in resumed:
        auto = each.comm.stats()["auto"]
        assert (auto["candidate"], auto["is_chosen"]) == (resumes, True)
        assert each.train(3) == expected


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("seconds", "before", "resumes"),
    [
        ({"plain": 4.0, "bf16-wire": 2.0, "sdp4bit": 1.0}, CHOICE_AFTER + 2, "sdp4bit"),
        ({"plain": 1.0, "bf16-wire": 1.0, "sdp4bit": 1.0}, 13, None),  # in a block of sdp4bit
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                ({"plain": 4.0, "bf16-wire": 1.0, "sdp4bit": 2.0}, CHOICE_AFTER + 2, "bf16-wire"),
                ({"plain": 1.0, "bf16-wire": 1.0, "sdp4bit": 1.0}, CHOICE_AFTER + 2, "plain"),
                ({"plain": 1.0, "bf16-wire": 1.0, "sdp4bit": 1.0}, 4, None),  # in a block of plain
            )
        ),
    ],
)
def test_a_resume_goes_on_with_the_choice(
    tmp_path: Path, seconds: dict[str, float], before: int, resumes: str | None
) -> None:
    run_ranks(save_and_resume, 2, str(tmp_path), seconds, before, resumes)


@pytest.mark.slow
@on_ranks(2)
def test_full_precision_and_removal_inside_a_block_of_each_candidate() -> None:
    for before in (3, 7, 11):  # in the first blocks of plain, bf16-wire and sdp4bit
        run = Run(build(), without_quantizers(), topology=1).train(before)
        with run.comm.full_precision():
            run.train(2)
        with pytest.raises(RuntimeError, match='while config="auto" measures'):
            run.comm.time_steps(dist.barrier)
        run.train(2)
        run.comm.remove()
        assert run.train(1).finish() == Run(build(), None).train(before + 5).finish()


@on_ranks(2)
def test_accumulation_and_two_optimizers() -> None:
    """The blocks are of optimizer steps, whatever passes they consist of."""
    finished = []
    for config in (without_quantizers(), None):
        run = Run(build(), config, topology=1)
        parameters = [*run.model.parameters()]
        optimizers = [adamw(run.model, params=half) for half in (parameters[::2], parameters[1::2])]
        for _ in range(28):
            for is_last in (False, True):
                run.model.set_requires_gradient_sync(is_last)
                run.backward()
            for optimizer in optimizers:
                optimizer.step()
            run.model.zero_grad()
        finished.append(run.finish())
        if config is not None:
            stats = run.comm.stats()["auto"]
            assert len(stats["seconds"]) == 3
    assert finished[0] == finished[1]


@pytest.mark.slow
@on_ranks(2)
def test_steps_that_gradscaler_skips_because_of_one_rank() -> None:
    finished = []
    for config in (without_quantizers(), None):
        run, scaler = Run(build(), config, topology=1), torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(40):
            scaler.scale(loss_of(run.model, next(run.data))).backward()
            if number % 6 == 1 and dist.get_rank() == 1:
                run.model.head.weight.grad.to_local()[0, 0] = float("inf")
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
        finished.append([run.evaluate(), scaler.get_scale()])
        if config is not None:
            assert run.comm.stats()["auto"]["is_chosen"]
    assert finished[0] == finished[1] and finished[0][1] < 0.1


@on_ranks(2)
def test_a_rank_without_an_optimizer_of_torch_does_not_stop_the_others() -> None:
    """Rank 1 changes its shards by hand. No rank waits for another, and both train as plain FSDP2 does."""
    finished = []
    for config in (without_quantizers(), None):
        run = Run(build(policy=MixedPrecisionPolicy()), config, topology=1)
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        for _ in range(28):
            run.backward()
            if dist.get_rank() == 0:
                run.optimizer.step()
            else:
                with torch.no_grad():
                    for parameter in run.model.parameters():
                        parameter.to_local().sub_(parameter.grad.to_local(), alpha=0.1)
            run.model.zero_grad()
        finished.append(run.losses)
        if config is not None:
            assert len(run.comm.stats()["auto"]["seconds"]) == 3
    assert finished[0] == finished[1]


@pytest.mark.slow
@on_ranks(2)
def test_optimizers_in_backward() -> None:
    finished = []
    for config in (without_quantizers(), None):
        run = Run(build(policy=MixedPrecisionPolicy()), config, topology=1)
        for parameter in run.model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.01)

            def step(_: object, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(32):
            run.backward()
        finished.append(run.finish())
        if config is not None:
            assert run.comm.stats()["auto"]["is_chosen"]
    assert finished[0] == finished[1]


@pytest.mark.slow
@on_ranks(2)
def test_two_models_search_independently() -> None:
    runs = [Run(build(), settings(), topology=1) for _ in range(2)]
    train_timed(runs[0], {"plain": 1.0, "bf16-wire": 2.0, "sdp4bit": 3.0}, CHOICE_AFTER)
    assert runs[1].comm.stats()["auto"]["candidate"] == "plain" and not runs[1].comm._search._passes
    train_timed(runs[1], {"plain": 9.0, "bf16-wire": 2.0, "sdp4bit": 1.0}, CHOICE_AFTER)
    assert [run.comm.stats()["auto"]["candidate"] for run in runs] == ["plain", "sdp4bit"]


def lose_rank_1(step: int) -> None:
    run = Run(build(), settings(), topology=1).train(step)
    if dist.get_rank() == 1:
        run.comm._search.begin_pass = lambda: os.kill(os.getpid(), signal.SIGKILL)
    run.train(1)


@pytest.mark.gloo
def test_a_rank_that_is_lost_at_the_end_of_a_block_is_named() -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks(lose_rank_1, 2, 5, timeout=60)
    assert 'ExchangeError: agreement of config="auto": rank 0 has waited' in str(failure.value)


@pytest.mark.slow
@on_ranks(4)
def test_tensor_parallel_ranks_choose_together() -> None:
    """They hold copies of the norms, which settings of their own would round differently."""
    for slow_rank, chosen in ((0, "plain"), (3, "plain"), (None, "settings 2")):
        run = TensorParallelRun(settings(candidates=("plain", QUANTIZED)), topology=1)
        quantized = 9.0 if dist.get_rank() == slow_rank else 1.0
        train_timed(run, {"plain": 2.0, "settings 2": quantized}, CHOICE_AFTER)
        assert run.comm.stats()["auto"]["candidate"] == chosen
        run.check_copies()


@on_ranks(2)
def test_only_fsdp2_and_ddp_search() -> None:
    with pytest.raises(ValueError, match="needs FSDP2 or DDP: name a preset here"):
        sdp4bit.engines.attach_engine([], install=lambda group: lambda: None, config="auto")


@on_ranks(2)
def test_different_candidates_on_ranks_are_refused() -> None:
    auto = Auto(rounds=4 + dist.get_rank())
    with pytest.raises(ValueError, match=r"config.rounds: 4 \[rank 0\], 5 \[rank 1\]"):
        Run(build(), auto, topology=1)
