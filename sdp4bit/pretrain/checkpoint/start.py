"""Where a run starts: at the beginning, from a checkpoint it is told of, or where it was ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sdp4bit.pretrain.checkpoint.config import CheckpointConfig
from sdp4bit.pretrain.checkpoint.folder import RunRecord, find_checkpoints, holds_checkpoints
from sdp4bit.pretrain.launch.ranks import first_rank_decides


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts."""

    folder: Path | None = None
    """Of the checkpoints to load; None to begin."""
    continues: bool = False
    """Whether they are the run's own, so that it may find all of its steps done."""


def choose_start(config: CheckpointConfig, *, job: str | None) -> Start:
    """Return where the run starts, the same on all ranks.

    1. From --save, if it holds a checkpoint and it was asked for, by --auto-resume or by a --load of the same
       folder, or if this job has saved it itself, before torchrun restarted its processes.
    2. From --load, if that is another folder.
    3. At the beginning.
    """
    return first_rank_decides(lambda: _choose(config, job))


def _choose(config: CheckpointConfig, job: str | None) -> Start:
    save, load = config.save, config.load
    if save is None:
        return Start(folder=load)
    same = load is not None and load.resolve() == save.resolve()
    if holds_checkpoints(save) and (config.auto_resume or same or _was_saved_by(job, save)):
        return Start(folder=save, continues=True)
    return Start(folder=None if same else load)


def _was_saved_by(job: str | None, folder: Path) -> bool:
    for path in find_checkpoints(folder) if job is not None else ():
        try:
            return RunRecord.read(path).job == job
        except ValueError:
            continue  # damaged; loading passes it over as well
    return False
