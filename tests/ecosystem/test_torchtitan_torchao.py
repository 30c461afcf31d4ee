"""torchtitan's Trainer with weights that torchao computes with in low precision, emulated on the CPU.

Layer: 2 gloo processes, which represent 2 nodes. torchtitan's float8 converter has an emulation; those for
MXFP8 and NVFP4 refuse all but SM100, so a converter of the test applies torchao's MXFP8 weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("torchao", reason="torchao is not installed: make test-ecosystem")
pytest.importorskip("spmd_types", reason="torchtitan is not installed: make test-ecosystem")
pytest.importorskip("tests.ecosystem.titan_device")

from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor
from torchao.quantization.quant_api import quantize_
from torchao.quantization.quantize_.common import KernelPreference
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.quantization import Float8LinearConverter, MXFP8LinearConverter
from torchtitan.models.common.linear import Linear

from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import CONFIGS, WORLD
from tests.ecosystem.trainers import torchtitan as titan
from tests.ranks import run_ranks

PRELOAD = [*titan.PRELOAD, "torchtitan.components.quantization"]
KINDS = ["float8", "mxfp8"]


class MXLinear(Linear):
    """Its weight is a tensor subclass of torchao's, as torchtitan's float8 experts have it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        emulated = MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED, wgrad_with_hp=True)
        quantize_(self, emulated, filter_fn=lambda module, _: module is self)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, MXFP8TrainingWeightWrapperTensor)
        return super().forward(x)


def convert(model: Any, kind: str) -> Any:
    """Return the model's config with low precision in its attention, whose sizes are multiples of 32."""
    if kind == "float8":
        return Float8LinearConverter.Config(emulate=True, filter_fqns=["lm_head"]).build().convert(model)
    for name, linear, parent, attribute in [*model.traverse(Linear.Config)]:
        if "attention" in name:
            options = {field: getattr(linear, field) for field in ("in_features", "out_features", "bias")}
            setattr(parent, attribute, MXLinear.Config(**options, param_init=linear.param_init))
    return model


def train_all(folder: Path, kind: str) -> dict[str, Any]:
    on_cpu.as_launched()
    result = {}
    for name, communication in CONFIGS.items():
        spec = titan.model_spec()
        config = replace(
            titan.config_of(folder / name),
            model_spec=replace(spec, model=convert(spec.model, kind)),
            checkpoint=CheckpointManager.Config(),
        )
        quantized = config if communication is None else titan.quantized(config, communication)
        result[name] = titan.run(quantized)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_weights_come_from_replicas(kind: str, tmp_path: Path) -> None:
    ranks = run_ranks(train_all, WORLD, tmp_path, kind)
    on_cpu.assert_losses(ranks)
    for rank in ranks:
        on_cpu.assert_bytes(rank["plain"], rank["quantized"], least=7)


def test_torchtitans_mxfp8_converter_has_no_emulation() -> None:
    """When this fails, drive that converter instead of the one above."""
    with pytest.raises(ValueError, match="SM100"):
        MXFP8LinearConverter.Config().build()
