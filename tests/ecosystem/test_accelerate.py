"""Accelerator with FSDP2 and `sdp4bit.trainers.accelerate`, against the same loop without.

Layer: 2 gloo processes that stand for 2 nodes.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-ecosystem")
pytest.importorskip("transformers", reason="transformers is not installed: make test-ecosystem")

from sdp4bit.trainers.accelerate import log_values, quantize_communication
from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import CONFIGS, QUANTIZED, WORLD
from tests.ranks import run_ranks

PRELOAD = ["transformers.models.llama.modeling_llama", "accelerate", "torch.utils.tensorboard"]
STEPS, SAVED = 6, 3


def accelerator_of(folder: Path, **options: Any) -> Any:
    """Return an Accelerator that shards the tiny Llama with FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState(cpu=True)
    on_cpu.let_accelerate_shard_on_the_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **options,
    )
    return Accelerator(
        fsdp_plugin=plugin,
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
        log_with="tensorboard",
        project_dir=str(folder),
    )


def train(folder: Path, config: Any, *, start: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train, log and save with the Accelerator's own means; or go on from a checkpoint."""
    accelerator = accelerator_of(folder, **options)
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
                values = {} if comm is None else log_values(comm)
                accelerator.log({"loss": loss.item(), "norm": float(norm), **values}, step=done)
                if done == SAVED and start is None:
                    accelerator.save_state(str(folder / "saved"))
    found = {"losses": losses, "weights": on_cpu.weights_of(model), "sent": sent, "values": None}
    if comm is not None:
        found |= {"reported": comm.stats()["total"]["inter_bytes"], "values": log_values(comm)}
    with torch.no_grad():
        found["evaluated"] = model.eval()(**batch).loss.item()
    whole = accelerator.get_state_dict(model)
    found["exported"] = sum(part.double().abs().sum().item() for part in whole.values())
    for tracker in accelerator.trackers:  # end_training() would destroy the process group, too
        tracker.finish()
    return found


def run_all(folder: Path) -> dict[str, Any]:
    on_cpu.as_launched()
    result = {name: train(folder / name, config) for name, config in CONFIGS.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="sdp4bit")
        result["resumed"] = train(folder / "resumed", QUANTIZED, start=folder / "quantized/saved")
    with pytest.warns(UserWarning, match="plain/saved/sdp4bit holds no communication state"):
        train(folder / "from plain", QUANTIZED, start=folder / "plain/saved")
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("accelerate")
    return folder, run_ranks(run_all, WORLD, folder, timeout=150)


def test_full_precision_equals_the_plain_loop_and_quantized_is_close(runs: Any) -> None:
    on_cpu.assert_losses(runs[1])
    for rank in runs[1]:
        assert rank["lossless"]["exported"] == rank["plain"]["exported"]


def test_bytes_are_counted_and_logged(runs: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for rank in runs[1]:
        on_cpu.assert_bytes(rank["plain"], rank["quantized"], least=7)
    log = EventAccumulator(str(runs[0] / "quantized/log"))
    log.Reload()
    written = log.Scalars("sdp4bit/inter_bytes")
    assert [event.step for event in written] == list(range(1, STEPS + 1))
    assert written[-1].value == runs[1][0]["quantized"]["values"]["sdp4bit/inter_bytes"] > 0


def test_a_resume_repeats_the_run_bit_for_bit(runs: Any) -> None:
    for rank in runs[1]:
        assert rank["resumed"]["losses"] == rank["quantized"]["losses"][2 * SAVED :]
        assert rank["resumed"]["weights"] == rank["quantized"]["weights"]


def refuse(folder: Path) -> list[str]:
    """Attach to models that are not sharded by FSDP2."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from torch.distributed.fsdp import FullyShardedDataParallel

    on_cpu.as_launched()
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 8)
    models = [
        accelerator.prepare(model),
        FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        model,
    ]
    texts = []
    for each in models:
        with pytest.raises(ValueError, match="fsdp_version=2") as error:
            quantize_communication(accelerator, model=each)
        texts.append(str(error.value))
    return texts


def test_without_fsdp2_the_error_says_what_to_do(tmp_path: Path) -> None:
    for ddp, fsdp1, alone in run_ranks(refuse, WORLD, tmp_path):
        assert "DistributedDataParallel" in ddp and "sdp4bit.ddp_comm_hook" in ddp
        assert "FSDP1" in fsdp1
        assert "no module of the model is sharded" in alone
