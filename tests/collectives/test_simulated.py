"""The exchanges of virtual ranks: bit for bit those between processes. Layer: 4 processes over gloo."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.simulated import SimulatedReduceScatter, SimulatedReplica, simulated_layout
from sdp4bit.collectives.topology import create_topologies
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.traffic import Traffic, TrafficCounter
from tests.ranks import run_ranks

LENGTHS = [0, 1, 31, 777, 3001]
NODES = [
    (2, 2),
    pytest.param(4, 1, marks=pytest.mark.slow),
    pytest.param(1, 4, marks=pytest.mark.slow),
]
GRADIENTS = [
    GradientConfig(),
    GradientConfig(intra_bits=4, inter_bits=8, hadamard=False, pipeline_chunks=3),
    GradientConfig(intra_bits=None, intra_group_size=96, inter_group_size=256, inter_rounding="nearest"),
    GradientConfig(inter_bits=None, pipeline_chunks=2, intra_rounding="nearest"),
    GradientConfig(intra_bits=None, inter_bits=None),
]
WEIGHTS = [
    WeightConfig(),
    WeightConfig(replica="full", rounding="stochastic", group_size=96),
    WeightConfig(mode="direct", bits=8),
    WeightConfig(bits=None, replica="full"),
]


def counted(nodes: int) -> TrafficCounter:
    return TrafficCounter(nodes=nodes, ranks_per_node=4 // nodes)


def gradients_of(rank: int, call: int, numel: int) -> torch.Tensor:
    return torch.randn(4, numel, generator=torch.Generator().manual_seed(100 * call + rank))


def weights_of(rank: int, call: int, numel: int) -> torch.Tensor:
    step = torch.randn(numel, generator=torch.Generator().manual_seed(100 * call + rank))
    return (1e-2 * call * step + rank).bfloat16()


def reduce_between_processes(nodes: int) -> list[tuple[list[torch.Tensor], Traffic]]:
    layout = simulated_layout(4, ranks_per_node=4 // nodes)
    topology, rank = create_topologies([layout])[layout.ranks], dist.get_rank()
    results = []
    for bucket, config in enumerate(GRADIENTS):
        traffic, rows = counted(nodes), []
        reduce_scatter = QuantizedReduceScatter(
            topology, config=config, seed=7, rank=rank, bucket=bucket, traffic=traffic, scratch=Scratch()
        )
        for call, numel in enumerate(LENGTHS):
            rows.append(torch.empty(numel))
            reduce_scatter(rows[-1], gradients_of(rank, call, numel).view(-1), call=call)
        results.append((rows, traffic.total))
    return results


@pytest.mark.parametrize(("nodes", "per_node"), NODES)
def test_reduced_rows_and_bytes_are_those_of_processes(nodes: int, per_node: int) -> None:
    expected = run_ranks(reduce_between_processes, 4, nodes)
    scratch = Scratch()
    for bucket, config in enumerate(GRADIENTS):
        traffic = counted(nodes)
        reduce_scatter = SimulatedReduceScatter(
            simulated_layout(4, ranks_per_node=per_node),
            config=config,
            seed=7,
            bucket=bucket,
            traffic=traffic,
            scratch=scratch,
        )
        for call, numel in enumerate(LENGTHS):
            handed_in = torch.empty(4, numel)
            for rank in range(4):
                handed_in.copy_(gradients_of(rank, call, numel))
                reduce_scatter.add(handed_in, call=call)
            rows: dict[int, torch.Tensor] = {}
            reduce_scatter.finish(lambda rank, row, rows=rows: rows.__setitem__(rank, row.clone()))
            for rank, row in rows.items():
                assert torch.equal(row, expected[rank][bucket][0][call]), (config, numel, rank)
        assert all(traffic.total == of_rank[bucket][1] for of_rank in expected), config


def refresh_between_processes(nodes: int) -> list[tuple[list[torch.Tensor], Traffic]]:
    layout = simulated_layout(4, ranks_per_node=4 // nodes)
    topology, rank = create_topologies([layout])[layout.ranks], dist.get_rank()
    results = []
    for bucket, config in enumerate(WEIGHTS):
        traffic, held = counted(nodes), []
        replica = WeightReplica(
            topology, config=config, seed=7, rank=rank, bucket=bucket, traffic=traffic, scratch=Scratch()
        )
        for numel in LENGTHS[1:]:
            replica.start_full_refresh(weights_of(rank, 0, numel))
            for call in (1, 2):
                replica.start_quantized_refresh(weights_of(rank, call, numel), call=call)
            held.append(replica.own_shard.clone())
        if not replica.is_full:
            replica.gather(torch.empty(4 * LENGTHS[-1], dtype=torch.bfloat16))
        results.append((held, traffic.total))
    return results


@pytest.mark.parametrize(("nodes", "per_node"), NODES)
def test_replicas_and_bytes_are_those_of_processes(nodes: int, per_node: int) -> None:
    expected = run_ranks(refresh_between_processes, 4, nodes)
    for bucket, config in enumerate(WEIGHTS):
        traffic = counted(nodes)
        replica = SimulatedReplica(
            simulated_layout(4, ranks_per_node=per_node),
            config=config,
            seed=7,
            bucket=bucket,
            traffic=traffic,
            scratch=Scratch(),
        )
        for index, numel in enumerate(LENGTHS[1:]):
            rows = [torch.stack([weights_of(rank, call, numel) for rank in range(4)]) for call in range(3)]
            held = torch.empty_like(rows[0])
            replica.refresh_fully(rows[0], held)
            for call in (1, 2):
                replica.refresh(rows[call], held, call=call)
            assert all(torch.equal(held[rank], expected[rank][bucket][0][index]) for rank in range(4)), config
        replica.count_gather(held[0].nbytes)
        assert all(traffic.total == of_rank[bucket][1] for of_rank in expected), config


def test_sums_of_full_precision_messages_are_within_the_bound_of_fp32() -> None:
    """The identity for a quantizer: the exact sum, within (ranks - 1) * 2**-24 * sum |x|."""
    config = replace(GradientConfig(), intra_bits=None, inter_bits=None)
    reduce_scatter = SimulatedReduceScatter(
        simulated_layout(6, ranks_per_node=2),
        config=config,
        seed=0,
        bucket=0,
        traffic=TrafficCounter(nodes=3, ranks_per_node=2),
        scratch=Scratch(),
    )
    inputs = torch.randn(6, 6, 321, generator=torch.Generator().manual_seed(0))
    for rows in inputs:
        reduce_scatter.add(rows.clone(), call=0)
    reduced = torch.empty(6, 321)
    reduce_scatter.finish(lambda rank, row: reduced[rank].copy_(row))
    bound = 5 * 2**-24 * inputs.double().abs().sum(0)
    assert ((reduced - inputs.double().sum(0)).abs() <= bound).all()
