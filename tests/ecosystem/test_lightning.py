"""Lightning's Trainer with ModelParallelStrategy and SDP4BitCallback, against the same Trainer without.

Layer: 2 gloo processes that stand for 2 nodes.
"""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("lightning", reason="lightning is not installed: make test-ecosystem")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sdp4bit.trainers.lightning import SDP4BitCallback
from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import CONFIGS, QUANTIZED, WORLD
from tests.ranks import run_ranks
from tests.toy import ToyGPT, loss_of

PRELOAD = ["lightning.pytorch"]
STEPS, SAVED = 6, 3


class Language(LightningModule):
    """The toy GPT of the other tests, sharded by hand as ModelParallelStrategy wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = ToyGPT()
        self.losses: list[float] = []

    def configure_model(self) -> None:
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


def fit(folder: Path, config: Any, *, start: Path | None = None, shards: bool = True) -> dict[str, Any]:
    """Fit two epochs with accumulation, each with a validation and a checkpoint, or the second one."""
    model = Language()
    callbacks: list[Callback] = [
        ModelCheckpoint(folder, every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1)
    ]
    callback = None if config is None else SDP4BitCallback(config, topology=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=ModelParallelStrategy(WORLD, 1, save_distributed_checkpoint=shards),
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        use_distributed_sampler=False,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[*callbacks, *([] if callback is None else [callback])],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with on_cpu.count_sent_bytes() as sent:
        trainer.fit(model, loader(2 * SAVED), loader(1), ckpt_path=start, weights_only=False)
    found = {
        "losses": model.losses,
        "weights": on_cpu.weights_of(model),
        "evaluated": float(trainer.callback_metrics["evaluated"]),
        "sent": sent,
    }
    if callback is not None:
        found["reported"] = callback.comm.stats()["total"]["inter_bytes"]
    return found


def run_all(folder: Path) -> dict[str, Any]:
    on_cpu.as_launched()
    result = {name: fit(folder / name, config) for name, config in CONFIGS.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="sdp4bit")
        saved = next((folder / "quantized").glob(f"*step={SAVED}.ckpt"))
        result["resumed"] = fit(folder / "resumed", QUANTIZED, start=saved)
    with pytest.warns(UserWarning, match="is a single file"):
        fit(folder / "file", QUANTIZED, shards=False)
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("lightning")
    return folder, run_ranks(run_all, WORLD, folder, timeout=150)


def test_full_precision_equals_the_plain_trainer_and_quantized_is_close(runs: Any) -> None:
    on_cpu.assert_losses(runs[1])


def test_bytes_are_counted_and_logged(runs: Any) -> None:
    folder, ranks = runs
    for rank in ranks:
        # After large steps an evaluation gets its weights in full precision.
        on_cpu.assert_bytes(rank["plain"], rank["quantized"], least=6)
    rows = [row for row in csv.DictReader((folder / "quantized/metrics.csv").open()) if row["loss"]]
    sent = [float(row["sdp4bit/inter_bytes"]) for row in rows if row["sdp4bit/inter_bytes"]]
    assert len(sent) == len(rows) and sent[-1] > 0
    assert float(rows[-1]["sdp4bit/compression_ratio"]) > 7


def test_a_resume_repeats_the_run_bit_for_bit(runs: Any) -> None:
    for rank in runs[1]:
        assert rank["resumed"]["losses"] == rank["quantized"]["losses"][2 * SAVED :]
        assert rank["resumed"]["weights"] == rank["quantized"]["weights"]


def test_the_export_is_a_state_dict(runs: Any) -> None:
    """A distributed checkpoint, put together by Lightning's tool, holds the weights and nothing else."""
    from lightning.fabric.utilities.load import _load_distributed_checkpoint

    folder, _ = runs
    states = {}
    for name in CONFIGS:
        saved = next((folder / name).glob(f"*step={STEPS}.ckpt"))
        states[name] = _load_distributed_checkpoint(saved)["state_dict"]
        model = Language()
        model.load_state_dict(states[name])
    assert all(torch.equal(states["plain"][key], states["lossless"][key]) for key in states["plain"])
    assert any(not torch.equal(states["plain"][key], states["quantized"][key]) for key in states["plain"])


def refuse(folder: Path) -> str:
    """Fit with DistributedDataParallel."""
    on_cpu.as_launched()
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[SDP4BitCallback()],
    )
    model = Language()
    model.configure_model = lambda: None
    with pytest.raises(ValueError, match="SDP4BitCallback") as error:
        trainer.fit(model, loader(4))
    return str(error.value)


def test_without_fsdp2_the_error_says_what_to_do(tmp_path: Path) -> None:
    for text in run_ranks(refuse, WORLD, tmp_path, timeout=150):
        assert "DistributedDataParallel" in text and "sdp4bit.ddp_comm_hook" in text
        assert "ModelParallelStrategy" in text
