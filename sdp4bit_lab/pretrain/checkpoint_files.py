"""Read and write checkpoints that are complete or absent, have checksums, and load without executing code.

    step-00000500/             complete: renamed to this after all of its files are on disk
        shard-00001-...        tensors of rank 0 as safetensors, written by torch.distributed.checkpoint
        run.json               description of the run and its progress
        SHA256SUMS             of all other files; checked when loading, or by `sha256sum -c SHA256SUMS`
    .step-00000750.partial/    being written, or left by a killed run

Tensor names are independent of the layout of the ranks, except for `rank3.random.*`, which only the same
layout loads. Other values are JSON in a byte tensor, because safetensors has no other values.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import warnings
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.storage import WriteResult

from sdp4bit.addresses import page
from sdp4bit_lab.common.failures import one_line
from sdp4bit_lab.common.files import SUMS, check_sums, sha256, sync, write_sums
from sdp4bit_lab.common.ranks import broadcast_from_rank0, gather_over_ranks
from sdp4bit_lab.common.settings import RunError, SettingError

RECORD = "run.json"
# While a checkpoint of the same step is replaced, the old one briefly has a dotted name.
_COMPLETE = re.compile(r"step-\d{8,}|\.step-\d{8,}\.replaced")
_OLDER = page("checkpoints#checkpoints-of-older-versions")
_FILE_BYTES = 1 << 29
"""Tensors per file and rank, in bytes, beyond its first tensor. The writer holds three copies of a file."""


class CheckpointError(RunError):
    """Report a failed save in one line: cause and remedy."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Position of a run."""

    step: int = 0
    """Completed optimizer steps; also the position of the learning-rate schedule."""
    samples: int = 0
    """Training samples read."""
    validation_due: bool = False
    """Whether the validation after this step was skipped because the run had to stop."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Content of run.json."""

    shape: dict[str, Any]
    """Fields of ModelShape."""
    vocabulary_size: int
    """Number of tokens; the embedding is padded to more rows."""
    world_size: int
    strategy: str
    dataset: str
    """Key of the training data."""
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that change the numbers, by the names of their options."""
    layout: str
    """Distribution of model and data over the ranks."""
    job: str | None = None
    """Job name that survives restarts by torchrun; None without a launcher."""
    serial: int = 0
    """Number of the checkpoint in its folder; the latest continues the run, whatever its step or the time."""
    saved_at: float = 0.0
    """Unix time."""
    progress: Progress = field(default_factory=Progress)

    @staticmethod
    def read(folder: Path) -> RunRecord:
        """Read the record of a checkpoint; ValueError if it is damaged."""
        try:
            values = json.loads((folder / RECORD).read_bytes())
            record = RunRecord(**{**values, "progress": Progress(**values["progress"])})
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{RECORD} cannot be read ({error})") from None
        progress = record.progress
        numbers = (record.world_size, record.vocabulary_size, record.serial, progress.step, progress.samples)
        are_mappings = isinstance(record.shape, dict) and isinstance(record.settings, dict)
        if not are_mappings or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"{RECORD} has sizes or steps that are not numbers")
        return record


class CheckpointPlanner(DefaultSavePlanner):
    """Give the writer tensors that safetensors accepts."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def transform_object(self, write_item: WriteItem, object: Any) -> Tensor:
        """Return a copy: safetensors refuses tensors that share memory or are not contiguous."""
        copy: Tensor = object.to("cpu", copy=True, memory_format=torch.contiguous_format)
        return copy


class CheckpointWriter(HuggingFaceStorageWriter):
    """Write one file and checksum per rank and _FILE_BYTES; rank 0 then completes and renames the folder."""

    def __init__(self, folder: Path, *, record: RunRecord, keep_last: int | None) -> None:
        self.folder = folder
        self.working = folder / f".step-{record.progress.step:08d}.partial"
        self._record, self._keep_last = record, keep_last
        super().__init__(str(self.working), save_distributed=True)
        # Copy-ahead needs a stream of the GPU, but the planner's tensors are on the CPU.
        self.per_thread_copy_ahead = 0

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign the tensors to files on rank 0: the same name to the same number on all ranks."""
        sizes: dict[str, int] = {}
        for item in (item for plan in plans for item in plan.items):
            assert item.tensor_data is not None  # all values are tensors
            size = math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            sizes[item.index.fqn] = max(size, sizes.get(item.index.fqn, 0))
        ends = itertools.accumulate(sizes.values())
        self.fqn_to_index_mapping = {
            name: 1 + end // _FILE_BYTES for name, end in zip(sizes, ends, strict=True)
        }
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            (self.working / f"{name}.sha256").write_text(sha256(self.working / name))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint on rank 0, after all ranks have written their files."""
        working = self.working
        serial = 1 + max((_serial(path) for path in find_checkpoints(self.folder)), default=0)
        record = replace(self._record, serial=serial)
        (working / RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n")
        known = {path: path.read_text() for path in working.glob("*.sha256")}
        for path in known:
            path.unlink()
        write_sums(working, known={path.stem: value for path, value in known.items()})
        for path in (*working.iterdir(), working):
            sync(path)
        target = self.folder / f"step-{self._record.progress.step:08d}"
        if target.exists():
            # A resumed run may reach the step of an older checkpoint. A crash may have left a replaced one.
            replaced = self.folder / f".{target.name}.replaced"
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        working.rename(target)
        sync(self.folder)
        for replaced in self.folder.glob(".step-*.replaced"):
            _delete(replaced)
        if self._keep_last is not None:
            for path in find_checkpoints(self.folder)[self._keep_last :]:
                if not path.is_symlink():  # a link may point anywhere
                    _delete(path)


def _delete(path: Path) -> None:
    """Delete a checkpoint without ever leaving a partial one under a loadable name."""
    removed = path.with_name(f"{'.' if path.name[0] != '.' else ''}{path.name}.partial")
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def first_failure(error: CheckpointException) -> str:
    """Return the cause on the lowest failed rank, in one line."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {one_line(cause)}"


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, latest first, damaged ones last."""
    paths = [path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(paths, key=lambda path: (_serial(path), path.name), reverse=True)


def _serial(path: Path) -> int:
    try:
        return RunRecord.read(path).serial
    except ValueError:
        return -1


class CheckpointReader(HuggingFaceStorageReader):
    """Read the files of a folder with verified checksums, whose metadata rank 0 has read for all ranks."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(str(folder))
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        return cast(dict[str, TensorStorageMetadata], self._metadata.state_dict_metadata)


def open_checkpoint(folder: Path) -> tuple[Path, RunRecord, CheckpointReader]:
    """Return the newest intact checkpoint of a folder, or the given step folder; ranks share the checks.

    Warns of damaged newer checkpoints. A damaged step folder is an error.

    Raises:
        SettingError: on all ranks: no intact checkpoint.
    """
    is_single = (folder / SUMS).is_file() or (_COMPLETE.fullmatch(folder.name) and folder.is_dir())
    # Those with a damaged record first, because any of them may be the newest.
    candidates = broadcast_from_rank0(
        lambda: (
            [folder] if is_single else sorted(find_checkpoints(folder), key=lambda path: _serial(path) >= 0)
        )
    )
    if not candidates:
        raise SettingError(f"--load {folder}: no checkpoint found (no step- folder)")
    damaged: list[str] = []
    for path in candidates:
        damages = gather_over_ranks(_damage_of_share(path), what="check of a checkpoint")
        problem = next((each for each in damages if each is not None), None)
        opened = problem or broadcast_from_rank0(partial(_described, path))
        if not isinstance(opened, str):
            record, metadata = opened
            if damaged and dist.get_rank() == 0:
                text = f"{'; '.join(damaged)}. Resuming from {path} instead, at step {record.progress.step}"
                warnings.warn(f"sdp4bit: {text}", stacklevel=2)
            return path, record, CheckpointReader(path, metadata)
        damaged.append(f"{path} is damaged: {opened}")
    raise SettingError(f"--load {folder}: no intact checkpoint found. {'; '.join(damaged)}")


def _damage_of_share(path: Path) -> str | None:
    """Check this rank's share of the files; describe the damage, if any."""
    part = slice(dist.get_rank(), None, dist.get_world_size())
    try:
        check_sums(path, needed=(RECORD,), part=part)
    except ValueError as error:
        return str(error)
    return None


def _described(path: Path) -> tuple[RunRecord, Metadata] | str:
    """Return the record and the tensors of a checkpoint, or describe the damage.

    Raises:
        SettingError: the checkpoint is of an older version.
    """
    if any(path.glob("*.distcp")):
        raise SettingError(f"{path} has .distcp files of an older version: convert it ({_OLDER})")
    try:
        record = RunRecord.read(path)
    except ValueError as error:
        return str(error)
    try:
        metadata = HuggingFaceStorageReader(str(path)).read_metadata()
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            covered = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if covered != math.prod(tensor.size):
                raise ValueError(f"{name}: {covered} of {math.prod(tensor.size)} values")
    except Exception as error:  # untrusted content can have any form
        return f"the .safetensors files do not have all tensors ({one_line(error)})"
    return record, metadata


def read_tensors(tensors: dict[str, Tensor], *, path: Path, reader: CheckpointReader) -> None:
    """Read the checkpoint's tensors into those given by name; SettingError on all ranks on failure."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        load_state(tensors, storage_reader=reader, planner=planner)
    except CheckpointException as error:
        raise SettingError(f"{path} cannot be loaded: {first_failure(error)}") from error
