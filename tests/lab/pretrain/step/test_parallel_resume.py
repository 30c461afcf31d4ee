"""Resuming runs with tensor and pipeline parallelism: bit for bit in the same layout, continuous in another.

Layer: 4 real processes over gloo, started once for the saved runs and once for those that load.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from tests.lab.pretrain.step.parallel_runs import LAYOUTS, ROUNDING, laid_out
from tests.lab.pretrain.tiny_runs import train_here
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

SAVED_AT = 2
SHORT = {"steps": 4, "eval_interval": 4, "eval_batches": 1}


def saving(text: Path, folder: Path, **options: Any) -> PretrainConfig:
    """Return a run of 4 steps with dropout and quantized communication, saved after each second."""
    settings = {"dropout": 0.2, "strategy": "sdp4bit", "ranks_per_node": 1, "param_dtype": "bf16"}
    config = laid_out(text, **{**settings, **SHORT, **options})
    return replace(config, checkpoint=CheckpointConfig(save=folder, save_interval=SAVED_AT))


def resumed(config: PretrainConfig) -> PretrainConfig:
    assert config.checkpoint.save is not None
    load = config.checkpoint.save / f"step-{SAVED_AT:08d}"
    return replace(config, checkpoint=CheckpointConfig(load=load))


def losses_of(*configs: PretrainConfig) -> tuple[list[list[Any]], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = train_here(*configs)
    texts = [str(warning.message) for warning in caught]
    return [[(step.loss, step.grad_norm) for step in result.steps] for result in results], [
        text for text in texts if "saved with" in text
    ]


@pytest.mark.slow
def test_the_same_layout_resumes_bit_for_bit_and_another_one_in_full_precision(text, tmp_path):
    names = ("TP2 x DP2", "PP2 x DP2, interleaved")
    runs = [
        saving(text, tmp_path / "tensor", layers=2, **LAYOUTS[names[0]]),
        saving(text, tmp_path / "pipeline", **LAYOUTS[names[1]]),
    ]
    # Without dropout and quantization, what another layout continues differs by rounding alone.
    plain = saving(
        text, tmp_path / "plain", **LAYOUTS[names[1]], dropout=0.0, strategy="baseline", param_dtype="fp32"
    )
    (whole, *_) = run_ranks(losses_of, 4, *runs, plain, timeout=140)
    expected, texts = whole
    assert not texts

    elsewhere = laid_out(text, **LAYOUTS[names[0]], **SHORT)
    elsewhere = replace(elsewhere, checkpoint=resumed(plain).checkpoint)
    (first, *others) = run_ranks(losses_of, 4, *map(resumed, runs), elsewhere, timeout=140)
    found, texts = first
    assert found[:2] == [run[SAVED_AT:] for run in expected[:2]]
    continued = [loss for loss, *_ in found[2]]
    assert continued == pytest.approx([loss for loss, *_ in expected[2][SAVED_AT:]], rel=ROUNDING)
    assert len(texts) == 1
    assert "(2 data x 2 pipeline in 2 stages each) and is loaded with 4 (2 data x 2 tensor)" in texts[0]
    assert all(other[0] == found for other in others)
