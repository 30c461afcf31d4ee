"""Small training runs and their text, for the tests of the pretraining program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import LoggingConfig, ModelConfig, OptimizerConfig, PretrainConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig
from sdp4bit_lab.pretrain.data.config import DataConfig
from sdp4bit_lab.pretrain.data.documents import END_OF_TEXT
from sdp4bit_lab.pretrain.metrics import StepMetrics
from sdp4bit_lab.pretrain.trainer import TrainingResult, pretrain
from tests.ranks import guard

SOURCES = ("argparse", "ast", "base64", "calendar", "enum", "heapq", "inspect", "pickle", "queue", "tarfile")


def write_text(path: Path) -> Path:
    """Write a file of a few documents, and return its path."""
    library = Path(json.__file__).parent.parent
    path.write_text(
        END_OF_TEXT.join((library / f"{name}.py").read_text("utf-8") for name in SOURCES), "utf-8"
    )
    return path


def small(text: Path, out: Path, **changes: Any) -> PretrainConfig:
    """Return a run of 8 steps of a model with 0.1 million parameters, with dropout."""
    config = PretrainConfig(
        seed=5,
        model=ModelConfig(layers=2, hidden=64, heads=2, dropout=0.1),
        data=DataConfig(data_path=(text,), vocabulary_size=512, cache_dir=text.parent / "cache"),
        training=TrainingConfig(
            steps=8,
            sequence_length=32,
            micro_batch_size=2,
            eval_interval=4,
            eval_batches=2,
            accumulation=2,
        ),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_fraction=0.25),
        parallel=ParallelConfig(ranks_per_node=2),
        logging=LoggingConfig(out=out, tensorboard=False),
    )
    return replace(config, **changes)


def step_metrics(step: int, *, grad_norm: float = 0.5) -> StepMetrics:
    """Return the measurements of a step that nobody has trained."""
    return StepMetrics(
        step=step, samples=8 * step, loss=float(step), lr=1e-3, grad_norm=grad_norm, tokens_per_second=1000.0,
        tflops_per_device=2.0, step_seconds=0.5, intra_bytes=1000 * step, inter_bytes=500,
        compression_ratio=5.9, weight_drift=None, gradient_error=None,
    )  # fmt: skip


def this_rank() -> Ranks:
    rank, size = dist.get_rank(), dist.get_world_size()
    return Ranks(
        rank=rank, world_size=size, local_rank=rank, local_world_size=size, device=torch.device("cpu")
    )


def train_here(*configs: PretrainConfig) -> list[TrainingResult]:
    return [pretrain(config, ranks=this_rank()) for config in configs]


def command_line(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sdp4bit_lab", *arguments],
        capture_output=True,
        text=True,
        timeout=guard(timeout),
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def read_log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> dict[tuple[str, int], float]:
    return {(line["event"], line["step"]): line["loss"] for line in read_log(out) if "loss" in line}
