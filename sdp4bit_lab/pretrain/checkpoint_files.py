"""Read and write checkpoints that are complete or absent, have checksums, and load without executing code.

    step-00000500/             complete: renamed to this after all of its files are on disk
        __0_0.distcp, ...      tensors, written by torch.distributed.checkpoint, one file per rank
        .metadata              location of each tensor
        run.json               description of the run and its progress
        tokenizer.json
        SHA256SUMS             of all other files; checked when loading, or by `sha256sum -c SHA256SUMS`
    .step-00000750.partial/    being written, or left by a killed run

Tensor names are independent of the layout of the ranks, except for `rank3.random.*`, which only the same
layout loads. Other values are JSON in a byte tensor, because torch.distributed.checkpoint would pickle them.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.storage import WriteResult

from sdp4bit_lab.common.files import sync
from sdp4bit_lab.common.ranks import broadcast_from_rank0, gather_over_ranks
from sdp4bit_lab.common.settings import SettingError

RECORD, SUMS, TOKENIZER, METADATA = "run.json", "SHA256SUMS", "tokenizer.json", ".metadata"
# While a checkpoint of the same step is replaced, the old one briefly has a dotted name.
_COMPLETE = re.compile(r"step-\d{8,}|\.step-\d{8,}\.replaced")
_CLASSES = (
    dcp_metadata.ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    dcp_metadata.StorageMeta,
    dcp_metadata.TensorProperties,
    TensorStorageMetadata,
    dcp_metadata._MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.Size,
)
_ALLOWED: dict[tuple[str, str], object] = {
    **{(kind.__module__, kind.__name__): kind for kind in _CLASSES},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    # Looks up a layout in a table; the layout of a tensor is pickled as a call of it.
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}


class CheckpointError(Exception):
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
    layout: str
    """Distribution of model and data over the ranks."""
    job: str | None = None
    """Job name that survives restarts by torchrun; None without a launcher."""
    saved_at: float = 0.0
    """Unix time; the latest checkpoint continues the run, whatever its step."""
    progress: Progress = field(default_factory=Progress)

    @staticmethod
    def read(folder: Path) -> RunRecord:
        """Read the record of a checkpoint; ValueError if it is damaged."""
        try:
            values = json.loads((folder / RECORD).read_bytes())
            record = RunRecord(**{**values, "progress": Progress(**values["progress"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{RECORD} cannot be read ({error})") from None
        numbers = (record.world_size, record.vocabulary_size, record.progress.step, record.progress.samples)
        if not isinstance(record.shape, dict) or not all(type(n) is int and n >= 0 for n in numbers):
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
            (self.working / f"{name}.sha256").write_text(_sha256(self.working / name))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint on rank 0, after all ranks have written their files."""
        super().finish(metadata, results)
        working = self.working
        (working / RECORD).write_text(json.dumps(asdict(self._record), indent=2) + "\n")
        if self._attach is not None:
            self._attach(working)
        sums = {path.stem: path.read_text() for path in working.glob("*.sha256")}
        for path in [*working.iterdir()]:
            if path.suffix == ".sha256":
                path.unlink()
            elif path.name not in sums:
                sums[path.name] = _sha256(path)
        (working / SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))
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

    def storage_meta(self) -> dcp_metadata.StorageMeta | None:
        """Record no location, so that the checkpoint can be moved."""
        return dcp_metadata.StorageMeta()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _delete(path: Path) -> None:
    """Delete a checkpoint without ever leaving a partial one under a loadable name."""
    removed = path.with_name(f"{'.' if path.name[0] != '.' else ''}{path.name}.partial")
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def first_failure(error: CheckpointException) -> str:
    """Return the cause on the lowest failed rank, in one line."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())}"


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, latest first, damaged ones last."""

    def saved_at(path: Path) -> tuple[float, str]:
        try:
            return RunRecord.read(path).saved_at, path.name
        except ValueError:
            return 0.0, path.name

    paths = [path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(paths, key=saved_at, reverse=True)


def open_checkpoint(folder: Path) -> tuple[Path, RunRecord, CheckpointReader]:
    """Return the newest intact checkpoint of a folder, or the given step folder; ranks share the checks.

    Warns of damaged newer checkpoints. A damaged step folder is an error.

    Raises:
        SettingError: on all ranks: no intact checkpoint.
    """
    is_single = (folder / SUMS).is_file() or (_COMPLETE.fullmatch(folder.name) and folder.is_dir())
    candidates = broadcast_from_rank0(lambda: [folder] if is_single else find_checkpoints(folder))
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
    try:
        sums = _read_sums(path)
        for name in sorted(sums)[rank::size]:
            if _sha256(path / name) != sums[name]:
                raise ValueError(f"the checksum of {name} differs from {SUMS}")
    except OSError as error:
        raise ValueError(f"{Path(error.filename or path).name} cannot be read ({error.strerror})") from None
    return RunRecord.read(path), CheckpointReader(path)


def _read_sums(path: Path) -> dict[str, str]:
    matches = [
        re.fullmatch(r"([0-9a-f]{64})  ([^/]+)", line)
        for line in (path / SUMS).read_text(encoding="utf-8").splitlines()
    ]
    if None in matches or not {METADATA, RECORD} <= {match[2] for match in matches if match}:
        raise ValueError(f"{SUMS} is not a list of this checkpoint's files")
    return {match[2]: match[1] for match in matches if match}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickle torch.distributed.checkpoint's metadata; reject any other name."""

    def find_class(self, module: str, name: str, /) -> object:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"{module}.{name} is not allowed in checkpoint metadata and was not executed"
            ) from None


class CheckpointReader(FileSystemReader):
    """Read a folder with verified checksums and metadata."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata without executing code; ValueError if it is invalid."""
        super().__init__(folder)
        try:
            with (folder / METADATA).open("rb") as file:
                self.metadata: Metadata = _MetadataUnpickler(file).load()
            sound = _is_sound(self.metadata, {path.name: path.stat().st_size for path in folder.iterdir()})
        except OSError as error:
            raise ValueError(f"{METADATA} cannot be read ({error.strerror})") from None
        except Exception as error:  # a pickle can fail in any way
            raise ValueError(f"{METADATA} was not written by this program ({error})") from error
        if not sound:
            raise ValueError(f"{METADATA} does not describe the files of this checkpoint")

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        cast(dcp_metadata.StorageMeta, self.metadata.storage_meta).load_id = self.load_id
        return self.metadata

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        return cast(dict[str, TensorStorageMetadata], self.metadata.state_dict_metadata)


def _is_sound(content: Metadata, sizes: Mapping[str, int]) -> bool:
    """Return whether the metadata describes complete tensors inside files of these sizes."""
    if not isinstance(content, Metadata) or not isinstance(content.storage_meta, dcp_metadata.StorageMeta):
        return False
    for name, tensor in content.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(tensor, TensorStorageMetadata):
            return False
        covered = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if covered != math.prod(tensor.size) or not isinstance(tensor.properties.dtype, torch.dtype):
            return False
        if any(MetadataIndex(name, chunk.offsets) not in content.storage_data for chunk in tensor.chunks):
            return False
    return bool(content.storage_data) and all(
        not getattr(info, "transform_descriptors", None)
        and 0 <= info.offset <= info.offset + info.length <= sizes.get(info.relative_path, -1)
        for info in content.storage_data.values()
    )


class _TensorLoadPlanner(DefaultLoadPlanner):
    """Load a flat dictionary of tensors only."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse, because the default would unpickle the value."""
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor and was not read")


def read_tensors(tensors: dict[str, Tensor], *, path: Path, reader: CheckpointReader) -> None:
    """Read the checkpoint's tensors into those given by name; SettingError on all ranks on failure."""
    alone = not dist.is_initialized()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load_state(tensors, storage_reader=reader, planner=_TensorLoadPlanner(), no_dist=alone)
    except CheckpointException as error:
        raise SettingError(f"{path} cannot be loaded: {first_failure(error)}") from error
