"""A world of one rank, and checkpoints of a model with two parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sdp4bit import ReplicaMismatchError
from sdp4bit_lab.common.files import LOCK
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.pretrain.checkpoint import Checkpointer
from sdp4bit_lab.pretrain.checkpoint_files import Progress, RunRecord
from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig

TENSORS = "shard-{:05d}-model-00001-of-00001.safetensors"
"""Name of the file of a rank, counted from 1."""
SHAPE = {"layers": 1, "hidden": 8, "heads": 2, "vocabulary": 128, "positions": 16, "dropout": 0.0}


class Communication:
    """State as a handle has it: tensors and other values, nested."""

    def __init__(self, step: int) -> None:
        self.state: dict[str, Any] = {"steps": step, "replica": {"a.b": torch.full((3,), float(step))}}

    def audit(self) -> bool:
        if self.state.get("differs"):
            raise ReplicaMismatchError
        return True

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class SavedRun:
    """A model after so many optimizer steps, and its checkpointer; made inside `one_rank`."""

    def __init__(
        self,
        folder: Path | None,
        *,
        step: int = 0,
        keep_last: int | None = None,
        **record: Any,
    ) -> None:
        torch.manual_seed(0)
        self.step = step
        self.model = nn.Linear(40, 50)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.communication = Communication(step)
        for _ in range(step):
            self.model(torch.randn(2, 40)).sum().backward()
            self.optimizer.step()
        values = {"world_size": 1, "strategy": "sdp4bit", "dataset": "text", "seed": 1, "layout": "one"}
        self.checkpointer = Checkpointer(
            models=[self.model],
            optimizer=self.optimizer,
            communication=self.communication,
            per_rank={},
            config=CheckpointConfig(save=folder, keep_last=keep_last),
            record=RunRecord(shape=SHAPE, vocabulary_size=100, **{**values, **record}),
            ranks=Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu")),
        )

    def save(self) -> None:
        self.checkpointer.save(progress=Progress(step=self.step, samples=4 * self.step))

    def everything(self) -> list[Tensor]:
        """Return all that a resume must restore."""
        slots = [state[slot] for state in self.optimizer.state.values() for slot in sorted(state)]
        return [*self.model.parameters(), *slots, self.communication.state["replica"]["a.b"]]


def save_step(folder: Path, step: int, **options: Any) -> Path:
    """Save a checkpoint of this step and return its folder."""
    SavedRun(folder, step=step, **options).save()
    return folder / f"step-{step:08d}"


def load_step(folder: Path) -> int:
    """Return the step of the checkpoint that was loaded, every bit of which is as it was saved."""
    run = SavedRun(None)
    progress = run.checkpointer.load(folder)
    expected = SavedRun(None, step=progress.step)
    assert all(map(torch.equal, run.everything(), expected.everything()))
    assert run.communication.state["steps"] == progress.step and progress.samples == 4 * progress.step
    return progress.step


def names(folder: Path) -> list[str]:
    """Return the names in a folder, without that of the lock, which stays after a run."""
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
