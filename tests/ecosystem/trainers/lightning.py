"""Lightning's Trainer with ModelParallelStrategy and SDP4BitCallback."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sdp4bit.trainers.lightning import SDP4BitCallback
from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import SAVED, STEPS, WORLD
from tests.toy import ToyGPT, loss_of

PRELOAD = ["lightning.pytorch"]
LEAST = 6  # after large steps an evaluation gets its weights in full precision
WITHOUT_STATE = "holds no communication state"


class Language(LightningModule):
    """The toy GPT of the other tests, sharded by hand as ModelParallelStrategy wants it; not with DDP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = ToyGPT()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not isinstance(self.trainer.strategy, ModelParallelStrategy):
            return
        mesh = self.device_mesh["data_parallel"]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = loss_of(self.model, batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("evaluated", loss_of(self.model, batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def loader(count: int) -> torch.utils.data.DataLoader:
    """Return so many batches of this rank, the same in every epoch."""
    starts = torch.arange(4 * count) * WORLD + dist.get_rank()
    tokens = (starts[:, None] * 5 + 7 * torch.arange(13)) % 61
    return torch.utils.data.DataLoader([(row[:-1], row[1:]) for row in tokens], batch_size=4)


def train(
    folder: Path,
    config: Any,
    start: Path | None = None,
    *,
    ddp: bool = False,
    strategy: Any = None,
    shards: bool = True,
) -> dict[str, Any]:
    """Fit two epochs with accumulation, each with a validation and a checkpoint, or the second one."""
    model = Language()
    callback = None if config is None else SDP4BitCallback(config, topology=1)
    saving = ModelCheckpoint(folder, every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1)
    if strategy is None:
        strategy = ModelParallelStrategy(WORLD, 1, save_distributed_checkpoint=shards)
        strategy = DDPStrategy(find_unused_parameters=True) if ddp else strategy
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        use_distributed_sampler=False,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[saving] if callback is None else [saving, callback],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with on_cpu.count_sent_bytes() as sent:
        trainer.fit(model, loader(2 * SAVED), loader(1), ckpt_path=start, weights_only=False)
    found = on_cpu.outcome(model, model.losses, sent, callback and callback.comm)
    return found | {"evaluated": float(trainer.callback_metrics["evaluated"])}


def checkpoint(folder: Path, step: int = SAVED) -> Path:
    return next(folder.glob(f"*step={step}.ckpt"))


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in csv.DictReader((folder / "metrics.csv").open()):
        for name, value in row.items():
            if value and row["loss"]:
                found.setdefault(name, []).append((int(row["step"]) + 1, float(value)))
    return found


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a file, or of shards joined by Lightning's tool; a model loads them."""
    path = checkpoint(folder, STEPS)
    saved = _load_distributed_checkpoint(path) if path.is_dir() else torch.load(path, weights_only=False)
    state: dict[str, torch.Tensor] = saved["state_dict"]
    Language().load_state_dict(state)
    return state
