"""OLMo-core's Trainer with SDP4BitCallback."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.config import DType
from olmo_core.data import DataLoaderBase
from olmo_core.distributed import parallel
from olmo_core.distributed.checkpoint import unshard_checkpoint
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train import Duration, TrainerConfig
from olmo_core.train.callbacks import Callback, CheckpointerCallback
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig

from sdp4bit.trainers.olmo_core import SDP4BitCallback
from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import SAVED, STEPS, TOKENS, WORLD

PRELOAD = ["olmo_core.train", "olmo_core.train.train_module", "olmo_core.train.callbacks"]
LEAST = 7
WITHOUT_STATE = "holds no communication state"
ROWS, LENGTH = 8, 16
"""Rows of a rank's batch, of two micro-batches, and tokens of a row."""


class Rows(DataLoaderBase):
    """Counts on from where it was saved; other rows on each rank."""

    total_batches = None

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.batches_processed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches_processed = state_dict["done"]

    def reshuffle(self, epoch: int | None = None, **_: Any) -> None:
        self._epoch = epoch

    def batch(self, place: int) -> dict[str, torch.Tensor]:
        starts = torch.arange(ROWS)[:, None] * 5 + 31 * place + 13 * self.dp_rank
        return {"input_ids": (starts + 7 * torch.arange(LENGTH)) % TOKENS}

    def get_mock_batch(self) -> dict[str, torch.Tensor]:
        return self.batch(1000)

    def _iter_batches(self) -> Iterable[dict[str, torch.Tensor]]:
        while True:
            yield self.batch(self.batches_processed)


class Recorder(Callback):
    """Keeps the metrics by name, each with its step."""

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[int, float]]] = {}

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if "CE loss" in name or name.startswith("sdp4bit/"):
                self.told.setdefault(name, []).append((step, value))


def trainer_of(
    folder: Path, callback: Any, *, kind: DataParallelType | None, start: Path | None = None
) -> tuple[Any, Recorder]:
    """Return a trainer of a tiny Llama, sharded or replicated by `kind`, and its recorder."""
    os.environ["OLMO_SHARED_FS"] = "1"
    parallel._WORLD_MESH = None  # OLMo-core builds one per process
    model = TransformerConfig.llama_like(d_model=32, vocab_size=TOKENS, n_layers=2, n_heads=2)
    sharding = None
    if kind is not None:
        sharding = TransformerDataParallelConfig(
            name=kind, param_dtype=None if kind == DataParallelType.ddp else DType.bfloat16
        )
    micro_batches = 1 if kind == DataParallelType.ddp else 2  # with DDP, OLMo-core reduces each of them
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=ROWS * LENGTH // micro_batches,
        max_sequence_length=LENGTH,
        optim=AdamWConfig(lr=5e-3, fused=False),
        max_grad_norm=1.0,
        dp_config=sharding,
    ).build(model.build(init_device="cpu"), device=torch.device("cpu"))
    loader = Rows(
        work_dir=folder, global_batch_size=WORLD * ROWS * LENGTH, dp_world_size=WORLD, dp_rank=dist.get_rank()
    )
    recorder = Recorder()
    callbacks: dict[str, Any] = {"recorder": recorder}
    if callback is not None:
        callbacks["sdp4bit"] = callback
    config = TrainerConfig(
        save_folder=str(folder),
        load_path=None if start is None else str(start),
        max_duration=Duration.steps(STEPS),
        callbacks={**callbacks, "checkpointer": CheckpointerCallback(save_interval=SAVED, save_async=False)},
    )
    return config.build(module, loader), recorder


def train(folder: Path, config: Any, start: Path | None = None, *, ddp: bool = False) -> dict[str, Any]:
    callback = None if config is None else SDP4BitCallback(config, topology=1)
    kind = DataParallelType.ddp if ddp else DataParallelType.fsdp
    trainer, recorder = trainer_of(folder, callback, kind=kind, start=start)
    with on_cpu.count_sent_bytes() as sent:
        trainer.fit()
    losses = [value for _, value in recorder.told["train/CE loss"]]
    model = trainer.train_module.model
    found = on_cpu.outcome(model, losses, sent, callback and callback.comm)
    found["passes"] += 1  # the dry run
    with torch.no_grad():
        found["evaluated"] = (
            model.eval()(trainer.data_loader.batch(0)["input_ids"]).double().abs().sum().item()
        )
    if dist.get_rank() == 0:
        (folder / "metrics.json").write_text(json.dumps(recorder.told))
    return found


def checkpoint(folder: Path) -> Path:
    return folder / f"step{SAVED}"


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = json.loads((folder / "metrics.json").read_text())
    return found


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """Return the last checkpoint's weights, joined by OLMo-core's tool."""
    path, _ = unshard_checkpoint(folder / f"step{STEPS}/model_and_optim", folder / "exported", optim=False)
    state: dict[str, torch.Tensor] = torch.load(path)
    return state
