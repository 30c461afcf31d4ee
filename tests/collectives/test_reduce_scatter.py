"""Two-level reduce-scatter, between processes and over simulated ranks, which refresh weights alike too.

The shard map, exactness with the identity, slices. Layer: gloo.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist

from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import Topology, arrange, create_topologies
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.quantization.random import MAX_BUCKETS
from sdp4bit.traffic import Traffic, TrafficCounter
from sdp4bit_lab.simulated.collectives import SimulatedReduceScatter, SimulatedReplica, simulated_layout
from tests.ranks import on_ranks, run_ranks

EXACT = GradientConfig(intra_bits=None, inter_bits=None)


def make(
    nodes: int, per_node: int, config: GradientConfig, *, bucket: int = 3
) -> tuple[Topology, QuantizedReduceScatter, TrafficCounter]:
    world = nodes * per_node
    layout = arrange(range(world), [rank // per_node for rank in range(world)])
    topology = create_topologies([layout])[layout.ranks]
    traffic = TrafficCounter(nodes=nodes, ranks_per_node=per_node)
    reduce_scatter = QuantizedReduceScatter(
        topology,
        config=config,
        seed=7,
        rank=dist.get_rank(),
        bucket=bucket,
        traffic=traffic,
        scratch=Scratch(),
    )
    return topology, reduce_scatter, traffic


def reduce_integers() -> None:
    """Each rank ends with the sum of the rows meant for it, in the order of a plain reduce-scatter."""
    rank = dist.get_rank()
    for chunks in (1, 3):
        _, reduce_scatter, _ = make(2, 2, replace(EXACT, pipeline_chunks=chunks))
        assert not reduce_scatter.hadamard, "nothing is quantized: there is no transform"
        for call, numel in enumerate((0, 1, 31, 128, 777, 1000)):
            # Small integers, so that sums are exact in fp32 in any order.
            rows = (torch.arange(4 * numel) % 997).float().view(4, numel)
            inputs = [rows * (r + 1) + r for r in range(4)]
            output = torch.full((numel,), float("nan"))
            reduce_scatter(output, inputs[rank].reshape(-1).clone(), call=call)
            assert torch.equal(output, torch.stack(inputs).sum(0)[rank])


def test_every_rank_gets_its_row_exactly() -> None:
    """On other layouts: threads, in test_properties.py."""
    run_ranks(reduce_integers, 4)


def bytes_of_messages() -> list[int]:
    layout, found = simulated_layout(4, ranks_per_node=2), []
    topology = create_topologies([layout])[layout.ranks]
    for chunks in (1, 2, 4, 16):
        scratch = Scratch()
        reduce_scatter = QuantizedReduceScatter(
            topology,
            config=GradientConfig(pipeline_chunks=chunks),
            seed=7,
            rank=dist.get_rank(),
            bucket=0,
            traffic=TrafficCounter(nodes=2, ranks_per_node=2),
            scratch=scratch,
        )
        reduce_scatter(torch.empty(1 << 14), torch.randn(4 << 14), call=0)
        found.append(sum(buffer.numel() for buffer in scratch._buffers.values()))
    return found


def test_messages_of_many_slices_take_the_memory_of_two() -> None:
    """Per value of the input, on 2 nodes x 2: int8 to and from 2 ranks, int4 rows to and from 2 nodes."""
    whole = 2 * 2 * (2 << 14) * (1 + 2 / 128) + 2 * 2 * (1 << 14) * (1 / 2 + 2 / 128)
    assert whole / (4 << 14) == 2.546875
    assert run_ranks(bytes_of_messages, 4) == 4 * [[whole, whole, whole / 2, whole / 8]]


def reduce_special_values() -> None:
    """A NaN or infinity of one rank reaches its group of the owner's row as NaN, and nothing else."""
    for infinity, hadamard in ((float("inf"), True), (float("-inf"), True), (float("inf"), False)):
        _, reduce_scatter, _ = make(2, 2, GradientConfig(hadamard=hadamard))
        rows = torch.ones(4, 512)
        if dist.get_rank() == 3:
            rows[1, 130], rows[2, 5] = float("nan"), infinity
        output = torch.empty(512)
        reduce_scatter(output, rows.view(-1), call=0)
        poisoned = {1: slice(128, 256), 2: slice(0, 128)}.get(dist.get_rank(), slice(0, 0))
        expected = torch.zeros(512, dtype=torch.bool)
        expected[poisoned] = True
        assert torch.equal(output.isnan(), expected)


def test_values_that_are_not_finite_come_out_not_finite() -> None:
    run_ranks(reduce_special_values, 4)


@on_ranks(2)
def test_the_last_group_and_a_late_step_are_reduced() -> None:
    """gloo's tags are C ints, and a group's last step is followed by its first."""
    rows = torch.randn(2 * 640, generator=torch.Generator().manual_seed(dist.get_rank()))
    results = []
    for bucket, call in ((MAX_BUCKETS - 1, 5), (MAX_BUCKETS - 1, 5 + (1 << 32)), (MAX_BUCKETS - 2, 5)):
        _, reduce_scatter, _ = make(2, 1, GradientConfig(), bucket=bucket)
        results.append(torch.empty(640))
        reduce_scatter(results[-1], rows, call=call)
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


@on_ranks(2)
def test_an_input_of_the_wrong_size_is_an_error() -> None:
    _, reduce_scatter, _ = make(2, 1, GradientConfig())
    with pytest.raises(ValueError, match="2 x 10 values, got 30"):
        reduce_scatter(torch.empty(10), torch.empty(30), call=0)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_a_gradient_that_only_one_node_has_reaches_its_own_ranks_exactly(nodes: int, per_node: int) -> None:
    world = nodes * per_node
    generator = torch.Generator().manual_seed(world)
    configs = GradientConfig(intra_bits=None), GradientConfig(intra_rounding="nearest")
    for owner, config in product(range(nodes), configs):
        rows = torch.randn(world, world, 300, generator=generator)
        rows[[rank for rank in range(world) if rank // per_node != owner]] = 0
        sums = {exact: simulated_sums(rows, per_node, config, exact_own=exact)[0] for exact in (True, False)}
        inside = torch.arange(world) // per_node == owner
        expected = rows[inside, :][:, inside].sum(0)
        if config.intra_bits is not None and per_node > 1:
            one_node = replace(config, inside_one_node=True)
            expected = simulated_sums(rows[inside][:, inside], per_node, one_node, rank=owner * per_node)[0]
        if per_node == 1:
            assert torch.equal(sums[True][inside], expected)
        assert (
            (sums[True][inside] - expected).abs().max() < 1e-5 < (sums[False][inside] - expected).abs().max()
        )
        assert torch.equal(sums[True][~inside], sums[False][~inside])  # messages are the same


def test_what_is_not_finite_is_counted_once_whether_it_stays_in_its_node_or_not() -> None:
    rows = torch.ones(4, 4, 1000)
    rows[1, 0, 5] = rows[1, 3, 300] = float("inf")
    rows[2, 0, 999] = float("nan")
    for per_node in (1, 2):
        for exact in (True, False):
            sums, counts = simulated_sums(rows, per_node, GradientConfig(), exact_own=exact)
            assert counts == [2, 0, 0, 1]
            assert [len(row.isfinite().logical_not().nonzero()) > 0 for row in sums] == [
                True,
                False,
                False,
                True,
            ]


def simulated_sums(
    rows: torch.Tensor, per_node: int, config: GradientConfig, *, exact_own: bool = True, rank: int = 0
) -> tuple[torch.Tensor, list[float]]:
    """Return the sum that each rank ends with, and how many groups it counts that are not finite."""
    world = rows.shape[0]
    reduce_scatter = SimulatedReduceScatter(
        simulated_layout(world, ranks_per_node=per_node),
        config=replace(config, exact_own=exact_own),
        seed=7,
        bucket=0,
        traffic=TrafficCounter(nodes=world // per_node, ranks_per_node=per_node),
        scratch=Scratch(),
        first_rank=rank,
    )
    counts = [torch.zeros(()) for _ in rows]
    for own, count in zip(rows.clone(), counts, strict=True):
        reduce_scatter.add(own, call=0, nonfinite=count)
    sums = torch.empty_like(rows[0])
    reduce_scatter.finish(lambda rank, row: sums[rank].copy_(row))
    return sums, [count.item() for count in counts]


# -- simulated ranks ----------------------------------------------------------------------------------


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
    GradientConfig(inter_bits=3.5, pipeline_chunks=2),
    GradientConfig(exact_own=False),
    GradientConfig(inter_bits=None, pipeline_chunks=2, intra_rounding="nearest"),
    GradientConfig(pipeline_chunks=2, intra_rounding="dither", inter_rounding="dither"),
    GradientConfig(intra_bits=None, inter_bits=None),
]
WEIGHTS = [
    WeightConfig(),
    WeightConfig(replica="full", group_size=96),
    WeightConfig(mode="direct", bits=8),
    WeightConfig(bits=3.5, group_size=128),
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
    rank, results = dist.get_rank(), []
    for bucket, config in enumerate(GRADIENTS):
        _, reduce_scatter, traffic = make(nodes, 4 // nodes, config, bucket=bucket)
        rows = []
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
    for config in WEIGHTS:
        traffic, held = counted(nodes), []
        replica = WeightReplica(topology, config=config, traffic=traffic, scratch=Scratch())
        for numel in LENGTHS[1:]:
            replica.start_full_refresh(weights_of(rank, 0, numel))
            for call in (1, 2):
                replica.start_quantized_refresh(weights_of(rank, call, numel))
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
            traffic=traffic,
            scratch=Scratch(),
        )
        for index, numel in enumerate(LENGTHS[1:]):
            rows = [torch.stack([weights_of(rank, call, numel) for rank in range(4)]) for call in range(3)]
            held = torch.empty_like(rows[0])
            replica.refresh_fully(rows[0], held)
            for call in (1, 2):
                replica.refresh(rows[call], held)
            assert all(torch.equal(held[rank], expected[rank][bucket][0][index]) for rank in range(4)), config
        replica.count_gather(held[0].nbytes)
        assert all(traffic.total == of_rank[bucket][1] for of_rank in expected), config
