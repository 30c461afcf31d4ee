"""transformers' Trainer with SDP4BitCallback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

from sdp4bit.trainers.hf import SDP4BitCallback
from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import SAVED, STEPS

PRELOAD = ["transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate", "datasets"]
LEAST = 7
WITHOUT_STATE = f"plain/checkpoint-{SAVED}/sdp4bit holds no communication state"

SETTINGS = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-3,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": SAVED,
    "bf16": True,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "ddp_backend": "gloo",
}


def trainer_of(folder: Path, callback: Any, **options: Any) -> Any:
    """Return a Trainer of the tiny Llama, with FSDP2 by default."""
    args = TrainingArguments(output_dir=str(folder), **{**SETTINGS, **options})
    if args.fsdp:
        on_cpu.let_accelerate_shard_on_the_cpu()
    return Trainer(
        model=on_cpu.tiny_llama(),
        args=args,
        train_dataset=Dataset.from_list(on_cpu.tiny_rows()),
        eval_dataset=Dataset.from_list(on_cpu.tiny_rows(16)),
        data_collator=default_data_collator,
        callbacks=[] if callback is None else [callback],
    )


DDP = {"fsdp": None, "fsdp_config": None}
"""Settings that replace those of FSDP2."""


def train(folder: Path, config: Any, start: Path | None = None, *, ddp: bool = False) -> dict[str, Any]:
    callback = None
    if config is not None:
        callback = SDP4BitCallback(config, topology=1, resume_from_checkpoint=start)
    trainer = trainer_of(folder, callback, **(DDP if ddp else {}))
    with on_cpu.count_sent_bytes() as sent:
        trainer.train(resume_from_checkpoint=None if start is None else str(start))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses = [entry["loss"] for entry in logs]
    found = on_cpu.outcome(trainer.model, losses, sent, callback and callback.comm)
    found["evaluated"] = trainer.evaluate()["eval_loss"]
    prompt = torch.tensor([[3, 10, 17]])
    tokens = trainer.model.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=True)
    found["generated"] = tokens.tolist()
    trainer.save_model(str(folder / "exported"))
    if trainer.is_world_process_zero():
        (folder / "logs.json").write_text(json.dumps(logs))
    return found


def checkpoint(folder: Path) -> Path:
    return folder / f"checkpoint-{SAVED}"


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in json.loads((folder / "logs.json").read_text()):
        for name, value in entry.items():
            found.setdefault(name, []).append((entry["step"], value))
    return found


def exported(folder: Path) -> dict[str, torch.Tensor]:
    model = LlamaForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32)
    state: dict[str, torch.Tensor] = model.state_dict()
    return state
