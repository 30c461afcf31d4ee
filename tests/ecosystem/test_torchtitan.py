"""torchtitan's own: replicas, experts, options. The contract of all trainers is in test_trainers.py.

Layer: gloo processes, each representing a node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("spmd_types", reason="torchtitan is not installed: make test-ecosystem")
pytest.importorskip("tests.ecosystem.titan_device")

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import ConfigManager, ParallelismConfig
from torchtitan.models import qwen3
from torchtitan.models.llama3.config_registry import llama3_8b
from torchtitan.trainer import Trainer

from examples import trainer_torchtitan
from sdp4bit.trainers.torchtitan import CommunicationOptions, SDP4BitTrainer, quantize
from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import CONFIGS, QUANTIZED, WORLD
from tests.ecosystem.trainers.torchtitan import PRELOAD, config_of, quantized, run, tiny, without_factors
from tests.ranks import run_ranks

__all__ = ["PRELOAD"]


def moe_spec() -> Any:
    """Return torchtitan's Qwen3 with experts, tiny."""
    spec = qwen3.model_registry("debugmodel_moe")
    dim, head_dim = 32, 16
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=2,
        dim=dim,
        n_heads=2,
        n_kv_heads=1,
        head_dim=head_dim,
        moe_hidden_dim=40,
        num_experts=4,
        top_k=2,
        rope=qwen3.CosSinRoPE.Config(dim=head_dim, max_seq_len=64, theta=10000.0),
        attn_backend="flex",
        moe_comm_backend="standard",
    )
    return replace(spec, model=tiny(spec.model, layers), parallelize_fn=parallelize_moe)


def parallelize_moe(model: Any, **options: Any) -> Any:
    return without_factors(qwen3.parallelize_qwen3(model, **options))


def explain_replicas(folder: Path) -> str:
    on_cpu.as_launched()
    config = config_of(folder)
    config.parallelism.data_parallel_shard_degree = 1
    config.parallelism.data_parallel_replicate_degree = WORLD
    table: str = quantized(config, QUANTIZED).build().comm.explain(full=True)
    return table


def test_replicas_of_the_complete_model_are_quantized_too(tmp_path: Path) -> None:
    for table in run_ranks(explain_replicas, WORLD, tmp_path):
        assert "all-reduce inter int4/128" in table


def test_the_example_is_found_by_torchtitan_and_takes_options() -> None:
    names = ["--module", "examples.trainer_torchtitan", "--config", "llama3_debugmodel_sdp4bit"]
    config = ConfigManager().parse_args(
        [*names, "--sdp4bit.preset", "sdp4bit-w2g3", "--sdp4bit.skip", "lm_head"]
    )
    assert config.sdp4bit == CommunicationOptions(preset="sdp4bit-w2g3", skip=["lm_head"])
    assert type(config) is SDP4BitTrainer.Config and config._owner is SDP4BitTrainer


def train_llama(folder: Path) -> tuple[list[float], list[float]]:
    """Return ten losses of torchtitan's config for Llama 3 8B and of the example's, with a tiny width."""
    on_cpu.as_launched()
    tiny_one = config_of(folder)
    parts = ("model_spec", "dump_folder", "loss", "tokenizer", "dataloader", "parallelism")
    losses = []
    for config in (llama3_8b(), trainer_torchtitan.llama3_8b_sdp4bit()):
        training = replace(
            config.training, steps=10, seq_len=12, local_batch_size=4, disable_cuda_graphs=True
        )
        config = replace(config, **{part: getattr(tiny_one, part) for part in parts}, training=training)
        config.metrics.log_freq, config.profiler.enable_profiling = 1, False
        if isinstance(config, SDP4BitTrainer.Config):
            config.sdp4bit.ranks_per_node = 1
        losses.append(run(config)["losses"])
    return losses[0], losses[1]


def test_the_config_of_8b_trains_ten_steps_with_a_tiny_width(tmp_path: Path) -> None:
    for plain, ours in run_ranks(train_llama, WORLD, tmp_path, timeout=240):
        assert len(plain) == len(ours) == 10 and ours[0] == plain[0] and ours[1:] != plain[1:]
        assert ours == pytest.approx(plain, rel=0.01)


def train_moe(folder: Path) -> dict[str, Any]:
    """Experts on two pairs of ranks, and no checkpoints, which is torchtitan's default."""
    on_cpu.as_launched()
    result = {}
    for name, communication in CONFIGS.items():
        config = replace(
            config_of(folder / name),
            model_spec=moe_spec(),
            checkpoint=CheckpointManager.Config(),
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor", expert_parallel_degree=2),
        )
        assert not config.checkpoint.enable
        result[name] = run(config if communication is None else quantized(config, communication))
    return result


def test_experts_train_without_checkpoints(tmp_path: Path) -> None:
    ranks = run_ranks(train_moe, 4, tmp_path, timeout=240)
    on_cpu.assert_losses(ranks)
    for rank in ranks:
        assert rank["quantized"]["reported"] > 0 and not list(tmp_path.glob("*/checkpoint"))


def test_another_trainers_config_is_refused() -> None:
    @dataclass(kw_only=True, slots=True)
    class Other(Trainer.Config):
        pass

    with pytest.raises(TypeError, match="belongs to a trainer that quantize"):
        quantize(Other())
