"""Trainers that prepare a model more than once: every step still communicates through the library.

Layer: 2 gloo processes, each representing a node.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import QUANTIZED, WORLD
from tests.ecosystem.test_trainers import driver_of, skip_without
from tests.ranks import run_ranks

STEPS = 3


def steps_counted(comm: Any, run: Callable[[], object]) -> int:
    """Return how many steps a run has counted, each with the bytes that were really sent."""
    before = {"steps": 0, "inter_bytes": 0}
    if comm() is not None:
        before = {"steps": comm().stats()["steps"], "inter_bytes": comm().stats()["total"]["inter_bytes"]}
    with on_cpu.count_sent_bytes() as sent:
        run()
    stats = comm().stats()
    assert sent["gathers"] == sent["reductions"] == 0
    assert sent["messages"] == stats["total"]["inter_bytes"] - before["inter_bytes"] > 0
    assert comm().log_values()
    return int(stats["steps"] - before["steps"])


def trainer_of_transformers(folder: Path, callback: Any, *, ddp: bool, **options: Any) -> Any:
    hf = driver_of("hf")
    settings = hf.DDP if ddp else {}
    return hf.trainer_of(folder, callback, **settings, max_steps=STEPS, save_strategy="no", **options)


def out_of_memory(at: int) -> Any:
    """Return a callback that raises once, as CUDA does, when this step begins."""
    from transformers import TrainerCallback

    class OutOfMemory(TrainerCallback):
        begun = 0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun += 1
            if self.begun == at:
                raise RuntimeError("CUDA out of memory.")

    return OutOfMemory()


def all_logged(trainer: Any) -> bool:
    """Return whether every line of the last training holds the bytes of its step."""
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    return len(lines) == STEPS and all(entry["sdp4bit/inter_bytes"] > 0 for entry in lines)


def find_the_batch_size(folder: Path, ddp: bool, **options: Any) -> None:
    callback = driver_of("hf").SDP4BitCallback(QUANTIZED, topology=1)
    trainer = trainer_of_transformers(folder, callback, ddp=ddp, auto_find_batch_size=True, **options)
    del trainer.model.model.layers[1:]
    trainer.add_callback(out_of_memory(at=2))
    assert steps_counted(lambda: callback.comm, trainer.train) == 1 + STEPS
    assert all_logged(trainer) and "sdp4bit/intra_bytes" not in trainer.state.log_history[0]
    if not options:
        # Another training, with the wrapper that is there, and with a new one.
        assert steps_counted(lambda: callback.comm, trainer.train) == STEPS
        trainer.model_wrapped = trainer.model
        assert steps_counted(lambda: callback.comm, trainer.train) == STEPS and all_logged(trainer)


def find_the_batch_size_compiled(folder: Path, ddp: bool) -> None:
    find_the_batch_size(folder, ddp, torch_compile_backend="eager")


def find_the_batch_size_with_trl(folder: Path, ddp: bool) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    hf = driver_of("hf")
    settings = {**hf.SETTINGS, **(hf.DDP if ddp else {}), "max_steps": STEPS, "save_strategy": "no"}
    args = SFTConfig(output_dir=str(folder), max_length=None, auto_find_batch_size=True, **settings)
    if not ddp:
        on_cpu.let_accelerate_shard_on_the_cpu()
    callback = hf.SDP4BitCallback(QUANTIZED, topology=1, log_all=True)
    trainer = SFTTrainer(
        model=on_cpu.tiny_llama(),
        args=args,
        train_dataset=Dataset.from_list(on_cpu.tiny_rows()),
        processing_class=on_cpu.tiny_tokenizer(),
        callbacks=[callback, out_of_memory(at=2)],
    )
    assert steps_counted(lambda: callback.comm, trainer.train) == 1 + STEPS
    assert all_logged(trainer) and "sdp4bit/total_ratio" in trainer.state.log_history[0]


def find_the_batch_size_with_axolotl(folder: Path, ddp: bool) -> None:
    from axolotl.utils.dict import DictDefault

    from sdp4bit.trainers.axolotl import SDP4BitPlugin

    trainer = trainer_of_transformers(folder, None, ddp=ddp, auto_find_batch_size=True)
    trainer.add_callback(out_of_memory(at=2))
    SDP4BitPlugin().add_callbacks_post_trainer(DictDefault({"sdp4bit_ranks_per_node": 1}), trainer)
    callback = trainer.callback_handler.callbacks[0]
    assert steps_counted(lambda: callback.comm, trainer.train) == 1 + STEPS
    assert all_logged(trainer)


def prepare_twice(folder: Path, ddp: bool) -> None:
    accelerate = driver_of("accelerate")
    accelerator = accelerate.accelerator_of(folder, ddp=ddp)
    bare = on_cpu.tiny_llama()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=5e-3)
    model, optimizer = accelerator.prepare(bare, optimizer)
    comm = accelerate.quantize_communication(accelerator, model=model, config=QUANTIZED, topology=1)
    rows = [{key: torch.tensor(row[key]) for key in row} for row in on_cpu.tiny_rows(4)]
    batch = torch.utils.data.default_collate(rows)

    def run() -> None:
        for _ in range(STEPS):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()

    assert steps_counted(lambda: comm, run) == STEPS
    for again in (model, accelerator.unwrap_model(model)):
        model, optimizer = accelerator.prepare(again, optimizer)
        assert steps_counted(lambda: comm, run) == STEPS


def fit_twice(folder: Path, ddp: bool) -> None:
    lightning = driver_of("lightning")

    class Rebuilt(lightning.Language):
        def configure_model(self) -> None:
            if not ddp:
                self.model = lightning.ToyGPT()
            super().configure_model()

    model, callback = Rebuilt(), lightning.SDP4BitCallback(QUANTIZED, topology=1, log_all=True)
    strategy = (
        lightning.DDPStrategy(find_unused_parameters=True)
        if ddp
        else lightning.ModelParallelStrategy(WORLD, 1)
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        max_epochs=1,
        limit_train_batches=STEPS,
        num_sanity_val_steps=1,
        use_distributed_sampler=False,
        logger=False,
        log_every_n_steps=1,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        callback.comm = None  # as if another callback had attached
        assert (
            steps_counted(
                lambda: callback.comm,
                lambda: trainer.fit(model, lightning.loader(STEPS), lightning.loader(1)),
            )
            == STEPS
        )
        assert trainer.logged_metrics["sdp4bit/total_ratio"] > 1
        trainer.validate(model, lightning.loader(1), verbose=False)


def fit_olmo_twice(folder: Path, ddp: bool) -> None:
    olmo = driver_of("olmo_core")
    callback = olmo.SDP4BitCallback(QUANTIZED, topology=1)
    kind = olmo.DataParallelType.ddp if ddp else olmo.DataParallelType.fsdp
    trainer, recorder = olmo.trainer_of(folder, callback, kind=kind)
    counted = steps_counted(lambda: callback.comm, trainer.fit)
    assert len(recorder.told["sdp4bit/inter_bytes"]) == olmo.STEPS
    trainer.max_duration = olmo.Duration.steps(olmo.STEPS + STEPS)
    again = steps_counted(lambda: callback.comm, trainer.fit)
    assert len(recorder.told["sdp4bit/inter_bytes"]) == olmo.STEPS + STEPS and again < counted


CASES = {
    "transformers": (find_the_batch_size, ["hf"], []),
    "transformers, compiled": (find_the_batch_size_compiled, ["hf"], []),
    "TRL": (find_the_batch_size_with_trl, ["hf"], ["trl"]),
    "Axolotl": (find_the_batch_size_with_axolotl, ["hf"], ["axolotl.integrations.base"]),
    "Accelerate": (prepare_twice, ["accelerate"], []),
    "Lightning": (fit_twice, ["lightning"], []),
    "OLMo-core": (fit_olmo_twice, ["olmo_core"], []),
}


def prepared_again(name: str, folder: Path, ddp: bool) -> None:
    on_cpu.as_launched()
    CASES[name][0](folder, ddp)


@pytest.mark.parametrize("ddp", [False, True], ids=["FSDP2", "DDP"])
@pytest.mark.parametrize("name", CASES)
def test_every_step_communicates_after_another_preparation(name: str, ddp: bool, tmp_path: Path) -> None:
    _, drivers, packages = CASES[name]
    for driver in drivers:
        skip_without(driver)
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed: make test-ecosystem")
    run_ranks(prepared_again, WORLD, name, tmp_path, ddp)
