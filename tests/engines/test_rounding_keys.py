"""No job rounds two values with the same random bits: over steps, micro-batches, a resume, and ranks.

Layer: real processes over gloo. A module runs once, twice or never in a step. The other
engines and the example have the same test beside their others.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from sdp4bit import GradientConfig, SDP4BitConfig
from sdp4bit.collectives.gradients import Gradients
from tests.engines.ddp.test_hook import DDPRun
from tests.engines.fsdp2.test_hybrid import HybridRun
from tests.ranks import on_ranks
from tests.rounding_keys import check_unique, drawn_keys
from tests.toy import Run, ToyGPT, shard

CONFIG = SDP4BitConfig(gradients=GradientConfig(min_numel=0, inter_rounding="dither"))


class Uneven(ToyGPT):
    """In successive forwards the last block runs once, twice and never."""

    forwards = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        x = self.blocks[0](x)
        for _ in range((1, 2, 0)[self.forwards % 3]):
            x = self.blocks[1](x)
        self.forwards += 1
        return self.head(self.norm(x)) * self.temperature  # type: ignore[no-any-return]


def fsdp2(config: SDP4BitConfig) -> Any:
    torch.manual_seed(0)
    return Run(shard(Uneven()), config)


def resumed(run: Any, fresh: Any, name: str = "comm") -> Any:
    getattr(fresh, name).load_state_dict(copy.deepcopy(getattr(run, name).state_dict()))
    return fresh


@pytest.mark.parametrize("kind", ["FSDP2", pytest.param("HSDP", marks=pytest.mark.slow), "DDP"])
@on_ranks(4, timeout=300)
def test_no_key_is_drawn_twice(kind: str) -> None:
    config = replace(CONFIG, gradients=replace(CONFIG.gradients, start_step=1))
    make: Any = {
        "FSDP2": lambda: fsdp2(config),
        "HSDP": lambda: HybridRun(config),
        "DDP": lambda: DDPRun(config, topology=2),
    }[kind]
    name = "state" if kind == "DDP" else "comm"
    run = make()
    with drawn_keys() as keys:
        run.train(3)
        if kind != "DDP":  # each of its backward passes is a step
            run.backward()
            run.backward()
            run.step()
        with getattr(run, name).full_precision():
            run.train(1)
        run.train(1)
        resumed(run, make(), name).train(2)
    check_unique(keys, at_least=30)


@on_ranks(4, timeout=300)
def test_an_engine_that_does_not_count_is_found() -> None:
    draw = Gradients.next_reduction

    def forgetful(gradients: Gradients, *args: Any) -> Any:
        options = draw(gradients, *args)
        gradients.reductions = 0
        return options

    run = fsdp2(CONFIG)
    with drawn_keys() as keys, mock.patch.object(Gradients, "next_reduction", forgetful):
        run.train(2)
    with pytest.raises(AssertionError, match="drawn twice"):
        check_unique(keys, at_least=1)
