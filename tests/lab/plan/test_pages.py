"""Calculated tables of the documentation beside the planner of today and arithmetic. Layer: no process."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from sdp4bit_lab.plan.config import ClusterConfig, PlanConfig
from sdp4bit_lab.plan.costs import StepCost
from sdp4bit_lab.plan.layout import ParallelLayout
from sdp4bit_lab.plan.memory import parts
from sdp4bit_lab.plan.model import PlanModelConfig
from sdp4bit_lab.plan.step import MIN_GAIN_TO_CONSIDER, StepPlan
from tests import ROOT

MODELS: dict[str, dict[str, Any]] = {"70B": {"layers": 80, "hidden": 8192, "heads": 64}}
SMALL = {
    name: {"layers": 12, "hidden": hidden, "heads": 16, "vocabulary": 8192, "sequence_length": 1024}
    for name, hidden in (("161M", 1024), ("620M", 2048))
}
"""Models of the tables that have no card."""
LARGE_BATCH = " with 32,768 tokens per GPU and step"
OURS = (1 / 2 + 2 / 128) + (1 / 2 + 2 / 2048)
"""Bytes per parameter that each of many nodes sends."""


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")


def table_after(page: str, words: str) -> list[list[str]]:
    """Return the cells of the first table after these words, with its titles and without the rule."""
    lines = text_of(page).partition(words)[2].split("\n")
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


def plan_of(model: str = "6.7B", *, sequences: int = 4, accumulation: int = 1, **cluster: Any) -> StepPlan:
    """Return the plan of nodes of 8 GPUs, with so many sequences of 2,048 tokens per GPU and micro-batch."""
    config = PlanConfig(
        model=PlanModelConfig(**MODELS.get(model, {"model_card": model})),
        cluster=ClusterConfig(devices_per_node=8, **cluster),
        layout=ParallelLayout(micro_batch_size=sequences, accumulation=accumulation),
    )
    return config.plan(config.cluster.resolve(model=config.model_name))


def plan_of_h100(model: str = "6.7B", *, nodes: int = 4, gbit: float = 100, **layout: int) -> StepPlan:
    """Return the plan of nodes of H100 with links of this rate per node."""
    return plan_of(model, device="h100", nodes=nodes, device_tflops=400.0, inter_bandwidth=gbit / 8, **layout)


def range_of(*ends: float) -> str:
    least, most = (f"{end:.1f}" for end in sorted(ends))
    return least if least == most else f"{least} to {most}"


def over_hybrid(plan: StepPlan) -> StepCost | None:
    return plan.hybrid and plan.hybrid.plain


@pytest.mark.parametrize(
    ("heading", "cost_of", "layout"),
    [
        ("## Over FSDP2's default", lambda plan: plan.baseline, {}),
        ("## Over FSDP2 with bf16", lambda plan: plan.bf16_baseline, {}),
        ("## Over HSDP", over_hybrid, {}),
        (f"{LARGE_BATCH} in one", over_hybrid, {"sequences": 16}),
        (f"{LARGE_BATCH} in 4", over_hybrid, {"accumulation": 4}),
    ],
)
def test_predicted_gains_are_those_of_the_planner(
    heading: str, cost_of: Callable[[StepPlan], StepCost | None], layout: dict[str, int]
) -> None:
    (_, _, *rates), *rows = table_after("docs/results/planning.md", heading)
    for model, nodes, *cells in rows:
        plans = [plan_of_h100(model, nodes=int(nodes), gbit=float(rate), **layout) for rate in rates]
        costs = [cost_of(plan) for plan in plans]
        due = [
            range_of(*p.speedups(c)) if p.fits and c else "no memory"
            for p, c in zip(plans, costs, strict=True)
        ]
        assert cells == due, (model, nodes)


def gains(job: str, *, nodes: int, per_node: int, gbit: float, end: int) -> bool:
    """Return whether sdp4bit gains enough at a rate per GPU; end 1: all that fits is hidden, 0: nothing."""
    model, tokens = re.fullmatch(r"(\S+), ([\d,]+) tokens", job).groups()  # type: ignore[union-attr]
    small = SMALL.get(model)
    length = 1024 if small else 2048
    config = PlanConfig(
        model=PlanModelConfig(**small or {"model_card": model}),
        cluster=ClusterConfig(
            device="h100",
            nodes=nodes,
            devices_per_node=per_node,
            inter_bandwidth=gbit * per_node / 8,
            device_tflops=400.0,
        ),
        layout=ParallelLayout(
            micro_batch_size=int(tokens.replace(",", "")) // length, reshard_after_forward=not small
        ),
    )
    plan = config.plan(config.cluster.resolve(model=config.model_name))
    costs = [plan.bf16_baseline, *([plan.hybrid.plain] if plan.hybrid else [])]
    best = min(cost.step_seconds[end] for cost in costs)
    return best / plan.quantized.step_seconds[end] >= 1 + MIN_GAIN_TO_CONSIDER


def test_break_even_is_that_of_the_planner() -> None:
    """The printed rates have two digits, and were found within 1 %."""
    _, *rows = table_after("docs/results/planning.md", "## Break-even")
    assert len(rows) == 6
    for job, grid, *rates in rows:
        nodes, per_node = map(int, grid.split(" x "))
        for end, rate in zip((1, 0), map(float, rates), strict=True):
            half = 10 ** (math.floor(math.log10(rate)) - 1) / 2
            below, above = 0.99 * (rate - half), 1.02 * (rate + half)
            found = [gains(job, nodes=nodes, per_node=per_node, gbit=g, end=end) for g in (below, above)]
            assert found == [True, False], (job, rate)


def test_memory_is_that_of_the_planner() -> None:
    plan = plan_of_h100()
    assert plan.hybrid is not None
    titles, *rows = table_after("docs/memory.md", "# Memory")
    (row,) = (dict(zip(titles, each, strict=True)) for each in rows if each[:2] == ["6.7B", "4"])
    used = parts(plan.quantized.memory)
    expected = {
        "FSDP2": plan.bf16_baseline.total_memory,
        "HSDP": plan.hybrid.plain.total_memory,
        "sdp4bit": plan.quantized.total_memory,
        "shards": used["shards"] + used["gradients"],
        **{"replica": used["replica"], "buffers": used["buffers"], "comm.": used["communicators"]},
    }
    assert {name: row[name] for name in expected} == {
        name: f"{size / 1e9:.1f}" for name, size in expected.items()
    }
    parameters = 6.66e9
    assert used["replica"] == pytest.approx(2 * parameters / 8, rel=2e-3)
    assert used["shards"] == pytest.approx(12 * parameters / 32, rel=2e-3)
    # One of FSDP2, and one per level for weights and for gradients.
    assert used["communicators"] == 5 * parts(plan.baseline.memory)["communicators"] == 5 * 616_000_000
    for cost in (plan.baseline, plan.bf16_baseline, plan.quantized):
        assert sum(parts(cost.memory).values()) == cost.total_memory


@pytest.mark.parametrize(
    ("link", "settings"), [("PCIe 3", {"link": "pcie3"}), ("NVLink", {"intra_bandwidth": 300.0})]
)
def test_gains_of_one_node_are_those_of_the_planner(link: str, settings: dict[str, Any]) -> None:
    plan = plan_of(device="l40s", nodes=1, device_tflops=150.0, **settings)
    assert plan.hybrid is not None
    (row,) = (
        row for row in table_after("docs/results/planning.md", "## One node") if row[:2] == ["6.7B", link]
    )
    assert row[3] == range_of(*plan.speedups(plan.bf16_baseline))
    assert row[4] == f"{range_of(*plan.speedups(plan.hybrid.plain))} (HSDP)"
    assert plan.recommendation.startswith(row[5])


def test_gains_of_the_readme_are_the_ends_of_those_of_the_page() -> None:
    page = "docs/results/planning.md"
    columns = (
        (["## Over HSDP"], "1.3B 6.7B"),
        ([f"{LARGE_BATCH} in one", f"{LARGE_BATCH} in 4"], "1.3B 6.7B"),
        (["## Over HSDP"], "70B"),
        (["## Over FSDP2 with bf16"], "1.3B 6.7B"),
    )
    _, *shown = table_after("README.md", "Calculated gains")
    for rate, _, *cells in shown:
        for cell, (headings, models) in zip(cells, columns, strict=True):
            gains = []
            for titles, *rows in (table_after(page, heading) for heading in headings):
                for row in rows:
                    if row[0] in models.split():
                        gains += [float(each) for each in re.findall(r"[\d.]+", row[titles.index(rate)])]
            assert cell == range_of(min(gains), max(gains)), (rate, models)


# -- ratios of bytes -------------------------------------------------------------------------------------


def ratio(*, nodes: int, ranks_per_node: int, gathers: int, gradient_bytes: int = 4) -> float:
    """Return the ratio of a matrix by the formula of docs/telemetry.md."""
    ranks = nodes * ranks_per_node
    plain = (2 * gathers + gradient_bytes) * (ranks - 1) / ranks
    return plain / (OURS * (nodes - 1) / nodes)


def test_ratios_follow_the_documented_formula() -> None:
    titles, *rows = table_after("docs/telemetry.md", "## Why your ratio differs")
    for _, gathers, gradients, *ratios in rows:
        kind = {"gathers": int(gathers), "gradient_bytes": {"fp32": 4, "bf16": 2}[gradients]}
        for title, shown in zip(titles[3:], ratios, strict=True):
            nodes, ranks_per_node = (int(each) for each in title.split(" x "))
            expected = ratio(nodes=nodes, ranks_per_node=ranks_per_node, **kind)
            assert float(shown) == pytest.approx(expected, abs=0.05 + 2e-3 * expected)


def printed(page: str, pattern: str) -> float:
    found = re.findall(pattern, text_of(page))
    assert len(found) == 1, (page, pattern)
    return float(found[0])


@pytest.mark.parametrize(
    ("page", "pattern", "layout", "least", "most"),
    [
        ("docs/tutorial.md", r"compression_ratio: ([\d.]+)", (2, 1, 4), 2, 2),
        ("examples/README.md", r"fsdp2_minimal\.py\n[^`]*?([\d.]+)x fewer inter-node bytes", (2, 2, 4), 2, 2),
        ("examples/README.md", r"sdp4bit/ratio': '([\d.]+)'", (2, 1, 2), 1, 2),
        ("examples/README.md", r"([\d.]+)x fewer than plain FSDP2\)", (2, 2, 4), 1, 2),
    ],
)
def test_printed_ratios_lie_between_the_rows_of_the_table(
    page: str, pattern: str, layout: tuple[int, int, int], least: int, most: int
) -> None:
    nodes, ranks_per_node, gradient_bytes = layout
    low, high = (
        ratio(nodes=nodes, ranks_per_node=ranks_per_node, gathers=gathers, gradient_bytes=gradient_bytes)
        for gathers in (least, most)
    )
    # Slightly less, because 1-D parameters keep 8 bits.
    assert 0.99 * low < printed(page, pattern) < high
