"""Step times, recommendations and layouts of the planner, by arithmetic done by hand. Layer: no process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sdp4bit import GradientConfig, SDP4BitConfig
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.plan.clusters import paper_cluster
from sdp4bit_lab.plan.costs import Cluster, transfer_seconds
from sdp4bit_lab.plan.host import HostTime
from sdp4bit_lab.plan.latency import Latency
from sdp4bit_lab.plan.layout import ParallelLayout
from sdp4bit_lab.plan.model import PlanModelConfig, flat_buffer, gpt_groups
from sdp4bit_lab.plan.step import StepPlan, plan_step
from sdp4bit_lab.plan.traffic import Exchange
from tests.lab.plan.test_traffic import SHAPE

FLOPS = 1e12
NO_LATENCY = Latency(message=0.0, nvlink=0.0, call=0.0, peer=0.0, gloo_hop=0.0)
CLUSTER = Cluster(
    name="test",
    nodes=4,
    devices_per_node=8,
    inter_bandwidth=1e9,
    intra_bandwidth=50e9,
    device_flops=1e14,
    latency=NO_LATENCY,
    host=HostTime(plain=0.0, added=0.0, source="none"),
)


def plan(
    *, config: SDP4BitConfig | None = None, layout: dict[str, Any] | None = None, **cluster: Any
) -> StepPlan:
    """Plan a step of a small GPT with a flat buffer on a cluster that differs from CLUSTER."""
    cut = ParallelLayout(**(layout or {}))
    return plan_step(
        flat_buffer(gpt_groups(SHAPE, tensor_parallel=cut.tensor_parallel)),
        flops_per_sequence=FLOPS,
        cluster=replace(CLUSTER, **cluster),
        layout=cut,
        config=config or SDP4BitConfig(),
    )


def test_a_step_is_computation_and_bytes_over_bandwidth() -> None:
    cost = plan().baseline
    assert cost.compute_seconds == FLOPS / CLUSTER.device_flops
    # The ring's slower level: a rank has an eighth of its node's link.
    assert cost.communication_seconds == pytest.approx(cost.inter_bytes / (1e9 / 8))
    assert cost.step_seconds[0] == cost.compute_seconds + cost.communication_seconds
    assert cost.inter_bytes_per_node == 8 * cost.inter_bytes
    assert plan(layout={"micro_batch_size": 3}).baseline.compute_seconds == pytest.approx(0.03)
    # Stages wait for each other.
    assert plan(layout={"pipeline_parallel": 2}).baseline.compute_seconds == cost.compute_seconds
    busy = plan(layout={"pipeline_parallel": 2, "accumulation": 8}).baseline.compute_seconds
    assert busy == pytest.approx(8 * cost.compute_seconds / 2 * (1 + 1 / 8))


def test_hops_follow_each_other_and_chunks_hide_the_shorter_one() -> None:
    def seconds(chunks: int | None) -> float:
        exchange = Exchange(chunks=chunks, intra_bytes=2 * 50e9, inter_bytes=6 * 1e9 / 8)
        return transfer_seconds(exchange, cluster=CLUSTER, layout=ParallelLayout())

    assert [seconds(chunks) for chunks in (None, 1, 2, 4)] == [6.0, 8.0, 7.0, 6.5]


def test_latency_kernels_and_a_shared_link_have_their_cost() -> None:
    bare = plan().quantized
    assert bare.quantization_seconds == 0
    # One slice, to 7 peers in the node and to 3 nodes.
    slow = plan(latency=replace(NO_LATENCY, peer=0.5)).quantized
    assert (slow.all_to_all_seconds, slow.ring_seconds) == (0.5 * (7 + 3), 0)
    assert slow.communication_seconds == pytest.approx(bare.communication_seconds + slow.all_to_all_seconds)
    # Of 31 steps per ring of the baseline, 28 stay inside nodes.
    rings = plan(latency=replace(NO_LATENCY, nvlink=0.5)).baseline
    assert rings.ring_seconds == pytest.approx(2 * 28 * 0.5)
    kernels = plan(quantization_bandwidth=1e9).quantized
    # fp32 gradients read once; int8 and int4 messages written and read; bf16 rows and messages for weights.
    rows = plan().row_numel * 32
    values = 4 * rows + 4 * rows / 32 + 2 * rows * (1 + 2 / 128) + 2 * rows / 8 * (1 / 2 + 2 / 128)
    values += (1 + 32) * rows / 32 * (2 + 2 + 1 / 2 + 2 / 2048)
    assert kernels.quantization_seconds * 1e9 == pytest.approx(values, rel=1e-3)
    assert kernels.step_seconds[0] == pytest.approx(bare.step_seconds[0] + kernels.quantization_seconds)
    for tensor_parallel, times in ((1, 1), (2, 2)):
        split = {"tensor_parallel": tensor_parallel}
        alone = plan(layout=split).baseline.communication_seconds
        shared = plan(layout=split, inter_bandwidth_shared=2e9).baseline.communication_seconds
        assert shared == pytest.approx(alone / times)


def test_overlap_hides_no_more_than_the_computation_it_runs_beside() -> None:
    for overlap in (None, 0.3):
        cost = plan(layout={"overlap": overlap}).baseline
        least, most = cost.hidden_seconds
        assert (least == 0) == (overlap is None)
        assert least <= most <= min(cost.compute_seconds, (overlap or 1) * cost.communication_seconds) + 1e-12
    slow = plan(inter_bandwidth=1e6).baseline
    assert slow.hidden_seconds[1] == pytest.approx(slow.compute_seconds)
    fast = plan(inter_bandwidth=1e15).quantized
    assert fast.hidden_seconds[1] == pytest.approx(fast.communication_seconds)


def test_the_gain_falls_with_bandwidth_and_with_accumulation() -> None:
    def speedup(**changes: Any) -> float:
        result = plan(**changes)
        return result.speedups(result.baseline)[0]

    speedups = [speedup(inter_bandwidth=bandwidth) for bandwidth in (1e8, 1e9, 1e10, 1e11)]
    assert speedups == sorted(speedups, reverse=True)
    # 6 bytes per parameter in a ring of 32 against 1 / 2 + 2 / G twice between 4 nodes: the most it can gain.
    assert 5 < speedups[0] < 6 * (31 / 32) / ((1 + 2 / 128 + 2 / 2048) * (3 / 4))
    speedups = [speedup(layout={"accumulation": times}) for times in (1, 4, 16, 64)]
    assert speedups == sorted(speedups, reverse=True)


ALONE = {"nodes": 1, "devices_per_node": 1}


@pytest.mark.parametrize(
    ("changes", "layout", "advice"),
    [
        # At 1 GB/s, 10 ms of computation per micro batch beside 20.1, 13.4 and 2.6 ms of communication.
        ({}, {"overlap": 0, "accumulation": 64}, "do not enable: 1.03 times"),
        ({}, {"overlap": 0, "accumulation": 8}, "perhaps: 1.21 times as fast as with fp32 gradients, 1.13"),
        ({}, {"overlap": 0}, "enable: 2.38 times as fast as with fp32 gradients, 1.85 with bf16 gradients"),
        ({}, {}, "enable: 2.01 to 2.38 times as fast as with fp32 gradients, 1.34 to 1.85 with bf16"),
        ({"inter_bandwidth": 1.5e9}, {}, "perhaps: 1.34 to 1.99 times"),
        ({"inter_bandwidth": 2.5e9}, {}, "depends on how much of the communication is hidden: 1.00 to 1.63 "),
        ({"inter_bandwidth": 1e15}, {}, "do not enable: 1.00 times"),
        # A gain over fp32 alone is not enough.
        ({"config": SDP4BitConfig(gradients=None)}, {"overlap": 0}, "do not enable: 1.2"),
        (ALONE, {}, "do not enable: the data-parallel group has one rank and sends nothing"),
    ],
)
def test_the_recommendation_follows_the_gain(
    changes: dict[str, Any], layout: dict[str, Any], advice: str
) -> None:
    text = plan(**{"intra_bandwidth": 1e15, **changes}, layout=layout).recommendation
    assert text.startswith(advice) and "\n" not in text


def test_replicas_lie_on_neighbouring_ranks() -> None:
    sizes = {}
    for replicas in (1, 2, 4, 8):
        grids = ParallelLayout(replicas=replicas).grids(nodes=4, devices_per_node=8)
        sizes[replicas] = [(grid.nodes, grid.ranks_per_node) for grid in grids]
    assert sizes == {
        1: [(4, 8), (1, 1)],
        2: [(2, 8), (2, 1)],
        4: [(1, 8), (4, 1)],
        8: [(1, 4), (4, 2)],
    }


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ({}, [(12, 8, 3), (1, 1, 1)]),
        ({"nodes_per_block": 12}, [(12, 8, 1), (1, 1, 1)]),
        ({"tensor_parallel": 16}, [(6, 1, 3), (1, 1, 1)]),  # every second node
        ({"tensor_parallel": 32}, [(3, 1, 1), (1, 1, 1)]),
        ({"pipeline_parallel": 3}, [(4, 8, 1), (1, 1, 1)]),
        ({"replicas": 12}, [(1, 8, 1), (12, 1, 3)]),
        ({"replicas": 6}, [(2, 8, 1), (6, 1, 3)]),  # of two nodes each
        ({"replicas": 3}, [(4, 8, 1), (3, 1, 1)]),
        ({"replicas": 24}, [(1, 4, 1), (12, 2, 3)]),
    ],
)
def test_groups_have_the_blocks_of_the_cluster_s_nodes(
    layout: dict[str, int], sizes: list[tuple[int, int, int]]
) -> None:
    grids = ParallelLayout(**{"nodes_per_block": 4, **layout}).grids(nodes=12, devices_per_node=8)
    assert [(grid.nodes, grid.ranks_per_node, grid.blocks) for grid in grids] == sizes


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"nodes_per_block": 3}, "--nodes-per-block 3 does not divide the 4 nodes"),
        ({"tensor_parallel": 3}, "does not divide the 32 devices"),
        ({"tensor_parallel": 16, "pipeline_parallel": 4}, "does not divide"),
        ({"replicas": 3}, "--replicas 3 does not divide the 32 ranks"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout: dict[str, int], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        ParallelLayout(**layout).grids(nodes=4, devices_per_node=8)


@pytest.mark.parametrize(
    ("cluster", "card", "tensor", "pipeline", "published"),
    [
        ("a100", "1.3B", 1, 1, 57.6 / 24.1),
        ("a100", "18B", 4, 2, 29.8 / 10.2),
        ("h800", "2.7B", 1, 1, 116.9 / 71.9),
        ("h800", "18B", 8, 1, 59.2 / 14.5),
    ],
)
def test_the_paper_s_clusters_give_its_table_2_back(
    cluster: Any, card: Any, tensor: int, pipeline: int, published: float
) -> None:
    """Their speeds are fitted to it, with fp32 scales and without the hop inside a node."""
    model = PlanModelConfig(model_card=card)
    shape = model.padded_shape(tensor_parallel=tensor)
    result = plan_step(
        flat_buffer(gpt_groups(shape, tensor_parallel=tensor, pipeline_parallel=pipeline)),
        flops_per_sequence=shape.flops_per_sample(model.tokens),
        cluster=replace(paper_cluster(cluster, model=card), quantization_bandwidth=None),
        layout=ParallelLayout(tensor_parallel=tensor, pipeline_parallel=pipeline),
        config=SDP4BitConfig(gradients=GradientConfig(pipeline_chunks=8)),
    )
    assert result.speedups(result.baseline)[0] == pytest.approx(published, rel=0.05)


def test_a_model_that_the_paper_lacks_gets_the_median_compute_rate() -> None:
    assert paper_cluster("h800", model="125M").device_flops == pytest.approx(132.925e12)
    assert paper_cluster("h800", model="18B").device_flops == pytest.approx(164.778e12)
