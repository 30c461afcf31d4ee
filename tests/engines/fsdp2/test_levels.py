"""FSDP2, HSDP and DDP with blocks of nodes: three levels. Layer: 4 and 8 real processes over gloo."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import sdp4bit
from tests.oracles.traffic import gradient_exchange
from tests.ranks import on_ranks, run_ranks
from tests.tables import flat
from tests.toy import (
    IDENTITY,
    QUANTIZED,
    Run,
    ToyGPT,
    assert_close,
    assert_equal,
    batches,
    build,
    train,
)

pytestmark = pytest.mark.gloo


def compare(topology: tuple[int, int], levels: str) -> list[int]:
    """With the identity, training equals a plain reduction in the same order; quantized it is close to it."""
    plain = Run(build(), None, topology=topology, ordered=True).train(2).finish()
    exact = Run(build(), IDENTITY, topology=topology).train(2).finish()
    assert_equal(exact, plain)
    run = Run(build(), QUANTIZED, topology=topology).train(2)
    quantized = run.finish()
    assert_close(quantized, plain)
    table = flat(run.comm.explain(full=True))
    assert table.count(f" {levels} ") == len(run.comm.groups)
    assert "inter int4/128, between blocks int4/128" in table
    planned = []
    for group in run.comm.groups:
        row = group.view.shard_numel
        sections = group.view.gradient_sections(row, unit=128, separate=True)
        config = run.comm.config.gradients
        planned.append(gradient_exchange(row, grid=group.layout, config=config, sections=sections))
        last = group.gradients.traffic.last_step
        assert (last.intra_bytes, last.inter_bytes) == (planned[-1].intra_bytes, planned[-1].inter_bytes)
    sliced = replace(QUANTIZED, gradients=replace(QUANTIZED.gradients, pipeline_chunks=3))
    assert_equal(Run(build(), sliced, topology=topology).train(2).finish(), quantized)
    return [int(run.comm.audit())]


@pytest.mark.parametrize(
    ("ranks", "topology", "levels"),
    [(4, (1, 2), "2 x 2 x 1"), pytest.param(8, (2, 2), "2 x 2 x 2", marks=pytest.mark.slow)],
)
def test_training_in_three_levels(ranks: int, topology: tuple[int, int], levels: str) -> None:
    assert run_ranks(compare, ranks, topology, levels) == [[1]] * ranks


@on_ranks(4)
def test_replicas_of_hsdp_sum_gradients_in_blocks() -> None:
    """One rank per replica and node: the reduction over four replicas is that of two blocks of two."""
    results: list[Any] = []
    for config in (None, IDENTITY, QUANTIZED):
        mesh = DeviceMesh("cpu", [[0], [1], [2], [3]], mesh_dim_names=("replicate", "shard"))
        run = Run(build(mesh=mesh), config, topology=(1, 2)).train(2)
        results.append(run.finish())
        if config is not None:
            assert "replicated 2 x 2 x 1" in flat(run.comm.explain(full=True))
    assert_close(results[2], results[0])
    for exact, plain in zip(results[1].gradients, results[0].gradients, strict=True):
        # Sums of four in two orders.
        assert torch.allclose(exact, plain, rtol=1e-5, atol=1e-7)


@on_ranks(4)
def test_ddp_sums_gradients_in_blocks() -> None:
    losses = []
    for topology in (None, (1, 2)):
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(ToyGPT())
        if topology is not None:
            state = sdp4bit.DDPCommState(topology=topology, config=QUANTIZED)
            model.register_comm_hook(state, sdp4bit.ddp_comm_hook)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        losses.append(train(model, optimizer, batches(), 2))
    assert "2 x 2 x 1" in flat(state.explain(full=True)) and state.audit()
    assert_close(losses[1], losses[0])
