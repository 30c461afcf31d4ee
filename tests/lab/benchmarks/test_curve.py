"""The curve of loss over bytes, from runs that are made up. Layer: files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import curve
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.report.runs import find_runs
from tests.lab.report.written_runs import settings, train_event, validation_event, write_run

pytestmark = pytest.mark.slow


def comparison_runs(folder: Path, costs: dict[str, tuple[float, float]]) -> None:
    """Write runs of three seeds whose gradient error and loss above the baseline's are given by strategy."""
    for seed in (1, 2, 3):
        for name, (error, cost) in {"baseline": (0.0, 0.0), **costs}.items():
            quantization = {"gradients": None if name == "baseline" else {"inter_bits": 4}, "weights": None}
            events = [train_event(step, gradient_error=error or None) for step in (1, 2, 3, 4)]
            events.append(validation_event(4, 5.0 * (1 + cost) + 0.01 * seed))
            config = settings(name, seed=seed) | {"quantization": quantization}
            write_run(folder / f"{name}-seed{seed}", events, config=config)


def curve_runs(folder: Path, simulated: int | None = 4) -> None:
    """Write a comparison of simulated ranks that have counted their bytes."""
    comparison_runs(folder, {"tlq-hs": (0.1, 0.001), "dithered": (0.07, 0.0006)})
    with torch.device("meta"):
        model = GPT(ModelConfig().shape(vocabulary=512, sequence_length=64))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for path in folder.glob("*/config.json"):
        config = json.loads(path.read_text())
        rounding = "dither" if path.parent.name.startswith("dithered") else "stochastic"
        if config["quantization"]["gradients"]:
            config["quantization"]["gradients"]["inter_rounding"] = rounding
        config["model"], config["data"] = {"model_card": "tiny"}, {"vocabulary_size": 500}
        config["training"] = {"sequence_length": 64}
        config["parallel"] = {"simulated_ranks": simulated, "ranks_per_node": 2}
        path.write_text(json.dumps(config))
    for path in folder.glob("*/metrics.jsonl"):
        sent = 6 if path.parent.name.startswith("baseline") else 1
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for event in events:
            if event["event"] == "train":
                # The first step sends more.
                event["inter_bytes"] = sent * parameters * (2 if event["step"] == 1 else 1)
        path.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_the_curve_holds_costs_against_bytes_and_what_was_expected(tmp_path):
    curve_runs(tmp_path / "runs")
    found = {point.label: point for point in curve.points(find_runs([tmp_path / "runs"]))}
    assert {point.bytes_per_parameter for point in found.values()} == {1.0}
    assert found["tlq-hs"].expected == pytest.approx(found["tlq-hs"].difference.mean_percent)
    assert found["dithered"].expected == pytest.approx(found["tlq-hs"].expected / 2, rel=0.03)
    curve.draw(list(found.values()), tmp_path / "curve.png")
    assert "| dithered | 1.000 | 3 | +0.060 % |" in curve.table(list(found.values()))
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_hooks_of_ddp_are_compared_with_ddp(tmp_path):
    curve_runs(tmp_path / "runs")
    for path in (tmp_path / "runs").glob("*/config.json"):
        config = json.loads(path.read_text())
        label = {"baseline": "ddp", "dithered": "ddp-bf16"}.get(config["strategy"], config["strategy"])
        quantization = {"gradients": None, "weights": None}
        ranks = {"parallel": {"simulated_ranks": None, "ranks_per_node": 2}, "ranks": 4}
        path.write_text(json.dumps(config | ranks | {"strategy": label, "quantization": quantization}))
    (point,) = curve.points(find_runs([tmp_path / "runs"]))
    assert (point.label, point.bytes_per_parameter, point.expected) == ("ddp-bf16", 1.0, None)
    assert point.difference.mean_percent == pytest.approx(0.06, abs=0.001)


def test_the_curve_needs_ranks_of_several_nodes(tmp_path):
    curve_runs(tmp_path / "runs", simulated=None)
    with pytest.raises(SettingError, match="--simulated-ranks"):
        curve.points(find_runs([tmp_path / "runs"]))
