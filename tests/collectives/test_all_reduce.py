"""Quantized all-reduce: exactness with the identity, equal bits on all ranks, its definition, its bytes.

Layer: gloo; of the definition, none.
"""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.all_reduce import PieceQuantizer, QuantizedAllReduce, pieces_of
from sdp4bit.collectives.plan import plan_all_reduce
from sdp4bit.collectives.sections import Section
from sdp4bit.collectives.topology import Nodes, create_topology
from sdp4bit.config import GradientConfig
from sdp4bit.quantization import definition, ops, reference
from sdp4bit.quantization.definition import Call
from sdp4bit.quantization.random import RoundingKey, Stage, derive_keys, pack_stream
from sdp4bit.traffic import Grid, Traffic
from tests.collectives.built import BUCKET, SEED, all_reduce_of
from tests.oracles import bounds
from tests.oracles.traffic import all_reduce_exchange
from tests.ranks import one_rank, run_ranks

DITHERED = GradientConfig(intra_rounding="dither", hadamard=False)
EXACT = GradientConfig(intra_bits=None, inter_bits=None)
LAYOUTS = [(2, 1), (2, 2)]
LARGE_LAYOUTS = [(3, 2), (4, 1), (1, 4), (1, 1)]
LENGTHS = [0, 1, 31, 64, 130, 777, 1000, 4096]
CONFIGS = [
    GradientConfig(),
    GradientConfig(pipeline_chunks=3, intra_group_size=96, inter_group_size=256),
    GradientConfig(intra_bits=4, inter_bits=8, hadamard=False, intra_rounding="nearest"),
    GradientConfig(intra_bits=4, intra_rounding="dither", inter_rounding="stochastic"),
    GradientConfig(intra_bits=3.5, inter_bits=3.5, intra_rounding="dither"),
    GradientConfig(intra_bits=None, inter_rounding="nearest"),
    EXACT,
]


def values_of(rank: int, numel: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values over several magnitudes."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    scale = torch.exp2(torch.randint(-6, 3, (numel,), generator=generator).float())
    return (torch.randn(numel, generator=generator) * scale).to(dtype)


# -- between processes --------------------------------------------------------------------------------


Results = list[tuple[list[Tensor], Traffic]]
"""Results of a rank for each of CONFIGS: a tensor for each of LENGTHS, and the sent bytes."""


def reduce_between_processes(nodes: int, per_node: int) -> Results:
    rank, results = dist.get_rank(), []
    for config in CONFIGS:
        all_reduce, traffic = all_reduce_of(nodes, per_node, config)
        found = []
        for call, numel in enumerate(LENGTHS):
            values = values_of(rank, numel)
            all_reduce(values, call=call, multiplier=0.25)
            found.append(values)
        results.append((found, traffic.total))
    return results


def reduce_integers(nodes: int, per_node: int) -> None:
    """Small integers, whose sums are exact in fp32 in any order: the plain collective's, bit for bit."""
    for chunks in (1, 3):
        all_reduce, _ = all_reduce_of(nodes, per_node, replace(EXACT, pipeline_chunks=chunks))
        for call, numel in enumerate(LENGTHS):
            values = ((torch.arange(numel) % 997) * (dist.get_rank() + 1)).float()
            expected = values.clone()
            dist.all_reduce(expected)
            # A part of a larger tensor, whose neighbours stay as they are.
            padded = torch.full((numel + 2,), -1.0)
            padded[1:-1] = values
            all_reduce(padded[1:-1], call=call)
            assert torch.equal(padded[1:-1], expected)
            assert padded[0] == padded[-1] == -1.0


def both(nodes: int, per_node: int) -> Results:
    reduce_integers(nodes, per_node)
    return reduce_between_processes(nodes, per_node)


@pytest.fixture(
    scope="module",
    params=[*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in LARGE_LAYOUTS)],
    ids=lambda layout: "x".join(map(str, layout)),
)
def reduced(request: pytest.FixtureRequest) -> tuple[int, int, list[Results]]:
    """Nodes, ranks per node, and the results of each rank; exact ones equal the plain collective."""
    nodes, per_node = request.param
    return nodes, per_node, run_ranks(both, nodes * per_node, nodes, per_node)


@pytest.mark.gloo
def test_all_ranks_end_with_the_same_bits(reduced: tuple[int, int, list[Results]]) -> None:
    _, _, (first, *others) = reduced
    for of_rank in others:
        for (mine, _), (theirs, _) in zip(first, of_rank, strict=True):
            assert all(map(torch.equal, mine, theirs))


@pytest.mark.gloo
def test_results_are_those_of_the_definition_within_its_bound(
    reduced: tuple[int, int, list[Results]],
) -> None:
    nodes, per_node, (first, *_) = reduced
    world = nodes * per_node
    for config, (found, _) in zip(CONFIGS, first, strict=True):
        for call, (numel, result) in enumerate(zip(LENGTHS, found, strict=True)):
            inputs = torch.stack([values_of(rank, numel) for rank in range(world)])
            exact = inputs.double().sum(0) * 0.25
            of_nodes = inputs.view(nodes, per_node, -1) if numel else inputs.view(nodes, per_node, 0)
            number = Call(SEED, BUCKET, call)
            expected = definition.all_reduce(of_nodes, config=config, call=number, multiplier=0.25)
            bound = bounds.all_reduce(of_nodes, config=config, multiplier=0.25)
            assert torch.equal(result, expected), (config, numel)
            rounding = world * 2**-22 * inputs.double().abs().sum(0)
            assert ((result - exact).abs() <= bound * (1 + 2**-7) + rounding).all(), (config, numel)


@pytest.mark.gloo
def test_bytes_are_those_of_the_formula(reduced: tuple[int, int, list[Results]]) -> None:
    nodes, per_node, results = reduced
    grid = Grid(nodes=nodes, ranks_per_node=per_node)
    for index, config in enumerate(CONFIGS):
        planned = [
            all_reduce_exchange(numel, grid=grid, config=replace(config, min_numel=0)) for numel in LENGTHS
        ]
        for of_rank in results:
            _, sent = of_rank[index]
            assert sent.intra_bytes == sum(each.intra_bytes for each in planned)
            assert sent.inter_bytes == sum(each.inter_bytes for each in planned)
            assert sent.padding_bytes == pytest.approx(sum(each.padding_bytes for each in planned))
            assert sent.collectives == sum(each.collectives for each in planned)


def reduce_special_values() -> None:
    """A NaN of one rank reaches its quantization group on all ranks, nothing else, and is counted once."""
    all_reduce, _ = all_reduce_of(4, 1, GradientConfig())
    for bad in (float("nan"), float("inf"), float("-inf")):
        values, nonfinite = torch.ones(4096), torch.zeros((), dtype=torch.float64)
        if dist.get_rank() == 3:
            values[1024 + 130] = bad
        all_reduce(values, call=0, nonfinite=nonfinite)
        expected = torch.zeros(4096, dtype=torch.bool)
        expected[1024 + 128 : 1024 + 256] = True
        assert torch.equal(values.isnan(), expected)
        assert nonfinite == (1 if dist.get_rank() == 1 else 0)


def reduce_other_types() -> tuple[list[Tensor], Tensor]:
    """bf16 and fp16 are summed in fp32 and rounded once; a sample has the error of both halves."""
    rank, found = dist.get_rank(), []
    for dtype in (torch.bfloat16, torch.float16):
        all_reduce, traffic = all_reduce_of(4, 1, EXACT)
        values = values_of(rank, 777, dtype=dtype)
        all_reduce(values, call=0)
        found.append(values)
        assert traffic.total.plain_inter_bytes == pytest.approx(2 * 777 * 2 * 3 / 4, abs=8)
    sample = torch.randn(4096, generator=torch.Generator().manual_seed(rank))
    halves, _ = all_reduce_of(4, 1, GradientConfig())
    return found, (halves.requantized(sample) - sample).norm() / sample.norm()


def several() -> tuple[list[Tensor], Tensor]:
    reduce_special_values()
    return reduce_other_types()


@pytest.mark.gloo
def test_special_values_and_other_types() -> None:
    results = run_ranks(several, 4)
    for index, dtype in enumerate((torch.bfloat16, torch.float16)):
        inputs = [values_of(rank, 777, dtype=dtype).float() for rank in range(4)]
        expected = ((inputs[0] + inputs[1]) + inputs[2] + inputs[3]).to(dtype)
        assert all(torch.equal(found[index], expected) for found, _ in results)
    # Twice dither of 4 bits: 0.12 each on normal values.
    assert all(0.13 < error < 0.24 for _, error in results)


# -- by definition ------------------------------------------------------------------------------------


def test_the_mean_over_calls_is_the_sum() -> None:
    """Unbiased: the mean of 400 calls is within 6 standard errors, measured, of the exact sum everywhere."""
    inputs = torch.stack([values_of(rank, 1024) for rank in range(4)])
    calls = (Call(seed=1, number=number) for number in range(400))
    found = torch.stack(
        [definition.all_reduce(inputs.view(4, 1, -1), config=GradientConfig(), call=call) for call in calls]
    ).double()
    error = found.mean(0) - inputs.double().sum(0)
    assert (error.abs() <= 6 * found.std(0) / 400**0.5 + 1e-6).all()
    assert found.std(0).min() > 0


def test_between_two_nodes_gradients_are_rounded_to_few_bits_once() -> None:
    """Dither of 4 bits costs 0.118 of normal values; more nodes round the gradients of other nodes before."""
    config = GradientConfig(intra_rounding="nearest")
    for nodes, per_node, roundings in ((2, 1, 1), (2, 2, 1), (3, 1, 5 / 3), (4, 2, 7 / 4)):
        generator = torch.Generator().manual_seed(nodes)
        inputs = torch.randn(nodes, per_node, 1 << 15, generator=generator)
        exact = inputs.sum((0, 1))
        error = (definition.all_reduce(inputs, config=config, call=Call()) - exact).norm() / exact.norm()
        assert error == pytest.approx(0.118 * roundings**0.5, rel=0.04), (nodes, per_node)


def test_pieces_begin_at_blocks_and_cover_everything_without_a_copy() -> None:
    for numel in (1, 31, 100, 1000, 4097):
        for ranks in (1, 2, 3, 8):
            values = torch.zeros(numel)
            for unit in (32, 384):
                section = Section(ranges=((0, numel),), unit=unit)
                grid = Grid(nodes=1, ranks_per_node=ranks)
                plan = plan_all_reduce((section,), grid=grid, config=GradientConfig())
                pieces = pieces_of(values.zero_(), plan, 0)
                assert pieces.data_ptr() == values.data_ptr()
                assert pieces.stride(0) % unit == 0 and pieces.shape[1] < numel // ranks + unit * ranks + 1
                pieces.fill_(1.0)
                assert values.all()


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 3, 1000])
def test_pieces_of_all_ranks_are_restored_in_one_launch_per_section(ranks: int) -> None:
    layout = Nodes(ranks=tuple(range(ranks)), nodes=ranks, ranks_per_node=1)
    numbers = range(5, 5 + 3 * ranks, 3)
    pieces = PieceQuantizer(layout, config=GradientConfig(), seed=1, ranks=numbers, bucket=BUCKET)
    values = torch.full((32 * 1000 + 77,), math.nan)
    sections = (Section(ranges=((0, 16_000),)), Section(ranges=((16_000, 32_077),)))
    plan = pieces.plan(sections)
    messages = [torch.zeros(ranks, each.nbytes, dtype=torch.uint8) for each in plan.message.layouts]
    with ops.use_backend("reference"), mock.patch.object(reference, "dequantize_reduce_pieces") as launch:
        pieces.restore(plan, messages, [values[:16_000], values[16_000:]]).run(3)
    assert launch.call_count == 2
    # Each piece has the key of its sender, the first of the two with two nodes.
    for each, call in zip(sections, launch.call_args_list, strict=True):
        series = call.kwargs["dither"]
        for piece in (0, pieces.count - 1):
            step, rank = each.call(3), numbers[piece]
            stream = pack_stream(step=step, bucket=BUCKET, stage=Stage.GATHER, rank=rank)
            assert series.key(piece) == RoundingKey(*derive_keys(1, stream), dither=True)


def reduce_with_numbers_apart(nodes: int, per_node: int) -> Tensor:
    all_reduce, _ = all_reduce_of(nodes, per_node, DITHERED, ranks=range(5, 17, 3))
    values = values_of(dist.get_rank(), 4096)
    all_reduce(values, call=0)
    return values


@pytest.mark.gloo
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (1, 4)])
def test_dither_is_taken_off_whatever_numbers_the_ranks_have(nodes: int, per_node: int) -> None:
    """As under HSDP, where replicas of a shard are as far apart in number as there are shards.

    Between two nodes, steps of 4 bits hide dither of 8 bits that a reduction inside a node leaves.
    """
    first, *others = run_ranks(reduce_with_numbers_apart, 4, nodes, per_node)
    assert all(torch.equal(first, other) for other in others)
    inputs = torch.stack([values_of(rank, 4096) for rank in range(4)])
    bound = bounds.all_reduce(inputs.view(nodes, per_node, -1), config=DITHERED)
    # Half a step per quantization: with the bits of another key errors are up to one and a half.
    slack = 4 * 2**-22 * inputs.double().abs().sum(0)
    assert ((first - inputs.double().sum(0)).abs() <= bound * (1 + 2**-7) + slack).all()


@pytest.mark.gloo
def test_a_world_of_one_multiplies() -> None:
    with one_rank():
        topology = create_topology(1)
        all_reduce = QuantizedAllReduce(topology, config=GradientConfig(min_numel=0))
        values = torch.arange(40.0)
        for multiplier in (0.5, 1.0):
            expected = values * multiplier
            all_reduce(values, call=0, multiplier=multiplier)
            assert torch.equal(values, expected)
