"""torchtitan's own Qwen3 MoE, sharded by its own code with expert parallelism, if torchtitan is installed.

Layer: 4 real processes over gloo. A CPU has no part for three things, which are replaced: the device type
that torchtitan settles on, its attention, and sums with a factor. Its trainer is not run.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sdp4bit
from sdp4bit import SDP4BitConfig
from tests.ranks import on_ranks
from tests.toy import IDENTITY, assert_close

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
]
LENGTH = 32


def attend(
    self: Any, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, enable_gqa: bool = False, **_: Any
) -> Tensor:
    """Stand in for FlexAttention, which has no backward on a CPU; torchtitan asks for these names."""
    heads = (each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH))
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=enable_gqa).transpose(1, 2)


class TitanRun:
    """A model of one MoE layer, two ranks with different experts, two with the same; and its training."""

    def __init__(self, config: SDP4BitConfig | None) -> None:
        from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.distributed import utils as distributed_utils
        from torchtitan.models.qwen3 import model_registry

        parallelism = ParallelismConfig(expert_parallel_degree=2, spmd_backend="partial_dtensor")
        dims = ParallelDims.from_config(parallelism, 4)
        dims.build_mesh()
        distributed_utils.set_spmd_backend(parallelism.spmd_backend)
        spec = model_registry("debugmodel_moe", attn_backend="flex")
        spec.model.layers = spec.model.layers[:1]
        training = TrainingConfig(local_batch_size=1, seq_len=LENGTH)
        job = SimpleNamespace(training=training, parallelism=parallelism, debug=DebugConfig())
        spec.model.update_from_config(config=job)  # how each part is sharded
        with torch.device("meta"):
            model = spec.model.build()
        self.model = spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=training,
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=None,
            dump_folder="",
        )
        self.model.to_empty(device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            self.model.init_weights(buffer_device=None)
        for module in self.model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sums with a factor
        self.comm: Any = None
        if config is not None:
            self.comm = sdp4bit.quantize_communication(self.model, topology=2, config=config)
        by_mesh: dict[Any, list[Any]] = {}
        for param in self.model.parameters():
            by_mesh.setdefault(param.device_mesh, []).append(param)
        self.optimizer = torch.optim.AdamW([{"params": each} for each in by_mesh.values()], lr=8e-4)

    def train(self, steps: int) -> list[float]:
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        losses = []
        for _ in range(steps):
            tokens = torch.randint(0, 256, (1, LENGTH + 1), generator=generator)
            logits = self.model(tokens[:, :-1].contiguous(), positions=torch.arange(LENGTH)[None])
            # torchtitan leaves the division by the tokens of all ranks to the loss.
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[0, 1:], reduction="sum")
            loss = loss / (4 * LENGTH)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@on_ranks(4, timeout=560.0)
def test_experts_and_the_rest_are_quantized_each_over_its_own_ranks() -> None:
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    from torchtitan.models.common.attention import FlexAttention

    FlexAttention.forward = attend
    plain = TitanRun(None).train(2)
    assert TitanRun(IDENTITY).train(2) == plain
    run = TitanRun(SDP4BitConfig())
    losses = run.train(2)
    assert losses != plain
    assert_close(losses, plain)
    layouts = {g.group.name: (g.layout.nodes, g.layout.ranks_per_node) for g in run.comm.groups}
    experts = "layers.0.moe.routed_experts.inner_experts"
    assert layouts == {name: (2, 1) if name == experts else (2, 2) for name in layouts}
    assert {experts, "layers.0", "norm"} <= layouts.keys()
    assert all(group.gradient_bits == 4 for group in run.comm.groups)
    run.comm.audit()
