"""Checkpoints of a run: saved while training goes on, and resumed bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from sdp4bit.collectives.errors import ExchangeError, comm_error_context, job_timeout
from sdp4bit_lab.common.ranks import Ranks, agree, gather_over_ranks
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint.config import CheckpointConfig
from sdp4bit_lab.pretrain.checkpoint.files import CheckpointError
from sdp4bit_lab.pretrain.checkpoint.folder import MODEL, OPTIMIZER, Progress, RunRecord
from sdp4bit_lab.pretrain.checkpoint.load import Checkpoint, open_checkpoint
from sdp4bit_lab.pretrain.checkpoint.save import start_in_background, write_checkpoint
from sdp4bit_lab.pretrain.checkpoint.state import COMMUNICATION, TrainingState

T = TypeVar("T")

SECONDS_AFTER_A_FAILURE = 30.0
"""How long a run that fails lets a save in the background go on."""
_SIZES = ("layers", "hidden", "heads", "vocabulary", "positions")


class Checkpointer:
    """The checkpoints of one run: saving and loading."""

    def __init__(
        self,
        state: TrainingState,
        *,
        config: CheckpointConfig,
        identity: RunRecord,
        ranks: Ranks,
        attach: Callable[[Path], None] | None = None,
    ) -> None:
        """Make one on all ranks, at the same point of the program.

        Args:
            identity: what the run trains, but for its parts and its progress; compared with what is loaded.
            attach: writes further files into a checkpoint's folder, such as the tokenizer; called on rank 0.
        """
        self._state = state
        self._config = config
        self._identity = identity
        self._ranks = ranks
        self._attach = attach
        self._pending: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None
        self._stager: DefaultStager | None = None
        if config.save is not None:
            # Of its own: the exchanges of a save in the background must not mix with those of training.
            self._group = dist.new_group(
                backend="gloo", timeout=job_timeout(), group_desc="sdp4bit checkpoints"
            )
            on_cuda = ranks.device.type == "cuda"
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=on_cuda,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=on_cuda,
                )
            )

    def save(self, *, progress: Progress) -> None:
        """Save the state of this moment, in the background unless --no-async-save; called on all ranks.

        1. Wait for a save that is still going on.
        2. Copy the state to the memory of the host.
        3. In the background, write it on all ranks, and publish it on rank 0.

        Raises:
            CheckpointError: on all ranks: this save, or the one before it, failed.
        """
        folder, group, stager = self._config.save, self._group, self._stager
        if folder is None or group is None or stager is None:
            raise RuntimeError("this run was not asked to save checkpoints")
        self.wait()
        tensors = self._state.to_save()
        parts = (MODEL, OPTIMIZER, *self._state.own_names)
        record = replace(self._identity, parts=parts, progress=progress)

        def write() -> None:
            write_checkpoint(
                tensors,
                folder=folder,
                record=record,
                attach=self._attach,
                keep_last=self._config.keep_last,
                group=group,
            )

        if not self._config.async_save:
            write()
            return
        tensors = stager.stage(tensors)  # type: ignore[assignment]
        self._pending = start_in_background(write)

    def poll(self) -> None:
        """Raise the error of the save in the background, once it has ended on all ranks.

        Called on all ranks after every step; one small exchange while a save goes on, none otherwise.

        Raises:
            CheckpointError: the same on all ranks.
        """
        if self._pending is None:
            return
        done = torch.tensor(int(self._pending.done()), device=self._ranks.device)
        with comm_error_context("agreement on whether the checkpoint is written"):
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
        if done.item():
            self.wait()

    def wait(self) -> None:
        """Wait until no save is going on, on any rank; CheckpointError on all ranks if one failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        error = pending.exception()
        own = None if error is None else str(error)
        for message in gather_over_ranks(own, what="outcome of the checkpoint"):
            if message is not None:
                raise CheckpointError(message) from error

    def close(self) -> None:
        """Wait for the save that was begun, and hold nothing any more; CheckpointError as by `wait`."""
        self.wait()
        if self._stager is not None:
            self._stager.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._stager = self._group = None

    def abandon(self, error: BaseException | None) -> None:
        """Give a save that is going on a moment to end; for a rank that fails, perhaps alone."""
        if self._pending is not None:
            timeout = job_timeout()
            limit = SECONDS_AFTER_A_FAILURE if timeout is None else timeout.total_seconds()
            wait_for([self._pending], timeout=seconds_for_a_save(error, timeout=limit))

    def load(self, folder: Path) -> Progress:
        """Return how far the loaded run had come; the run continues from there.

        Saved with the same strategy on the same ranks, the continuation is bit-exact. Otherwise replicas are
        refreshed in full precision, with a warning.

        Raises:
            SettingError: on all ranks: no complete checkpoint there, or one of another model.
        """
        checkpoint = open_checkpoint(folder)
        self._check_matches(checkpoint)
        state = self._state
        tensors = _loadable(checkpoint, lambda: self._templates(checkpoint))
        own = self._own_parts(checkpoint)
        checkpoint.read_into(tensors)
        _loadable(checkpoint, lambda: state.apply_common(tensors))
        # Loading weights asks for a refresh of the replicas; their own state, loaded after, says otherwise.
        own_tensors = state.own_tensors(checkpoint.saved, parts=own) or {}
        checkpoint.read_into(own_tensors)
        _loadable(checkpoint, lambda: state.apply_own(own_tensors, parts=own))
        if "communication" not in own:
            state.start_communication(step=checkpoint.record.progress.step)
        return checkpoint.record.progress

    def _check_matches(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of another model; warn of what else differs or is missing."""
        record, here = checkpoint.record, self._identity.shape
        different = [
            f"{name} {record.shape.get(name)} (now {here[name]})"
            for name in _SIZES
            if record.shape.get(name) != here[name]
        ]
        if different:
            raise SettingError(f"{checkpoint.path} is a checkpoint of another model: {', '.join(different)}")
        if record.dataset not in (None, self._identity.dataset):
            self._warn(f"{checkpoint.path} was trained on other text or another tokenizer than this run")
        if record.seed not in (None, self._identity.seed):
            self._warn(
                f"{checkpoint.path} was trained with seed {record.seed}, this run has {self._identity.seed}: "
                "it reads samples in another order, and may read some twice"
            )
        absent = [part for part in (OPTIMIZER, *self._state.own_names) if part not in record.parts]
        if absent:
            self._warn(f"{checkpoint.path} has no {', '.join(absent)} state: this run starts with a new one")

    def _templates(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        """Return the tensors to load on any number of ranks; ValueError if the checkpoint lacks some."""
        state, saved = self._state, checkpoint.saved
        tensors = state.model()
        for name, value in tensors.items():
            if name not in saved or saved[name].size != value.shape:
                found = "is not in it" if name not in saved else f"has the shape {tuple(saved[name].size)}"
                raise ValueError(f"{name} {found}, this model needs {tuple(value.shape)}")
        if OPTIMIZER in checkpoint.record.parts:
            tensors.update(state.optimizer(saved))
        return {**tensors, **state.shared_parts(saved)}

    def _own_parts(self, checkpoint: Checkpoint) -> list[str]:
        """Return which parts every rank finds of its own; a warning says why others are not used.

        Raises:
            SettingError: on all ranks: a part is missing that must be there.
        """
        record, path, size = checkpoint.record, checkpoint.path, self._ranks.world_size
        names = [name for name in self._state.own_names if name in record.parts]
        moved = None
        if record.strategy is not None and record.world_size != size:
            moved = f"{record.world_size} ranks and is loaded by {size}"
        elif record.layout not in (None, self._identity.layout):
            # Random states would fit, but tensor-parallel ranks must draw the same numbers as their peers.
            moved = f"ranks as {record.layout} and is loaded by {self._identity.layout}"
        if moved is not None:
            self._warn(
                f"{path} was saved by {moved}: replicas are refreshed in full precision and random numbers "
                "start anew; the continuation is not bit-exact"
            )
            return []
        if record.strategy not in (None, self._identity.strategy):
            self._warn(
                f"{path} was saved with strategy {record.strategy} and continues with "
                f"{self._identity.strategy}: replicas are refreshed in full precision"
            )
            names = [name for name in names if name != COMMUNICATION]
        missing = [name for name in names if not self._state.has_own(name, saved=checkpoint.saved)]
        _loadable(checkpoint, lambda: _refuse(missing))
        fitting = {
            name for name in names if self._state.own_tensors(checkpoint.saved, parts=[name]) is not None
        }
        everywhere = set.intersection(*gather_over_ranks(fitting, what="parts that can be loaded"))
        if left_out := [name for name in names if name not in everywhere]:
            self._warn(
                f"{path} was saved with another layout of ranks: its {' and '.join(left_out)} state is not "
                "used, so the continuation is not bit-exact"
            )
        return [name for name in names if name in everywhere]

    def _warn(self, message: str) -> None:
        if self._ranks.is_first:
            warnings.warn(f"sdp4bit: {message}", stacklevel=4)


def seconds_for_a_save(error: BaseException | None, *, timeout: float) -> float:
    """Return how long a rank that fails lets a save go on.

    Together with what it has waited for other ranks already, that is no longer than the job's timeout.
    """
    waited = error.seconds if isinstance(error, ExchangeError) else 0.0
    return max(0.0, min(SECONDS_AFTER_A_FAILURE, timeout - waited))


def _refuse(missing: list[str]) -> None:
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)} state, which it was saved with")


def _loadable(checkpoint: Checkpoint, work: Callable[[], T]) -> T:
    """Return what `work` returns; SettingError on all ranks if the checkpoint does not have what it needs."""

    def attempt() -> T:
        try:
            return work()
        except (ValueError, TypeError, RuntimeError) as error:
            message = " ".join(str(error).split())
            raise SettingError(f"{checkpoint.path} cannot be loaded: {message}") from error

    return agree(attempt)
