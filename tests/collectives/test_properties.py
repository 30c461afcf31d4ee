"""Both collectives against what they compute by definition, over layouts and settings drawn at random.

Layer: threads, with real data through c10d; the definition is
tests/collectives/plain_collectives.py, computed for all ranks in one process. Equality is bit for bit; bytes
are the planner's. `-m slow` draws more than a thousand cases, and worlds of up to 256 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import Topology, arrange, create_topologies
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import QUANTIZED_BITS, GradientConfig, Rounding, WeightConfig
from sdp4bit.traffic import Traffic, TrafficCounter
from sdp4bit_lab.plan.traffic import Exchange, RankGrid, gradient_exchange, weight_refresh
from tests.collectives import plain_collectives as plain
from tests.ranks import run_threads

few = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
many = settings(few, max_examples=500)

MAX_RANKS = 16
layouts = st.integers(1, MAX_RANKS).flatmap(
    lambda nodes: st.tuples(st.just(nodes), st.integers(1, MAX_RANKS // nodes))
)
bits = st.sampled_from([*QUANTIZED_BITS, None])
group_sizes = st.sampled_from([32, 64, 96, 128, 256, 2048])
roundings = st.sampled_from(["nearest", "stochastic", "dither"])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
lengths = st.one_of(st.sampled_from([0, 1, 2, 31, 32, 33, 127, 128, 129, 256]), st.integers(0, 700))
gradient_configs = st.builds(
    GradientConfig,
    intra_bits=bits,
    inter_bits=bits,
    intra_group_size=group_sizes,
    inter_group_size=group_sizes,
    hadamard=st.booleans(),
    intra_rounding=roundings,
    inter_rounding=roundings,
    exact_own=st.booleans(),
    pipeline_chunks=st.integers(1, 5),
    min_numel=st.just(0),
)
weight_configs = st.builds(
    WeightConfig,
    bits=bits,
    group_size=group_sizes,
    mode=st.sampled_from(["difference", "direct"]),
    replica=st.sampled_from(["node", "full"]),
)
Case = tuple[tuple[int, int], list[int], torch.dtype, int]
"""Nodes and ranks per node, lengths of rows, their type, a seed."""
cases = st.tuples(layouts, st.lists(lengths, min_size=1, max_size=3), dtypes, st.integers(0, 1 << 20))


def values(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Values over several magnitudes, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp2(torch.randint(-6, 3, (*shape[:-1], 1), generator=generator).float())
    drawn = torch.randn(shape, generator=generator) * scales
    return torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, drawn).to(dtype)


@dataclass(frozen=True, kw_only=True)
class World:
    """What the ranks of a case share."""

    nodes: int
    per_node: int

    def counter(self) -> TrafficCounter:
        return TrafficCounter(nodes=self.nodes, ranks_per_node=self.per_node)

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    @property
    def grid(self) -> RankGrid:
        return RankGrid(nodes=self.nodes, ranks_per_node=self.per_node)

    def topology(self) -> Topology:
        layout = arrange(range(self.size), [rank // self.per_node for rank in range(self.size)])
        return create_topologies([layout])[layout.ranks]


def assert_sent(sent: Traffic, planned: list[Exchange]) -> None:
    assert sent.intra_bytes == sum(exchange.intra_bytes for exchange in planned)
    assert sent.inter_bytes == sum(exchange.inter_bytes for exchange in planned)
    assert sent.collectives == sum(exchange.collectives for exchange in planned)


# Gradients


def reduce_on_threads(
    world: World, config: GradientConfig, inputs: list[Tensor], multiplier: float
) -> list[Tensor]:
    """What this rank ends with for each of the inputs [world, world, n]."""
    counter, rank = world.counter(), dist.get_rank()
    reduce_scatter = QuantizedReduceScatter(
        world.topology(),
        config=config,
        seed=plain.SEED,
        rank=rank,
        bucket=plain.BUCKET,
        traffic=counter,
        scratch=Scratch(),
    )
    outputs = []
    for call, rows in enumerate(inputs):
        output = torch.full(rows.shape[-1:], float("nan"), dtype=rows.dtype)
        reduce_scatter(output, rows[rank].reshape(-1).clone(), call=call, multiplier=multiplier)
        outputs.append(output)
    planned = [gradient_exchange(rows.shape[-1], grid=world.grid, config=config) for rows in inputs]
    assert_sent(counter.total, planned)
    return outputs


def check_sums(
    world: World, config: GradientConfig, inputs: list[Tensor], multiplier: float
) -> list[tuple[Tensor, Tensor]]:
    """Return of each of the inputs [world, world, n] the error of its sum [world, n], and a bound for it."""
    results = run_threads(reduce_on_threads, world.size, world, config, inputs, multiplier, timeout=280)
    errors = []
    for call, rows in enumerate(inputs):
        expected, bound = plain.reduce_scatter(
            rows,
            nodes=world.nodes,
            per_node=world.per_node,
            config=config,
            call=call,
            multiplier=multiplier,
        )
        outputs = torch.stack([result[call] for result in results])
        assert torch.equal(outputs, expected.to(rows.dtype))
        error = (expected - rows.double().sum(0) * multiplier).abs()
        # fp32 sums and transforms lose little beside the quantizers' steps.
        slack = 1e-4 * rows.double().abs().sum((0, 2), keepdim=True)[0] * abs(multiplier)
        assert (error <= bound + slack).all()
        errors.append((error, bound))
    return errors


def check_gradients(case: Case, config: GradientConfig, multiplier: float) -> None:
    (nodes, per_node), numels, dtype, seed = case
    world = World(nodes=nodes, per_node=per_node)
    inputs = [values(world.size, world.size, n, seed=seed + i, dtype=dtype) for i, n in enumerate(numels)]
    check_sums(world, config, inputs, multiplier)


multipliers = st.sampled_from([1.0, 0.25, 1 / 3])


@few
@given(case=cases, config=gradient_configs, multiplier=multipliers)
def test_every_rank_gets_the_sum_that_the_definition_gives(
    case: Case, config: GradientConfig, multiplier: float
) -> None:
    check_gradients(case, config, multiplier)


@pytest.mark.parametrize("rounding", ["dither", "stochastic"])
@pytest.mark.parametrize("layout", [(3, 1), (3, 2)], ids=lambda layout: "x".join(map(str, layout)))
def test_sums_begin_with_what_stays_in_the_node(layout: tuple[int, int], rounding: Rounding) -> None:
    config = GradientConfig(inter_rounding=rounding, intra_rounding=rounding, pipeline_chunks=2, min_numel=0)
    check_gradients((layout, [33, 300], torch.bfloat16, 5), config, 1 / 3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@many
@given(case=cases, config=gradient_configs, multiplier=multipliers)
def test_every_rank_gets_the_sum_that_the_definition_gives_in_many_cases(
    case: Case, config: GradientConfig, multiplier: float
) -> None:
    check_gradients(case, config, multiplier)


@few
@given(case=cases, chunks=st.integers(1, 5), group_size=group_sizes)
def test_without_a_quantizer_whole_numbers_are_summed_exactly(
    case: Case, chunks: int, group_size: int
) -> None:
    (nodes, per_node), numels, _, seed = case
    world = World(nodes=nodes, per_node=per_node)
    config = GradientConfig(
        intra_bits=None, inter_bits=None, intra_group_size=group_size, pipeline_chunks=chunks, min_numel=0
    )
    generator = torch.Generator().manual_seed(seed)
    shape = (world.size, world.size)
    inputs = [torch.randint(-999, 1000, (*shape, n), generator=generator).float() for n in numels]
    results = run_threads(reduce_on_threads, world.size, world, config, inputs, 1.0, timeout=60)
    for call, rows in enumerate(inputs):
        assert torch.equal(torch.stack([result[call] for result in results]), rows.sum(0))


# Weights


def refresh_on_threads(world: World, config: WeightConfig, mains: list[Tensor]) -> list[Tensor]:
    """What this rank holds, [rows, n], or could gather, [world, n], after each refresh towards [world, n]."""
    counter, rank, topology = world.counter(), dist.get_rank(), world.topology()
    replica = WeightReplica(topology, config=config, traffic=counter, scratch=Scratch())
    replica.start_full_refresh(mains[0][rank])
    replica.wait()
    counter.end_step()
    held = []
    for rows in mains:
        replica.start_quantized_refresh(rows[rank].clone())
        replica.wait()
        held.append(replica.rows.clone())
    planned = [weight_refresh(rows.shape[1], grid=world.grid, config=config) for rows in mains]
    # The planner knows unquantized weights as bf16 only, and drops the collectives of empty rows.
    if rows.numel() and (rows.dtype != torch.float32 or config.bits is not None):
        assert_sent(counter.current_step, planned)
    if not replica.is_full:
        gathered = torch.full((rows.numel(),), float("nan"), dtype=rows.dtype)
        replica.gather(gathered)
        held.append(gathered.view(rows.shape))
    return held


def check_weights(case: Case, config: WeightConfig) -> None:
    (nodes, per_node), numels, dtype, seed = case
    world = World(nodes=nodes, per_node=per_node)
    numel = numels[0]
    start = values(world.size, numel, seed=seed, dtype=dtype)
    mains = [start]
    for number in range(1, 3):
        change = values(world.size, numel, seed=seed + number, dtype=torch.float32) * 0.01
        mains.append((mains[-1].float() + change).to(dtype))
    results = run_threads(refresh_on_threads, world.size, world, config, mains, timeout=280)
    expected = start
    is_full = config.replica == "full" or per_node == 1
    for call, rows in enumerate(mains):
        expected = plain.refresh(expected, rows, config=config)
        if config.bits is None:
            assert torch.equal(expected, rows)
        by_place = expected.view(nodes, per_node, numel)
        for rank, held in enumerate(results):
            want = by_place if is_full else by_place[:, rank % per_node]
            assert torch.equal(held[call], want)
    if not is_full:
        assert all(torch.equal(held[-1], expected) for held in results)


@few
@given(case=cases, config=weight_configs)
def test_every_replica_holds_what_the_definition_gives(case: Case, config: WeightConfig) -> None:
    check_weights(case, config)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@many
@given(case=cases, config=weight_configs)
def test_every_replica_holds_what_the_definition_gives_in_many_cases(
    case: Case, config: WeightConfig
) -> None:
    check_weights(case, config)


# Large worlds


@pytest.mark.parametrize(
    "nodes", [8, pytest.param(16, marks=pytest.mark.slow), pytest.param(32, marks=pytest.mark.slow)]
)
def test_hundreds_of_ranks_sum_and_refresh_by_definition(nodes: int) -> None:
    world, numel = World(nodes=nodes, per_node=8), 161
    generator, shape = torch.Generator().manual_seed(nodes), (world.size, world.size, numel)
    config = GradientConfig(min_numel=0, intra_group_size=64, inter_group_size=32, pipeline_chunks=2)
    whole = torch.randint(-99, 100, shape, generator=generator).float()
    exact = replace(config, intra_bits=None, inter_bits=None)
    ((error, _),) = check_sums(world, exact, [whole], 1.0)
    assert not error.any()
    ((error, bound),) = check_sums(world, config, [torch.randn(shape, generator=generator)], 1.0)
    assert (error <= bound * (1 + 1e-3)).all() and error.max() > 0
    # Far below the bound on average: the errors of world x 2 roundings are independent.
    assert error.mean() < bound.mean() / world.size**0.5
    for weights in (
        WeightConfig(group_size=64),
        WeightConfig(group_size=64, replica="full"),
        WeightConfig(bits=None),
    ):
        check_weights(((nodes, 8), [numel], torch.bfloat16, nodes), weights)
