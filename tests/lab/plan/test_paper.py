"""The planner against the paper's tables. Layer: no process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdp4bit import GradientConfig, SDP4BitConfig
from sdp4bit_lab.plan.config import PlanModelConfig, reproduction
from sdp4bit_lab.plan.model import flat_buffer, gpt_groups
from sdp4bit_lab.plan.paper import FIGURE_8, TABLE_2, TABLE_4_QUANTIZED_MS, Reproduction
from sdp4bit_lab.plan.step import ParallelLayout, plan_step
from sdp4bit_lab.pretrain.model.cards import MODEL_CARDS


@pytest.fixture(scope="module")
def found() -> Reproduction:
    return reproduction()


def test_every_speedup_of_table_2_is_predicted_within_5_percent(found: Reproduction) -> None:
    assert [p.row for p in found.rows] == list(TABLE_2)
    assert len(found.rows) == 10
    for p in found.rows:
        assert abs(p.error) < 0.05, p
        assert p.error == p.predicted / (p.row.quantized / p.row.baseline) - 1


def test_two_bandwidths_per_cluster_and_one_compute_rate_per_model(found: Reproduction) -> None:
    for cluster in ("a100", "h800"):
        rows = [p for p in found.rows if p.row.cluster == cluster]
        assert len({p.bandwidth for p in rows}) == 2
        assert len({(p.row.model, p.device_flops) for p in rows}) == len({p.row.model for p in rows}) == 5


def test_bytes_per_node_are_those_worked_out_by_hand(found: Reproduction) -> None:
    """GB per node: 6 N (D - 1) / D in full precision, per tensor-parallel rank."""
    by_hand = [(7.77, 1.31), (15.66, 2.63), (37.46, 6.45), (34.43, 5.93), (49.24, 8.48)]
    by_hand += [(7.83, 1.31), (15.79, 2.64), (38.71, 6.56), (72.33, 12.45), (103.78, 17.87)]
    for p, (baseline, quantized) in zip(found.rows, by_hand, strict=True):
        assert p.baseline_bytes / 1e9 == pytest.approx(baseline, abs=0.006)
        assert p.quantized_bytes / 1e9 == pytest.approx(quantized, abs=0.006)


def test_table_4_is_predicted_within_a_millisecond_by_its_own_bandwidth(found: Reproduction) -> None:
    assert found.table_4_ms == pytest.approx(TABLE_4_QUANTIZED_MS, abs=1.0)
    assert found.table_4_fitted_ms == pytest.approx(TABLE_4_QUANTIZED_MS, rel=0.1)


def test_figure_8_falls_into_the_ranges_of_the_text(found: Reproduction) -> None:
    for speedups in found.figure_8.values():
        for strategy, (low, high) in FIGURE_8.items():
            # The text rounds to one digit.
            assert low - 0.05 <= speedups[strategy] <= high + 0.05
    a100, h800 = found.figure_8["a100"], found.figure_8["h800"]
    assert all(a100[strategy] > h800[strategy] > 1 for strategy in FIGURE_8)


def test_the_clusters_of_the_paper_plan_its_own_rows_closely(found: Reproduction) -> None:
    """The general planner, with bf16 scales and the intra-node hop, is near its fit to the reference."""
    for p in found.rows:
        row = p.row
        card = next(name for name in MODEL_CARDS if name == row.model)
        size = PlanModelConfig(model_card=card).size(tensor_parallel=row.tensor_parallel)
        groups = gpt_groups(
            size,
            tensor_parallel=row.tensor_parallel,
            pipeline_parallel=row.pipeline_parallel,
        )
        cluster = replace(found.cluster(row.cluster, model=row.model), quantization_bandwidth=None)
        plan = plan_step(
            flat_buffer(groups),
            flops_per_sequence=size.flops_per_sequence,
            cluster=cluster,
            layout=ParallelLayout(
                tensor_parallel=row.tensor_parallel, pipeline_parallel=row.pipeline_parallel
            ),
            config=SDP4BitConfig(gradients=GradientConfig(pipeline_chunks=8)),
        )
        assert plan.speedup == pytest.approx(p.predicted, rel=0.05)
