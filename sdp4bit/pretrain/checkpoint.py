"""Checkpoints that appear complete or not at all and resume bit-exactly (torch.distributed.checkpoint)."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from sdp4bit.pretrain.metrics import write_atomically
from sdp4bit.pretrain.model_cards import ModelShape
from sdp4bit.pretrain.parallelize import Communication
from sdp4bit.pretrain.ranks import Ranks, first_rank_decides
from sdp4bit.pretrain.settings import SettingError

LATEST = "latest"
RUN_STATE = "run.json"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    """Optimizer steps done; also the position of the learning-rate schedule."""
    samples: int = 0
    """Training samples read; the position in the data."""


@dataclass(frozen=True, kw_only=True)
class Checkpointer:
    """Saves and loads one run: weights, optimizer, communication, random state, position."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    communication: Communication
    shape: ModelShape
    strategy: str
    dataset_key: str
    ranks: Ranks

    def save(self, folder: Path, *, progress: Progress) -> Path:
        """The folder holds the checkpoint step-N, and `latest` names it.

        1. All ranks write into a folder with a temporary name.
        2. Rank 0 renames it, then replaces `latest`.
        """
        target = folder / f"step-{progress.step:08d}"
        working = folder / f".step-{progress.step:08d}.partial"
        first_rank_decides(lambda: _empty_folder(working))
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {
            "model": model,
            "optimizer": optimizer,
            "communication": self.communication.state_dict(),
            **self._random_state(),
        }
        save_state(state, checkpoint_id=working)

        def publish() -> None:
            run = {
                "progress": asdict(progress),
                "shape": asdict(self.shape),
                "strategy": self.strategy,
                "dataset": self.dataset_key,
                "world_size": self.ranks.world_size,
            }
            write_atomically(working / RUN_STATE, json.dumps(run, indent=2) + "\n")
            if target.exists():
                # A resumed run reaches the step of an older checkpoint again.
                target.rename(folder / f".step-{progress.step:08d}.replaced-{time.time_ns()}")
            working.rename(target)
            write_atomically(folder / LATEST, target.name + "\n")
            for replaced in folder.glob(".step-*.replaced-*"):
                shutil.rmtree(replaced, ignore_errors=True)

        first_rank_decides(publish)
        return target

    def load(self, folder: Path) -> Progress:
        """Return how far the loaded run had come; the run continues from there.

        On the same number of ranks the continuation is bit-exact. On another number, replicas are refreshed
        in full precision and dropout starts from a new random state.

        Raises:
            SettingError: on all ranks: no checkpoint there, or one of another model.
        """
        source = first_rank_decides(lambda: find_checkpoint(folder))
        run: dict[str, Any] = first_rank_decides(
            lambda: json.loads((source / RUN_STATE).read_text(encoding="utf-8"))
        )
        self._check_matches(run, source=source)
        same_world = run["world_size"] == self.ranks.world_size
        model, optimizer = get_state_dict(self.model, self.optimizer)
        load_state({"model": model, "optimizer": optimizer}, checkpoint_id=source)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        # Loading weights asks for a refresh of the replicas; their own state, loaded after, says otherwise.
        if same_world and run["strategy"] == self.strategy:
            communication = self.communication.state_dict()
            load_state({"communication": communication}, checkpoint_id=source)
            self.communication.load_state_dict(communication)
        if same_world:
            random_state = self._random_state()
            load_state(random_state, checkpoint_id=source)
            self._set_random_state(random_state)
        elif self.ranks.is_first:
            warnings.warn(
                f"{source} was saved by {run['world_size']} ranks and is loaded by {self.ranks.world_size}: "
                "the continuation is correct but not bit-exact",
                stacklevel=2,
            )
        return Progress(**run["progress"])

    def _check_matches(self, run: dict[str, Any], *, source: Path) -> None:
        here = asdict(self.shape)
        different = [
            f"{name} {run['shape'][name]} (now {here[name]})"
            for name in ("layers", "hidden", "heads", "vocabulary", "positions")
            if run["shape"][name] != here[name]
        ]
        if different:
            raise SettingError(f"{source} is a checkpoint of another model: {', '.join(different)}")
        if run["dataset"] != self.dataset_key and self.ranks.is_first:
            warnings.warn(
                f"{source} was trained on other text or another tokenizer than this run",
                stacklevel=3,
            )

    def _random_state(self) -> dict[str, torch.Tensor]:
        state = {f"random_cpu_{self.ranks.rank}": torch.get_rng_state()}
        if self.ranks.device.type == "cuda":
            state[f"random_cuda_{self.ranks.rank}"] = torch.cuda.get_rng_state()
        return state

    def _set_random_state(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state[f"random_cpu_{self.ranks.rank}"])
        if self.ranks.device.type == "cuda":
            torch.cuda.set_rng_state(state[f"random_cuda_{self.ranks.rank}"])


def find_checkpoint(folder: Path) -> Path:
    """Return the folder itself or the one its `latest` names; SettingError if neither is a checkpoint."""
    if (folder / RUN_STATE).is_file():
        return folder
    latest = folder / LATEST
    if not latest.is_file():
        raise SettingError(f"--load {folder}: no checkpoint there (neither {LATEST} nor {RUN_STATE})")
    source = folder / latest.read_text(encoding="utf-8").strip()
    if not (source / RUN_STATE).is_file():
        raise SettingError(f"--load {folder}: {latest} names {source.name}, which is not a checkpoint")
    return source


def _empty_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
