"""A loop with Accelerate's Accelerator and `sdp4bit.trainers.accelerate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    PartialState,
)
from accelerate.state import AcceleratorState, GradientState

from sdp4bit.trainers.accelerate import quantize_communication
from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import SAVED, STEPS

PRELOAD = ["transformers.models.llama.modeling_llama", "accelerate", "torch.utils.tensorboard"]
LEAST = 7
WITHOUT_STATE = "plain/saved/sdp4bit holds no communication state"


def accelerator_of(folder: Path, *, ddp: bool) -> Any:
    """Return an Accelerator that prepares the tiny Llama with FSDP2 or DDP."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState(cpu=True)
    plugin = None
    if not ddp:
        on_cpu.let_accelerate_shard_on_the_cpu()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    return Accelerator(
        fsdp_plugin=plugin,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] if ddp else [],
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
        log_with="tensorboard",
        project_dir=str(folder),
    )


def train(folder: Path, config: Any, start: Path | None = None, *, ddp: bool = False) -> dict[str, Any]:
    accelerator = accelerator_of(folder, ddp=ddp)
    accelerator.init_trackers("log")
    model = on_cpu.tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 2 * STEPS)
    rows = [{key: torch.tensor(row[key]) for key in row} for row in on_cpu.tiny_rows(2 * 2 * 4 * STEPS)]
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    comm = None
    if config is not None:
        comm = quantize_communication(accelerator, model=model, config=config, topology=1)
    done = 0
    if start is not None:
        accelerator.load_state(str(start))
        loader, done = accelerator.skip_first_batches(loader, 2 * SAVED), SAVED
    losses = []
    with on_cpu.count_sent_bytes() as sent:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if accelerator.sync_gradients:
                done += 1
                values = {} if comm is None else comm.log_values()
                accelerator.log({"loss": loss.item(), "norm": float(norm), **values}, step=done)
                if done == SAVED and start is None:
                    accelerator.save_state(str(folder / "saved"))
    found = on_cpu.outcome(model, losses, sent, comm)
    with torch.no_grad():
        found["evaluated"] = model.eval()(**batch).loss.item()
    exported = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save(exported, folder / "exported.pt")
    for tracker in accelerator.trackers:  # end_training() would destroy the process group, too
        tracker.finish()
    return found


def checkpoint(folder: Path) -> Path:
    return folder / "saved"


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    return on_cpu.read_tensorboard(folder / "log")


def exported(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "exported.pt")
    return state
