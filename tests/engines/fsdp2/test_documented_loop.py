"""The lines of docs/training-loop.md do what the page says.

Layer: gloo, 2 processes that represent 2 nodes, a model of one block.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests import ROOT, toy
from tests.ranks import on_ranks
from tests.toy import QUANTIZED, Run, build


def block(word: str) -> str:
    """Return the only block of the page with this word."""
    page = (ROOT / "docs/training-loop.md").read_text(encoding="utf-8")
    (found,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if word in text]
    return found


def names_of(run: Run, **more: Any) -> dict[str, Any]:
    names = {"torch": torch, "model": run.model, "optimizer": run.optimizer, "comm": run.comm}
    return {**names, "loss_of": toy.loss_of, "batch": next(run.data), **more}


def weights_of(model: nn.Module) -> list[Tensor]:
    return [param.to_local().clone() for param in model.parameters() if isinstance(param, DTensor)]


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@on_ranks(2)
def test_the_norm_that_clipping_returns_is_within_a_percent_of_plain_fsdp2_s() -> None:
    norms = []
    for config in (QUANTIZED, None):
        run = Run(build(), config, topology=1)
        names = names_of(run, scheduler=torch.optim.lr_scheduler.ConstantLR(run.optimizer))
        exec(block("scheduler"), names)
        norms.append(names["norm"].full_tensor().item())
    ours, plain = norms
    assert ours != plain and ours == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("fused", [pytest.param(False, marks=pytest.mark.slow), True])
@on_ranks(2)
def test_a_scaler_skips_steps_with_infinite_gradients_and_no_others(fused: bool) -> None:
    """A fused optimizer is called for skipped steps, too, so these are counted."""
    run = Run(build(), QUANTIZED, topology=1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = weights_of(run.model)
    exec(block("scaler"), names_of(run, scaler=scaler, loss_of=lambda *a: math.inf * toy.loss_of(*a)))
    assert are_equal(weights_of(run.model), before) and scaler.get_scale() == 512
    run.optimizer.zero_grad()
    exec(block("scaler"), names_of(run, scaler=scaler))
    run.evaluate()
    assert not are_equal(weights_of(run.model), before) and scaler.get_scale() == 512
    assert run.comm.stats()["steps"] == 1 + fused


@on_ranks(2)
def test_micro_batches_are_one_reduction_and_one_step() -> None:
    run = Run(build(), QUANTIZED, topology=1)
    micro_batches = [next(run.data) for _ in range(3)]
    exec(block("micro_batches"), names_of(run, micro_batches=micro_batches))
    assert {group.gradients.reductions for group in run.comm.groups} == {1}
    run.step()
    run.evaluate()
    assert run.comm.stats()["steps"] == 1


@on_ranks(2)
def test_averages_are_swapped_in_and_out() -> None:
    run = Run(build(), QUANTIZED, topology=1).train(1)
    average = [0.5 * weight for weight in weights_of(run.model)]
    plain, losses, weights = build(), [], weights_of(run.model)

    @torch.no_grad()
    def swap(model: nn.Module, average: list[Tensor]) -> None:
        for param, value in zip(model.parameters(), average, strict=True):
            assert isinstance(param, DTensor)
            kept = param.to_local().clone()
            param.to_local().copy_(value)
            value.copy_(kept)

    def evaluate(model: nn.Module) -> None:
        losses.append(run.evaluate())

    exec(block("swap"), names_of(run, swap=swap, evaluate=evaluate, average=average))
    assert run.model.training and are_equal(weights_of(run.model), weights)
    swap(plain, average)
    assert losses == [Run(plain, None).evaluate()]


@on_ranks(2)
def test_nothing_is_quantized_in_the_last_tenth() -> None:
    """tests/engines/fsdp2/test_switches.py compares such steps with plain FSDP2."""
    run = Run(build(), QUANTIZED, topology=1)
    sent: list[int] = []

    def train(steps: int) -> None:
        run.train(steps)
        sent.append(run.comm.stats()["total"]["inter_bytes"])

    exec(block("full_precision"), names_of(run, train=train))
    assert len(run.losses) == 10
    train(1)
    assert 0 < sent[0] == sent[1] < sent[2]


@on_ranks(2)
def test_logged_values_are_numbers() -> None:
    run = Run(build(), QUANTIZED, topology=1).train(2)
    run.evaluate()
    names = names_of(run)
    exec(block("comm.log_values()"), names)
    assert {"sdp4bit/inter_bytes", "sdp4bit/gradient_error"} < names["values"].keys()
    assert names["values"]["sdp4bit/ratio"] > 4
    assert all(isinstance(value, float | int) for value in names["values"].values())
