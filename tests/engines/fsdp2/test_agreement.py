"""Ranks of several meshes agree on steps, alerts and audits, whichever of them has seen an event.

Layer: 4 processes over gloo, each of them a node. Blocks are sharded over two different pairs, or over all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sdp4bit import (
    AlertConfig,
    AuditConfig,
    GradientConfig,
    SDP4BitConfig,
    TelemetryConfig,
    quantize_communication,
)
from tests.ranks import on_ranks
from tests.toy import POLICY, assert_replicas_identical

WIDTH = 24
CONFIG = SDP4BitConfig(
    gradients=GradientConfig(min_numel=0),
    telemetry=TelemetryConfig(interval=1),
    alerts=AlertConfig(gradient_error=1e-6, weight_error=1e-6),
    audit=AuditConfig(interval=1),
)


class Job:
    """A model whose blocks are on different ranks; without a sharded root each block runs for itself."""

    def __init__(self, *, order: str, root: bool) -> None:
        torch.manual_seed(0)
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        meshes = {"r": square["rows"], "c": square["columns"], "a": init_device_mesh("cpu", (4,))}
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in order), nn.Linear(WIDTH, WIDTH))
        for layer, kind in zip(self.model, order, strict=False):
            fully_shard(layer, mesh=meshes[kind], mp_policy=POLICY)
        fully_shard(self.model if root else self.model[-1], mesh=meshes["a"], mp_policy=POLICY)
        self.comm: Any = quantize_communication(self.model, CONFIG, topology=1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.seed = 0

    def forward(self) -> torch.Tensor:
        self.seed += 1
        data = torch.Generator().manual_seed(4 * self.seed + dist.get_rank())
        return self.model(torch.randn(4, WIDTH, generator=data)).float().square().mean()

    def edit(self, block: int, by: float = 1.0) -> None:
        for parameter in self.model[block].parameters():
            parameter.detach().to_local().add_(parameter.grad.to_local(), alpha=-0.01 * by)


def load_in_place(job: Job) -> None:
    for value in job.model.state_dict().values():
        value.to_local().mul_(1.0)


def tear(job: Job) -> None:
    for group in job.comm.groups:
        group.weights.replica._is_unfinished = True


EVENTS: dict[str, Callable[[Job], Any]] = {
    "nothing": lambda job: None,
    "an optimizer has stepped": lambda job: job.optimizer.step(),
    "weights of the first block were edited": lambda job: job.edit(0),
    "weights of the last block were edited": lambda job: job.edit(-1),
    "weights were edited a lot": lambda job: job.edit(1, 1e4),
    "a step was reported": lambda job: job.comm.mark_step(),
    "a state dict was loaded": lambda job: job.model.load_state_dict(job.model.state_dict()),
    "a state dict was loaded in place": load_in_place,
    "an exception has interrupted refreshes": tear,
    "the forward evaluates": lambda job: job.model.eval(),
    "weights are not finite": lambda job: job.edit(1, float("inf")),
}
"""Inputs of the decisions, each of which a rank may see alone."""


def everywhere(value: object) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_that_ranks_agree(order: str, *, root: bool) -> None:
    job = Job(order=order, root=root)
    for what, event in EVENTS.items():
        job.forward().backward()
        if dist.get_rank() == 3:
            with torch.no_grad():
                event(job)
        job.model.zero_grad()
        with torch.no_grad() if what == "the forward evaluates" else nullcontext():
            job.forward()
        job.model.train()
        steps = everywhere(job.comm.stats()["steps"])
        assert len(set(steps)) == 1, (what, steps)
    assert steps[0] == 6  # two optimizer steps and four edits
    shared = [group.view.name for group in job.comm.groups if group.layout.size == 4]
    alerts = everywhere([alert for alert in job.comm.alerts() if alert.group in shared])
    assert alerts[0] and alerts == alerts[:1] * 4
    assert_replicas_identical(job.comm)


@on_ranks(4, timeout=120.0)
def test_ranks_of_all_meshes_agree_whatever_one_of_them_has_seen() -> None:
    check_that_ranks_agree("rac", root=True)


@pytest.mark.slow
@on_ranks(4)
def test_ranks_agree_in_any_order_of_meshes_and_without_a_root() -> None:
    check_that_ranks_agree("acr", root=True)
    check_that_ranks_agree("ra", root=False)
