"""Errors of quantization by kind of layer, and the law of loss over error. Layer: one process, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import curve, errors, law
from benchmarks.errors import KINDS, OWN, ErrorConfig, kind_of, read, relative, train_and_measure
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig, PretrainConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.pretrain.trainer import pretrain
from sdp4bit_lab.report.runs import find_runs
from tests.lab.pretrain.tiny_runs import small, this_rank, write_text
from tests.lab.report.written_runs import settings, train_event, validation_event, write_run
from tests.ranks import run_ranks


def simulated(tmp_path: Path, out: str, strategy: str) -> PretrainConfig:
    config = small(write_text(tmp_path / "text"), tmp_path / out, strategy=strategy)
    training = TrainingConfig(steps=6, sequence_length=32, micro_batch_size=2, eval_batches=2)
    return replace(config, training=training, parallel=ParallelConfig(simulated_ranks=4, ranks_per_node=2))


def measured(config: ErrorConfig) -> float:
    train_and_measure(config, ranks=this_rank())
    return float(json.loads((config.training.logging.out / "result.json").read_text())["validation_loss"])


def plain(config: PretrainConfig) -> float:
    return pretrain(config, ranks=this_rank()).validation_loss


@pytest.mark.slow
def test_measuring_changes_nothing_and_finds_the_errors_of_the_settings(tmp_path):
    config = simulated(tmp_path, "run", "sdp4bit")
    (loss,) = run_ranks(measured, 1, ErrorConfig(training=config, every=2))
    (undisturbed,) = run_ranks(plain, 1, simulated(tmp_path, "plain", "sdp4bit"))
    assert loss == undisturbed
    records = read(tmp_path / "run")
    assert [record["step"] for record in records] == [2, 4, 6]
    for record in records:
        found = {name: relative(squares) for name, squares in record["gradients"].items()}
        assert found["tlq-hs, 8 bits inter-node"] < 0.002
        assert found["tlq-hs, groups of 32 inter-node"] < found["tlq-hs"] < found["ulq"] < 0.2
        assert found["tlq-hs, dither inter-node"] == pytest.approx(found["tlq-hs"] / 2, rel=0.2)
        # Another seed draws other rounding bits.
        assert found[OWN] == pytest.approx(found["tlq-hs, dither inter-node"], rel=0.1)
        for kind in KINDS:
            # Nothing of the weights' type is closer to them than what they round to.
            assert relative(record["weights"], "drift", "rounding", kind) >= 1
    table = (tmp_path / "run" / "table.md").read_text()
    assert table.count("\n") == 2 + 7 + 2 * 4 + 2 * 5 and "nan" not in table
    assert (tmp_path / "run" / "errors.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_without_errors_of_any_kind_a_run_is_the_baseline(tmp_path):
    config = ErrorConfig(
        training=simulated(tmp_path, "exact", "sdp4bit"), exact_gradients=KINDS, exact_weights=KINDS, every=2
    )
    (exact,) = run_ranks(measured, 1, config)
    (baseline,) = run_ranks(plain, 1, simulated(tmp_path, "baseline", "baseline"))
    (quantized,) = run_ranks(plain, 1, simulated(tmp_path, "quantized", "sdp4bit"))
    # The mean is rounded once here, and at every addition there.
    assert exact == pytest.approx(baseline, abs=1e-4)
    assert abs(quantized - baseline) > 10 * abs(exact - baseline)


def test_real_ranks_cannot_be_measured():
    with pytest.raises(SettingError, match="give --simulated-ranks"):
        ErrorConfig(training=PretrainConfig())


def test_every_parameter_has_a_kind():
    matrix, vector = torch.empty(2, 2), torch.empty(2)
    assert [
        kind_of(name, parameter)
        for name, parameter in (
            *(("token_embedding.weight", matrix), ("position_embedding.weight", matrix)),
            ("blocks.0.attention.projection.weight", matrix),
            *(("blocks.0.feed_forward.expand.weight", matrix), ("blocks.0.feed_forward.expand.bias", vector)),
            ("final_norm.weight", vector),
        )
    ] == ["embeddings", "embeddings", "attention", "MLP", "norms and biases", "norms and biases"]


def law_runs(folder: Path, costs: dict[str, tuple[float, float]]) -> None:
    """Write runs of three seeds whose gradient error and loss above the baseline's are given by strategy."""
    for seed in (1, 2, 3):
        for name, (error, cost) in {"baseline": (0.0, 0.0), **costs}.items():
            quantization = {"gradients": None if name == "baseline" else {"inter_bits": 4}, "weights": None}
            events = [train_event(step, gradient_error=error or None) for step in (1, 2, 3, 4)]
            events.append(validation_event(4, 5.0 * (1 + cost) + 0.01 * seed))
            config = settings(name, seed=seed) | {"quantization": quantization}
            write_run(folder / f"{name}-seed{seed}", events, config=config)


def test_costs_in_proportion_to_the_squared_error_are_on_the_line(tmp_path):
    law_runs(tmp_path / "runs", {"tlq": (0.2, 0.004), "tlq-hs": (0.1, 0.001)})
    found = law.points(find_runs([tmp_path / "runs"]))
    assert [(point.label, round(point.squared_error, 6)) for point in found] == [
        ("tlq-hs", 0.01),
        ("tlq", 0.04),
    ]
    assert law.slope(found) == pytest.approx(10.0, rel=0.01)
    law.draw(found, tmp_path / "law.png")
    assert "| tlq-hs | 3 | 0.0100 | +0.100 % |" in law.table(found)
    assert (tmp_path / "law.png").read_bytes().startswith(b"\x89PNG")


def test_a_law_needs_three_seeds(tmp_path):
    law_runs(tmp_path / "runs", {"tlq": (0.2, 0.004)})
    with pytest.raises(SettingError, match="three seeds"):
        law.points([run for run in find_runs([tmp_path / "runs"]) if run.seed != 3])


def curve_runs(folder: Path, simulated: int | None = 4) -> None:
    """Write the runs of the law as simulated ranks' that have counted their bytes."""
    law_runs(folder, {"tlq-hs": (0.1, 0.001), "dithered": (0.07, 0.0006)})
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


def test_too_few_measurements_are_said(tmp_path):
    (tmp_path / "errors.jsonl").write_text("")
    with pytest.raises(SettingError, match="0 measured steps are too few"):
        errors.draw(tmp_path)
