"""Save checkpoints during training and resume bit for bit; `checkpoint_files.py` has the file format."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.stateful import Stateful

from sdp4bit import CommHandle
from sdp4bit.collectives.errors import comm_error_context, job_timeout
from sdp4bit_lab.common.failures import free_bytes
from sdp4bit_lab.common.files import lock_folder
from sdp4bit_lab.common.ranks import Ranks, broadcast_from_rank0, gather_over_ranks, run_on_all_ranks
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint_files import (
    CheckpointError,
    CheckpointPlanner,
    CheckpointWriter,
    Progress,
    RunRecord,
    find_checkpoints,
    first_failure,
    open_checkpoint,
    read_tensors,
)
from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig
from sdp4bit_lab.pretrain.config.schedule import Schedule
from sdp4bit_lab.pretrain.model.tensor_parallel import local_part

T = TypeVar("T")

_SIZES = ("layers", "hidden", "heads", "vocabulary", "positions")


class RandomState:
    """Random generators of this rank; a Stateful."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        torch.set_rng_state(state_dict["cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state_dict["cuda"], self._device)


class Checkpointer:
    """Save and load the checkpoints of one run."""

    def __init__(
        self,
        *,
        models: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        communication: CommHandle,
        per_rank: Mapping[str, Stateful],
        config: CheckpointConfig,
        record: RunRecord,
        ranks: Ranks,
    ) -> None:
        """Create on all ranks before the first forward, because gathering replaces parameters.

        Args:
            models: this rank's sharded part of the model, or its pipeline stages; names are global.
            communication: handle of sdp4bit.quantize_communication.
            per_rank: further state of this rank, such as random generators.
            record: description of the run, compared with that of a loaded checkpoint.

        Raises:
            SettingError: on all ranks: another run saves into the folder.
        """
        self._models, self._optimizer, self._communication = models, optimizer, communication
        self._names = {p: name for model in models for name, p in model.named_parameters()}
        self._per_rank = {"random": RandomState(ranks.device), **per_rank}
        self._config, self._record, self._ranks = config, record, ranks
        self._group: dist.ProcessGroup | None = None
        self._lock: TextIO | None = None
        if (folder := config.save) is not None:
            self._lock = run_on_all_ranks(
                lambda: lock_folder(folder, option="--save") if ranks.is_first else None
            )
            if ranks.is_first:
                for leftover in folder.glob(".step-*.partial"):  # of runs that were killed
                    shutil.rmtree(leftover, ignore_errors=True)
            # Over gloo, because plans and errors are objects of the host.
            self._group = dist.new_group(
                backend="gloo", timeout=job_timeout(), group_desc="sdp4bit checkpoints"
            )

    # -- saving ----------------------------------------------------------------------------------------

    def first_not_finite(self) -> str | None:
        """Return the name of a weight that is NaN or infinite on any rank; None if all are finite."""
        weights = self._model_tensors()
        finite = torch.stack([local_part(value).isfinite().all() for value in weights.values()]).tolist()
        wrong = next((name for name, right in zip(weights, finite, strict=True) if not right), None)
        found = gather_over_ranks(wrong, what="check of the weights to save")
        return next((f"{name} on rank {rank}" for rank, name in enumerate(found) if name is not None), None)

    def save(self, *, progress: Progress) -> None:
        """Save the state on all ranks, and wait until its files are complete.

        Raises:
            CheckpointError: on all ranks: the save failed on one.
            ReplicaMismatchError: copies of the weights differ. A run that loads the checkpoint would have
                equal copies, so that no later audit could find the difference.
        """
        self._communication.audit()
        folder, failure = self._config.save, None
        assert folder is not None
        record = replace(self._record, progress=progress, saved_at=time.time())
        writer = CheckpointWriter(folder, record=record, keep_last=self._config.keep_last)
        try:
            with comm_error_context("writing of a checkpoint"):
                save_state(
                    self._state(),
                    storage_writer=writer,
                    planner=CheckpointPlanner(),
                    process_group=self._group,
                )
        except CheckpointException as error:
            failure = (
                f"the checkpoint of step {progress.step} was not saved: {first_failure(error)}; "
                f"{free_bytes(folder):,} bytes are free in {folder}. Older checkpoints are unchanged"
            )
            if self._ranks.is_first:
                shutil.rmtree(writer.working, ignore_errors=True)
        for message in gather_over_ranks(failure, what="outcome of the checkpoint"):
            if message is not None:
                raise CheckpointError(message)

    def close(self) -> None:
        """Free all resources."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        if self._lock is not None:
            self._lock.close()

    # -- loading ---------------------------------------------------------------------------------------

    def load(self, folder: Path) -> Progress:
        """Load the newest intact checkpoint and return its position; a collective.

        With the same strategy and layout, training continues bit for bit. Otherwise replicas are refreshed in
        full precision or random numbers restart. One warning lists all that changes the numbers.

        Raises:
            SettingError: on all ranks: no complete checkpoint, or one of another model.
        """
        path, record, reader = open_checkpoint(folder)
        self._check_matches(path, record)
        tensors = self._loadable(path, lambda: self._templates(reader.tensors))
        communication = self._fitting("communication", self._communication, reader.tensors)
        random = {}
        if record.layout == self._record.layout and record.world_size == self._record.world_size:
            prefix = f"rank{self._ranks.rank}"
            for part, stateful in self._per_rank.items():
                random.update(self._fitting(f"{prefix}.{part}", stateful, reader.tensors) or {})
        if record.strategy != self._record.strategy or None in gather_over_ranks(
            communication, what="whether the communication's state fits"
        ):
            communication = None
        read_tensors({**tensors, **(communication or {}), **random}, path=path, reader=reader)
        self._loadable(path, lambda: self._apply(tensors))
        for part, stateful in self._per_rank.items() if random else ():
            stateful.load_state_dict(_nested(stateful.state_dict(), f"rank{self._ranks.rank}.{part}", random))
        # After the weights, because loading them requests a refresh of the replicas.
        if communication is not None:
            state = self._communication.state_dict()
            self._communication.load_state_dict(_nested(state, "communication", communication))
        else:
            self._communication.load_state_dict(
                {**self._communication.state_dict(), "steps": record.progress.step}
            )
        self._warn_of_differences(path, record, exact=communication is not None and bool(random))
        return record.progress

    def _check_matches(self, path: Path, record: RunRecord) -> None:
        here = self._record.shape
        different = [
            f"{name} {record.shape.get(name)} (now {here[name]})"
            for name in _SIZES
            if record.shape.get(name) != here[name]
        ]
        if different:
            raise SettingError(f"{path} is a checkpoint of a different model: {', '.join(different)}")

    def _warn_of_differences(self, path: Path, record: RunRecord, *, exact: bool) -> None:
        """Warn once of all that changes the numbers of the continuation."""
        here, step = self._record, record.progress.step
        messages = []
        if record.dataset != here.dataset:
            messages.append("it was trained on different text or with a different tokenizer")
        if record.seed != here.seed:
            messages.append(
                f"it was trained with seed {record.seed}, this run has {here.seed}: the sample order "
                "differs, and some samples may be repeated"
            )
        if record.strategy != here.strategy:
            messages.append(
                f"it was saved with strategy {record.strategy} and continues with {here.strategy}: "
                "replicas are refreshed in full precision"
            )
        elif not exact:
            messages.append(
                f"it was saved with world size {record.world_size} ({record.layout}) and is loaded with "
                f"{here.world_size} ({here.layout}): random numbers restart, so the continuation is not "
                "bit-exact"
            )
        saved, ours = Schedule.of(record.settings), Schedule.of(here.settings)
        is_expected = self._config.override_opt_param_scheduler
        changed = [
            f"--{name.replace('_', '-')} {value} (now {here.settings[name]})"
            for name, value in record.settings.items()
            if here.settings.get(name, value) != value
            and not (is_expected and name in Schedule.__dataclass_fields__)
        ]
        if changed:
            messages.append(f"it was trained with {', '.join(changed)}")
        if saved is not None and ours is not None and saved != ours and not is_expected:
            messages.append(
                f"step {step + 1} has the learning rate {ours.rate(step):.3g}, by the saved schedule "
                f"{saved.rate(step):.3g} (--override-opt_param-scheduler replaces it without this warning)"
            )
        if messages and self._ranks.is_first:
            warnings.warn(f"sdp4bit: {path} continues differently: {'; '.join(messages)}", stacklevel=3)

    def _loadable(self, path: Path, work: Callable[[], T]) -> T:
        """Return the result of `work`; SettingError on all ranks if the checkpoint does not fit."""

        def attempt() -> T:
            try:
                return work()
            except (ValueError, TypeError, RuntimeError, KeyError) as error:
                raise SettingError(f"{path} cannot be loaded: {' '.join(str(error).split())}") from error

        return run_on_all_ranks(attempt)

    # -- state -----------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Tensor]:
        """Return all tensors to save, as references."""
        tensors = self._model_tensors()
        for parameter, name in self._optimized():
            for slot, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{slot}"] = torch.as_tensor(value)
        tensors.update(_flat("communication", self._communication.state_dict()))
        for part, stateful in self._per_rank.items():
            tensors.update(_flat(f"rank{self._ranks.rank}.{part}", stateful.state_dict()))
        return tensors

    def _model_tensors(self) -> dict[str, Tensor]:
        return {f"model.{n}": v.detach() for model in self._models for n, v in model.state_dict().items()}

    def _optimized(self) -> Iterator[tuple[nn.Parameter, str]]:
        """Yield the parameters in the optimizer's order, with their global names."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, self._names[parameter]

    def _templates(self, saved: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
        """Return tensors to load model and optimizer into; ValueError if the checkpoint lacks some."""
        tensors = self._model_tensors()
        for name, value in tensors.items():
            if name not in saved or saved[name].size != value.shape:
                actual = "is missing" if name not in saved else f"has shape {tuple(saved[name].size)}"
                raise ValueError(f"{name} {actual}, but this model needs {tuple(value.shape)}")
        for parameter, name in self._optimized():
            for slot in _slots(saved, name):
                kind = saved[f"optimizer.{name}.{slot}"]
                like = torch.zeros_like(parameter, dtype=kind.properties.dtype, requires_grad=False)
                is_sharded = len(kind.size) and kind.size == parameter.shape
                tensors[f"optimizer.{name}.{slot}"] = (
                    like if is_sharded else torch.zeros(kind.size, dtype=kind.properties.dtype)
                )
        return tensors

    def _fitting(
        self, prefix: str, stateful: Stateful, saved: Mapping[str, TensorStorageMetadata]
    ) -> dict[str, Tensor] | None:
        """Return tensors to load a part into; None if the checkpoint lacks some or has other sizes."""
        tensors = {}
        for name, value in _flat(prefix, stateful.state_dict()).items():
            kind = saved.get(name)
            if kind is None:
                return None
            if name == f"{prefix}.values":
                tensors[name] = torch.empty(kind.size, dtype=torch.uint8)
            elif kind.size == value.shape and kind.properties.dtype == value.dtype:
                tensors[name] = torch.empty_like(value)
            else:
                return None
        return tensors

    def _apply(self, loaded: Mapping[str, Tensor]) -> None:
        for model in self._models:
            model.load_state_dict({name: loaded[f"model.{name}"] for name in model.state_dict()})
        state = {
            index: {slot: loaded[f"optimizer.{name}.{slot}"] for slot in _slots(loaded, name)}
            for index, (_, name) in enumerate(self._optimized())
        }
        # Learning rate, betas and decay come from this run's settings.
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


def _slots(names: Mapping[str, object], parameter: str) -> list[str]:
    prefix = f"optimizer.{parameter}."
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _leaves(prefix: str, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested state by path."""
    for key, value in state.items():
        path = f"{prefix}.{key}"
        yield from _leaves(path, value) if isinstance(value, Mapping) else [(path, value)]


def _flat(prefix: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Flatten a nested state into tensors by path, plus one tensor for all other values."""
    flat = dict(_leaves(prefix, state))
    tensors = {path: value.detach() for path, value in flat.items() if isinstance(value, Tensor)}
    if values := {path: value for path, value in flat.items() if path not in tensors}:
        content = bytearray(json.dumps(values).encode())
        tensors[f"{prefix}.values"] = torch.frombuffer(content, dtype=torch.uint8)
    return tensors


def _nested(state: Mapping[str, Any], prefix: str, loaded: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a state of this structure with the loaded values."""
    content = loaded.get(f"{prefix}.values")
    values = {**loaded, **({} if content is None else json.loads(bytes(content.tolist())))}

    def filled(part: Mapping[str, Any], path: str) -> dict[str, Any]:
        return {
            key: filled(value, f"{path}.{key}") if isinstance(value, Mapping) else values[f"{path}.{key}"]
            for key, value in part.items()
        }

    return filled(state, prefix)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Starting point of a run."""

    folder: Path | None = None
    """Folder of checkpoints to load; None to start from scratch."""
    continues: bool = False
    """Whether they are the run's own, so that all steps may be done already."""


def choose_start(config: CheckpointConfig, *, job: str | None) -> Start:
    """Return the starting point, identical on all ranks.

    Use --save if it has a checkpoint and --auto-resume or an equal --load is given, or if this job saved it
    before torchrun restarted the processes. Otherwise use --load, or start from scratch.
    """

    def choose() -> Start:
        save, load = config.save, config.load
        if save is None:
            return Start(folder=load)
        is_same = load is not None and load.resolve() == save.resolve()
        own = find_checkpoints(save)
        if own and (config.auto_resume or is_same or (job is not None and _job_of(own) == job)):
            return Start(folder=save, continues=True)
        return Start(folder=None if is_same else load)

    return broadcast_from_rank0(choose)


def _job_of(checkpoints: Sequence[Path]) -> str | None:
    """Return the job that saved the newest readable checkpoint."""
    for path in checkpoints:
        try:
            return RunRecord.read(path).job
        except ValueError:
            continue
    return None
