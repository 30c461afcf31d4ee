"""Tensor and pipeline parallelism: whatever the layout, what is trained is what data parallelism trains.

Layer: 4 real processes over gloo, started once; they stand for 2 nodes of 2 ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from tests.lab.pretrain.step.parallel_runs import LAYOUTS, ROUNDING, laid_out
from tests.lab.pretrain.tiny_runs import train_here
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

GRADIENT_ERROR = 0.15
"""Relative error of gradients rounded stochastically to 8, then 4 bits (docs/method.md).

An update that is off by this share of its length changes what the loss decreases by in a step by at most this
share, to first order. So two such runs end within it, times the decrease.
"""


def curve(config: PretrainConfig) -> dict[str, Any]:
    (result,) = train_here(config)
    (_, validation) = result.validation[-1]
    return {
        "losses": [*(step.loss for step in result.steps), validation],
        "norms": [step.grad_norm for step in result.steps],
        "bytes": result.steps[-1].inter_bytes,
    }


def curves(configs: dict[str, PretrainConfig]) -> dict[str, Any]:
    return {name: curve(config) for name, config in configs.items()}


def on_all_ranks(
    world_size: int, configs: dict[str, PretrainConfig], *, timeout: float = 140
) -> dict[str, Any]:
    """Return the curves of runs one after another, which every rank reports alike, bit for bit."""
    first, *others = run_ranks(curves, world_size, configs, timeout=timeout)
    assert all(other == first for other in others)
    return first


def assert_equal_but_for_rounding(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=ROUNDING)
    assert found["norms"] == pytest.approx(expected["norms"], rel=ROUNDING)


def assert_equal_but_for_quantization(found: dict[str, Any], exact: dict[str, Any]) -> None:
    start, *_, end, _ = exact["losses"]
    bound = GRADIENT_ERROR * (start - end)
    assert all(abs(a - b) < bound for a, b in zip(found["losses"], exact["losses"], strict=True))
    # The first step starts from the same weights; afterwards rounding shows.
    assert found["losses"][0] == pytest.approx(exact["losses"][0], rel=ROUNDING)
    assert found["losses"][2] != pytest.approx(exact["losses"][2], rel=ROUNDING)


def test_every_layout_trains_as_data_parallelism_alone(text):
    """Quantized; one step in full precision is compared in test_parallel_state."""
    names = ["TP2 x DP2", "PP2 x DP2"]
    # A rank is a node of its own, so that the data ranks of every layout cross nodes.
    quantized = {
        name: laid_out(text, **LAYOUTS[name], ranks_per_node=1, strategy="sdp4bit") for name in names
    }
    found = on_all_ranks(4, {"DP4": laid_out(text, data=4, ranks_per_node=1), **quantized})
    assert found["DP4"]["losses"][-2] < found["DP4"]["losses"][0] - 0.2
    for name in names:
        assert_equal_but_for_quantization(found[name], found["DP4"])
        assert 0 < found[name]["bytes"] < found["DP4"]["bytes"] / 4


@pytest.mark.slow
def test_all_three_dimensions_on_eight_processes(text):
    dims = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "data": 2}
    interleaved = {**dims, "num_layers_per_virtual_pipeline_stage": 1}
    quantized = {"strategy": "sdp4bit", "ranks_per_node": 2}
    configs = {
        # 8 sequences a step as in the others, one on each rank.
        "DP8": laid_out(text, data=4, accumulation=1),
        "TP2 x PP2 x DP2": laid_out(text, **dims),
        "interleaved": laid_out(text, **interleaved),
        "quantized": laid_out(text, **dims, **quantized),
        "interleaved, quantized": laid_out(text, **interleaved, **quantized),
    }
    found = on_all_ranks(8, configs, timeout=280)
    for name in ("TP2 x PP2 x DP2", "interleaved"):
        assert_equal_but_for_rounding(found[name], found["DP8"])
    for name in ("quantized", "interleaved, quantized"):
        assert_equal_but_for_quantization(found[name], found["DP8"])


@pytest.mark.slow
def test_compiled_blocks_train_as_eager_ones(text):
    """Also around FSDP2's hooks of the norms, which are groups of their own, and with recomputation."""
    options = {**LAYOUTS["TP2 x DP2"], "layers": 2, "ranks_per_node": 1}
    configs = {
        "eager": laid_out(text, **options),
        "compiled": laid_out(text, **options, compile=True),
        "compiled, quantized": laid_out(
            text, **options, compile=True, strategy="sdp4bit", recompute_granularity="selective"
        ),
    }
    found = on_all_ranks(4, configs, timeout=280)
    assert_equal_but_for_rounding(found["compiled"], found["eager"])
    assert_equal_but_for_quantization(found["compiled, quantized"], found["eager"])
