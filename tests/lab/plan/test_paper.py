"""The planner against the paper's tables. Layer: no process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdp4bit import GradientConfig, SDP4BitConfig
from sdp4bit_lab.plan.model import PlanModelConfig, flat_buffer, gpt_groups
from sdp4bit_lab.plan.paper import FIGURE_8, TABLE_2, TABLE_4_QUANTIZED_MS, Reproduction, reproduction
from sdp4bit_lab.plan.step import ParallelLayout, plan_step


@pytest.fixture(scope="module")
def tables() -> Reproduction:
    return reproduction()


def test_every_speedup_of_table_2_is_predicted_within_5_percent(tables: Reproduction) -> None:
    assert [p.row for p in tables.rows] == list(TABLE_2)
    for p in tables.rows:
        assert p.predicted == pytest.approx(p.row.quantized / p.row.baseline, rel=0.05)
    for cluster in ("a100", "h800"):
        rows = [p for p in tables.rows if p.row.cluster == cluster]
        assert len(rows) == len({p.device_flops for p in rows}) == 5
        assert len({p.bandwidth for p in rows}) == 2


def test_bytes_per_node_are_those_worked_out_by_hand(tables: Reproduction) -> None:
    """GB per node: 6 N (D - 1) / D in full precision, per tensor-parallel rank."""
    by_hand = [(7.77, 1.31), (15.66, 2.63), (37.46, 6.45), (34.43, 5.93), (49.24, 8.48)]
    by_hand += [(7.83, 1.31), (15.79, 2.64), (38.71, 6.56), (72.33, 12.45), (103.78, 17.87)]
    for p, (baseline, quantized) in zip(tables.rows, by_hand, strict=True):
        assert p.baseline_bytes / 1e9 == pytest.approx(baseline, abs=0.006)
        assert p.quantized_bytes / 1e9 == pytest.approx(quantized, abs=0.006)


def test_table_4_and_figure_8_are_predicted(tables: Reproduction) -> None:
    assert tables.table_4_ms == pytest.approx(TABLE_4_QUANTIZED_MS, abs=1.0)
    assert tables.table_4_fitted_ms == pytest.approx(TABLE_4_QUANTIZED_MS, rel=0.1)
    a100, h800 = tables.figure_8["a100"], tables.figure_8["h800"]
    for strategy, (low, high) in FIGURE_8.items():
        # The text rounds to one digit.
        assert low - 0.05 <= h800[strategy] < a100[strategy] <= high + 0.05


def test_the_clusters_of_the_paper_plan_its_own_rows_closely(tables: Reproduction) -> None:
    """The general planner, with bf16 scales and the intra-node hop, is near its fit to the reference."""
    for p in tables.rows:
        row = p.row
        model = PlanModelConfig(model_card=row.model)
        shape = model.padded_shape(tensor_parallel=row.tensor_parallel)
        cut = {"tensor_parallel": row.tensor_parallel, "pipeline_parallel": row.pipeline_parallel}
        plan = plan_step(
            flat_buffer(gpt_groups(shape, **cut)),
            flops_per_sequence=shape.flops_per_sample(model.tokens),
            cluster=replace(tables.cluster(row.cluster, model=row.model), quantization_bandwidth=None),
            layout=ParallelLayout(**cut),
            config=SDP4BitConfig(gradients=GradientConfig(pipeline_chunks=8)),
        )
        assert plan.speedups(plan.baseline)[0] == pytest.approx(p.predicted, rel=0.05)


def test_a_model_that_the_paper_lacks_gets_the_median_compute_rate(tables: Reproduction) -> None:
    rates = sorted(p.device_flops for p in tables.rows if p.row.cluster == "h800")
    assert tables.cluster("h800", model="125M").device_flops == rates[2]
    assert tables.cluster("h800", model="18B").device_flops == tables.rows[-1].device_flops
