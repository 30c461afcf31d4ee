"""torchtitan's Trainer and `sdp4bit.trainers.torchtitan`, against the same Trainer without.

Layer: 2 gloo processes that stand for 2 nodes. torchtitan knows no CPU: a stand-in answers what it asks of a
device.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("spmd_types", reason="torchtitan is not installed: make test-ecosystem")
pytest.importorskip("tests.ecosystem.titan_device")

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager, ParallelismConfig, TrainingConfig
from torchtitan.models import llama3, qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

from sdp4bit.trainers.torchtitan import CommunicationOptions, SDP4BitTrainer, quantize
from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import CONFIGS, QUANTIZED, TOKENS, WORLD
from tests.ranks import run_ranks

PRELOAD = ["tests.ecosystem.titan_device", "torchtitan.trainer", "torchtitan.models.llama3"]
STEPS, SAVED = 6, 3


class NoTokenizer(BaseTokenizer):
    """The data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return TOKENS


class Rows(BaseDataLoader):
    """Counts on from where it was saved; other rows on each rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self.rank, self.shape, self.place = dp_rank, (local_batch_size, seq_len), 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            batch, length = self.shape
            starts = torch.arange(batch)[:, None] * 5 + 31 * self.place + 13 * self.rank
            tokens = (starts + 7 * torch.arange(length + 1)) % TOKENS
            self.place += 1
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def model_spec() -> Any:
    """Return torchtitan's Llama 3, tiny, with attention that the CPU has."""
    spec = llama3.model_registry("debugmodel")
    dim = 32
    layers = llama3._build_llama3_layers(
        n_layers=2,
        dim=dim,
        n_heads=2,
        hidden_dim=80,
        rope=llama3.ComplexRoPE.Config(dim=dim // 2, max_seq_len=64, theta=10000, scaling="llama"),
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = replace(
        spec.model,
        dim=dim,
        vocab_size=TOKENS,
        tok_embeddings=replace(spec.model.tok_embeddings, num_embeddings=TOKENS, embedding_dim=dim),
        norm=replace(spec.model.norm, normalized_shape=dim),
        lm_head=replace(spec.model.lm_head, in_features=dim, out_features=TOKENS),
        layers=layers,
    )
    return replace(spec, model=config, parallelize_fn=parallelize)


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
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = replace(
        spec.model,
        dim=dim,
        vocab_size=TOKENS,
        tok_embeddings=replace(spec.model.tok_embeddings, num_embeddings=TOKENS, embedding_dim=dim),
        norm=replace(spec.model.norm, normalized_shape=dim),
        lm_head=replace(spec.model.lm_head, in_features=dim, out_features=TOKENS),
        layers=layers,
    )
    return replace(spec, model=config, parallelize_fn=parallelize_moe)


def parallelize(model: Any, **options: Any) -> Any:
    """Shard as torchtitan does; gloo cannot multiply as it sums, which torchtitan's factor of 1 asks for."""
    return without_factors(llama3.parallelize_llama(model, **options))


def parallelize_moe(model: Any, **options: Any) -> Any:
    return without_factors(qwen3.parallelize_qwen3(model, **options))


def without_factors(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def config_of(folder: Path) -> Any:
    """Return the config of a short training with accumulation and checkpoints.

    torch 2.13 cannot shard what torchtitan's default SPMD backend makes of parameters.
    """
    return Trainer.Config(
        model_spec=model_spec(),
        dump_folder=str(folder),
        loss=CrossEntropyLoss.Config(global_vocab_size=TOKENS),
        tokenizer=NoTokenizer.Config(),
        dataloader=Rows.Config(),
        optimizer=default_adamw(lr=5e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        training=TrainingConfig(
            local_batch_size=4, global_batch_size=16, seq_len=12, steps=STEPS, disable_cuda_graphs=True
        ),
        metrics=MetricsProcessor.Config(log_freq=1, enable_tensorboard=True),
        checkpoint=CheckpointManager.Config(enable=True, interval=SAVED, last_save_model_only=True),
    )


def train(config: Any) -> dict[str, Any]:
    """Build the trainer, train, and return what is compared."""
    config.debug.seed = 0
    trainer = config.build()
    losses = []
    own = trainer.metrics_processor.log

    def log(step: int, loss: float, *args: Any, **options: Any) -> None:
        losses.append(loss)
        own(step, loss, *args, **options)

    trainer.metrics_processor.log = log
    with on_cpu.count_sent_bytes() as sent:
        trainer.train()
    (model,) = trainer.model_parts
    comm = getattr(trainer, "comm", None)
    reported = None if comm is None else comm.stats()["total"]["inter_bytes"]
    batch, _ = next(iter(trainer.dataloader))
    with torch.no_grad():
        evaluated = model.eval()(batch["input"]).double().abs().sum().item()
    found = {"losses": losses, "weights": on_cpu.weights_of(model), "sent": sent, "evaluated": evaluated}
    found["reported"] = reported
    trainer.close()
    return found


def quantized(config: Any, communication: Any) -> Any:
    """Return the config with communication of this kind, in nodes of one rank."""
    return quantize(config, ranks_per_node=1, communication=communication)


def run_all(folder: Path) -> dict[str, Any]:
    on_cpu.as_launched()
    result = {}
    for name, communication in CONFIGS.items():
        config = config_of(folder / name)
        result[name] = train(config if communication is None else quantized(config, communication))
    # As if the run had ended with its first checkpoint.
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(folder / f"quantized/checkpoint/step-{SAVED}", folder / f"r/checkpoint/step-{SAVED}")
    dist.barrier()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="sdp4bit")
        result["resumed"] = train(quantized(config_of(folder / "r"), QUANTIZED))
    config = config_of(folder / "ddp")
    config.parallelism.data_parallel_shard_degree = 1
    config.parallelism.data_parallel_replicate_degree = WORLD
    result["replicated"] = quantized(config, QUANTIZED).build().comm.explain()
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("torchtitan")
    return folder, run_ranks(run_all, WORLD, folder, timeout=240)


def test_full_precision_equals_the_plain_trainer_and_quantized_is_close(runs: Any) -> None:
    on_cpu.assert_losses(runs[1])


def test_bytes_are_counted_and_logged(runs: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for rank in runs[1]:
        on_cpu.assert_bytes(rank["plain"], rank["quantized"], least=7)
    (folder,) = (runs[0] / "quantized/tb").iterdir()
    log = EventAccumulator(str(folder))
    log.Reload()
    assert [event.step for event in log.Scalars("sdp4bit/inter_bytes")] == list(range(1, STEPS + 1))
    assert log.Scalars("sdp4bit/compression_ratio")[-1].value > 7


def test_replicas_of_the_whole_model_are_quantized_too(runs: Any) -> None:
    for rank in runs[1]:
        assert "all-reduce inter int4/128" in rank["replicated"]


def test_a_resume_repeats_the_run_bit_for_bit(runs: Any) -> None:
    for rank in runs[1]:
        assert rank["resumed"]["losses"] == rank["quantized"]["losses"][SAVED:]
        assert rank["resumed"]["weights"] == rank["quantized"]["weights"]


def test_the_last_checkpoint_is_the_model_alone(runs: Any, tmp_path: Path) -> None:
    folder, _ = runs
    exported = {}
    for name in CONFIGS:
        dcp_to_torch_save(folder / name / f"checkpoint/step-{STEPS}", tmp_path / f"{name}.pt")
        exported[name] = torch.load(tmp_path / f"{name}.pt")
    plain, lossless, quantized = exported.values()
    # What torchtitan's own conversion takes: the parameters by name, whole, without anything of ours.
    assert plain.keys() == lossless.keys() == quantized.keys() and "tok_embeddings.weight" in plain
    assert all(torch.equal(plain[name], lossless[name]) for name in plain)
    assert any(not torch.equal(plain[name], quantized[name]) for name in plain)


def test_the_example_is_found_by_torchtitan_and_takes_options() -> None:
    names = ["--module", "examples.trainer_torchtitan", "--config", "llama3_debugmodel_sdp4bit"]
    config = ConfigManager().parse_args(
        [*names, "--sdp4bit.preset", "sdp4bit-w2g3", "--sdp4bit.skip", "lm_head"]
    )
    assert config.sdp4bit == CommunicationOptions(preset="sdp4bit-w2g3", skip=["lm_head"])
    assert type(config) is SDP4BitTrainer.Config and config._owner is SDP4BitTrainer


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
        result[name] = train(config if communication is None else quantized(config, communication))
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
