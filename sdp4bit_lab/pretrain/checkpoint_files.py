"""Read and write checkpoints that are complete or absent, have checksums, and load without executing code.

    step-00000500/             complete: renamed to this after all of its files are on disk
        __0_0.distcp, ...      tensors, written by torch.distributed.checkpoint, one file per rank
        tensors.json           location of each tensor
        .metadata              the same as a pickle for PyTorch's tools; never read here
        run.json               description of the run and its progress
        tokenizer.json
        SHA256SUMS             of all other files; checked when loading, or by `sha256sum -c SHA256SUMS`
    .step-00000750.partial/    being written, or left by a killed run

Tensor names are independent of the layout of the ranks, except for `rank3.random.*`, which only the same
layout loads. Other values are JSON in a byte tensor, because torch.distributed.checkpoint would pickle them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.storage import WriteResult

from sdp4bit_lab.common.failures import one_line
from sdp4bit_lab.common.files import SUMS, check_sums, sha256, sync, write_sums
from sdp4bit_lab.common.ranks import broadcast_from_rank0, gather_over_ranks
from sdp4bit_lab.common.settings import RunError, SettingError

RECORD, TENSORS, TOKENIZER = "run.json", "tensors.json", "tokenizer.json"
"""Time for the ranks of a killed run to end."""
# While a checkpoint of the same step is replaced, the old one briefly has a dotted name.
_COMPLETE = re.compile(r"step-\d{8,}|\.step-\d{8,}\.replaced")


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


class CheckpointWriter(FileSystemWriter):
    """Write one file and checksum per rank; rank 0 then completes and renames the folder."""

    def __init__(
        self, folder: Path, *, record: RunRecord, attach: Callable[[Path], None] | None, keep_last: int | None
    ) -> None:
        self.folder = folder
        self.working = folder / f".step-{record.progress.step:08d}.partial"
        self._record, self._attach, self._keep_last = record, attach, keep_last
        super().__init__(self.working, single_file_per_rank=True, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            (self.working / f"{name}.sha256").write_text(sha256(self.working / name))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint on rank 0, after all ranks have written their files."""
        super().finish(metadata, results)
        working = self.working
        (working / TENSORS).write_text(json.dumps(_described(metadata, results)) + "\n")
        serial = 1 + max((_serial(path) for path in find_checkpoints(self.folder)), default=0)
        record = replace(self._record, serial=serial)
        (working / RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n")
        if self._attach is not None:
            self._attach(working)
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

    def storage_meta(self) -> StorageMeta | None:
        """Record no location, so that the checkpoint can be moved."""
        return StorageMeta()


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
        opened: tuple[RunRecord, CheckpointReader] | None = None
        problem: str | None = None
        try:
            opened = _open_intact(path)
        except ValueError as error:
            problem = str(error)
        problem = next(
            (each for each in gather_over_ranks(problem, what="check of a checkpoint") if each is not None),
            None,
        )
        if opened is not None and problem is None:
            if damaged and (not dist.is_initialized() or dist.get_rank() == 0):
                step = opened[0].progress.step
                text = f"sdp4bit: {'; '.join(damaged)}. Resuming from {path} instead, at step {step}"
                warnings.warn(text, stacklevel=2)
            return path, *opened
        damaged.append(f"{path} is damaged: {problem}")
    raise SettingError(f"--load {folder}: no intact checkpoint found. {'; '.join(damaged)}")


def _open_intact(path: Path) -> tuple[RunRecord, CheckpointReader]:
    """Check this rank's share of the files and read the metadata; ValueError names the damage."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    check_sums(path, needed=(TENSORS, RECORD), part=slice(rank, None, size))
    return RunRecord.read(path), CheckpointReader(path)


class CheckpointReader(FileSystemReader):
    """Read a folder with verified checksums and metadata."""

    def __init__(self, folder: Path) -> None:
        """Read the locations of the tensors; ValueError if they are invalid."""
        super().__init__(folder)
        try:
            sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
            self.metadata = _metadata(json.loads((folder / TENSORS).read_bytes()), sizes)
        except Exception as error:  # untrusted content can have any form
            raise ValueError(f"{TENSORS} does not describe the files of this checkpoint ({error})") from None

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        cast(StorageMeta, self.metadata.storage_meta).load_id = self.load_id
        return self.metadata

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        return cast(dict[str, TensorStorageMetadata], self.metadata.state_dict_metadata)


def _described(metadata: Metadata, results: list[list[WriteResult]]) -> dict[str, Any]:
    """Return the content of tensors.json: of each tensor dtype, size, and its chunks with their places."""
    tensors = cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)
    # From the results, because torch 2.9 fills in a copy of the metadata.
    places: dict[MetadataIndex, _StorageInfo] = {
        each.index: each.storage_data for of_rank in results for each in of_rank
    }

    def described(name: str, chunk: ChunkStorageMetadata) -> list[object]:
        place = places[MetadataIndex(name, chunk.offsets)]
        return [list(chunk.offsets), list(chunk.sizes), place.relative_path, place.offset, place.length]

    return {
        name: {
            "dtype": str(tensor.properties.dtype).removeprefix("torch."),
            "size": list(tensor.size),
            "chunks": [described(name, chunk) for chunk in tensor.chunks],
        }
        for name, tensor in tensors.items()
    }


def _metadata(described: Mapping[str, Any], sizes: Mapping[str, int]) -> Metadata:
    """Return the metadata of complete tensors inside files of these sizes; raises if there are others."""
    tensors: dict[str, Any] = {}
    places = {}
    for name, tensor in described.items():
        size, chunks, dtype = torch.Size(tensor["size"]), [], getattr(torch, tensor["dtype"])
        for offsets, lengths, file, start, length in tensor["chunks"]:
            if not 0 <= start <= start + length <= sizes.get(file, -1):
                raise ValueError(f"{name}: bytes {start} to {start + length} of {file}")
            chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(lengths)))
            places[MetadataIndex(name, chunks[-1].offsets)] = _StorageInfo(file, start, length)
        covered = sum(math.prod(chunk.sizes) for chunk in chunks)
        if covered != math.prod(size) or not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name}: {covered} of {math.prod(size)} values of type {dtype}")
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


def read_tensors(tensors: dict[str, Tensor], *, path: Path, reader: CheckpointReader) -> None:
    """Read the checkpoint's tensors into those given by name; SettingError on all ranks on failure."""
    alone = not dist.is_initialized()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load_state(tensors, storage_reader=reader, planner=planner, no_dist=alone)
    except CheckpointException as error:
        raise SettingError(f"{path} cannot be loaded: {first_failure(error)}") from error
