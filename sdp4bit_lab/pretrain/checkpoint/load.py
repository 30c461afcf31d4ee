"""Where a run starts; finding a checkpoint that is complete and undamaged, before anything of it is used."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from sdp4bit_lab.common.ranks import decide_on_rank_0, gather_over_ranks
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint.config import CheckpointConfig
from sdp4bit_lab.pretrain.checkpoint.files import Digest, damage, read_manifest
from sdp4bit_lab.pretrain.checkpoint.folder import RunRecord, find_checkpoints, holds_checkpoints
from sdp4bit_lab.pretrain.checkpoint.state import Saved
from sdp4bit_lab.pretrain.checkpoint.storage import CheckpointReader, TensorLoadPlanner, failure_of


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
    return decide_on_rank_0(lambda: _choose(config, job))


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


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint whose files are as they were written."""

    path: Path
    record: RunRecord
    reader: CheckpointReader

    @property
    def saved(self) -> Saved:
        """Names and sizes of its tensors."""
        return self.reader.tensors

    def read_into(self, tensors: dict[str, Tensor]) -> None:
        """Read what the checkpoint has under the tensors' names into them; called on all ranks.

        Raises:
            SettingError: on all ranks, if one could not read its tensors.
        """
        try:
            load_state(tensors, storage_reader=self.reader, planner=TensorLoadPlanner())
        except CheckpointException as error:
            raise SettingError(f"{self.path} cannot be loaded: {failure_of(error)}") from error


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return the newest undamaged checkpoint; the same on all ranks, which share the work of checking.

    A warning names checkpoints that were passed over, and the one that is used. A single step folder is used
    or refused.

    Raises:
        SettingError: on all ranks: there is none.
    """
    candidates = decide_on_rank_0(lambda: find_checkpoints(folder))
    passed_over: list[str] = []
    for path in candidates:
        found = _checked(path)
        if isinstance(found, Checkpoint):
            if passed_over and dist.get_rank() == 0:
                warnings.warn(
                    f"sdp4bit: {'; '.join(passed_over)}. Resuming from {path} instead, at step "
                    f"{found.record.progress.step}",
                    stacklevel=2,
                )
            return found
        passed_over.append(f"{path} is damaged: {found}")
    raise SettingError(f"--load {folder}: no complete checkpoint there. {'; '.join(passed_over)}")


def _checked(path: Path) -> Checkpoint | str:
    """Return the checkpoint, or what is wrong with it.

    1. Rank 0 reads the manifest.
    2. The ranks compare sizes and checksums, each of its share of the files.
    3. Only then, everybody reads the metadata.
    """
    digests = decide_on_rank_0(lambda: _manifest(path))
    if isinstance(digests, str):
        return digests
    rank, size = dist.get_rank(), dist.get_world_size()
    problem = _first_problem(damage(path, digests, names=sorted(digests)[rank::size]))
    if problem is None:
        result: Checkpoint | None = None
        try:
            record = RunRecord.read(path)
            result = Checkpoint(path=path, record=record, reader=CheckpointReader(path, digests=digests))
        except ValueError as error:
            problem = str(error)
        problem = _first_problem(problem)
        if result is not None and problem is None:
            return result
    return problem or "it changed while it was read"


def _manifest(path: Path) -> dict[str, Digest] | str:
    try:
        return read_manifest(path)
    except ValueError as error:
        return str(error)


def _first_problem(problem: str | None) -> str | None:
    """Return the problem of the lowest rank that has one."""
    problems = gather_over_ranks(problem, what="comparison of a checkpoint with its manifest")
    return next((found for found in problems if found is not None), None)
