"""Checkpoints across layouts by plain `torch.distributed.checkpoint`: pipeline stages, nodes, HSDP, settings.

Layer: gloo, 4 processes. What is saved in one set of processes is loaded in the same ones, into new models.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sdp4bit import SDP4BitConfig, quantize_communication
from sdp4bit.engines.fsdp2.refresh import State
from tests import toy
from tests.ranks import on_ranks


class Stage(nn.Module):
    """A stage of a pipeline whose parameters have names of their own; the second one has a layer more."""

    def __init__(self, number: int) -> None:
        super().__init__()
        names = [str(10 * number + index) for index in range(2 + number)]
        self.layers = nn.ModuleDict({name: nn.Linear(64, 64) for name in names})
        # With parameters in the root, all stages have a group of the same name.
        own = [f"scale{number}", "shift"][: 1 + number]
        self.own = nn.ParameterDict({name: nn.Parameter(torch.ones(64)) for name in own})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = x + torch.relu(layer(x))
        for parameter in self.own.values():
            x = x * parameter
        return x


def stage(number: int, dp: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    torch.manual_seed(number)
    model = Stage(number)
    for layer in model.layers.values():
        fully_shard(layer, mesh=dp, mp_policy=toy.POLICY)
    fully_shard(model, mesh=dp, mp_policy=toy.POLICY)
    comm = quantize_communication(model, topology=1, config=toy.QUANTIZED)
    return model, comm, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(4, 64) * (1 + dist.get_rank())).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(4)
def test_stages_of_unequal_size_resume_bit_for_bit(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number = mesh["pp"].get_local_rank()
    model, comm, optimizer = stage(number, mesh["dp"])
    train(model, optimizer, 1)
    dcp.save({"model": model.state_dict(), "comm": comm}, checkpoint_id=tmp_path)
    losses = train(model, optimizer, 2)
    model, comm, optimizer = stage(number, mesh["dp"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dcp.load({"model": model.state_dict(), "comm": comm}, checkpoint_id=tmp_path)
        assert train(model, optimizer, 2) == losses


def job(kind: str) -> tuple[nn.Module, Any]:
    """Return a model of 4 ranks and its handle; the layouts have names."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")) if kind == "HSDP" else None
    model = toy.build(mesh=mesh)
    config: SDP4BitConfig = toy.QUANTIZED
    if kind == "full-precision weights":
        config = replace(config, weights=None)
    if kind == "full-precision gradients":
        config = replace(config, gradients=None)
    return model, quantize_communication(model, topology=4 if kind == "one node" else 2, config=config)


CHAIN = ["full-precision gradients", "HSDP", "one node", "full-precision weights", "two nodes"]
"""What each saves, the next one loads."""


@on_ranks(4, timeout=240)
def test_another_layout_starts_from_the_main_weights(tmp_path: Path) -> None:
    """The first forward equals that of plain FSDP2 with the same weights; plain `dcp.load` raises nothing."""
    batch, plain = next(toy.batches(seed=9))[0], toy.build()
    for number, kind in enumerate(CHAIN):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, comm = job(kind)
            if number:
                saved = f"{tmp_path}/{number - 1}"
                plain_state = plain.state_dict()
                dcp.load({"model": plain_state}, checkpoint_id=saved)
                dcp.load({"model": model.state_dict(), "comm": comm}, checkpoint_id=saved)
                with torch.no_grad():
                    assert torch.equal(model(batch), plain(batch)), kind
                    plain.reshard()
                toy.assert_replicas_identical(comm)
                assert comm.stats()["steps"] == number
            toy.train(model, toy.adamw(model), toy.batches(), 1)
            dcp.save({"model": model.state_dict(), "comm": comm}, checkpoint_id=f"{tmp_path}/{number}")
            comm.remove()


@on_ranks(2)
def test_an_edit_that_no_forward_has_used_survives_a_resume() -> None:
    """Saved between an edit and the next forward: the resumed run computes with the edited weights.

    The last forward before the edit used finite weights, or weights that left NaN in the replica.
    """
    run = toy.Run(toy.build(), toy.QUANTIZED, topology=1).train(2)
    edited = [param.detach() * 0.9 for param in run.model.parameters()]
    for factor in (1.0, math.nan):
        run.model.reshard()
        with torch.no_grad():
            torch._foreach_mul_(list(run.model.parameters()), factor)
            run.evaluate()
            run.model.reshard()
            for param, value in zip(run.model.parameters(), edited, strict=True):
                param.data.copy_(value)
        resumed = toy.Run(toy.build(), toy.QUANTIZED, topology=1)
        resumed.model.load_state_dict(run.model.state_dict())
        resumed.comm.load_state_dict(run.comm.state_dict())
        assert {comm.state for comm in resumed.comm.groups} == {State.LOADED}
        with pytest.warns(UserWarning, match="was not saved with these weights"):
            loss = resumed.evaluate()
        assert math.isfinite(loss) and loss == run.evaluate()
