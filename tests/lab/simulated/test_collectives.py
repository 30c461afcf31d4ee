"""Simulated ranks compute what the definition gives, bit for bit, and count the bytes of one rank.

Layer: no process. tests/collectives compares the collectives between processes with the same definition.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import Section
from sdp4bit.collectives.topology import Nodes
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.traffic import Traffic, TrafficCounter
from sdp4bit_lab.simulated.collectives import (
    SimulatedAllReduce,
    SimulatedReduceScatter,
    SimulatedReplica,
    simulated_layout,
)
from tests.collectives.test_sections import NUMEL, SECTIONS
from tests.oracles import sections as by_definition
from tests.oracles.traffic import gradient_exchange, weight_gather, weight_refresh

ROWS: list[tuple[int, tuple[Section, ...]]] = [*((n, ()) for n in (0, 1, 31, 777, 3001)), (NUMEL, SECTIONS)]
LAYOUTS = [(2, 2), (4, 1), (1, 4), (2, 2, 1)]
"""Nodes and ranks per node, or blocks, nodes of a block and ranks per node."""
GRADIENTS = [
    replace(config, min_numel=0)
    for config in (
        GradientConfig(intra_group_size=96),
        GradientConfig(intra_bits=4, inter_bits=8, hadamard=False, intra_group_size=96, pipeline_chunks=3),
        GradientConfig(intra_bits=None, intra_group_size=96, inter_group_size=384, inter_rounding="nearest"),
        GradientConfig(intra_group_size=96, inter_bits=3.5, pipeline_chunks=2),
        GradientConfig(intra_group_size=96, exact_own=False),
        GradientConfig(intra_group_size=96, inter_bits=None, pipeline_chunks=2, intra_rounding="nearest"),
        GradientConfig(intra_group_size=96, pipeline_chunks=2, intra_rounding="dither"),
        GradientConfig(intra_bits=None, inter_bits=None, intra_group_size=96),
    )
]
WEIGHTS = [
    WeightConfig(group_size=384),
    WeightConfig(replica="full", group_size=96),
    WeightConfig(mode="direct", bits=8, group_size=384),
    WeightConfig(bits=3.5, group_size=128),
    WeightConfig(bits=2, group_size=384),
    WeightConfig(bits=None, replica="full"),
]


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layout_of(sizes: tuple[int, ...]) -> Nodes:
    return simulated_layout(4, ranks_per_node=sizes[-1], nodes_per_block=sizes[-2])


def assert_sent(sent: Traffic, planned: list[Traffic]) -> None:
    total = sum(planned, Traffic())
    assert (sent.intra_bytes, sent.inter_bytes) == (total.intra_bytes, total.inter_bytes)
    assert sent.padding_bytes == pytest.approx(total.padding_bytes)
    assert sent.collectives == total.collectives


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_sums_of_rows_and_their_bytes(sizes: tuple[int, ...]) -> None:
    scratch, grid = Scratch(), layout_of(sizes)
    for bucket, config in enumerate(GRADIENTS):
        traffic, planned = TrafficCounter(grid), []
        reduce_scatter = SimulatedReduceScatter(
            grid,
            config=config,
            seed=7,
            bucket=bucket,
            traffic=traffic,
            scratch=scratch,
        )
        for call, (numel, sections) in enumerate(ROWS):
            inputs = values(4, 4, numel, seed=call)
            for rank in range(4):
                reduce_scatter.add(inputs[rank].clone(), call=call, sections=sections)
            rows: dict[int, Tensor] = {}
            reduce_scatter.finish(lambda rank, row, rows=rows: rows.update({rank: row.clone()}))
            sums = torch.stack([rows[rank] for rank in range(4)])
            expected, _ = by_definition.reduce_scatter(
                inputs.view(*sizes, *sizes, numel),
                sections,
                config=config,
                seed=7,
                bucket=bucket,
                call=call,
                multiplier=1.0,
            )
            assert torch.equal(sums, expected.view(4, numel)), (config, numel)
            planned.append(gradient_exchange(numel, grid=grid, config=config, sections=sections))
        assert_sent(traffic.total, planned)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_sums_of_tensors(sizes: tuple[int, ...]) -> None:
    layout = layout_of(sizes)
    for bucket, config in enumerate(GRADIENTS):
        all_reduce = SimulatedAllReduce(layout, config=config, seed=7, bucket=bucket, scratch=Scratch())
        for call, (numel, sections) in enumerate(ROWS):
            inputs = values(4, numel, seed=call)
            expected = by_definition.all_reduce(
                inputs.view(*sizes, numel),
                sections,
                config=config,
                seed=7,
                bucket=bucket,
                call=call,
                multiplier=0.25,
            )
            found = all_reduce(list(inputs), call=call, multiplier=0.25, sections=sections)
            assert torch.equal(found, expected), (config, numel)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_replicas_and_their_bytes(sizes: tuple[int, ...]) -> None:
    layout = grid = layout_of(sizes)
    for config in WEIGHTS:
        traffic, planned = TrafficCounter(layout), []
        for numel, sections in ROWS[1:]:
            replica = SimulatedReplica(
                layout, config=config, traffic=traffic, scratch=Scratch(), sections=sections
            )
            mains = [values(4, numel, seed=step).bfloat16() for step in range(3)]
            held = torch.empty_like(mains[0])
            replica.rows = held
            replica.start_full_refresh(mains[0])
            expected = mains[0]
            for main in mains[1:]:
                replica.start_quantized_refresh(main)
                expected = by_definition.refresh(expected, main, sections, config=config)
            assert torch.equal(held, expected), config
            exact = replace(config, bits=None, clip=None)
            planned.append(weight_refresh(numel, grid=grid, config=exact))
            planned += 2 * [weight_refresh(numel, grid=grid, config=config, sections=sections)]
        replica.count_gather(held[0].nbytes)
        planned.append(weight_gather(held.shape[1], grid=grid, config=config))
        assert_sent(traffic.total, planned)
