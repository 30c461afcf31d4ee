"""Files of a checkpoint: complete or absent, with checksums, and read without executing anything.

    step-00000500/             complete: a folder gets this name when all of its files are on the disk
        __0_0.distcp, ...      tensors, written by torch.distributed.checkpoint, one file per rank
        .metadata              which tensor is where
        run.json               what was trained, and how far
        tokenizer.json
        SHA256SUMS             of all other files; loading checks it, and so does `sha256sum -c SHA256SUMS`
    .step-00000750.partial/    being written, or left by a run that was killed

Names of tensors do not depend on the layout of the ranks, except `rank3.random.*`, which only the same layout
loads. Other values are JSON in a tensor of bytes, because torch.distributed.checkpoint would pickle them.
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
from typing import Any, TypeVar, cast

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

T = TypeVar("T")

RECORD, SUMS, TOKENIZER, METADATA = "run.json", "SHA256SUMS", "tokenizer.json", ".metadata"
# While a checkpoint of the same step is replaced, the old one has a name with a dot for a moment.
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
    # A function of a table of layouts; the layout of a tensor is pickled as a call of it.
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}


class CheckpointError(Exception):
    """A checkpoint that could not be saved; the message has the cause and the way out, in one line."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The position of a run."""

    step: int = 0
    """Optimizer steps done; also the position of the learning-rate schedule."""
    samples: int = 0
    """Training samples read; the position in the data."""
    validation_due: bool = False
    """Whether a validation after this step was left out because the run had to stop."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of run.json."""

    shape: dict[str, Any]
    """Sizes of the model, by the names of ModelShape."""
    vocabulary_size: int
    """Tokens that exist; the embedding has more rows."""
    world_size: int
    strategy: str
    dataset: str
    """Key of the text that was read."""
    seed: int
    layout: str
    """How the ranks share the model and the data."""
    job: str | None = None
    """Name of the job, the same after torchrun has restarted it; None for a process alone."""
    saved_at: float = 0.0
    """Seconds since 1970: of two checkpoints the later one continues the run, whatever its step."""
    progress: Progress = field(default_factory=Progress)

    @staticmethod
    def read(folder: Path) -> RunRecord:
        """Return the record of a checkpoint; ValueError if it is damaged."""
        try:
            values = json.loads((folder / RECORD).read_bytes())
            record = RunRecord(**{**values, "progress": Progress(**values["progress"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{RECORD} cannot be read ({error})") from None
        numbers = (record.world_size, record.vocabulary_size, record.progress.step, record.progress.samples)
        if not isinstance(record.shape, dict) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"{RECORD} has other values than numbers for sizes and steps")
        return record


class CheckpointWriter(FileSystemWriter):
    """Writes one file per rank with its checksum; rank 0 then completes the folder and gives it its name."""

    def __init__(
        self,
        folder: Path,
        *,
        record: RunRecord,
        attach: Callable[[Path], None] | None,
        keep_last: int | None,
    ) -> None:
        self.folder = folder
        self.working = folder / f".step-{record.progress.step:08d}.partial"
        self._record, self._attach, self._keep_last = record, attach, keep_last
        super().__init__(self.working, single_file_per_rank=True, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's file, and its checksum beside it."""
        written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            (self.working / f"{name}.sha256").write_text(_sha256(self.working / name))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint; called on rank 0 when all ranks have written their files."""
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
            # A resumed run reaches the step of an older checkpoint again. A crash may have left one replaced.
            replaced = self.folder / f".{target.name}.replaced"
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        working.rename(target)
        sync(self.folder)
        for replaced in self.folder.glob(".step-*.replaced"):
            _delete(replaced)
        if self._keep_last is not None:
            for path in find_checkpoints(self.folder)[self._keep_last :]:
                if not path.is_symlink():  # a link may lead anywhere
                    _delete(path)

    def storage_meta(self) -> dcp_metadata.StorageMeta | None:
        """Return nothing about the place of the checkpoint: it may be moved."""
        return dcp_metadata.StorageMeta()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _delete(path: Path) -> None:
    """Delete a checkpoint; no moment leaves a half-deleted one under a name that is loaded."""
    removed = path.with_name(f"{'.' if path.name[0] != '.' else ''}{path.name}.partial")
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def first_failure(error: CheckpointException) -> str:
    """Return the cause of the lowest rank that failed, in one line."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())}"


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, the last saved first, damaged ones at the end."""

    def saved_at(path: Path) -> tuple[float, str]:
        try:
            return RunRecord.read(path).saved_at, path.name
        except ValueError:
            return 0.0, path.name

    paths = [path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(paths, key=saved_at, reverse=True)


def open_checkpoint(folder: Path) -> tuple[Path, RunRecord, CheckpointReader]:
    """Return the newest intact checkpoint of a folder, or the step folder itself; all ranks share the checks.

    A warning names damaged checkpoints that are newer. A single step folder is used or refused.

    Raises:
        SettingError: on all ranks: there is none.
    """
    is_single = (folder / SUMS).is_file() or (_COMPLETE.fullmatch(folder.name) and folder.is_dir())
    candidates = _from_rank_0(lambda: [folder] if is_single else find_checkpoints(folder))
    if not candidates:
        raise SettingError(f"--load {folder}: no checkpoint there (no step- folder)")
    damaged: list[str] = []
    for path in candidates:
        opened: tuple[RunRecord, CheckpointReader] | None = None
        problem: str | None = None
        try:
            opened = _open_intact(path)
        except ValueError as error:
            problem = str(error)
        problem = next((each for each in _from_all(problem) if each is not None), None)
        if opened is not None and problem is None:
            if damaged and (not dist.is_initialized() or dist.get_rank() == 0):
                step = opened[0].progress.step
                text = f"sdp4bit: {'; '.join(damaged)}. Resuming from {path} instead, at step {step}"
                warnings.warn(text, stacklevel=2)
            return path, *opened
        damaged.append(f"{path} is damaged: {problem}")
    raise SettingError(f"--load {folder}: no complete checkpoint there. {'; '.join(damaged)}")


def _open_intact(path: Path) -> tuple[RunRecord, CheckpointReader]:
    """Check this rank's share of the files, and read what describes them; ValueError names the damage."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        sums = _read_sums(path)
        for name in sorted(sums)[rank::size]:
            if _sha256(path / name) != sums[name]:
                raise ValueError(f"{name} does not have the checksum that {SUMS} has")
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


def _from_all(value: T) -> list[T]:
    return gather_over_ranks(value, what="check of a checkpoint") if dist.is_initialized() else [value]


def _from_rank_0(work: Callable[[], T]) -> T:
    return broadcast_from_rank0(work) if dist.is_initialized() else work()


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler of torch.distributed.checkpoint's metadata; any other name is an error."""

    def find_class(self, module: str, name: str, /) -> object:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"{module}.{name} has no place in the metadata of a checkpoint; it was not executed"
            ) from None


class CheckpointReader(FileSystemReader):
    """Reads a folder whose checksums are right, with metadata that were checked."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata without executing anything; ValueError if they are not sound."""
        super().__init__(folder)
        try:
            with (folder / METADATA).open("rb") as file:
                self.metadata: Metadata = _MetadataUnpickler(file).load()
            sound = _is_sound(self.metadata, {path.name: path.stat().st_size for path in folder.iterdir()})
        except OSError as error:
            raise ValueError(f"{METADATA} cannot be read ({error.strerror})") from None
        except Exception as error:  # a pickle can fail in any way
            raise ValueError(f"{METADATA} is not what this program wrote ({error})") from error
        if not sound:
            raise ValueError(f"{METADATA} does not describe the files of this checkpoint")

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return the metadata that were checked."""
        cast(dcp_metadata.StorageMeta, self.metadata.storage_meta).load_id = self.load_id
        return self.metadata

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Names and sizes of all tensors."""
        return cast(dict[str, TensorStorageMetadata], self.metadata.state_dict_metadata)


def _is_sound(content: Metadata, sizes: Mapping[str, int]) -> bool:
    """Return whether everything is a tensor, whole, and inside files of these sizes."""
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
    """Loads a flat dictionary of tensors, and nothing else."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse: the default would unpickle the value."""
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor; it was not read")


def read_tensors(tensors: dict[str, Tensor], *, path: Path, reader: CheckpointReader) -> None:
    """Read the checkpoint's tensors of these names into them; SettingError on all ranks if one cannot."""
    alone = not dist.is_initialized()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be
            load_state(tensors, storage_reader=reader, planner=_TensorLoadPlanner(), no_dist=alone)
    except CheckpointException as error:
        raise SettingError(f"{path} cannot be loaded: {first_failure(error)}") from error
