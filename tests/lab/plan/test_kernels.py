"""Kernels by instructions and bytes, communicators, and a verdict over a range: by hand-computed numbers.

Layer: no process.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit_lab.plan.kernels import DEVICES, DeviceName, Kernel, Operator, kernel_seconds
from sdp4bit_lab.plan.memory import communicators
from sdp4bit_lab.plan.model import ShardedGroup
from sdp4bit_lab.plan.step import Cluster, ParallelLayout, plan_step, verdict
from sdp4bit_lab.plan.traffic import RankGrid, all_reduce_exchange, gradient_exchange, weight_refresh

MILLION = 1_000_000
FP32, INT8, INT4 = 4.0, 1 + 2 / 128, 1 / 2 + 2 / 128
DIFFERENCE = 1 / 2 + 2 / 2048


@pytest.mark.parametrize(
    ("operator", "messages", "bytes_per_value", "device", "microseconds"),
    [
        # H100: 3.35 TB/s x 0.92 = 3.082 TB/s; 132 x 128 x 1.755 GHz = 29.65 instructions per ps.
        ("hadamard_quantize_8", 0, FP32 + INT8, "h100", 1.627),  # bytes; 18.2 instructions take 0.614
        ("hadamard_quantize_4", 0, FP32 + INT4, "h100", 1.465),  # bytes; 17.9 take 0.604
        ("dequantize_reduce_quantize", 4, 4 * INT8 + INT4, "h100", 1.485),  # bytes; 28.5 take 0.961
        ("dequantize_reduce_quantize", 8, 8 * INT8 + INT4, "h100", 2.804),  # bytes; 51.1 take 1.723
        ("dequantize_reduce_hadamard", 4, 4 * INT4 + FP32, "h100", 1.967),  # bytes; 32.6 take 1.099
        ("subtract_quantize", 0, 4 + DIFFERENCE, "h100", 1.461),  # bytes; 17.6 take 0.594
        # H200: as many instructions, 4.8 TB/s x 0.92 = 4.416 TB/s.
        ("hadamard_quantize_4", 0, FP32 + INT4, "h200", 1.023),
        ("dequantize_reduce_quantize", 4, 4 * INT8 + INT4, "h200", 1.037),
        # B200: 7.36 TB/s, 148 x 128 x 1.85 GHz = 35.05 instructions per ps.
        ("hadamard_quantize_8", 0, FP32 + INT8, "b200", 0.681),
        ("subtract_quantize", 0, 4 + DIFFERENCE, "b200", 0.612),
        ("dequantize_reduce_quantize", 8, 8 * INT8 + INT4, "b200", 1.458),  # instructions; bytes take 1.174
        ("dequantize_add", 0, 4 + DIFFERENCE, "b200", 0.612),
    ],
)
def test_a_kernel_takes_the_longer_of_bytes_and_instructions(
    operator: Operator, messages: int, bytes_per_value: float, device: DeviceName, microseconds: float
) -> None:
    kernel = Kernel(operator=operator, values=MILLION, messages=messages, nbytes=MILLION * bytes_per_value)
    assert 1e6 * kernel.seconds(DEVICES[device]) == pytest.approx(microseconds, rel=1e-3)
    assert kernel.times(3).seconds(DEVICES[device]) == pytest.approx(3 * kernel.seconds(DEVICES[device]))


def test_the_kernels_of_a_step_are_those_of_the_method() -> None:
    """4 nodes x 8, rows of 2 ** 20: 32 rows are quantized, 4 summed over 8 ranks, one over 4 nodes."""
    grid, row = RankGrid(nodes=4, ranks_per_node=8), 1 << 20
    for chunks in (1, 4):
        config = GradientConfig(pipeline_chunks=chunks)
        kernels = gradient_exchange(row, grid=grid, config=config).kernels
        assert len(kernels) == 3 * chunks
        values = {
            operator: sum(kernel.values for kernel in kernels if kernel.operator == operator) / row
            for operator in {kernel.operator for kernel in kernels}
        }
        assert values == {
            "hadamard_quantize_8": 32,
            "dequantize_reduce_quantize": 4,
            "dequantize_reduce_hadamard": 1,
        }
        assert {kernel.messages for kernel in kernels} == {0, 8, 4}
        moved = 32 * (FP32 + INT8) + 32 * INT8 + 4 * INT4 + 4 * INT4 + FP32
        assert sum(kernel.nbytes for kernel in kernels) == row * moved
    weights = weight_refresh(row, grid=grid, config=WeightConfig())
    assert [(kernel.operator, kernel.values / row) for kernel in weights.kernels] == [
        ("subtract_quantize", 1),
        ("dequantize_add", 4),
    ]
    assert weights.moved_bytes == row * 5 * (4 + DIFFERENCE)
    seconds = kernel_seconds(
        gradient_exchange(row, grid=grid, config=GradientConfig()).kernels, DEVICES["h100"]
    )
    # 32 x 5.0156, 8.125 x 4 + 2.0625 and 4 x 0.5156 + 4 bytes at 3.082 TB/s.
    assert seconds == pytest.approx(row * (160.5 + 34.5625 + 6.0625) / 3.082e12)


def test_kernels_of_fewer_bits_have_instructions_and_bytes_of_their_own() -> None:
    """2 nodes x 4: 3 bits between nodes, 2 for weights in groups of 128."""
    grid, row = RankGrid(nodes=2, ranks_per_node=4), 1 << 20
    gradients = gradient_exchange(row, grid=grid, config=GradientConfig(inter_bits=3, pipeline_chunks=1))
    int3, int2 = 3 / 8 + 2 / 128, 2 / 8 + 2 / 128
    assert [(kernel.bits, kernel.nbytes / row) for kernel in gradients.kernels] == [
        (8, 8 * (FP32 + INT8)),
        (3, 8 * INT8 + 2 * int3),
        (3, 2 * int3 + FP32),
    ]
    assert gradients.inter_bytes == row * int3
    weights = weight_refresh(row, grid=grid, config=WeightConfig(bits=2, group_size=128))
    assert [(kernel.bits, kernel.nbytes / row) for kernel in weights.kernels] == [
        (2, 4 + int2),
        (2, 2 * (4 + int2)),
    ]
    # B200: 35.05 instructions per ps. 3 bits of 4 messages are 14.6 + 4 x 7.0 = 42.6 instructions a value.
    kernel = Kernel(operator="dequantize_reduce_hadamard", values=MILLION, messages=4, bits=3, nbytes=0)
    assert 1e6 * kernel.seconds(DEVICES["b200"]) == pytest.approx(42.6 / 35.05, rel=1e-3)
    assert kernel.times(2).bits == 3


@pytest.mark.parametrize(
    ("bits", "operator"), [(2, "hadamard_quantize_4"), (3, "hadamard_quantize_4"), (8, "hadamard_quantize_8")]
)
def test_the_second_half_of_an_all_reduce_has_the_bits_of_its_message(bits: int, operator: Operator) -> None:
    config = GradientConfig(inter_bits=bits, min_numel=0)
    exchange = all_reduce_exchange(MILLION, grid=RankGrid(nodes=4, ranks_per_node=2), config=config)
    quantize, restore = exchange.kernels[-2:]
    assert (quantize.operator, quantize.bits) == (operator, bits)
    assert (restore.operator, restore.bits) == ("dequantize_reduce_hadamard", bits)


def test_exact_rows_have_no_kernels() -> None:
    grid = RankGrid(nodes=4, ranks_per_node=8)
    assert gradient_exchange(1 << 20, grid=grid, config=None).kernels == ()
    assert weight_refresh(1 << 20, grid=grid, config=WeightConfig(bits=None)).kernels == ()


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "config", "count"),
    [
        (4, 8, SDP4BitConfig(), 5),
        (4, 1, SDP4BitConfig(), 3),
        (1, 8, SDP4BitConfig(), 1),  # nothing is quantized on one node unless asked for
        (1, 8, SDP4BitConfig(gradients=GradientConfig(inside_one_node=True)), 2),
        (1, 8, SDP4BitConfig(weights=WeightConfig(replica="full")), 2),
        (4, 8, SDP4BitConfig.preset("qwd"), 3),
        (4, 8, SDP4BitConfig.preset("baseline"), 1),
    ],
)
def test_communicators_are_one_per_level_and_purpose(
    nodes: int, ranks_per_node: int, config: SDP4BitConfig, count: int
) -> None:
    assert communicators(grid=RankGrid(nodes=nodes, ranks_per_node=ranks_per_node), config=config) == count


@pytest.mark.parametrize(
    ("grid", "replicas", "count"),
    # FSDP2's two, the reduction's levels, the all-reduce's
    [((1, 8), (4, 1), 2 + 1 + 1), ((2, 4), (1, 2), 2 + 4 + 1), ((1, 2), (4, 4), 2 + 1 + 2)],
)
def test_replicas_have_communicators_of_their_own(
    grid: tuple[int, int], replicas: tuple[int, int], count: int
) -> None:
    sharded, replicated = (RankGrid(nodes=n, ranks_per_node=g) for n, g in (grid, replicas))
    assert communicators(grid=sharded, replicas=replicated, config=SDP4BitConfig()) == count


H100 = Cluster(
    name="h100",
    nodes=4,
    devices_per_node=8,
    inter_bandwidth=50e9,
    intra_bandwidth=300e9,
    device_flops=400e12,
    device=DEVICES["h100"],
)
ONE_BUFFER = (ShardedGroup(name="all", shapes=((7_000_000_000 // 128, 128),), freed_after_forward=False),)


def test_a_step_adds_kernels_nvlink_and_network() -> None:
    """7 billion parameters, 32 ranks, one slice: every part by hand."""
    flat = tuple(replace(group, is_flat=True) for group in ONE_BUFFER)
    config = SDP4BitConfig(weights=None, gradients=GradientConfig(pipeline_chunks=1))
    cost = plan_step(
        flat, flops_per_sequence=1e15, cluster=H100, layout=ParallelLayout(), config=config
    ).quantized
    assert 1e3 * cost.quantization_seconds == pytest.approx(14.28, rel=2e-3)  # 7e9 x 6.285 B at 3.082 TB/s
    # In the node 7/8 of 7e9 x 1.0156 B at 300 GB/s; between nodes 3/4 of 7e9/8 x 0.5156 B at 50/8 GB/s;
    # and the gather of the weights, a ring: 2 B x 7e9 / 32 x 31 / 8 at the same rate.
    assert 1e3 * cost.communication_seconds == pytest.approx(20.74 + 54.14 + 271.25, rel=1e-3)
    memory = cost.memory
    assert memory["communicators"] == 3 * 600e6
    none = plan_step(
        flat,
        flops_per_sequence=1e15,
        cluster=replace(H100, communicator_bytes=0.0),
        layout=ParallelLayout(),
        config=config,
    )
    assert "communicators" not in none.quantized.memory
    measured = replace(H100, quantization_bandwidth=1e12)
    assert plan_step(
        flat, flops_per_sequence=1e15, cluster=measured, layout=ParallelLayout(), config=config
    ).quantized.quantization_seconds == pytest.approx(7e9 * 6.285 / 1e12, rel=2e-3)


@pytest.mark.parametrize(
    ("gigabytes", "flops", "said"),
    [
        (50.0, 88e12, "enable: "),
        (400.0, 88e12, "do not enable: 0.93 to 1.11 times as fast"),
        (100.0, 350e12, "depends on how much of the communication is hidden: "),
        (1e6, 88e12, "do not enable: "),
    ],
)
def test_one_sentence_covers_both_ends_of_the_overlap(gigabytes: float, flops: float, said: str) -> None:
    unhidden, hidden = (
        plan_step(
            ONE_BUFFER,
            flops_per_sequence=flops,
            cluster=replace(H100, inter_bandwidth=gigabytes * 1e9),
            layout=ParallelLayout(),
            config=SDP4BitConfig(),
            overlap=overlap,
        )
        for overlap in (0.0, 1.0)
    )
    text = verdict(unhidden, hidden)
    assert text.startswith(said) and "\n" not in text
    assert verdict(hidden, hidden) == hidden.verdict
