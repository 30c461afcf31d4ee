"""The planner's tables of the documentation, by arithmetic done by hand. Layer: no process."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks import planning
from sdp4bit_lab.cli import main
from sdp4bit_lab.plan.memory import parts
from tests import ROOT

RESULT: dict[str, Any] = json.loads((ROOT / "results/planning.json").read_text(encoding="utf-8"))
OURS = (1 / 2 + 2 / 128) + (1 / 2 + 2 / 2048)
"""Bytes per parameter that each of many nodes sends."""


def ratio(*, nodes: int, ranks_per_node: int, gathers: int, gradient_bytes: int = 4) -> float:
    """Return the ratio of a matrix by the formula of docs/telemetry.md."""
    ranks = nodes * ranks_per_node
    plain = (2 * gathers + gradient_bytes) * (ranks - 1) / ranks
    return plain / (OURS * (nodes - 1) / nodes)


def test_ratios_follow_the_documented_formula() -> None:
    found = planning.ratios()
    assert json.loads(json.dumps(found)) == RESULT["ratios"]
    for row in found["rows"]:
        kind = {name: row[name] for name in ("gathers", "gradient_bytes")}
        expected = [ratio(nodes=n, ranks_per_node=g, **kind) for n, g in found["grids"]]
        assert row["ratios"] == pytest.approx(expected, rel=2e-3)


def printed(page: str, pattern: str) -> float:
    found = re.findall(pattern, (ROOT / page).read_text(encoding="utf-8"))
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


def test_memory_is_the_plan_s(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MODELS", {"6.7B": planning.MODELS["6.7B"]})
    rows = planning.memory()
    assert json.loads(json.dumps(rows)) == [row for row in RESULT["memory"] if row["model"] == "6.7B"]
    arguments = "--preset 6.7B --device h100 --nodes 4 --devices-per-node 8 --device-tflops 400"
    options = ("--inter-bandwidth", "12.5", "--micro-batch-size", "4", "--json")
    assert main(["plan", *arguments.split(), *options]) == 0
    memory = json.loads(capsys.readouterr().out)["quantized"]["memory"]
    row = next(row for row in rows if row["nodes"] == 4)
    assert sum(row["sdp4bit"].values()) == sum(memory.values())
    parameters = 6.66e9
    assert row["sdp4bit"]["replica"] == pytest.approx(2 * parameters / 8, rel=2e-3)
    assert row["sdp4bit"]["shards"] == pytest.approx(12 * parameters / 32, rel=2e-3)
    # One of FSDP2, and one per level for weights and for gradients.
    assert row["sdp4bit"]["communicators"] == 5 * row["fsdp2"]["communicators"] == 5 * 616_000_000


def test_the_reported_box_is_calculated_from_one_of_its_steps() -> None:
    found = planning.reported_box()
    assert found == pytest.approx({name: RESULT["reported_box"][name] for name in found})
    sent = 2 * 1.2e9 * 7 / 8
    rate = 4 * sent / 5.0
    assert found["gigabytes"] == pytest.approx(rate / 1e9)
    assert found["bf16"] == pytest.approx(1.4 + 2 * sent / rate, rel=0.02)
    # 7.76 times fewer bytes than in fp32, and kernels.
    assert 1.4 + 5.0 / 7.76 < found["sdp4bit"] < 1.4 + 5.0 / 7.76 + 0.06


def test_the_needed_link_is_the_slowest_standard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "LINK_MODELS", ("1.3B",))
    monkeypatch.setattr(planning, "LINK_SEQUENCES", (4,))
    (row,) = planning.links()
    assert row in RESULT["links"]["rows"]
    for name, gbit in row["gbit"].items():
        slower = planning.STANDARD_GBITS[planning.STANDARD_GBITS.index(gbit) - 1]
        shares = []
        for rate in (slower, gbit):
            costs = planning._costs(planning.plan_of("1.3B", nodes=planning.LINK_NODES, gbit=rate))
            shares.append(costs[name].compute_seconds / costs[name].step_seconds[1])
        assert shares[0] < planning.EFFICIENCY <= shares[1], name


def test_a_decision_fits_and_is_nearly_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MODELS", {"70B": planning.MODELS["70B"]})
    monkeypatch.setattr(planning, "DECISION_NODES", (2, 8))
    rows = planning.decisions()
    stored = [row for row in RESULT["decisions"]["rows"] if row["model"] == "70B" and row["nodes"] < 64]
    assert json.loads(json.dumps(rows)) == stored
    # Two nodes lack the memory for a replica, and a fast link needs no quantization.
    assert rows[0]["chosen"][0] == ["sdp4bit, gradients only"] * 2
    assert rows[1]["chosen"][0] == ["sdp4bit"] * 2
    assert rows[1]["chosen"][-1] == ["FSDP2, bf16"] * 2


def test_links_between_gpus_are_ordered() -> None:
    rows = [row for row in RESULT["boxes"]["rows"] if row["model"] == "6.7B"]
    assert [row["link"] for row in rows] == list(planning.BOX_LINKS)
    gains = [max(row["over_hybrid"]) for row in rows]
    assert gains == sorted(gains, reverse=True)
    assert [row["recommendation"] for row in (rows[0], rows[-1])] == ["enable", "do not enable"]


def test_parts_cover_every_use_of_memory() -> None:
    plan = planning.plan_of("1.3B", nodes=2, gbit=100)
    for cost in (plan.baseline, plan.bf16_baseline, plan.quantized):
        assert sum(parts(cost.memory).values()) == cost.total_memory
