"""transformers' Trainer with FSDP2 and SDP4BitCallback, against the same Trainer without.

Layer: 2 gloo processes that stand for 2 nodes; a Llama of 30 thousand random parameters, made in place.
"""

from __future__ import annotations

import warnings
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
from tests.ranks import run_ranks

PRELOAD = ["transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate", "datasets"]
"""trl and peft are imported by the ranks that need them."""


SETTINGS = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    "max_steps": 6,
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
ACCUMULATING = {"gradient_accumulation_steps": 2}


def trainer_of(folder: Path, callback: Any, **options: Any) -> Any:
    """Return a Trainer that has FSDP2 shard the tiny Llama."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments, default_data_collator

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


def outcome(trainer: Any, sent: dict[str, int], callback: Any) -> dict[str, Any]:
    """Return what is compared of a run."""
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    reported = 0 if callback is None else callback.comm.stats()["total"]["inter_bytes"]
    return {
        "losses": [entry["loss"] for entry in logs],
        "weights": on_cpu.weights_of(trainer.model),
        "logs": logs,
        "sent": sent,
        "reported": reported,
    }


def run_in_full(folder: Path) -> dict[str, Any]:
    """Train in all configurations with accumulation, evaluate, generate, export; save and resume."""
    on_cpu.as_launched()
    result: dict[str, Any] = {}
    for name, config in CONFIGS.items():
        callback = None if config is None else SDP4BitCallback(config, topology=1)
        trainer = trainer_of(folder / name, callback, **ACCUMULATING, save_strategy="steps", save_steps=3)
        with on_cpu.count_sent_bytes() as sent:
            trainer.train()
        found = outcome(trainer, sent, callback)
        found["evaluated"] = trainer.evaluate()["eval_loss"]
        prompt = torch.tensor([[3, 10, 17]])
        tokens = trainer.model.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=True)
        found["generated"] = tokens.tolist()
        trainer.save_model(str(folder / name / "exported"))
        result[name] = found
    # From its own folder, and from another one's.
    for name, output, given in (
        ("resumed", "quantized", None),
        ("resumed elsewhere", "elsewhere", folder / "quantized/checkpoint-3"),
    ):
        callback = SDP4BitCallback(QUANTIZED, topology=1, resume_from_checkpoint=given)
        trainer = trainer_of(folder / output, callback, **ACCUMULATING)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="sdp4bit")
            trainer.train(resume_from_checkpoint=str(folder / "quantized/checkpoint-3"))
        result[name] = outcome(trainer, {}, callback)
    trainer = trainer_of(folder / "third", SDP4BitCallback(QUANTIZED, topology=1), **ACCUMULATING)
    with pytest.warns(UserWarning, match="third/checkpoint-3/sdp4bit holds no communication state"):
        trainer.train(resume_from_checkpoint=str(folder / "quantized/checkpoint-3"))
    result["resumed without"] = outcome(trainer, {}, None)
    return result


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("hf")
    return folder, run_ranks(run_in_full, WORLD, folder)


def test_full_precision_equals_the_plain_trainer_and_quantized_is_close(full: Any) -> None:
    on_cpu.assert_losses(full[1])
    for rank in full[1]:
        assert rank["lossless"]["generated"] == rank["plain"]["generated"]


def test_bytes_are_counted_and_logged(full: Any) -> None:
    for rank in full[1]:
        # Weights are gathered anew for each of the two micro-batches; the first time counts in full.
        on_cpu.assert_bytes(rank["plain"], rank["quantized"], least=7)
        assert not any(key.startswith("sdp4bit/") for entry in rank["plain"]["logs"] for key in entry)
        for entry in rank["quantized"]["logs"][1:]:
            assert entry["sdp4bit/inter_bytes"] == rank["quantized"]["logs"][1]["sdp4bit/inter_bytes"] > 0
            assert entry["sdp4bit/compression_ratio"] > 9
        assert 0 < rank["quantized"]["logs"][-1]["sdp4bit/gradient_error"] < 0.3


def test_a_resume_repeats_the_run_bit_for_bit(full: Any) -> None:
    for rank in full[1]:
        for name in ("resumed", "resumed elsewhere"):
            assert rank[name]["losses"] == rank["quantized"]["losses"], name
            assert rank[name]["weights"] == rank["quantized"]["weights"], name
        assert rank["resumed without"]["weights"] != rank["quantized"]["weights"]


def test_the_export_is_a_model_of_transformers(full: Any) -> None:
    from transformers import LlamaForCausalLM

    folder, _ = full
    plain, lossless, quantized = (
        LlamaForCausalLM.from_pretrained(folder / name / "exported", dtype=torch.float32).state_dict()
        for name in CONFIGS
    )
    assert all(torch.equal(plain[name], lossless[name]) for name in plain)
    assert any(not torch.equal(plain[name], quantized[name]) for name in plain)


class Reporter(TrainerCallback):
    """Keeps what it is given to report."""

    def __init__(self) -> None:
        self.told: list[float | None] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.told.append(logs.get("sdp4bit/inter_bytes"))


def run_lora(folder: Path) -> dict[str, Any]:
    """Fine-tune adapters with TRL's SFTTrainer in all configurations; resume the quantized run."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    on_cpu.as_launched()
    result: dict[str, Any] = {}
    for name, config in [*CONFIGS.items(), ("resumed", QUANTIZED)]:
        callback = None if config is None else SDP4BitCallback(config, topology=1)
        options = {**SETTINGS, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 3}
        output = folder / ("quantized" if name == "resumed" else name)
        args = SFTConfig(output_dir=str(output), max_length=None, **options)
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
        result[name] = outcome(trainer, sent, callback)
        result[name]["told"] = reporter.told
        result[name]["evaluated"] = trainer.evaluate(trainer.train_dataset)["eval_loss"]
        if name != "resumed":
            trainer.save_model(str(folder / name / "exported"))
    return result


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    pytest.importorskip("trl", reason="trl is not installed: make test-ecosystem")
    pytest.importorskip("peft", reason="peft is not installed: make test-ecosystem")
    folder = tmp_path_factory.mktemp("lora")
    return folder, run_ranks(run_lora, WORLD, folder)


def test_adapters_are_fine_tuned_by_trl(lora: Any) -> None:
    on_cpu.assert_losses(lora[1], learned=0.0)  # adapters start slowly
    for rank in lora[1]:
        assert rank["resumed"]["losses"] == rank["quantized"]["losses"]
        assert rank["resumed"]["weights"] == rank["quantized"]["weights"]
        # Added in front, the callback adds its values before others report.
        assert len(rank["quantized"]["told"]) == 6 and None not in rank["quantized"]["told"]
        assert rank["plain"]["told"] == [None] * 6
        # Frozen weights are sent once, at the first forward.
        on_cpu.assert_bytes(rank["plain"], rank["quantized"], least=9)


def test_the_exported_adapters_are_those_of_peft(lora: Any) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    plain, lossless, quantized = (
        get_peft_model_state_dict(PeftModel.from_pretrained(on_cpu.tiny_llama(), lora[0] / name / "exported"))
        for name in CONFIGS
    )
    assert plain and all(torch.equal(plain[name], lossless[name]) for name in plain)
    assert any(not torch.equal(plain[name], quantized[name]) for name in plain)


def refuse(folder: Path) -> str:
    """Train where FSDP2 is not used."""
    on_cpu.as_launched()
    trainer = trainer_of(folder, SDP4BitCallback(), fsdp=None, fsdp_config=None)
    with pytest.raises(ValueError, match="SDP4BitCallback") as error:
        trainer.train()
    return str(error.value)


def test_without_fsdp2_the_error_says_what_to_do(tmp_path: Path) -> None:
    for text in run_ranks(refuse, WORLD, tmp_path):
        assert "DistributedDataParallel" in text and "sdp4bit.ddp_comm_hook" in text
        assert "fsdp=True" in text
