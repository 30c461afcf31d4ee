"""Gradients in bf16 on the wire, summed in fp32, are exact sums if bf16 can hold them.

Layer: 4 processes over gloo, on the layouts 2 x 2, 4 x 1 and HSDP's 2 x 2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sdp4bit
from sdp4bit import SDP4BitConfig
from tests.ranks import on_ranks

PRESET = SDP4BitConfig.preset("bf16-wire")
WIDTH = 96
STEPS = 3


def train(model: Any, *, scale: float = 1.0) -> list[torch.Tensor]:
    """Train with gradients that are integers up to 90 times the scale, whatever the weights are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x, y = (torch.randint(-3, 4, (10, WIDTH), generator=data).float() for _ in range(2))
        (model(x) * y * scale).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(each, "full_tensor", lambda each=each: each)().detach() for each in model.parameters()]


def built(engine: str) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    if engine == "DDP":
        return DistributedDataParallel(model)
    is_hybrid = engine == "HSDP"
    shape, names = ((2, 2), ("replicate", "shard")) if is_hybrid else ((4,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return fully_shard(model, mesh=mesh)


def attached(engine: str, model: Any, *, topology: int, config: SDP4BitConfig = PRESET) -> Any:
    if engine != "DDP":
        return sdp4bit.quantize_communication(model, topology=topology, config=config)
    state = sdp4bit.DDPCommState(topology=topology, config=config)
    model.register_comm_hook(state, sdp4bit.ddp_comm_hook)
    return state


@pytest.mark.parametrize("topology", [1, 2])
@pytest.mark.parametrize("engine", ["FSDP2", "HSDP", "DDP"])
@on_ranks(4)
def test_sums_that_bf16_can_hold_are_exact(engine: str, topology: int) -> None:
    plain = train(built(engine))
    model = built(engine)
    comm = attached(engine, model, topology=topology)
    assert all(map(torch.equal, train(model), plain))
    table = comm.explain(full=True)
    assert "bf16" in table and "int" not in table.replace("inter", "").replace("intra", "")
    if engine == "FSDP2":
        sent, numel = comm.groups[0].gradients.traffic.total, sum(each.numel() for each in plain)
        values = numel / 4 * {1: 3, 2: 1}[topology]  # a row for each other node
        assert 0 <= sent.inter_bytes - STEPS * 2 * values < STEPS * 4 * 64
    comm.remove()


@pytest.mark.parametrize("engine", ["FSDP2", "DDP"])
@on_ranks(4)
def test_other_sums_are_rounded_to_bf16_once_or_twice(engine: str) -> None:
    """Each value is off by at most 2**-9 of the largest gradient for each of two roundings, and by some."""
    plain, model = train(built(engine), scale=1 / 3), built(engine)
    attached(engine, model, topology=2)
    found = train(model, scale=1 / 3)
    bound = STEPS * 0.5 * 2 * 2.0**-9 * 4 * 90 / 3
    errors = [(one - other).abs().max().item() for one, other in zip(found, plain, strict=True)]
    assert 0 < max(errors) < bound, errors


@on_ranks(4)
def test_weights_in_bf16_differ_by_less_than_differences_of_four_bits() -> None:
    """Differences of fp32 weights in bf16: the replica follows the main weights to 2**-8 of a step."""
    errors = {}
    for bits in (16, 4):
        config = SDP4BitConfig(weights=sdp4bit.WeightConfig(bits=bits), gradients=None)
        model = built("FSDP2")
        comm = attached("FSDP2", model, topology=2, config=config)
        train(model, scale=1 / 3)
        model(torch.zeros(1, WIDTH))
        errors[bits] = comm.measure()["weight_drift"]
        assert comm.audit()
        comm.remove()
    assert 0 < errors[16] < errors[4] / 8, errors


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
@on_ranks(4)
def test_a_gradient_that_is_not_finite_in_bf16_is_seen(bad: float) -> None:
    model = built("FSDP2")
    attached("FSDP2", model, topology=2)
    x = torch.zeros(1, WIDTH)
    x[0, 5] = bad if dist.get_rank() == 3 else 0.0
    model(x).sum().backward()
    gradient = model.weight.grad.full_tensor()
    assert not gradient[:, 5].isfinite().any() and gradient[:, :5].isfinite().all()
