"""Optimizers beyond Adam: torch's Muon, and one that is no torch.optim.Optimizer. Layer: 2 gloo processes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import mutations
from tests.ranks import run_ranks
from tests.toy import Run, assert_close_to_plain, build

STEPS = 3


class MuonAndAdam:
    """Muon for the matrices of the blocks, AdamW for the rest, as is usual."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
        others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        self.parts = [
            torch.optim.Muon(matrices, lr=2e-2, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=2e-3, fused=True),
        ]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


class SignDescent:
    """No torch.optim.Optimizer: nothing tells of its steps."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())

    @torch.no_grad()
    def step(self) -> None:
        for param in self.params:
            param.sub_(param.grad.sign(), alpha=2e-3)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


def train(config: Any, optimizer: Any, marks: bool = False) -> list[float]:
    """Train with an optimizer; marked steps, and those of torch's optimizers, are sent as differences."""
    run = Run(build(), config, topology=1)
    run.optimizer = optimizer(run.model)
    for _ in range(STEPS):
        run.backward()
        run.step()
        if marks and run.comm is not None:
            run.comm.mark_step()
    result = run.finish()
    if config is not None and (marks or optimizer is MuonAndAdam):
        assert run.comm.stats()["steps"] == STEPS and run.comm.stats()["full_refreshes"] == 0
    elif config is not None:
        assert run.comm.stats()["full_refreshes"] > 0
    return result


def check() -> None:
    assert_close_to_plain(train, MuonAndAdam)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="sdp4bit: weights")
        assert_close_to_plain(train, SignDescent, True)
    # Unmarked steps are edits: found, sent in full precision, and warned of with the way out.
    with pytest.warns(UserWarning, match=r"call comm\.mark_step\(\) after each"):
        # What is left to send as a difference is the rounding of weights to bf16.
        assert_close_to_plain(train, SignDescent, harmless=[mutations.TWICE])
    dist.barrier()


@pytest.mark.slow
def test_muon_is_noticed_and_other_optimizers_say_when_they_step() -> None:
    run_ranks(check, 2)
