"""Bytes and buffers of exchanges by the method's formulas, and the groups of a GPT. Layer: no process."""

from __future__ import annotations

import pytest
import torch

from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.traffic import ALONE, Grid
from sdp4bit_lab.plan.memory import COMMUNICATOR_BYTES, communicator_bytes, memory_per_rank
from sdp4bit_lab.plan.model import ShardedGroup, flat_buffer, gpt_groups, least_padded_dim
from sdp4bit_lab.plan.traffic import (
    all_reduce_exchange,
    gradient_exchange,
    group_traffic,
    ring,
    weight_gather,
    weight_refresh,
)
from sdp4bit_lab.pretrain.model.cards import ModelShape
from sdp4bit_lab.pretrain.model.gpt import GPT

INT8, INT4, DIFFERENCE = 1 + 2 / 128, 1 / 2 + 2 / 128, 1 / 2 + 2 / 2048
"""Bytes per value of the messages, scales included."""
SHAPE = ModelShape(layers=4, hidden=256, heads=4, vocabulary=1024, positions=128)


@pytest.mark.parametrize(("n", "g"), [(16, 8), (8, 1), (1, 8), (3, 2)])
def test_bytes_are_those_of_the_method(n: int, g: int) -> None:
    grid, row = Grid(nodes=n, ranks_per_node=g), 2**16
    total = row * grid.size
    gradients = gradient_exchange(row, grid=grid, config=GradientConfig())
    weights = weight_refresh(row, grid=grid, config=WeightConfig())
    assert gradients.intra_bytes == total * INT8 * (g - 1) / g
    assert gradients.inter_bytes == total / g * INT4 * (n - 1) / n
    assert weights.inter_bytes == total / g * DIFFERENCE * (n - 1) / n
    assert weights.intra_bytes == 0
    gathered = weight_gather(row, grid=grid, config=WeightConfig())
    assert gathered.intra_bytes == (2 * total * (g - 1) / g if g > 1 else 0)
    full = weight_refresh(row, grid=grid, config=WeightConfig(replica="full"))
    assert full.intra_bytes == total * DIFFERENCE * (g - 1) / g
    # A ring crosses every node boundary with all rows but one.
    node = ring(4 * row, grid=grid)
    assert node.inter_bytes * g == (4 * total * (grid.size - 1) / grid.size if n > 1 else 0)
    assert (node.intra_bytes + node.inter_bytes) * grid.size == 4 * total * (grid.size - 1)


def test_three_levels_send_the_bytes_of_two_in_fewer_messages() -> None:
    """48 nodes of 8 in 6 blocks; rows of 2 ** 16, and an all-reduce of pieces of that size."""
    row, config = 1 << 16, GradientConfig(pipeline_chunks=1)
    two, three = (Grid(nodes=48, ranks_per_node=8, blocks=blocks) for blocks in (1, 6))
    for exchange, numel in ((gradient_exchange, row), (all_reduce_exchange, row * two.size)):
        one_hop, two_hops = (exchange(numel, grid=grid, config=config) for grid in (two, three))
        assert two_hops.inter_bytes == one_hop.inter_bytes
        assert two_hops.intra_bytes == one_hop.intra_bytes
        grids = [call.grid for call in two_hops.calls if call.grid.nodes > 1]
        assert {(grid.nodes, grid.ranks_per_node) for grid in grids} == {(8, 1), (6, 1)}
    reduced = gradient_exchange(row, grid=three, config=config)
    _, first, second, last = reduced.work
    # Sums of 48 rows over 8 ranks, of 6 over 8 nodes, and of one over 6 blocks.
    assert [(each.values, each.messages) for each in (first, second, last)] == [
        (48 * row, 8),
        (6 * row, 8),
        (row, 6),
    ]
    in_node, in_block, between = 48 * 8 * row * INT8, 48 * row * INT4, 6 * row * INT4
    assert reduced.buffer_bytes == 2 * (in_node + in_block + between)
    assert [each.moved_bytes for each in reduced.work] == [
        4 * row * 384 + in_node,
        in_node + in_block,
        in_block + between,
        between + 4 * row,
    ]
    # Gradients have a communicator per level, also if two levels have the same size.
    group = ShardedGroup(name="all", shapes=((512, 4096),))
    counts = []
    for blocks in (1, 8):
        grid = Grid(nodes=64, ranks_per_node=8, blocks=blocks)
        traffic = [group_traffic(group, grid=grid, config=SDP4BitConfig())]
        counts.append(communicator_bytes(traffic, grid=grid, replicas=ALONE) // COMMUNICATOR_BYTES)
    assert counts == [1 + 2 + 2, 1 + 2 + 3]
    for exchange in (weight_refresh, weight_gather):
        assert exchange(row, grid=three, config=WeightConfig()) == exchange(
            row, grid=two, config=WeightConfig()
        )


@pytest.mark.parametrize(("chunks", "at_once"), [(1, 1.0), (4, 0.5)])
def test_kernels_and_buffers_move_every_message(chunks: int, at_once: float) -> None:
    """4 nodes x 8, rows of 2 ** 20: 32 fp32 rows read, one written, 8 and 4 messages sent and received."""
    grid, row = Grid(nodes=4, ranks_per_node=8), 1 << 20
    gradients = gradient_exchange(row, grid=grid, config=GradientConfig(pipeline_chunks=chunks))
    messages = 2 * row * (8 * 4 * INT8 + 4 * INT4)
    assert gradients.moved_bytes == 4 * row * 33 + messages
    assert gradients.buffer_bytes == at_once * messages  # two chunks are under way at once
    weights = weight_refresh(row, grid=grid, config=WeightConfig())
    assert weights.moved_bytes == row * 5 * (4 + DIFFERENCE)
    assert weights.buffer_bytes == row * 5 * DIFFERENCE
    full = weight_refresh(row, grid=grid, config=WeightConfig(replica="full"))
    assert full.moved_bytes == row * 33 * (4 + DIFFERENCE)
    assert full.buffer_bytes == row * (1 + 4 + 32) * DIFFERENCE
    # An all-reduce over 4 x 8 ranks reduces pieces of a 32nd, which are then gathered on both levels.
    piece = row // 32
    summed = all_reduce_exchange(row, grid=grid, config=GradientConfig(pipeline_chunks=1))
    messages = 2 * piece * (8 * 4 * INT8 + 4 * INT4)
    assert summed.moved_bytes == 4 * piece * 33 + messages + 33 * piece * (4 + INT4)
    assert summed.buffer_bytes == messages + piece * (1 + 4 + 32) * INT4


def test_full_precision_has_no_kernels_and_no_buffers_and_one_rank_no_traffic() -> None:
    grid = Grid(nodes=4, ranks_per_node=8)
    exchanges = [
        gradient_exchange(1 << 20, grid=grid, config=None),
        all_reduce_exchange(1 << 20, grid=grid, config=None),
        weight_refresh(1 << 20, grid=grid, config=WeightConfig(bits=None)),
    ]
    assert [(e.moved_bytes, e.buffer_bytes) for e in exchanges] == [(0, 0)] * 3
    assert all(e.inter_bytes > 0 for e in exchanges)
    group = ShardedGroup(name="all", shapes=((7, 3),))
    alone = group_traffic(group, grid=ALONE, config=SDP4BitConfig(), accumulation=2)
    assert all((e.intra_bytes, e.inter_bytes, e.collectives) == (0, 0, 0) for e in alone.exchanges)


@pytest.mark.parametrize(("replica", "copies"), [("node", 4), ("full", 32)])
def test_memory_follows_the_replica_and_the_largest_group(replica: str, copies: int) -> None:
    grid = Grid(nodes=4, ranks_per_node=8)
    config = SDP4BitConfig(weights=WeightConfig(replica=replica))  # type: ignore[arg-type]
    groups = [ShardedGroup(name=str(n), shapes=((n * 2**15, 32),)) for n in (1, 2, 4)]
    traffic = [group_traffic(group, grid=grid, config=config) for group in groups]
    memory = memory_per_rank(traffic, grid=grid, accumulation=1)
    row, largest = 7 * 2**15, 4 * 2**15
    assert memory["main weights, fp32"] == 4 * row
    assert memory["Adam, fp32"] == 8 * row
    assert memory["gradients, fp32"] == 4 * row
    assert memory["gathered weights, bf16"] == 2 * 32 * (row - 2**15)  # two groups at once
    assert memory["rows being reduced, fp32"] == 4 * 32 * largest
    assert memory["weight replica, bf16"] == 2 * copies * row
    assert memory["message buffers"] == sum(each.buffer_bytes for each in traffic[2].exchanges)
    accumulated = memory_per_rank(traffic, grid=grid, accumulation=2)
    assert accumulated["gradients, fp32"] == 32 * memory["gradients, fp32"]
    # The flat engine has all weights already, and gradients of all parameters.
    buffer = [group_traffic(group, grid=grid, config=config) for group in flat_buffer(groups)]
    flat = memory_per_rank(buffer, grid=grid, accumulation=1)
    assert "weight replica, bf16" not in flat
    assert flat["gradients, fp32"] == 2 * flat["gathered weights, bf16"] == 4 * 32 * row


def test_rows_are_cut_as_the_engines_cut_them() -> None:
    group = ShardedGroup(name="all", shapes=((10, 3), (4,)))
    assert group.row_numel(ranks=4) == 3 * 3 + 1
    assert group.row_numel(ranks=8) == 2 * 3 + 1
    (buffer,) = flat_buffer([group])
    # Megatron-Core ends buckets at multiples of 128 and of the ranks.
    assert buffer.numel == 34
    assert buffer.row_numel(ranks=4) == 128 // 4
    assert buffer.row_numel(ranks=3) == 384 // 3


def test_another_dimension_is_chosen_only_where_it_is_divided_evenly() -> None:
    for shape, ranks, dim in (
        *(((1024, 4096), 4096, 1), ((1024, 4096), 512, 0), ((1000,), 16, 0)),
        *(((6, 8, 16), 16, 2), ((3, 5), 2, 0)),
    ):
        assert least_padded_dim(shape, ranks=ranks) == dim


def test_groups_are_those_of_the_pretraining_model() -> None:
    with torch.device("meta"):
        model = GPT(SHAPE)
    real: dict[str, list[tuple[int, ...]]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        group = ".".join(parts[:2]) if parts[0] == "blocks" else "(root)"
        real.setdefault(group, []).append(tuple(parameter.shape))
    planned = {group.name: sorted(group.shapes) for group in gpt_groups(SHAPE)}
    assert planned == {name: sorted(shapes) for name, shapes in real.items()}
