"""Step times, recommendations and layouts of the planner, by arithmetic done by hand. Layer: no process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from sdp4bit import SDP4BitConfig
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.plan.model import flat_buffer, gpt_groups
from sdp4bit_lab.plan.step import Cluster, ParallelLayout, Plan, exchange_seconds, plan_step, recommendation
from sdp4bit_lab.plan.traffic import Exchange
from tests.lab.plan.test_traffic import SHAPE

FLOPS = 1e12
CLUSTER = Cluster(
    name="test",
    nodes=4,
    devices_per_node=8,
    inter_bandwidth=1e9,
    intra_bandwidth=50e9,
    device_flops=1e14,
)


def plan(
    *,
    cluster: Cluster = CLUSTER,
    layout: ParallelLayout | None = None,
    config: SDP4BitConfig | None = None,
    overlap: float = 0.0,
    flat: bool = False,
) -> Plan:
    layout = layout or ParallelLayout()
    groups = gpt_groups(SHAPE, tensor_parallel=layout.tensor_parallel)
    return plan_step(
        flat_buffer(groups) if flat else groups,
        flops_per_sequence=FLOPS,
        cluster=cluster,
        layout=layout,
        config=config or SDP4BitConfig(),
        overlap=overlap,
    )


def test_a_step_is_computation_and_bytes_over_bandwidth() -> None:
    cost = plan(flat=True).baseline
    assert cost.compute_seconds == FLOPS / CLUSTER.device_flops
    # The ring's slower level: a rank has an eighth of its node's link.
    assert cost.communication_seconds == pytest.approx(cost.inter_bytes / (1e9 / 8))
    assert cost.step_seconds == cost.compute_seconds + cost.communication_seconds
    assert cost.inter_bytes_per_node == 8 * cost.inter_bytes
    assert plan(layout=ParallelLayout(micro_batch_size=3)).baseline.compute_seconds == pytest.approx(
        3 * cost.compute_seconds
    )


def test_hops_follow_each_other_and_chunks_hide_the_shorter_one() -> None:
    def seconds(chunks: int | None) -> float:
        exchange = Exchange(chunks=chunks, intra_bytes=2 * 50e9, inter_bytes=6 * 1e9 / 8)
        return exchange_seconds(exchange, cluster=CLUSTER, layout=ParallelLayout())

    assert [seconds(chunks) for chunks in (None, 1, 2, 4)] == [6.0, 8.0, 7.0, 6.5]


def test_latency_kernels_and_a_shared_link_cost_what_they_say() -> None:
    bare = plan(flat=True).quantized
    assert bare.quantization_seconds == 0
    slow = plan(flat=True, cluster=replace(CLUSTER, latency=0.5)).quantized
    assert slow.communication_seconds == pytest.approx(bare.communication_seconds + 0.5 * bare.collectives)
    kernels = plan(flat=True, cluster=replace(CLUSTER, quantization_bandwidth=1e9)).quantized
    # fp32 gradients read once; int8 and int4 messages written and read; bf16 rows and messages for weights.
    rows = plan(flat=True).row_numel * 32
    values = 4 * rows + 4 * rows / 32 + 2 * rows * (1 + 2 / 128) + 2 * rows / 8 * (1 / 2 + 2 / 128)
    values += (1 + 32) * rows / 32 * (2 + 2 + 1 / 2 + 2 / 2048)
    assert kernels.quantization_seconds * 1e9 == pytest.approx(values, rel=1e-3)
    assert kernels.step_seconds == pytest.approx(bare.step_seconds + kernels.quantization_seconds)
    shared = replace(CLUSTER, inter_bandwidth_shared=2e9)
    assert plan(cluster=shared, flat=True).baseline.communication_seconds == pytest.approx(
        plan(flat=True).baseline.communication_seconds
    )
    split = ParallelLayout(tensor_parallel=2)
    assert plan(cluster=shared, layout=split, flat=True).baseline.communication_seconds == pytest.approx(
        plan(layout=split, flat=True).baseline.communication_seconds / 2
    )


def test_overlap_hides_no_more_than_the_computation_it_runs_beside() -> None:
    for flat in (False, True):
        for overlap in (0.0, 0.3, 1.0):
            cost = plan(overlap=overlap, flat=flat).baseline
            assert cost.hidden_seconds <= cost.compute_seconds + 1e-12
            assert cost.hidden_seconds <= overlap * cost.communication_seconds + 1e-12
        slow = replace(CLUSTER, inter_bandwidth=1e6)
        assert plan(cluster=slow, overlap=1.0, flat=flat).baseline.hidden_seconds == pytest.approx(
            plan().baseline.compute_seconds
        )
        fast = replace(CLUSTER, inter_bandwidth=1e15)
        cost = plan(cluster=fast, overlap=1.0, flat=flat).quantized
        assert cost.hidden_seconds == pytest.approx(cost.communication_seconds)


def test_the_gain_falls_with_bandwidth_and_with_accumulation() -> None:
    speedups = [
        plan(cluster=replace(CLUSTER, inter_bandwidth=b), flat=True).speedup for b in (1e8, 1e9, 1e10, 1e11)
    ]
    assert speedups == sorted(speedups, reverse=True)
    # 6 bytes per parameter in a ring of 32 against 1 / 2 + 2 / G twice between 4 nodes: the most it can gain.
    assert 5 < speedups[0] < 6 * (31 / 32) / ((1 + 2 / 128 + 2 / 2048) * (3 / 4))
    speedups = [plan(layout=ParallelLayout(accumulation=a), flat=True).speedup for a in (1, 4, 16, 64)]
    assert speedups == sorted(speedups, reverse=True)


def test_pipeline_stages_wait_for_each_other() -> None:
    one = plan().baseline.compute_seconds
    waiting = plan(layout=ParallelLayout(pipeline_parallel=2)).baseline.compute_seconds
    assert waiting == one
    busy = plan(layout=ParallelLayout(pipeline_parallel=2, accumulation=8)).baseline.compute_seconds
    assert busy == pytest.approx(8 * one / 2 * (1 + 1 / 8))


@pytest.mark.parametrize(
    ("bandwidth", "accumulation", "advice"),
    [
        (1e15, 1, "do not enable: 1.00 times"),
        (1e9, 64, "do not enable: 1.03 times"),
        (1e9, 8, "perhaps: 1.21 times as fast as with fp32 gradients, 1.13 with bf16 gradients"),
        (1e9, 1, "enable: 2.38 times as fast as with fp32 gradients, 1.85 with bf16 gradients"),
    ],
)
def test_the_recommendation_follows_the_gain(bandwidth: float, accumulation: int, advice: str) -> None:
    """At 1 GB/s, 10 ms of computation per micro batch beside 20.1, 13.4 and 2.6 ms of communication."""
    cluster = replace(CLUSTER, intra_bandwidth=1e15, inter_bandwidth=bandwidth)
    result = plan(cluster=cluster, layout=ParallelLayout(accumulation=accumulation), flat=True)
    assert recommendation(result, result).startswith(advice)


def test_a_gain_over_fp32_alone_is_not_enough() -> None:
    only_weights = plan(config=SDP4BitConfig(gradients=None), flat=True)
    assert only_weights.speedup > 1.2
    assert recommendation(only_weights, only_weights).startswith("do not enable: 1.2")
    alone = plan(cluster=replace(CLUSTER, nodes=1, devices_per_node=1))
    assert recommendation(alone, alone).endswith("the data-parallel group has one rank, nothing is sent")


@pytest.mark.parametrize(
    ("bandwidth", "advice"),
    [
        (1e9, "enable: 2.01 to 2.38 times as fast as with fp32 gradients, 1.34 to 1.85 with bf16 gradients"),
        (1.5e9, "perhaps: 1.34 to 1.99 times as fast as with fp32 gradients, 1.11 to 1.61 with"),
        (2.5e9, "depends on how much of the communication is hidden: 1.00 to 1.63 times as fast"),
        (1e15, "do not enable: 1.00 times as fast as with fp32 gradients, 1.00 with bf16 gradients"),
    ],
)
def test_one_sentence_covers_both_ends_of_the_overlap(bandwidth: float, advice: str) -> None:
    cluster = replace(CLUSTER, inter_bandwidth=bandwidth, intra_bandwidth=1e15)
    unhidden, hidden = (plan(cluster=cluster, overlap=overlap, flat=True) for overlap in (0.0, 1.0))
    text = recommendation(unhidden, hidden)
    assert text.startswith(advice) and "\n" not in text


def test_replicas_lie_on_neighbouring_ranks() -> None:
    sizes = {}
    for replicas in (1, 2, 4, 8):
        grids = ParallelLayout(replicas=replicas).grids(CLUSTER)
        sizes[replicas] = [(grid.nodes, grid.ranks_per_node) for grid in grids]
    assert sizes == {
        1: [(4, 8), (1, 1)],
        2: [(2, 8), (2, 1)],
        4: [(1, 8), (4, 1)],
        8: [(1, 4), (4, 2)],
    }


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor_parallel": 3}, "does not divide the 32 devices"),
        ({"tensor_parallel": 16, "pipeline_parallel": 4}, "does not divide"),
        ({"replicas": 3}, "--replicas 3 does not divide the 32 ranks"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout: dict[str, int], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        ParallelLayout(**layout).grids(CLUSTER)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"nodes": 0}, {"inter_bandwidth": 0.0}, {"device_flops": -1.0}, {"latency": -1.0}),
        *({"quantization_bandwidth": 0.0}, {"inter_bandwidth": math.nan}),
    ],
)
def test_impossible_clusters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(CLUSTER, **wrong)
