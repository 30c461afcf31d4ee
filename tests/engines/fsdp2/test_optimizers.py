"""Every optimizer of torch: a save changes nothing, and a resume continues bit for bit.

`torch.distributed.checkpoint` takes a step with a learning rate of zero to create the state of an optimizer,
after it has handed out the weights. An optimizer without state takes that step at every save.

Layer: 2 processes over gloo, as 2 nodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only

from sdp4bit import GradientConfig, SDP4BitConfig, quantize_communication
from tests.engines.fsdp2.jobs import bits_of
from tests.ranks import on_ranks
from tests.toy import POLICY, QUANTIZED, Run, build, data_mesh

WIDTH, STEPS, SAVED = 24, 4, 1
CONFIG = SDP4BitConfig(gradients=GradientConfig(min_numel=0))
STATELESS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "SGD with decay": {"weight_decay": 0.1},
    "SGD, maximize": {"maximize": True},
    "SGD, one by one": {"foreach": False},
    "SGD, rate in a tensor": {"lr": torch.tensor(0.01)},
}
OTHERS: dict[str, dict[str, Any]] = {
    "SGD with momentum": {"momentum": 0.9},
    "SGD with dampening": {"momentum": 0.9, "dampening": 0.1},
    "SGD, Nesterov": {"momentum": 0.9, "nesterov": True},
    **{
        name: {}
        for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
        if issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "SGD")
    },
}
REFUSED = ("LBFGS", "SparseAdam", "Adafactor", "Rprop")
"""They cannot train, or save, a model of plain FSDP2 in torch 2.13: closures, sparse gradients, DTensors."""
POINTS = ("after a step", "after a forward", "in accumulation")


class Job:
    """A model of two groups and its optimizer."""

    def __init__(self, name: str, *, freezes: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.model[2].weight.requires_grad_(not freezes)
        for layer in (self.model[0], self.model):
            fully_shard(layer, mesh=data_mesh(), mp_policy=POLICY)
        self.comm: Any = quantize_communication(self.model, CONFIG, topology=1)
        kind = getattr(torch.optim, name.partition(",")[0].partition(" ")[0])
        params = [p for p in self.model.parameters() if kind.__name__ != "Muon" or p.dim() == 2]
        self.optimizer = kind(params, **{"lr": 0.01, **STATELESS.get(name, {}), **OTHERS.get(name, {})})
        self.losses: list[float] = []

    def forward(self, number: int) -> Tensor:
        data = torch.Generator().manual_seed(2 * number + dist.get_rank())
        loss: Tensor = self.model(torch.randn(4, WIDTH, generator=data)).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def train(self, steps: Sequence[int], *, save: str = "") -> Any:
        """Train these steps of two micro-batches; return the save at that point of one of them."""
        saved = None
        for step in steps:
            self.forward(2 * step).backward()
            if step == SAVED and save == "in accumulation":
                saved = self.save()
            self.forward(2 * step + 1).backward()
            self.optimizer.step()
            self.model.zero_grad()
            if step == SAVED and save == "after a step":
                saved = self.save()
            self.evaluate()
            if step == SAVED and save == "after a forward":
                saved = self.save()
        return saved

    def evaluate(self) -> None:
        with torch.no_grad():
            self.forward(2 * STEPS)

    def save(self) -> Any:
        parts = (*get_state_dict(self.model, self.optimizer), self.comm.state_dict())
        return tree_map_only(Tensor, lambda value: value.detach().clone(), parts)

    def load(self, saved: Any) -> Job:
        model, optimizer, comm = saved
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.comm.load_state_dict(comm)
        return self

    def bits(self) -> list[int]:
        return bits_of(self.comm)


def check(name: str, *, freezes: bool) -> None:
    undisturbed = Job(name, freezes=freezes)
    undisturbed.train(range(STEPS))
    for point in POINTS:
        job, what = Job(name, freezes=freezes), (name, freezes, point)
        saved = job.train(range(STEPS), save=point)
        assert (job.losses, job.bits()) == (undisturbed.losses, undisturbed.bits()), what
        found, expected = job.comm.stats(), undisturbed.comm.stats()
        assert all(found[key] == expected[key] for key in ("steps", "total", "full_refreshes")), what
        if point == "in accumulation":
            continue  # a checkpoint has no gradients
        resumed = Job(name, freezes=freezes).load(saved)
        if point == "after a step":
            resumed.evaluate()
        resumed.train(range(SAVED + 1, STEPS))
        assert resumed.losses == job.losses[-len(resumed.losses) :] and resumed.bits() == job.bits(), what


@on_ranks(2)
def test_a_save_with_an_optimizer_without_state_changes_nothing_and_resumes_bit_for_bit() -> None:
    check("SGD", freezes=False)


@on_ranks(2)
def test_a_gradient_that_a_rank_keeps_of_an_empty_shard_sends_nothing() -> None:
    """An optimizer step of another part of the model must not send a group without a gradient."""
    run = Run(build(), QUANTIZED, topology=1).train(1)
    run.evaluate()
    run.model.reshard()
    sent = run.comm.stats()["total"]
    scale = run.model.temperature  # one value, which the first rank holds
    assert scale.to_local().numel() == (dist.get_rank() == 0)
    if dist.get_rank() == 1:
        scale.grad = torch.zeros_like(scale)
    run.optimizer.step()
    run.evaluate()
    assert run.comm.stats()["total"] == sent


NAMES = [name for name in (*STATELESS, *OTHERS) if name not in REFUSED]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
@on_ranks(2)
def test_a_save_with_any_optimizer_changes_nothing_and_resumes_bit_for_bit(part: int) -> None:
    for name in NAMES[part::6]:
        for freezes in (False, True):
            check(name, freezes=freezes)
