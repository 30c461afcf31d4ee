"""transformers' Trainer with FSDP2 and SDP4BitCallback, against the same Trainer without.

Layer: 2 gloo processes that stand for 2 nodes; a Llama of 40 thousand random parameters; nothing is downloaded.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed: make test-ecosystem")
pytest.importorskip("accelerate", reason="accelerate is not installed: make test-ecosystem")

from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import CONFIGS, QUANTIZED, WORLD
from tests.ranks import run_ranks

PRELOAD = ["transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate", "datasets"]
STEPS = 6


def trainer_of(folder: Path, config: Any, *, callback: Any = None, model: Any = None, **options: Any) -> Any:
    """Return a Trainer that has FSDP2 shard the tiny Llama."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments, default_data_collator

    from sdp4bit.trainers.hf import SDP4BitCallback

    if callback is None and config is not None:
        callback = SDP4BitCallback(config, topology=1)
    defaults = {
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": True,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo",
    }
    args = TrainingArguments(output_dir=str(folder), **{**defaults, **options})
    if args.fsdp:
        on_cpu.let_accelerate_shard_on_the_cpu()
    return Trainer(
        model=on_cpu.tiny_llama() if model is None else model,
        args=args,
        train_dataset=Dataset.from_list(on_cpu.tiny_rows()),
        eval_dataset=Dataset.from_list(on_cpu.tiny_rows(16)),
        data_collator=default_data_collator,
        callbacks=[] if callback is None else [callback],
    )


def losses(trainer: Any) -> list[float]:
    """Return the losses that were logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_in_all_ways(folder: Path) -> dict[str, Any]:
    on_cpu.as_launched()
    result: dict[str, Any] = {}
    for name, config in CONFIGS.items():
        trainer = trainer_of(folder / name, config, gradient_accumulation_steps=2)
        with on_cpu.count_sent_bytes() as sent:
            trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        prompt = torch.tensor([[3, 10, 17]])
        generated = trainer.model.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=True)
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        result[name] = {
            "losses": losses(trainer),
            "evaluated": evaluated,
            "generated": generated.tolist(),
            "sent": sent,
            "logs": logs,
        }
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(train_in_all_ways, WORLD, tmp_path_factory.mktemp("hf"))


def test_it(runs):
    print(runs[0])
    assert 0
