"""Both levels of both collectives in worlds of 64 to 256 ranks with real data. Layer: threads.

What 256 ranks compute is compared with the definition, computed for all of them in one process
(tests/collectives/plain_collectives.py); what they send, with the planner.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import arrange, create_topologies
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.plan.traffic import RankGrid, gradient_exchange, weight_refresh
from sdp4bit.traffic import TrafficCounter
from tests.collectives import plain_collectives as plain
from tests.ranks import run_threads

SIZES = [
    (8, 8),
    pytest.param(16, 8, marks=pytest.mark.slow),
    pytest.param(32, 8, marks=pytest.mark.slow),
]
NUMEL, REFRESHES = 161, 2
QUANTIZED = GradientConfig(min_numel=0, intra_group_size=64, inter_group_size=32, pipeline_chunks=2)
EXACT = replace(QUANTIZED, intra_bits=None, inter_bits=None)
WEIGHTS = {
    "node": WeightConfig(group_size=64),
    "full": WeightConfig(group_size=64, replica="full", rounding="stochastic"),
    "exact": WeightConfig(bits=None),
}

Outcome = tuple[list[Tensor], dict[str, list[Tensor]]]


def run_rank(grid: RankGrid, gradients: dict[str, Tensor], mains: list[Tensor]) -> Outcome:
    """Return this rank's sums of each kind, and what it holds of the weights after each refresh."""
    rank, world = dist.get_rank(), grid.size
    layout = arrange(range(world), [rank // grid.ranks_per_node for rank in range(world)])
    options = {"seed": plain.SEED, "rank": rank, "bucket": plain.BUCKET, "scratch": Scratch()}
    topology = create_topologies([layout])[layout.ranks]
    sums, held = [], {}
    for config, rows in zip((EXACT, QUANTIZED), gradients.values(), strict=True):
        traffic = TrafficCounter(nodes=grid.nodes, ranks_per_node=grid.ranks_per_node)
        output = torch.empty(NUMEL)
        reduce_scatter = QuantizedReduceScatter(topology, config=config, traffic=traffic, **options)
        reduce_scatter(output, rows[rank].reshape(-1), call=5)
        planned, sent = gradient_exchange(NUMEL, grid=grid, config=config), traffic.total
        assert (sent.intra_bytes, sent.inter_bytes) == (planned.intra_bytes, planned.inter_bytes)
        sums.append(output)
    for name, weights in WEIGHTS.items():
        traffic = TrafficCounter(nodes=grid.nodes, ranks_per_node=grid.ranks_per_node)
        replica = WeightReplica(topology, config=weights, traffic=traffic, **options)
        replica.start_full_refresh(mains[0][rank])
        replica.wait()
        traffic.end_step()
        held[name] = []
        for call, rows in enumerate(mains[1:]):
            replica.start_quantized_refresh(rows[rank], call=call)
            replica.wait()
            assert replica.rows is not None
            held[name].append(replica.rows.clone())
            planned, sent = weight_refresh(NUMEL, grid=grid, config=weights), traffic.current_step
            assert (sent.intra_bytes, sent.inter_bytes) == (planned.intra_bytes, planned.inter_bytes)
            traffic.end_step()
    return sums, held


@pytest.mark.parametrize(("nodes", "per_node"), SIZES)
def test_hundreds_of_ranks_sum_and_refresh_by_definition(nodes: int, per_node: int) -> None:
    grid = RankGrid(nodes=nodes, ranks_per_node=per_node)
    world, generator = grid.size, torch.Generator().manual_seed(nodes)
    gradients = {
        "whole numbers": torch.randint(-99, 100, (world, world, NUMEL), generator=generator).float(),
        "reals": torch.randn(world, world, NUMEL, generator=generator),
    }
    mains = [torch.randn(world, NUMEL, generator=generator)]
    for _ in range(REFRESHES):
        mains.append(mains[-1] + 0.01 * torch.randn(world, NUMEL, generator=generator))
    mains = [rows.bfloat16() for rows in mains]
    outcomes: list[Outcome] = run_threads(run_rank, world, grid, gradients, mains, timeout=280)

    exact = torch.stack([sums[0] for sums, _ in outcomes])
    assert torch.equal(exact, gradients["whole numbers"].sum(0))
    quantized = torch.stack([sums[1] for sums, _ in outcomes])
    rows = gradients["reals"]
    expected, bound = plain.reduce_scatter(
        rows, nodes=nodes, per_node=per_node, config=QUANTIZED, call=5, multiplier=1.0
    )
    assert torch.equal(quantized, expected)
    error = (quantized - rows.double().sum(0)).abs()
    assert (error <= bound * (1 + 1e-3)).all() and error.max() > 0
    # Far below the bound on average: the errors of world x 2 roundings are independent.
    assert error.mean() < bound.mean() / world**0.5

    for name, weights in WEIGHTS.items():
        replica = mains[0]
        for call, towards in enumerate(mains[1:]):
            replica = plain.refresh(replica, towards, config=weights, call=call)
            by_place = replica.view(nodes, per_node, NUMEL)
            for rank, (_, held) in enumerate(outcomes):
                want = by_place if weights.replica == "full" else by_place[:, rank % per_node]
                assert torch.equal(held[name][call], want)
        assert name != "exact" or torch.equal(replica, mains[-1])
