"""Three levels: nodes of blocks, the process groups of each level, who gets which row, and errors of layouts.

Sums, bytes and bounds of errors are tested in test_properties.py, with two levels. Layers: no process; a
fake process group; gloo.
"""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sdp4bit
from sdp4bit.collectives import QuantizedReduceScatter, WeightReplica, create_topology
from sdp4bit.collectives.topology import Nodes, arrange, block_numbers, destroy_topology, split_spec
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.observe.explain import one_hop_note
from sdp4bit.quantization import definition
from sdp4bit.quantization.definition import Call
from sdp4bit.quantization.random import Stage, pack_stream
from tests.ranks import fake_world, run_ranks
from tests.tables import flat


def layout(sizes: tuple[int, int, int]) -> Nodes:
    """Return a layout of blocks, nodes of a block and ranks per node, arranged from labels."""
    blocks, nodes, per_node = sizes
    labels = [rank // per_node for rank in range(blocks * nodes * per_node)]
    return arrange(range(len(labels)), labels, block_of=block_numbers(labels, nodes_per_block=nodes))


# Layouts


def test_ranks_of_a_level_are_those_that_differ_in_one_digit() -> None:
    found = layout((2, 3, 2))
    assert (found.nodes, found.ranks_per_node, found.blocks, found.describe()) == (6, 2, 2, "2 x 3 x 2")
    assert found.members("intra") == [[2 * node, 2 * node + 1] for node in range(6)]
    assert found.members("inter") == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert found.members("outer") == [[place, place + 6] for place in range(6)]


def test_blocks_of_one_node_or_of_all_nodes_are_two_levels() -> None:
    for sizes in ((4, 1, 2), (1, 4, 2)):
        assert layout(sizes) == Nodes(ranks=tuple(range(8)), nodes=4, ranks_per_node=2)


def test_groups_beside_each_other_have_the_nodes_of_their_own_in_a_block() -> None:
    """As with HSDP, 2 nodes per replica, and under tensor parallelism over 2 nodes."""
    labels = [rank // 2 for rank in range(16)]
    block_of = block_numbers(labels, nodes_per_block=4)
    assert arrange(range(0, 4), labels, block_of=block_of).blocks == 1
    assert arrange((0, 4, 8, 12), labels, block_of=block_of).blocks == 2
    assert arrange((0, 8), labels, block_of=block_of).blocks == 1  # a node in each block
    with pytest.raises(ValueError, match=r"3 nodes .* ranks 0 to 9 .*\(block 0: 2, block 1: 1\)"):
        arrange((0, 1, 4, 5, 8, 9), labels, block_of=block_of)


@pytest.mark.parametrize("nodes_per_block", [3, 0, -2, 8])
def test_nodes_that_do_not_fill_blocks_are_an_error_with_the_divisors(nodes_per_block: int) -> None:
    message = rf"{nodes_per_block} nodes per block does not divide the 4 nodes: use one of \[1, 2, 4\]"
    with pytest.raises(ValueError, match=message):
        block_numbers([rank // 2 for rank in range(8)], nodes_per_block=nodes_per_block)


@pytest.mark.parametrize("spec", [(8,), (8, 4, 2), (8, "4"), (8, True), (None, 4), (8, 2.0)])
def test_a_tuple_of_other_things_is_an_unknown_topology(spec: Any) -> None:
    with pytest.raises(ValueError, match=r"topology=\(.* is unknown: .*\(ranks per node, nodes per block\)"):
        split_spec(spec)


def test_random_bits_of_the_hops_are_distinct() -> None:
    streams = {pack_stream(step=3, bucket=1, stage=stage, rank=rank) for stage in Stage for rank in range(8)}
    assert len(streams) == 4 * 8


@pytest.mark.parametrize(
    ("nodes", "blocks", "expected"),
    [(64, 1, ""), (128, 8, ""), (128, 1, "8 nodes send 7 + 15"), (1000, 1, "25 nodes send 24 + 39")],
)
def test_more_than_64_nodes_in_one_hop_get_a_note(nodes: int, blocks: int, expected: str) -> None:
    note = one_hop_note([Nodes(ranks=tuple(range(nodes)), nodes=nodes, ranks_per_node=1, blocks=blocks)])
    assert expected in note and bool(note) == bool(expected)
    if note:
        assert f"{nodes - 1} messages" in note and 'topology=("auto", ' in note
    assert "97 has no divisors" in one_hop_note([Nodes(ranks=tuple(range(97)), nodes=97, ranks_per_node=1)])


def attach(topology: Any) -> tuple[int, int, str, list[str]]:
    """Return the process groups that a rank of 128 nodes asks for and joins, its table and its warnings."""
    c10d: Any = dist.distributed_c10d
    with fake_world(1024, rank=0), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fully_shard(nn.Linear(256, 4096), mesh=init_device_mesh("cpu", (1024,)))
        before = len(c10d._world.pg_map)
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
            comm = sdp4bit.quantize_communication(model, topology=topology)
        joined = len(c10d._world.pg_map) - before
        table, texts = flat(comm.explain(full=True)), [str(each.message) for each in caught]
        return new_group.call_count, joined, table, texts


def test_attaching_creates_the_groups_of_three_levels_for_gradients_alone() -> None:
    weights = 128 + 8
    asked_for, joined, table, warned = attach(8)
    assert (asked_for, joined) == (2 * weights, 4) and "128 x 8" in table
    assert sum("one hop between nodes, with 127 messages" in each for each in warned) == 1
    asked_for, joined, table, warned = attach((8, 16))
    assert (asked_for, joined) == (weights + 128 + 8 * 8 + 16 * 8, 5)
    assert "8 x 16 x 8" in table and "inter int4/128, between blocks int4/128" in table
    assert not any("one hop" in each for each in warned)


# Between processes


def reduce(spec: tuple[int, int], config: GradientConfig) -> tuple[torch.Tensor, list[Any]]:
    """Return the row of this rank and the ranks that it exchanges messages with, by level."""
    topology = create_topology(spec)
    reduction, world = QuantizedReduceScatter(topology, config=config, seed=5), dist.get_world_size()
    rows = torch.randn(world, world, 700, generator=torch.Generator().manual_seed(1))
    output = torch.empty(700)
    reduction(output, rows[dist.get_rank()].flatten(), call=4)
    groups = (topology.intra, topology.inter, topology.outer)
    peers = [group and dist.get_process_group_ranks(group) for group in groups]
    with pytest.raises(ValueError, match="the topology has 2 blocks of nodes"):
        WeightReplica(topology, config=WeightConfig())
    destroy_topology(topology)
    return output, peers


@pytest.mark.gloo
@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 2, 1)])
def test_processes_exchange_messages_in_three_levels(sizes: tuple[int, int, int]) -> None:
    world = torch.Size(sizes).numel()
    for config in (GradientConfig(pipeline_chunks=3), GradientConfig(intra_bits=None, inter_bits=None)):
        results = run_ranks(reduce, world, (sizes[2], sizes[1]), config)
        rows = torch.randn(world, world, 700, generator=torch.Generator().manual_seed(1))
        expected = definition.reduce_scatter(
            rows.view(*sizes, *sizes, 700), config=config, call=Call(seed=5, number=4)
        )
        assert torch.equal(torch.stack([row for row, _ in results]), expected.view(world, 700))
    for rank, (_, peers) in enumerate(results):
        found = layout(sizes)
        for level, group in zip(found.levels, peers, strict=True):
            (expected_peers,) = (members for members in found.members(level) if rank in members)
            assert (group or [rank]) == expected_peers


def refuse(topology: Any) -> str:
    with pytest.raises(ValueError) as caught:
        sdp4bit.quantize_communication(fully_shard(nn.Linear(8, 8)), topology=topology)
    return str(caught.value)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("topology", "message"),
    [((1, 3), "3 nodes per block does not divide the 4 nodes"), ((3, 1), "3 ranks per node"), ((1, 0), "0 ")],
)
def test_all_ranks_refuse_blocks_that_do_not_fit_with_one_message(topology: Any, message: str) -> None:
    texts = run_ranks(refuse, 4, topology, timeout=60)
    assert len(set(texts)) == 1 and message in texts[0]
