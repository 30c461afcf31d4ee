"""TRL's SFTTrainer with SDP4BitCallback.

The contract of all trainers is in test_trainers.py. Layer: 2 gloo processes, each representing a node.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: make test-ecosystem")
pytest.importorskip("accelerate", reason="accelerate is not installed: make test-ecosystem")

from transformers import TrainerCallback

from sdp4bit.trainers.hf import SDP4BitCallback
from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import CONFIGS, QUANTIZED, WORLD
from tests.ecosystem.trainers.hf import DDP, PRELOAD, SETTINGS
from tests.ranks import run_ranks

__all__ = ["PRELOAD"]  # trl and peft are imported by the ranks that need them


class Reporter(TrainerCallback):
    """Keeps the values that it is given to report."""

    def __init__(self) -> None:
        self.told: list[float | None] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.told.append(logs.get("sdp4bit/inter_bytes"))


def run_lora(folder: Path, ddp: bool) -> dict[str, Any]:
    """Fine-tune adapters with TRL's SFTTrainer in all configurations; resume the quantized run."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    on_cpu.as_launched()
    result: dict[str, Any] = {}
    for name, config in [*CONFIGS.items(), ("resumed", QUANTIZED)]:
        callback = None if config is None else SDP4BitCallback(config, topology=1)
        output = folder / ("quantized" if name == "resumed" else name)
        args = SFTConfig(output_dir=str(output), max_length=None, **SETTINGS | (DDP if ddp else {}))
        if not ddp:
            on_cpu.let_accelerate_shard_on_the_cpu()
        torch.manual_seed(1)
        trainer = SFTTrainer(
            model=on_cpu.tiny_llama(),
            args=args,
            train_dataset=Dataset.from_list(on_cpu.tiny_rows()),
            processing_class=on_cpu.tiny_tokenizer(),
            peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        reporter = Reporter()
        trainer.add_callback(reporter)  # as those for TensorBoard and so on: before callbacks of the user
        if callback is not None:
            callback.add_to(trainer)
        with on_cpu.count_sent_bytes() as sent:
            trainer.train(resume_from_checkpoint=name == "resumed" and str(output / "checkpoint-3"))
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        result[name] = on_cpu.outcome(trainer.model, losses, sent, callback and callback.comm)
        result[name]["told"] = reporter.told
        result[name]["evaluated"] = trainer.evaluate(trainer.train_dataset)["eval_loss"]
        if name != "resumed":
            trainer.save_model(str(folder / name / "exported"))
    return result


@pytest.fixture(scope="module", params=[False, True], ids=["FSDP2", "DDP"])
def lora(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]], bool]:
    pytest.importorskip("trl", reason="trl is not installed: make test-ecosystem")
    pytest.importorskip("peft", reason="peft is not installed: make test-ecosystem")
    folder = tmp_path_factory.mktemp("lora")
    return folder, run_ranks(run_lora, WORLD, folder, request.param), request.param


def test_adapters_are_fine_tuned_by_trl(lora: Any) -> None:
    on_cpu.assert_losses(lora[1], learned=0.0, rel=0.01 if lora[2] else 0.02)  # adapters start slowly
    for rank in lora[1]:
        assert rank["resumed"]["losses"] == rank["quantized"]["losses"]
        assert rank["resumed"]["weights"] == rank["quantized"]["weights"]
        # Added in front, the callback adds its values before others report.
        assert len(rank["quantized"]["told"]) == 6 and None not in rank["quantized"]["told"]
        assert rank["plain"]["told"] == [None] * 6
        # Frozen weights are sent once by FSDP2, at the first forward.
        on_cpu.assert_bytes(rank["plain"], rank["quantized"], least=7 if lora[2] else 9, ddp=lora[2])


def test_the_exported_adapters_are_those_of_peft(lora: Any) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    plain, lossless, quantized = (
        get_peft_model_state_dict(PeftModel.from_pretrained(on_cpu.tiny_llama(), lora[0] / name / "exported"))
        for name in CONFIGS
    )
    assert plain and all(torch.equal(plain[name], lossless[name]) for name in plain)
    assert any(not torch.equal(plain[name], quantized[name]) for name in plain)
