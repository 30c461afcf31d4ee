"""A world of one rank and small checkpoints, for the tests of checkpoint files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from sdp4bit_lab.pretrain.checkpoint.folder import Progress, RunRecord
from sdp4bit_lab.pretrain.checkpoint.load import open_checkpoint
from sdp4bit_lab.pretrain.checkpoint.save import write_checkpoint

SHAPE = {"layers": 1, "hidden": 8, "heads": 2, "vocabulary": 128, "positions": 16, "dropout": 0.0}


@contextmanager
def one_rank() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model.a": torch.randn(40, 50, generator=generator),
        "model.b": torch.randn((), generator=generator),
        "rank0.random.cpu": torch.randint(0, 256, (100,), dtype=torch.uint8, generator=generator),
    }


def attach_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def save_step(
    folder: Path,
    step: int,
    *,
    keep_last: int | None = None,
    attach: Callable[[Path], None] = attach_tokenizer,
    job: str | None = None,
) -> Path:
    """Save the checkpoint of the step; called inside `one_rank`."""
    return write_checkpoint(
        tensors_of(step),
        folder=folder,
        record=RunRecord(
            shape=SHAPE,
            vocabulary_size=100,
            world_size=1,
            job=job,
            progress=Progress(step=step, samples=4 * step),
        ),
        attach=attach,
        keep_last=keep_last,
        group=dist.group.WORLD,
    )


def load_step(folder: Path) -> int:
    """Return the step that was loaded, every bit of which was as saved; called inside `one_rank`."""
    checkpoint = open_checkpoint(folder)
    expected = tensors_of(checkpoint.record.progress.step)
    tensors = {name: torch.empty_like(value) for name, value in expected.items()}
    checkpoint.read_into(tensors)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert checkpoint.record.progress.samples == 4 * checkpoint.record.progress.step
    return checkpoint.record.progress.step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
