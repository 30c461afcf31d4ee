"""Reports of a model whose communication has left its handle. Layer: 2 processes over gloo."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sdp4bit
from sdp4bit import GradientConfig, SDP4BitConfig
from sdp4bit.observe.stats import ModelState
from sdp4bit.traffic import Traffic
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

CONFIG = SDP4BitConfig(gradients=GradientConfig(min_numel=0))


def model_of(engine: str) -> tuple[Any, Any]:
    """Return a model of two layers with this engine, and its handle."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    if engine == "DDP":
        model, comm = DistributedDataParallel(model), sdp4bit.DDPCommState(topology=1, config=CONFIG)
        model.register_comm_hook(comm, sdp4bit.ddp_comm_hook)
        return model, comm
    fully_shard(model)
    return model, sdp4bit.quantize_communication(model, topology=1, config=CONFIG)


def train(model: Any, *optimizers: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(2, 64)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def said(function: Callable[[], object]) -> list[str]:
    """Return the library's warnings in a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(w.message) for w in caught if "nothing was sent" in str(w.message)]


def test_silence_is_nothing_new_after_something() -> None:
    state = ModelState([])
    state.expects_silence = True
    for sent, is_silent in ((0, False), (0, False), (3, False), (3, True), (4, False), (4, True)):
        state.retired = Traffic(collectives=sent)  # of groups that the engine has dropped
        state.note_step_of(state)
        assert state.is_silent == is_silent


def test_the_total_holds_what_dropped_groups_have_sent() -> None:
    state = ModelState([])
    state.retired = Traffic(inter_bytes=7, collectives=3)
    total = state.stats()["total"]
    assert (total["inter_bytes"], total["collectives"]) == (7, 3)


def replace_the_wrapper() -> None:
    model, comm = model_of("DDP")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, steps=2)
    total, logged = comm.stats()["total"], comm.log_values()
    assert logged["sdp4bit/inter_bytes"] > 0
    model = DistributedDataParallel(model.module)
    told = said(lambda: train(model, optimizer))
    assert len(told) == (dist.get_rank() == 0)
    if told:
        assert told[0].startswith("sdp4bit: an optimizer steps, but nothing was sent since step 2: either")
    assert not said(lambda: train(model, optimizer))  # once
    stats = comm.stats()
    assert comm.log_values() == {} and stats["compression_ratio"] is None
    assert stats["total"] == total and set(stats["last_step"].values()) == {0}
    assert {(group["inter_bytes"], group["compression_ratio"]) for group in comm.group_stats()} == {(0, None)}
    text = comm.explain()
    assert " ".join(text.split()).endswith("with this state") and "nothing was sent since step 2" in text
    assert [line.split()[-2:] for line in text.splitlines() if line.startswith("total")] == [["-", "-"]]
    model.register_comm_hook(comm, sdp4bit.ddp_comm_hook)
    train(model, optimizer)
    assert comm.log_values() == logged and "nothing was sent" not in comm.explain()
    comm.remove()
    assert comm.log_values() == {} and comm.stats()["compression_ratio"] == logged["sdp4bit/ratio"]


def test_a_new_ddp_wrapper_without_the_state_ends_the_reports() -> None:
    run_ranks(replace_the_wrapper, 2)


def step_as_usual(engine: str) -> None:
    """Several optimizers, one inside another, states that are created, and another model are no silence."""
    model, comm = model_of(engine)
    layers = model.module if engine == "DDP" else model
    first, second = ([*layer.parameters()] for layer in layers)
    inner, stateless = torch.optim.AdamW(first, lr=1e-3), torch.optim.SGD(second, lr=1e-3)
    other = nn.Linear(4, 4)
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)

    class Outer(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(first, {})

        def step(self, closure: Any = None) -> None:
            inner.step()

    def run() -> None:
        outer = Outer()
        for _ in range(3):
            train(model, outer, stateless)
            assert comm.log_values()
            for _ in range(2):
                other(torch.ones(4)).sum().backward()
                foreign.step()
                get_state_dict(model, [inner, stateless])
            assert comm.log_values()

    assert not said(run)


def step_in_full_precision(engine: str) -> None:
    model, comm = model_of(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, steps=3)

    def run() -> None:
        with comm.full_precision():
            assert comm.log_values()  # no step since
            train(model, optimizer)
            assert comm.log_values() == {} and comm.stats()["compression_ratio"] is None
        assert comm.log_values() == {} and "nothing was sent" not in comm.explain()
        train(model, optimizer)
        assert comm.log_values()

    assert not said(run)


@pytest.mark.parametrize("engine", ["FSDP2", "DDP"])
@pytest.mark.parametrize("scenario", [step_as_usual, step_in_full_precision])
def test_no_silence_is_reported_without_one(scenario: Any, engine: str) -> None:
    run_ranks(scenario, 2, engine)


def stop_communicating() -> None:
    """FSDP2 without its hooks, as a program would leave it that replaces them."""
    model, comm = model_of("FSDP2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, steps=2)
    assert comm.log_values()

    def step_alone() -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    told = said(step_alone)
    assert len(told) == (dist.get_rank() == 0) and comm.log_values() == {}


def test_steps_of_fsdp2_without_messages_end_the_reports() -> None:
    run_ranks(stop_communicating, 2)
