"""Frameworks without a switch of their own, by the line of docs/trainers/index.md.

Layer: 2 gloo processes, each representing a node. NeMo Automodel and verl shard the model; the loop is ours.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import sdp4bit
from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import CONFIGS, STEPS, WORLD
from tests.ranks import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed: make test-ecosystem")


def nemo_automodel(model: nn.Module) -> nn.Module:
    from nemo_automodel.components.distributed.config import DistributedSetup
    from nemo_automodel.components.distributed.model_parallelizer import parallelize_model

    sharded: nn.Module = parallelize_model(model, DistributedSetup.build("fsdp2").mesh_context)
    return sharded


def verl(model: nn.Module) -> nn.Module:
    from verl.utils.fsdp_utils import apply_fsdp2

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    apply_fsdp2(model, {"mesh": init_device_mesh("cpu", (WORLD,)), "mp_policy": policy}, {})
    return model


def train_sharded(name: str, config: Any) -> dict[str, Any]:
    """Shard by the framework and train with two micro-batches per step."""
    model: Any = globals()[name](on_cpu.tiny_llama())
    comm = None if config is None else sdp4bit.quantize_communication(model, topology=1, config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rows = torch.tensor([row["input_ids"] for row in on_cpu.tiny_rows(2 * WORLD * 4 * STEPS)])
    batches = rows.view(STEPS, 2, WORLD, 4, -1)[:, :, torch.distributed.get_rank()]
    losses = []
    with on_cpu.count_sent_bytes() as sent:
        for batch in batches:
            for part, tokens in enumerate(batch):
                model.set_requires_gradient_sync(part == 1)
                loss = model(input_ids=tokens, labels=tokens).loss
                (loss / 2).backward()
                losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    found = on_cpu.outcome(model, losses, sent, comm)
    with torch.no_grad():
        found["evaluated"] = model.eval()(input_ids=tokens, labels=tokens).loss.item()
    return found


def train_all(name: str, folder: Path) -> dict[str, Any]:
    on_cpu.as_launched()
    if name == "sentence_transformers":
        return {kind: train_pairs(folder / kind, config) for kind, config in CONFIGS.items()}
    return {kind: train_sharded(name, config) for kind, config in CONFIGS.items()}


def train_pairs(folder: Path, config: Any) -> dict[str, Any]:
    """Train sentence embeddings with sentence-transformers' trainer and the callback for transformers."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel

    from sdp4bit.trainers.hf import SDP4BitCallback
    from tests.ecosystem.trainers.hf import SETTINGS

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = folder / "base"
    BertModel(BertConfig(vocab_size=on_cpu.TOKENS, **shape)).save_pretrained(base)  # rank 0 writes
    if torch.distributed.get_rank() == 0:
        on_cpu.tiny_tokenizer().save_pretrained(base)
    torch.distributed.barrier()
    encoder = Transformer(str(base))
    model = SentenceTransformer(modules=[encoder, Pooling(32)], device="cpu")
    texts = [" ".join(map(str, row["input_ids"])) for row in on_cpu.tiny_rows(128, length=8)]
    pairs = Dataset.from_dict({"anchor": texts, "positive": texts[1:] + texts[:1]})
    sharding = {"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]}
    args = SentenceTransformerTrainingArguments(
        output_dir=str(folder), **{**SETTINGS, "fsdp_config": sharding, "save_strategy": "no"}
    )
    on_cpu.let_accelerate_shard_on_the_cpu()
    callback = None if config is None else SDP4BitCallback(config, topology=1)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=pairs,
        loss=MultipleNegativesRankingLoss(model),
        callbacks=[] if callback is None else [callback],
    )
    with on_cpu.count_sent_bytes() as sent:
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = on_cpu.outcome(trainer.model, losses, sent, callback and callback.comm)
    return found | {"evaluated": losses[-1]}


@pytest.mark.parametrize("name", ["nemo_automodel", "sentence_transformers", "verl"])
def test_a_framework_trains_as_before_in_full_precision_and_closely_in_4_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed: make test-ecosystem")
    monkeypatch.setattr(sys.modules[__name__], "PRELOAD", [name], raising=False)
    ranks = run_ranks(train_all, WORLD, name, tmp_path)
    on_cpu.assert_losses(ranks, learned=0.1)
    for rank in ranks:
        on_cpu.assert_bytes(rank["plain"], rank["quantized"], least=6)
