"""torchtitan's Trainer and `sdp4bit.trainers.torchtitan`.

torchtitan does not support CPUs: a stand-in answers its questions about a device.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

import tests.ecosystem.titan_device  # noqa: F401  before torchtitan
from sdp4bit.trainers.torchtitan import quantize
from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import SAVED, STEPS, TOKENS

PRELOAD = ["tests.ecosystem.titan_device", "torchtitan.trainer", "torchtitan.models.llama3"]
LEAST = 7
WITHOUT_STATE = None


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
    return replace(spec, model=tiny(spec.model, layers), parallelize_fn=parallelize)


def tiny(model: Any, layers: list[Any], dim: int = 32) -> Any:
    """Return a model config with these layers and attention that the CPU has."""
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return replace(
        model,
        dim=dim,
        vocab_size=TOKENS,
        tok_embeddings=replace(model.tok_embeddings, num_embeddings=TOKENS, embedding_dim=dim),
        norm=replace(model.norm, normalized_shape=dim),
        lm_head=replace(model.lm_head, in_features=dim, out_features=TOKENS),
        layers=layers,
    )


def parallelize(model: Any, **options: Any) -> Any:
    """Shard as torchtitan does; gloo cannot multiply as it sums, which torchtitan's factor of 1 asks for."""
    return without_factors(llama3.parallelize_llama(model, **options))


def without_factors(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def config_of(folder: Path) -> Any:
    """Return the config of a short training with accumulation and checkpoints.

    torch 2.13 cannot shard the parameters of torchtitan's default SPMD backend.
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


def run(config: Any) -> dict[str, Any]:
    """Build the trainer of a config, train, and return the outcome."""
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
    found = on_cpu.outcome(model, losses, sent, getattr(trainer, "comm", None))
    batch, _ = next(iter(trainer.dataloader))
    with torch.no_grad():
        found["evaluated"] = model.eval()(batch["input"]).double().abs().sum().item()
    trainer.close()
    return found


def quantized(config: Any, communication: Any) -> Any:
    """Return the config with communication of this kind, in nodes of one rank."""
    return quantize(config, ranks_per_node=1, communication=communication)


def train(folder: Path, config: Any, start: Path | None = None) -> dict[str, Any]:
    if start is not None and dist.get_rank() == 0:
        # As if the run had ended with its first checkpoint.
        shutil.copytree(start, folder / "checkpoint" / start.name)
    dist.barrier()
    titan = config_of(folder)
    return run(titan if config is None else quantized(titan, config))


def checkpoint(folder: Path) -> Path:
    return folder / f"checkpoint/step-{SAVED}"


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    (events,) = (folder / "tb").iterdir()
    return on_cpu.read_tensorboard(events)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """Return the last checkpoint, the model alone, as torchtitan's conversion reads it."""
    dcp_to_torch_save(folder / f"checkpoint/step-{STEPS}", folder / "exported.pt")
    state: dict[str, torch.Tensor] = torch.load(folder / "exported.pt")
    return state
