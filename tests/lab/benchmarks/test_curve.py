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


def curve_runs(folder: Path, *, simulated: int | None = 4) -> None:
    """Write a comparison of simulated ranks that have counted their bytes, with three seeds."""
    with torch.device("meta"):
        model = GPT(ModelConfig().shape(vocabulary=512, sequence_length=64))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for name, rounding, cost, sent in (
        ("baseline", None, 0.0, 6),
        ("tlq-hs", "stochastic", 0.001, 1),
        ("dithered", "dither", 0.0006, 1),
    ):
        gradients = rounding and {"inter_bits": 4, "inter_rounding": rounding}
        # The first step sends more.
        events = [train_event(s, inter_bytes=sent * parameters * (1 + (s == 1))) for s in (1, 2, 3, 4)]
        for seed in (1, 2, 3):
            config = settings(
                name,
                seed=seed,
                model={"model_card": "tiny"},
                data={"vocabulary_size": 500},
                training={"sequence_length": 64},
                parallel={"simulated_ranks": simulated, "ranks_per_node": 2},
                quantization={"gradients": gradients, "weights": None},
            )
            validation = validation_event(4, 5.0 * (1 + cost) + 0.01 * seed)
            write_run(folder / f"{name}-seed{seed}", [*events, validation], config=config)


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
