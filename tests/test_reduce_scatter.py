"""Two-level reduce-scatter: shard map, exactness with the identity, pipelining. Processes and threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import Topology, arrange, create_topologies
from sdp4bit.config import GradientConfig
from sdp4bit.telemetry import TrafficCounter
from tests.ranks import run_ranks, run_threads

EXACT = GradientConfig(intra_bits=None, inter_bits=None)
LAYOUTS = [(2, 2), (3, 2), (2, 3), (4, 2), (4, 1), (1, 4), (1, 1)]


def make(
    nodes: int, per_node: int, config: GradientConfig
) -> tuple[Topology, QuantizedReduceScatter, TrafficCounter]:
    world = nodes * per_node
    layout = arrange(range(world), [rank // per_node for rank in range(world)])
    topology = create_topologies([layout])[layout.ranks]
    traffic = TrafficCounter(nodes=nodes, ranks_per_node=per_node)
    reduce_scatter = QuantizedReduceScatter(
        topology, config=config, seed=7, rank=dist.get_rank(), bucket=3, traffic=traffic, scratch=Scratch()
    )
    return topology, reduce_scatter, traffic


def reduce_integers(nodes: int, per_node: int, lengths: list[int], chunks: int) -> None:
    """Each rank ends with the sum of the rows meant for it, in the order of a plain reduce-scatter."""
    world, rank = nodes * per_node, dist.get_rank()
    config = replace(EXACT, pipeline_chunks=chunks)
    _, reduce_scatter, _ = make(nodes, per_node, config)
    for call, numel in enumerate(lengths):
        # Small integers, so that sums are exact in fp32 in any order.
        rows = (torch.arange(world * numel) % 997).float().view(world, numel)
        inputs = [rows * (r + 1) + r for r in range(world)]
        output = torch.full((numel,), float("nan"))
        reduce_scatter(output, inputs[rank].reshape(-1).clone(), call=call)
        assert torch.equal(output, torch.stack(inputs).sum(0)[rank])


@pytest.mark.parametrize(("nodes", "per_node"), LAYOUTS)
def test_every_rank_gets_its_row_exactly(nodes: int, per_node: int) -> None:
    for chunks in (1, 3):
        run_ranks(reduce_integers, nodes * per_node, nodes, per_node, [0, 1, 31, 128, 1000], chunks)


@pytest.mark.parametrize(("nodes", "per_node"), [(8, 8), (16, 8)])
def test_the_shard_map_holds_in_large_worlds(nodes: int, per_node: int) -> None:
    run_threads(reduce_integers, nodes * per_node, nodes, per_node, [160], 1, timeout=240)
