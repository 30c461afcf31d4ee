"""The collectives against the definition, over layouts, rows, sections and settings drawn at random.

Layer: threads, with real data through c10d. Equality is bit for bit, and bytes are those of
tests/oracles/traffic.py. `-m slow` draws more than a thousand cases, and worlds of up to 256 ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdp4bit.collectives.chunks import group_unit
from sdp4bit.collectives.sections import CutParam, Section, cut_row, merge_ranges
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.quantization.formats import choices
from sdp4bit.traffic import Grid, Traffic
from tests.collectives.built import BUCKET, SEED, all_reduce_of, reduce_scatter_of, replica_of
from tests.oracles import sections as by_definition
from tests.oracles.traffic import all_reduce_exchange, gradient_exchange, weight_refresh
from tests.ranks import run_threads

pytestmark = pytest.mark.gloo

few = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
many = settings(few, max_examples=500)

MAX_RANKS = 16
Sizes = tuple[int, ...]
"""Nodes and ranks per node, or blocks, nodes of a block and ranks per node."""
layouts = st.integers(1, MAX_RANKS).flatmap(
    lambda nodes: st.tuples(st.just(nodes), st.integers(1, MAX_RANKS // nodes))
)
in_blocks = st.sampled_from([(2, 2, 1), (2, 2, 2), (3, 2, 2), (2, 3, 1), (2, 4, 2), (4, 2, 1), (2, 2, 3)])
bits = st.sampled_from([*choices(), None])
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


@dataclass(frozen=True)
class Row:
    """Values of the parameters of a row, and the indices of norms and biases and of trained ones."""

    numels: tuple[int, ...]
    fine: tuple[int, ...] = ()
    trained: tuple[int, ...] = ()
    is_cut: bool = True

    @property
    def numel(self) -> int:
        return sum(self.numels)

    def sections(self, unit: int) -> tuple[Section, ...]:
        """Return the sections, cut at the borders of parameters; () for a row that is not cut."""
        if not self.is_cut:
            return ()
        parameters = [
            CutParam(numel=numel, is_fine=index in self.fine, number=index)
            for index, numel in enumerate(self.numels)
        ]
        return cut_row(parameters, unit=unit, count=len(parameters))

    def trained_ranges(self) -> list[tuple[int, int]]:
        starts = [sum(self.numels[:index]) for index in range(len(self.numels))]
        return merge_ranges(
            [(starts[i], starts[i] + n) for i, n in enumerate(self.numels) if i in self.trained]
        )


numels = st.one_of(st.sampled_from([0, 1, 32, 64, 128, 384]), st.integers(0, 200))
indices = st.sets(st.integers(0, 4)).map(lambda chosen: tuple(sorted(chosen)))
rows = st.one_of(
    lengths.map(lambda numel: Row((numel,), is_cut=False)),
    st.builds(Row, st.lists(numels, min_size=1, max_size=5).map(tuple), indices, indices),
)
MIXED = Row((100, 33, 768, 384, 130, 1, 64), fine=(1, 5, 6), trained=(1, 2, 4, 5))
"""Aligned matrices, norms and biases among them."""

Case = tuple[Sizes, list[Row], torch.dtype, int]
"""Sizes, rows, their type, a seed."""
some_rows = st.lists(rows, min_size=1, max_size=3), dtypes, st.integers(0, 1 << 20)
cases = st.tuples(layouts, *some_rows)
in_levels = st.tuples(layouts | in_blocks, *some_rows)
FLAT = ((2, 2), [MIXED], torch.float32, 1)
NODES = ((4, 1), [MIXED], torch.float32, 2)
BLOCKS = ((2, 2, 2), [MIXED], torch.float32, 3)
NODES_IN_BLOCKS = ((2, 2, 1), [MIXED], torch.float32, 4)


def grid_of(sizes: Sizes) -> Grid:
    *blocks, nodes, per_node = sizes
    return Grid(nodes=prod(blocks) * nodes, ranks_per_node=per_node, blocks=prod(blocks))


def values(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Values over several magnitudes, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp2(torch.randint(-6, 3, (*shape[:-1], 1), generator=generator).float())
    drawn = torch.randn(shape, generator=generator) * scales
    return torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, drawn).to(dtype)


def assert_sent(sent: Traffic, planned: list[Traffic]) -> None:
    assert sent.intra_bytes == sum(each.intra_bytes for each in planned)
    assert sent.inter_bytes == sum(each.inter_bytes for each in planned)
    assert sent.padding_bytes == pytest.approx(sum(each.padding_bytes for each in planned))
    assert sent.collectives == sum(each.collectives for each in planned)


# Gradients


Inputs = list[tuple[Tensor, tuple[Section, ...]]]
"""Rows of all ranks, and their sections."""


def reduce_on_threads(
    sizes: Sizes, config: GradientConfig, inputs: Inputs, multiplier: float
) -> list[Tensor]:
    """Return the row that this rank ends with for each of the inputs [*sizes, *sizes, values]."""
    grid = grid_of(sizes)
    reduce_scatter, traffic = reduce_scatter_of(grid.nodes, grid.ranks_per_node, config, blocks=grid.blocks)
    outputs, planned = [], []
    for call, (rows, sections) in enumerate(inputs):
        own = rows.flatten(0, len(sizes) - 1)[dist.get_rank()].flatten().clone()
        output = torch.full(rows.shape[-1:], float("nan"), dtype=rows.dtype)
        reduce_scatter(output, own, call=call, multiplier=multiplier, sections=sections)
        outputs.append(output)
        planned.append(gradient_exchange(rows.shape[-1], grid=grid, config=config, sections=sections))
    assert_sent(traffic.total, planned)
    return outputs


def check_sums(config: GradientConfig, inputs: Inputs, multiplier: float) -> list[tuple[Tensor, Tensor]]:
    """Return of each of the inputs [*sizes, *sizes, values] the errors of the sums, and bounds for them."""
    first = inputs[0][0]
    sizes = tuple(first.shape[: first.dim() // 2])
    senders = tuple(range(len(sizes)))
    results = run_threads(reduce_on_threads, prod(sizes), sizes, config, inputs, multiplier, timeout=280)
    errors = []
    for call, (rows, sections) in enumerate(inputs):
        expected, bound = by_definition.reduce_scatter(
            rows, sections, config=config, seed=SEED, bucket=BUCKET, call=call, multiplier=multiplier
        )
        outputs = torch.stack([result[call] for result in results]).view(expected.shape)
        assert torch.equal(outputs, expected.to(rows.dtype))
        error = (expected - rows.double().sum(senders) * multiplier).abs()
        # fp32 sums and transforms lose little beside the quantizers' steps.
        slack = 1e-4 * rows.double().abs().sum((*senders, -1))[..., None] * abs(multiplier)
        assert (error <= bound + slack).all()
        errors.append((error, bound))
    return errors


def check_gradients(case: Case, config: GradientConfig, multiplier: float) -> None:
    layout, drawn, dtype, seed = case
    unit = group_unit(config, grid=grid_of(layout))
    inputs = [
        (values(*layout, *layout, row.numel, seed=seed + index, dtype=dtype), row.sections(unit))
        for index, row in enumerate(drawn)
    ]
    check_sums(config, inputs, multiplier)


multipliers = st.sampled_from([1.0, 0.25, 1 / 3])
SLICES = GradientConfig(min_numel=0, intra_group_size=96, pipeline_chunks=3)
NARROW = GradientConfig(min_numel=0, intra_bits=3, inter_bits=3.5, intra_group_size=96, hadamard=False)


@few
@given(case=in_levels, config=gradient_configs, multiplier=multipliers)
@example(case=FLAT, config=SLICES, multiplier=0.25)
@example(case=NODES, config=NARROW, multiplier=0.25)
@example(case=BLOCKS, config=SLICES, multiplier=0.125)
@example(case=BLOCKS, config=GradientConfig(min_numel=0, exact_own=False), multiplier=1.0)
@example(case=NODES_IN_BLOCKS, config=NARROW, multiplier=0.25)
def test_every_rank_gets_the_sum_that_the_definition_gives(
    case: Case, config: GradientConfig, multiplier: float
) -> None:
    check_gradients(case, config, multiplier)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@many
@given(case=in_levels, config=gradient_configs, multiplier=multipliers)
def test_every_rank_gets_the_sum_that_the_definition_gives_in_many_cases(
    case: Case, config: GradientConfig, multiplier: float
) -> None:
    check_gradients(case, config, multiplier)


@few
@given(case=in_levels, chunks=st.integers(1, 5), group_size=group_sizes)
@example(case=BLOCKS, chunks=3, group_size=96)
def test_integers_are_summed_exactly_without_a_quantizer(case: Case, chunks: int, group_size: int) -> None:
    layout, drawn, _, seed = case
    config = GradientConfig(
        intra_bits=None, inter_bits=None, intra_group_size=group_size, pipeline_chunks=chunks, min_numel=0
    )
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*layout, *layout, row.numel) for row in drawn]
    inputs: Inputs = [(torch.randint(-999, 1000, shape, generator=generator).float(), ()) for shape in shapes]
    results = run_threads(reduce_on_threads, prod(layout), layout, config, inputs, 1.0, timeout=60)
    for call, (rows, _) in enumerate(inputs):
        sums = torch.stack([result[call] for result in results])
        assert torch.equal(sums, rows.sum(tuple(range(len(layout)))).flatten(0, -2))


def all_reduce_on_threads(
    sizes: Sizes, config: GradientConfig, inputs: Inputs, multiplier: float
) -> list[Tensor]:
    """Return the sum that this rank ends with for each of the inputs [*sizes, values]."""
    grid = grid_of(sizes)
    all_reduce, traffic = all_reduce_of(grid.nodes, grid.ranks_per_node, config, blocks=grid.blocks)
    outputs, planned = [], []
    for call, (rows, sections) in enumerate(inputs):
        outputs.append(rows.flatten(0, -2)[dist.get_rank()].clone())
        all_reduce(outputs[-1], call=call, multiplier=multiplier, sections=sections)
        planned.append(all_reduce_exchange(rows.shape[-1], grid=grid, config=config, sections=sections))
    assert_sent(traffic.total, planned)
    return outputs


@few
@given(case=in_levels, config=gradient_configs, multiplier=multipliers)
@example(case=FLAT, config=SLICES, multiplier=0.25)
@example(case=NODES, config=NARROW, multiplier=0.25)
@example(case=BLOCKS, config=SLICES, multiplier=0.125)
@example(case=NODES_IN_BLOCKS, config=NARROW, multiplier=0.25)
def test_all_ranks_get_the_sum_of_tensors_that_the_definition_gives(
    case: Case, config: GradientConfig, multiplier: float
) -> None:
    sizes, drawn, dtype, seed = case
    unit = group_unit(config, grid=grid_of(sizes))
    inputs = [
        (values(*sizes, row.numel, seed=seed + index, dtype=dtype), row.sections(unit))
        for index, row in enumerate(drawn)
    ]
    arguments = sizes, config, inputs, multiplier
    results = run_threads(all_reduce_on_threads, prod(sizes), *arguments, timeout=280)
    for call, (rows, sections) in enumerate(inputs):
        expected = by_definition.all_reduce(
            rows, sections, config=config, seed=SEED, bucket=BUCKET, call=call, multiplier=multiplier
        )
        assert all(torch.equal(result[call], expected.to(dtype)) for result in results)


# Weights


def refresh_on_threads(
    nodes: int, per_node: int, config: WeightConfig, row: Row, mains: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor | None]:
    """Return the rows that this rank holds after each refresh, the last one of trained parameters only.

    Args:
        mains: [n, g, values], at the start and at each refresh.
    """
    sections, rank = row.sections(config.group_size), dist.get_rank()
    replica, traffic = replica_of(nodes, per_node, config, sections=sections)
    own = [each.flatten(0, 1)[rank].clone() for each in mains]
    replica.start_full_refresh(own[0])
    replica.wait()
    traffic.end_step()
    grid, held = Grid(nodes=nodes, ranks_per_node=per_node), []
    for main in own:
        ranges = row.trained_ranges() if main is own[-1] and row.is_cut else None
        replica.start_quantized_refresh(main, ranges=ranges)
        replica.wait()
        assert replica.rows is not None
        held.append(replica.rows.clone())
        # Empty rows have a collective, and rows of full precision are counted in their own dtype.
        if ranges is None and row.numel and (main.dtype != torch.float32 or config.bits is not None):
            planned = weight_refresh(row.numel, grid=grid, config=config, sections=sections)
            assert_sent(traffic.current_step, [planned])
        traffic.end_step()
    if replica.holds_all_rows:
        return held, None
    gathered = torch.full((mains[0].numel(),), float("nan"), dtype=mains[0].dtype)
    replica.gather(gathered)
    return held, gathered.view(mains[0].shape)


def check_weights(case: Case, config: WeightConfig) -> None:
    (nodes, per_node), (row, *_), dtype, seed = case
    shape = nodes, per_node, row.numel
    mains = [values(*shape, seed=seed, dtype=dtype)]
    for number in range(1, 4):
        mains.append(
            (mains[-1].float() + 0.01 * values(*shape, seed=seed + number, dtype=torch.float32)).to(dtype)
        )
    results = run_threads(
        refresh_on_threads, nodes * per_node, nodes, per_node, config, row, mains, timeout=280
    )
    sections, expected = row.sections(config.group_size), mains[0].flatten(0, 1)
    is_full = config.replica == "full" or per_node == 1
    for call, main in enumerate(mains):
        is_last = main is mains[-1] and row.is_cut
        refreshed = [each.within(row.trained_ranges()) for each in sections] if is_last else sections
        if refreshed or not is_last:
            expected = by_definition.refresh(expected, main.flatten(0, 1), refreshed, config=config)
        by_node = expected.view(shape)
        for rank, (held, _) in enumerate(results):
            assert torch.equal(held[call], by_node if is_full else by_node[:, rank % per_node])
    assert all(gathered is None or torch.equal(gathered, expected.view(shape)) for _, gathered in results)


@few
@given(case=cases, config=weight_configs)
@example(case=FLAT, config=WeightConfig(group_size=384))
@example(case=FLAT, config=WeightConfig(group_size=384, bits=2, replica="full"))
@example(case=NODES, config=WeightConfig(group_size=384, mode="direct"))
def test_every_replica_holds_the_weights_that_the_definition_gives(case: Case, config: WeightConfig) -> None:
    check_weights(case, config)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@many
@given(case=cases, config=weight_configs)
def test_every_replica_holds_the_weights_that_the_definition_gives_in_many_cases(
    case: Case, config: WeightConfig
) -> None:
    check_weights(case, config)


# Large worlds


@pytest.mark.parametrize(
    "nodes", [8, pytest.param(16, marks=pytest.mark.slow), pytest.param(32, marks=pytest.mark.slow)]
)
def test_hundreds_of_ranks_sum_and_refresh_by_definition(nodes: int) -> None:
    numel, world = 161, nodes * 8
    generator, shape = torch.Generator().manual_seed(nodes), (nodes, 8, nodes, 8, numel)
    config = GradientConfig(min_numel=0, intra_group_size=64, inter_group_size=32, pipeline_chunks=2)
    integers = torch.randint(-99, 100, shape, generator=generator).float()
    exact = replace(config, intra_bits=None, inter_bits=None)
    ((error, _),) = check_sums(exact, [(integers, ())], 1.0)
    assert not error.any()
    ((error, bound),) = check_sums(config, [(torch.randn(shape, generator=generator), ())], 1.0)
    assert (error <= bound * (1 + 1e-3)).all() and error.max() > 0
    # Far below the bound on average: the errors of world x 2 roundings are independent.
    assert error.mean() < bound.mean() / world**0.5
    for weights in (
        WeightConfig(group_size=64),
        WeightConfig(group_size=64, replica="full"),
        WeightConfig(bits=None),
    ):
        check_weights(((nodes, 8), [Row((numel,), is_cut=False)], torch.bfloat16, nodes), weights)
