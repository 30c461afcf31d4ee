"""Latencies by NCCL's table, kernels by their machine code, and steps at scale. Layer: no process."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sdp4bit import GradientConfig, SDP4BitConfig
from sdp4bit.collectives.chunks import pipeline_chunks
from sdp4bit.collectives.host import exchanges_of
from sdp4bit.traffic import Grid
from sdp4bit_lab.plan.costs import Cluster
from sdp4bit_lab.plan.devices import DEVICES, DeviceName, Operator, Work
from sdp4bit_lab.plan.latency import Call, Latency
from sdp4bit_lab.plan.layout import ParallelLayout
from sdp4bit_lab.plan.model import ShardedGroup
from sdp4bit_lab.plan.step import StepPlan, plan_step

GPUS, NVLINK, KERNEL_RATE, FLOPS, TOKENS = 8, 300e9, 2.4e12, 400e12, 8192
MODELS = {"7B": (6.7e9, 33), "70B": (70e9, 81)}
"""Parameters, and groups of equal size."""
STEPS = {
    ("7B", 2, 50): (1.03, 0.82, 0.85, 0.85),
    ("7B", 16, 50): (1.09, 0.83, 0.84, 0.85),
    ("7B", 128, 50): (1.29, 1.02, 0.84, 0.89),
    ("7B", 1000, 50): (2.78, 2.52, 0.84, 1.24),
    ("7B", 10_000, 50): (18.20, 17.93, 0.84, 7.54),
    ("7B", 16, 12.5): (4.28, 3.22, 0.86, 0.87),
    ("7B", 128, 12.5): (4.50, 3.43, 0.88, 0.94),
    ("7B", 1000, 12.5): (6.00, 4.93, 0.88, 1.41),
    ("70B", 16, 50): (11.25, 8.60, 8.80, 8.81),
    ("70B", 128, 50): (11.73, 8.93, 8.80, 8.85),
    ("70B", 1000, 50): (15.40, 12.60, 8.80, 9.20),
    ("70B", 10_000, 50): (53.24, 50.44, 8.80, 19.45),
    ("70B", 16, 12.5): (44.52, 33.40, 8.98, 8.99),
    ("70B", 128, 12.5): (45.29, 34.11, 9.13, 9.21),
    ("70B", 1000, 12.5): (49.00, 37.80, 9.15, 9.86),
}
"""Seconds of an independent model, by parameters, nodes and GB/s of a node: plain FSDP2 with fp32 and with
bf16 gradients; sdp4bit with three levels above 64 nodes, and with an agreement in a ring over all ranks."""


@pytest.mark.parametrize(
    ("kind", "nodes", "ranks_per_node", "microseconds"),
    [
        ("gather", 16, 8, 14 + 15 * 4.0 + 112 * 1.9),
        ("reduce", 1, 8, 14 + 7 * 1.9),
        ("gather", 2, 1, 8 + 4 + 2 * 2.8),  # PAT
        ("gather", 1000, 1, 8 + math.log2(1000) * 4 + 1000 * 2.8),
        ("all-reduce", 1, 8, 14 + 14 * 1.9),
        ("all-reduce", 64, 1, 14 + 2 * 6 * 8.5),  # a tree
        ("all-reduce", 64, 4, 14 + 2 * (3 * 1.25 + 6 * 8.5)),
        ("all-to-all", 1000, 1, 14 + 8.5 + 999 * 2),
        ("all-to-all", 1, 8, 14 + 1.9 + 7 * 2),
    ],
)
def test_latencies_are_those_of_nccl_s_table(
    kind: str, nodes: int, ranks_per_node: int, microseconds: float
) -> None:
    grid = Grid(nodes=nodes, ranks_per_node=ranks_per_node)
    call = Call(kind=kind, grid=grid, times=3)  # type: ignore[arg-type]
    assert Latency().seconds(call) == pytest.approx(3e-6 * microseconds)


@pytest.mark.parametrize("ranks", [1, 2, 3, 128, 129, 8000])
def test_an_agreement_takes_the_hops_of_the_library(ranks: int) -> None:
    longest = max(len(exchanges_of(rank, size=ranks)) for rank in range(ranks))
    assert Latency().agreement(ranks=ranks) == pytest.approx(longest * 25e-6)
    assert Latency(message=1e-3).agreement(ranks=ranks) == pytest.approx(longest * 1e-3)


@pytest.mark.parametrize(
    ("operator", "bytes_per_value", "messages", "shares"),
    [
        # Percent of a copy, from the instructions of the compiled kernels and the rates of the units.
        ("quantize to 8 bits", 4 + 1 + 1 / 64, 0, (100, 100, 100)),  # fp32 rows
        ("quantize to 8 bits", 2 + 1 + 1 / 64, 0, (100, 89, 68)),  # bf16 rows
        ("quantize to 4 bits", 2 + 1 / 2 + 1 / 64, 0, (95, 66, 50)),
        ("reduce and requantize", 4 * (1 + 1 / 64) + 1 / 2 + 1 / 64, 4, (100, 70, 51)),
        ("reduce and requantize", 8 * (1 + 1 / 64) + 1 / 2 + 1 / 64, 8, (100, 74, 54)),
        ("reduce", 2 * (1 / 2 + 1 / 64) + 4, 2, (100, 100, 100)),
        ("reduce", 4 * (1 / 2 + 1 / 64) + 4, 4, (100, 93, 67)),
        ("reduce", 8 * (1 / 2 + 1 / 64) + 4, 8, (87, 61, 44)),
        ("weights", 4.5, 0, (100, 100, 100)),
    ],
)
def test_kernels_reach_the_share_of_a_copy_that_their_machine_code_allows(
    operator: Operator, bytes_per_value: float, messages: int, shares: tuple[int, ...]
) -> None:
    work = Work(operator=operator, moved_bytes=bytes_per_value, values=1, messages=messages)
    names: tuple[DeviceName, ...] = ("h100", "h200", "b200")
    for name, copy, share in zip(names, (3.0e12, 4.3e12, 7e12), shares, strict=True):
        found = bytes_per_value / copy / max(bytes_per_value / copy, DEVICES[name].kernels.seconds(work))
        assert 100 * found == pytest.approx(share, abs=2.5), name


def planned(model: str, nodes: int, *, link: float, **layout: Any) -> StepPlan:
    """Plan groups that fill their rows, at full overlap if the layout does not say else."""
    parameters, count = MODELS[model]
    ranks = GPUS * nodes
    groups = [
        ShardedGroup(name=f"blocks.{index}", shapes=((ranks, round(parameters / count / ranks)),))
        for index in range(count)
    ]
    return plan_step(
        groups,
        flops_per_sequence=6 * parameters * TOKENS,
        cluster=Cluster(
            name="test",
            nodes=nodes,
            devices_per_node=GPUS,
            inter_bandwidth=link,
            intra_bandwidth=NVLINK,
            device_flops=FLOPS,
            quantization_bandwidth=KERNEL_RATE,
        ),
        layout=ParallelLayout(**{"overlap": 1.0, **layout}),
        config=SDP4BitConfig(),
    )


def quantized_seconds(model: str, nodes: int, *, link: float) -> float:
    """Return a step of sdp4bit from formulas, with as many slices as the library chooses."""
    parameters, count = MODELS[model]
    row = round(parameters / count / GPUS / nodes)
    inside = 2 * row * nodes * (GPUS - 1) / NVLINK + 14e-6 + (GPUS - 1) * 1.9e-6
    between = 14e-6 + (nodes - 1) * 8.5e-6
    refresh = 0.501 * row * (nodes - 1) / (link / GPUS)
    refresh += min(between, 8e-6 + math.log2(nodes) * 4e-6 + nodes * 2.8e-6)
    intra, inter = row * nodes * 1.0156 * (GPUS - 1) / NVLINK, row * 0.5156 * (nodes - 1) / (link / GPUS)
    grid = Grid(nodes=nodes, ranks_per_node=GPUS)
    slices = pipeline_chunks(row, config=GradientConfig(), grid=grid)
    messages = slices * (14e-6 + 1.9e-6 + 7 * 2e-6 + 14e-6 + 8.5e-6 + (nodes - 1) * 2e-6)
    gradients = max(intra, inter) + min(intra, inter) / slices + messages
    kernels = parameters * 5.0156 + 2 * parameters / GPUS * (GPUS * 1.0156 + 0.5156) / 2
    # Each value of a rank's replica is read and written in bf16, and read in a message.
    kernels += parameters / GPUS * (4.5 + 0.52) + parameters / GPUS / nodes * 8
    compute = 6 * parameters * TOKENS / FLOPS
    return (
        max(compute / 3, count * (inside + refresh))
        + max(compute * 2 / 3, count * (inside + gradients))
        + len(exchanges_of(0, size=GPUS * nodes)) * 25e-6
        + kernels / KERNEL_RATE
    )


@pytest.mark.parametrize(("model", "nodes", "gigabytes"), list(STEPS))
def test_steps_of_up_to_80_000_gpus_are_those_of_an_independent_model(
    model: str, nodes: int, gigabytes: float
) -> None:
    """Plain FSDP2 within 1.5 %: a call has a base time of 14 us here. Ours lies between the two cases.

    By formula ours is within 1 %: rows are cut into complete quantization groups, and messages are padded.
    """
    fp32, bf16, least, most = STEPS[model, nodes, gigabytes]
    plan = planned(model, nodes, link=1e9 * gigabytes)
    for cost, expected in ((plan.baseline, fp32), (plan.bf16_baseline, bf16)):
        assert cost.step_seconds[0] == pytest.approx(expected, rel=0.015)
    ours = plan.quantized.step_seconds[0]
    assert 0.99 * least < ours < 1.01 * most
    assert ours == pytest.approx(quantized_seconds(model, nodes, link=1e9 * gigabytes), rel=0.01)


def test_blocks_of_nodes_are_recommended_where_messages_take_time() -> None:
    plan = planned("7B", 1000, link=50e9, overlap=0.0)
    assert plan.three_levels is not None and plan.three_levels.nodes_per_block == 25
    ours, blocks = plan.quantized, plan.three_levels.quantized
    assert blocks.step_seconds[0] < 0.96 * ours.step_seconds[0]
    assert blocks.inter_bytes == pytest.approx(ours.inter_bytes, rel=0.01)
    # 33 groups: a rank sends 24 + 39 messages instead of 999, in one more call.
    saved = ours.all_to_all_seconds - blocks.all_to_all_seconds
    assert saved == pytest.approx(33 * ((999 - 63) * 2e-6 - (14e-6 + 8.5e-6)), rel=0.01)
    chosen = planned("7B", 1000, link=50e9, overlap=0.0, nodes_per_block=25)
    assert chosen.quantized == blocks and chosen.three_levels is None and chosen.grid.blocks == 40
    for nodes in (16, 97):  # few messages, or no blocks
        assert planned("7B", nodes, link=50e9, overlap=0.0).three_levels is None
