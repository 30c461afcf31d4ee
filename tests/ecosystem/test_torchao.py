"""torchao's low-precision training, emulated on the CPU, against plain FSDP2 with the same weights.

Layer: 2 gloo processes, which represent 2 nodes. MXFP8 weights are gathered in bf16, and float8 ones in bf16
or, by `enable_fsdp_float8_all_gather`, in float8.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

pytest.importorskip("torchao", reason="torchao is not installed: make test-ecosystem")

from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization.quant_api import quantize_
from torchao.quantization.quantize_.common import KernelPreference

from sdp4bit import SDP4BitConfig, quantize_communication
from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import CONFIGS, LOSSLESS, QUANTIZED, TOKENS, WORLD
from tests.ranks import run_ranks
from tests.tables import flat
from tests.toy import POLICY, data_mesh

PRELOAD = ["torchao.float8", "torchao.prototype.moe_training.config"]
# torchao lets checkpoints hold its float8 weights, but not these.
torch.serialization.add_safe_globals(
    [MXFP8TrainingWeightWrapperTensor, MXFP8TrainingOpConfig, KernelPreference, ScaleCalculationMode]
)
WIDTH, STEPS = 64, 6
MX, FLOAT8, GATHERED, PRECOMPUTED = "mxfp8", "float8", "float8 all-gather", "precomputed scales"
SERVED, LEFT = [MX, FLOAT8], [GATHERED, PRECOMPUTED]


class Block(nn.Module):
    """A gated MLP without biases, which torchao's MXFP8 weights leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 96, bias=False), nn.Linear(WIDTH, 96, bias=False)
        self.down = nn.Linear(96, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + self.down(self.up(hidden) * F.silu(self.gate(hidden)))


def build(kind: str) -> nn.Sequential:
    """Return a sharded model whose blocks compute in low precision, with the same weights in every call."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(2)]
    model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), *blocks, nn.Linear(WIDTH, TOKENS, bias=False))
    for block in blocks:
        if kind == MX:
            config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
            quantize_(block, config, filter_fn=lambda module, _: isinstance(module, nn.Linear))
        else:
            config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=kind in LEFT)
            convert_to_float8_training(block, config=config)
        fully_shard(block, mesh=data_mesh(), mp_policy=POLICY)
    return fully_shard(model, mesh=data_mesh(), mp_policy=POLICY)


def rows(step: int) -> tuple[Tensor, Tensor]:
    """Return 64 tokens, other ones on each rank, in which there is something to learn."""
    tokens = (torch.arange(64) * 5 + 31 * step + 13 * dist.get_rank()) % TOKENS
    return tokens, (tokens * 7 + 3) % TOKENS


def train(
    kind: str, config: SDP4BitConfig | None, *, folder: str = "", resume: bool = False
) -> dict[str, Any]:
    """Train, save after half of the steps or resume from there; return the values that are compared."""
    model = build(kind)
    comm = None if config is None else quantize_communication(model, topology=1, config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    parts = {} if comm is None else {"comm": comm}
    if resume:
        dcp.load(parts, checkpoint_id=f"{folder}/comm")
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=f"{folder}/states")
        set_state_dict(
            model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )
    losses = []
    with on_cpu.count_sent_bytes() as sent:
        for step in range(STEPS // 2 if resume else 0, STEPS):
            tokens, targets = rows(step)
            loss = F.cross_entropy(model(tokens).float(), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if kind == PRECOMPUTED:
                precompute_float8_dynamic_scale_for_fsdp(model)
            losses.append(loss.item())
            if folder and not resume and step + 1 == STEPS // 2:
                states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
                dcp.save(states, checkpoint_id=f"{folder}/states")
                dcp.save(parts, checkpoint_id=f"{folder}/comm")
    found: dict[str, Any] = {"losses": losses, "sent": dict(sent), "weights": on_cpu.weights_of(model)}
    found["reported"] = None if comm is None else comm.stats()["total"]["inter_bytes"]
    with torch.no_grad():
        found["evaluated"] = model(rows(99)[0]).double().abs().sum().item()
    if comm is not None:
        found["served"] = [group.weights.replica is not None for group in comm.groups]
        found["explained"] = flat(comm.explain(full=True))
        comm.audit()
    return found


def run_all(kind: str) -> dict[str, Any]:
    return {name: train(kind, config) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("kind", SERVED)
def test_weights_gathered_in_bf16_come_from_replicas(kind: str) -> None:
    ranks = run_ranks(run_all, WORLD, kind)
    on_cpu.assert_losses(ranks)
    for rank in ranks:
        assert all(rank["quantized"]["served"])
        on_cpu.assert_bytes(rank["plain"], rank["quantized"], least=5)


def run_exactly(kind: str) -> None:
    """The blocks' gathers are FSDP2's, so that skipping the others leaves a plain run."""
    plain = train(kind, None)
    for config in (LOSSLESS, replace(QUANTIZED, weights=None, gradients=None)):
        ours = train(kind, config)
        assert [ours[what] == plain[what] for what in ("losses", "weights", "evaluated")] == [True] * 3
        assert not any(ours["served"][1:])
    reason = "WeightWithDynamicFloat8CastTensor of 1.up.weight: gathers float8_e4m3fn itself"
    quantized = train(kind, QUANTIZED)
    assert reason in quantized["explained"] and quantized["served"] == [True, False, False]
    assert quantized["losses"] == pytest.approx(plain["losses"], rel=0.02)


@pytest.mark.parametrize("kind", LEFT)
def test_float8_gathers_stay_with_fsdp2(kind: str) -> None:
    run_ranks(run_exactly, WORLD, kind)


def save_and_resume(kind: str, folder: str) -> None:
    whole = train(kind, QUANTIZED, folder=folder)
    resumed = train(kind, QUANTIZED, folder=folder, resume=True)
    assert resumed["losses"] == whole["losses"][STEPS // 2 :]
    assert [resumed[what] for what in ("weights", "evaluated")] == [whole["weights"], whole["evaluated"]]


@pytest.mark.parametrize("kind", [MX, GATHERED])
def test_a_resumed_run_continues_bit_for_bit(kind: str, tmp_path: Path) -> None:
    run_ranks(save_and_resume, WORLD, kind, str(tmp_path))
