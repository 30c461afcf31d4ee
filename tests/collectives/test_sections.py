"""Rows in sections: where they are cut, and each section by the definition of a row of its own.

Layer: threads with real data through c10d, against tests/collectives/plain_collectives.py and simulated
ranks. Equality is bit for bit; bytes are the planner's, collectives those of a row that is not cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import RowParameter, Section, cut_row
from sdp4bit.collectives.topology import create_topologies
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.traffic import TrafficCounter
from sdp4bit_lab.plan.traffic import RankGrid, all_reduce_exchange, gradient_exchange, weight_refresh
from sdp4bit_lab.simulated.collectives import (
    SimulatedAllReduce,
    SimulatedReduceScatter,
    SimulatedReplica,
    simulated_layout,
)
from tests.collectives import plain_collectives as plain
from tests.ranks import run_threads

UNIT = 384
LAYOUTS = [(2, 2), (4, 1)]
NUMELS = [(100, False), (33, True), (2 * UNIT, False), (UNIT, False), (130, False), (1, True), (64, True)]
"""Values of each parameter of a row, and whether it is a norm or a bias."""
NUMEL = sum(numel for numel, _ in NUMELS)
GRADIENTS = {
    "dither": GradientConfig(min_numel=0, intra_group_size=96, pipeline_chunks=1),
    "slices": GradientConfig(min_numel=0, intra_group_size=96, pipeline_chunks=3),
    "2 bits": GradientConfig(min_numel=0, intra_bits=3, inter_bits=2, intra_group_size=96),
    "3.5 bits": GradientConfig(min_numel=0, inter_bits=3.5, intra_group_size=96),
    "nearest": GradientConfig(min_numel=0, inter_rounding="nearest", intra_group_size=96, hadamard=False),
    "intra in fp32": GradientConfig(min_numel=0, intra_bits=None, intra_group_size=96),
}
WEIGHTS = {
    "difference": WeightConfig(group_size=UNIT),
    "full": WeightConfig(group_size=UNIT, replica="full"),
    "2 bits": WeightConfig(group_size=UNIT, bits=2),
    "direct": WeightConfig(group_size=UNIT, mode="direct"),
}


def parameters_of(numels: Sequence[tuple[int, bool]]) -> list[RowParameter]:
    return [RowParameter(numel=n, is_fine=fine, number=i) for i, (n, fine) in enumerate(numels)]


SECTIONS = cut_row(parameters_of(NUMELS), unit=UNIT, count=len(NUMELS))


def values(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of every parameter at a scale of its own, a thousand times that of the one before."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    at = 0
    for index, (numel, _) in enumerate(NUMELS):
        drawn[..., at : at + numel] *= 1000.0 ** (index % 3 - 1)
        at += numel
    return drawn.to(dtype)


# -- where rows are cut -------------------------------------------------------------------------------


def test_a_row_is_cut_at_the_borders_of_its_parameters() -> None:
    first, aligned, fine = SECTIONS
    assert first.ranges == ((0, 100),) and first.unit == 32
    assert aligned.ranges == ((133, 263 + 3 * UNIT),) and aligned.unit == UNIT  # three matrices, aligned
    assert fine.ranges == ((100, 133), (263 + 3 * UNIT, 264 + 3 * UNIT), (264 + 3 * UNIT, NUMEL))
    assert fine.is_fine and fine.numel == 64 + 32 + 64
    assert [section.number for section in SECTIONS] == [0, 2, 1]


parameters = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0, 1, 32, 64, 128, 256, 384]), st.integers(0, 400)),
        st.booleans(),
        st.sampled_from([(), ("tensor",)]),
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(drawn=parameters, unit=st.sampled_from([32, 64, 128]))
def test_no_block_and_no_group_has_values_of_two_parameters(
    drawn: list[tuple[int, bool, tuple[str, ...]]], unit: int
) -> None:
    owner = torch.cat([torch.full((n,), i) for i, (n, *_) in enumerate(drawn)] or [torch.empty(0)])
    row = [RowParameter(numel=n, is_fine=fine, number=i, kind=k) for i, (n, fine, k) in enumerate(drawn)]
    sections = cut_row(row, unit=unit, count=len(row))
    seen = torch.zeros(len(owner), dtype=torch.int64)
    for section in sections:
        for start, end in section.ranges:
            seen[start:end] += 1
        # 0 fills a section up, so owners are counted from 1.
        taken = section.take(owner.double() + 1)
        assert len(taken) == section.numel
        for group in taken.split(32 if section.is_fine else unit):
            assert len(set(group.tolist()) - {0.0}) == 1
        members = [drawn[int(i) - 1] for i in set(taken.tolist()) - {0.0}]
        assert all(fine == section.is_fine for _, fine, _ in members)
        assert len({kind for *_, kind in members}) == 1
        back = torch.zeros(len(owner), dtype=torch.float64)
        section.take(back).copy_(taken)
        section.put(taken, back)
        assert torch.equal(section.take(back), taken)
    assert (seen == 1).all()
    assert len({section.number for section in sections}) == len(sections)
    assert len({section.call(call) for section in sections for call in range(3)}) == 3 * len(sections)


def test_the_numbers_of_copies_do_not_depend_on_what_is_split() -> None:
    """A tensor-parallel peer whose split parameters are shorter rounds the copies by the same bits."""

    def copies(split: int) -> list[tuple[int, int, int]]:
        row = [
            RowParameter(numel=split, is_fine=False, number=0, kind="split"),
            RowParameter(numel=64, is_fine=False, number=1),
            RowParameter(numel=split, is_fine=True, number=2, kind="split"),
            RowParameter(numel=40, is_fine=True, number=3),
        ]
        cut = cut_row(row, unit=32, count=4)
        return [(s.call(5), s.numel, s.unit) for s in cut if s.number in (1, 3)]

    assert copies(33) == copies(64) == [(21, 64, 32), (23, 40, 32)]


# -- each section by definition -----------------------------------------------------------------------


def of_section(config: Any, section: Section) -> Any:
    """The settings of a row that holds nothing but this section."""
    if not section.is_fine:
        return config
    if isinstance(config, WeightConfig):
        return replace(config, bits=max(8, config.bits), group_size=32, clip=1.0)
    bits = {
        name: value and max(8, value)
        for name, value in (("intra_bits", config.intra_bits), ("inter_bits", config.inter_bits))
    }
    return replace(config, **bits, intra_group_size=32, inter_group_size=32)


def grid_of(nodes: int, per_node: int) -> tuple[RankGrid, TrafficCounter]:
    return RankGrid(nodes=nodes, ranks_per_node=per_node), TrafficCounter(
        nodes=nodes, ranks_per_node=per_node
    )


def assert_sent(counter: TrafficCounter, *planned: Any) -> None:
    sent = counter.total
    assert sent.intra_bytes == sum(each.intra_bytes for each in planned)
    assert sent.inter_bytes == sum(each.inter_bytes for each in planned)
    assert sent.padding_bytes == pytest.approx(sum(each.padding_bytes for each in planned))
    assert sent.collectives == sum(each.collectives for each in planned)


def reduce_on_threads(nodes: int, per_node: int, config: GradientConfig, inputs: Tensor) -> Tensor:
    layout, rank = simulated_layout(nodes * per_node, ranks_per_node=per_node), dist.get_rank()
    grid, counter = grid_of(nodes, per_node)
    reduction = QuantizedReduceScatter(
        create_topologies([layout])[layout.ranks],
        config=config,
        seed=plain.SEED,
        rank=rank,
        bucket=plain.BUCKET,
        traffic=counter,
        scratch=Scratch(),
    )
    output = torch.full((NUMEL,), float("nan"))
    reduction(output, inputs[rank].reshape(-1).clone(), call=5, multiplier=0.25, sections=SECTIONS)
    planned = gradient_exchange(NUMEL, grid=grid, config=config, sections=SECTIONS)
    assert_sent(counter, planned)
    assert planned.collectives == gradient_exchange(NUMEL, grid=grid, config=config).collectives
    return output


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize(("nodes", "per_node"), LAYOUTS)
def test_each_section_is_summed_as_if_it_were_alone(nodes: int, per_node: int, name: str) -> None:
    world, config = nodes * per_node, GRADIENTS[name]
    inputs = values(world, world, NUMEL, seed=1)
    found = torch.stack(run_threads(reduce_on_threads, world, nodes, per_node, config, inputs))
    for section in SECTIONS:
        expected, _ = plain.reduce_scatter(
            section.take(inputs),
            nodes=nodes,
            per_node=per_node,
            config=of_section(config, section),
            call=section.call(5),
            multiplier=0.25,
        )
        place = torch.zeros(world, NUMEL)
        section.take(place).copy_(expected)
        section.put(expected, place)
        assert torch.equal(section.take(found), section.take(place)), (name, section)

    _, counter = grid_of(nodes, per_node)
    simulated = SimulatedReduceScatter(
        simulated_layout(world, ranks_per_node=per_node),
        config=config,
        seed=plain.SEED,
        bucket=plain.BUCKET,
        traffic=counter,
        scratch=Scratch(),
    )
    for rank in range(world):
        simulated.add(inputs[rank].clone(), call=5, sections=SECTIONS)
    rows: dict[int, Tensor] = {}
    simulated.finish(lambda rank, row: rows.__setitem__(rank, row * 0.25))
    assert torch.equal(torch.stack([rows[rank] for rank in range(world)]), found)


def all_reduce_on_threads(nodes: int, per_node: int, config: GradientConfig, inputs: Tensor) -> Tensor:
    layout, rank = simulated_layout(nodes * per_node, ranks_per_node=per_node), dist.get_rank()
    grid, counter = grid_of(nodes, per_node)
    all_reduce = QuantizedAllReduce(
        create_topologies([layout])[layout.ranks],
        config=config,
        seed=plain.SEED,
        ranks=range(layout.size),
        bucket=plain.BUCKET,
        traffic=counter,
        scratch=Scratch(),
    )
    found = inputs[rank].clone()
    all_reduce(found, call=5, multiplier=0.25, sections=SECTIONS)
    planned = all_reduce_exchange(NUMEL, grid=grid, config=config, sections=SECTIONS)
    assert_sent(counter, planned)
    if config.pipeline_chunks == 1:  # short pieces of the whole row make fewer slices
        assert planned.collectives == all_reduce_exchange(NUMEL, grid=grid, config=config).collectives
    return found


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize(("nodes", "per_node"), LAYOUTS)
def test_each_section_is_all_reduced_as_if_it_were_alone(nodes: int, per_node: int, name: str) -> None:
    world, config = nodes * per_node, GRADIENTS[name]
    inputs = values(world, NUMEL, seed=2)
    first, *others = run_threads(all_reduce_on_threads, world, nodes, per_node, config, inputs)
    assert all(torch.equal(first, other) for other in others)
    for section in SECTIONS:
        expected, _ = plain.all_reduce(
            section.take(inputs),
            nodes=nodes,
            per_node=per_node,
            config=of_section(config, section),
            call=section.call(5),
            multiplier=0.25,
        )
        place = torch.zeros(NUMEL)
        section.take(place).copy_(expected)
        section.put(expected, place)
        if section.unit == 32:  # of several matrices a piece begins at a group, which the definition lacks
            assert torch.equal(section.take(first), section.take(place)), (name, section)
    simulated = SimulatedAllReduce(
        simulated_layout(world, ranks_per_node=per_node),
        config=config,
        seed=plain.SEED,
        bucket=plain.BUCKET,
        scratch=Scratch(),
    )
    assert torch.equal(simulated(list(inputs), call=5, multiplier=0.25, sections=SECTIONS), first)


Held = tuple[Tensor, Tensor, bool]


def refresh_on_threads(nodes: int, per_node: int, config: WeightConfig, mains: Tensor) -> Held:
    """What a rank holds after a refresh of the whole row, after one of some parameters, and its messages."""
    layout, rank = simulated_layout(nodes * per_node, ranks_per_node=per_node), dist.get_rank()
    grid, counter = grid_of(nodes, per_node)
    replica = WeightReplica(
        create_topologies([layout])[layout.ranks],
        config=config,
        traffic=counter,
        scratch=Scratch(),
        sections=SECTIONS,
    )
    replica.start_full_refresh(mains[0, rank].bfloat16())
    replica.wait()
    before = counter.total
    replica.start_quantized_refresh(mains[1, rank])
    replica.wait()
    whole = replica.rows.clone()  # type: ignore[union-attr]
    sent, planned = counter.total, weight_refresh(NUMEL, grid=grid, config=config, sections=SECTIONS)
    assert sent.inter_bytes - before.inter_bytes == planned.inter_bytes
    assert sent.intra_bytes - before.intra_bytes == planned.intra_bytes
    assert sent.collectives - before.collectives == planned.collectives
    replica.start_quantized_refresh(mains[2, rank], ranges=TRAINED)
    replica.wait()
    return whole, replica.rows, replica.is_full  # type: ignore[return-value]


TRAINED = [(100, 133 + 2 * UNIT), (133 + 3 * UNIT, 264 + 3 * UNIT)]
"""All but the first parameter, the second of three aligned matrices and the last norm."""


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 1)])
def test_each_section_is_refreshed_as_if_it_were_alone(nodes: int, per_node: int, name: str) -> None:
    world, config = nodes * per_node, WEIGHTS[name]
    mains = torch.stack([values(world, NUMEL, seed=3)] * 3)
    mains[1] += 0.01 * values(world, NUMEL, seed=4)
    mains[2] = mains[1] + 0.01 * values(world, NUMEL, seed=5)
    results = run_threads(refresh_on_threads, world, nodes, per_node, config, mains)
    expected = mains[0].bfloat16()
    whole = expected.clone()
    for sections, call in ((SECTIONS, 5), ([section.within(TRAINED) for section in SECTIONS], 6)):
        for section in sections:
            if section.ranges:
                moved = plain.refresh(
                    section.take(expected),
                    section.take(mains[call - 4]),
                    config=of_section(config, section),
                )
                section.take(expected).copy_(moved)
                section.put(moved, expected)
        if call == 5:
            whole = expected.clone()
    for rank, (held, after, is_full) in enumerate(results):
        for got, want in ((held, whole), (after, expected)):
            by_place = want.view(nodes, per_node, NUMEL)
            assert torch.equal(got, by_place if is_full else by_place[:, rank % per_node])

    _, counter = grid_of(nodes, per_node)
    simulated = SimulatedReplica(
        simulated_layout(world, ranks_per_node=per_node),
        config=config,
        traffic=counter,
        scratch=Scratch(),
    )
    held = mains[0].bfloat16()
    simulated.refresh(mains[1], held, sections=SECTIONS)
    assert torch.equal(held, whole)


def test_norms_and_biases_have_errors_of_eight_bits() -> None:
    """Half a step of 8 bits in blocks of 32 of the parameter alone, whatever its neighbours are."""
    config, world = WeightConfig(bits=2), 4
    mains = torch.stack([torch.zeros(world, NUMEL), values(world, NUMEL, seed=6)])
    simulated = SimulatedReplica(
        simulated_layout(world, ranks_per_node=2),
        config=config,
        traffic=TrafficCounter(nodes=2, ranks_per_node=2),
        scratch=Scratch(),
    )
    held = mains[0].clone()
    simulated.refresh(mains[1], held, sections=SECTIONS)
    at = 0
    for numel, fine in NUMELS:
        for start in range(at, at + numel, 32) if fine else ():
            block = slice(start, min(start + 32, at + numel))
            wanted = mains[1, :, block]
            # Scales are bf16: 2**-8 of the step.
            half_step = wanted.abs().amax(1, keepdim=True) / 127 / 2 * (1 + 2**-7)
            assert ((held[:, block] - wanted).abs() <= half_step).all()
        at += numel
