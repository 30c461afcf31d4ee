"""How torch.distributed.checkpoint writes and reads a checkpoint's folder: hashed, and executing nothing.

Two things in its format can carry code: `.metadata`, which is a pickle, and values that are not tensors,
which are pickles too. The first is read here by an unpickler that knows only the names of the format; of the
second there are none, and what claims to be one is refused. Tensors are read with `weights_only=True`.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from sdp4bit_lab.pretrain.checkpoint.files import CheckpointError, Digest, HashedFile

METADATA = ".metadata"
_CLASSES = (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.Size,
)
_ALLOWED: dict[tuple[str, str], object] = {
    **{(kind.__module__, kind.__name__): kind for kind in _CLASSES},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    # A function of a table of layouts; the layout of a tensor is pickled as a call of it.
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler of torch.distributed.checkpoint's metadata; any other name is an error."""

    def find_class(self, module: str, name: str, /) -> object:
        """Return a class of the format; UnpicklingError for anything else."""
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"{module}.{name} has no place in the metadata of a checkpoint; it was not executed"
            ) from None


class HashedFileSystem(FileSystem):
    """Files whose digests are kept, for the manifest."""

    def __init__(self, *, expected_bytes: int) -> None:
        super().__init__()
        self._expected_bytes = expected_bytes
        self.digests: dict[str, Digest] = {}

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Yield a stream that writes a file; after the block the file is complete and its digest known."""
        if mode != "wb":
            raise ValueError(f"a checkpoint is written from start to end, not in mode {mode!r}")
        path = Path(path)
        stream = HashedFile(path, expected_bytes=self._expected_bytes)
        try:
            yield stream
            stream.close()
        except Exception as error:
            stream.discard()
            # torch.save reports a full disk in words of its own.
            raise stream.failure or error from error
        self.digests[path.name] = stream.digest

    def rename(self, path: str | PathLike[str], new_path: str | PathLike[str]) -> None:
        """Give the file a new name, also in the manifest."""
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class CheckpointWriter(FileSystemWriter):
    """A writer of one file per rank, and of the metadata."""

    def __init__(self, folder: Path, *, expected_bytes: int) -> None:
        # Every file is synchronized once, when it is complete.
        super().__init__(folder, single_file_per_rank=True, sync_files=False, per_thread_copy_ahead=0)
        self._hashed = HashedFileSystem(expected_bytes=expected_bytes)
        self.fs = self._hashed

    @property
    def digests(self) -> dict[str, Digest]:
        """Digests of the files that this rank has written."""
        return self._hashed.digests

    def storage_meta(self) -> StorageMeta | None:
        """Return nothing of where the checkpoint is written: it may be moved."""
        return StorageMeta()


class TensorSavePlanner(DefaultSavePlanner):
    """The saving of a flat dictionary of tensors, each under its own name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)


class TensorLoadPlanner(DefaultLoadPlanner):
    """The loading of a flat dictionary of tensors, and of nothing else."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse; the default implementation would unpickle the value."""
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor; it was not read")


class CheckpointReader(FileSystemReader):
    """A reader of a folder whose files have been checked against the manifest."""

    def __init__(self, folder: Path, *, digests: Mapping[str, Digest]) -> None:
        """Read and check the metadata; ValueError if it is not sound."""
        super().__init__(folder)
        self.metadata = read_metadata(folder, digests=digests)

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return the metadata that was checked when this reader was made."""
        cast(StorageMeta, self.metadata.storage_meta).load_id = self.load_id
        return self.metadata

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Names and sizes of everything in the checkpoint."""
        return cast(dict[str, TensorStorageMetadata], self.metadata.state_dict_metadata)


def read_metadata(folder: Path, *, digests: Mapping[str, Digest]) -> Metadata:
    """Return the metadata of a checkpoint, without executing anything that it may contain.

    Raises:
        ValueError: it is not such metadata, or speaks of files or bytes that the checkpoint does not have.
    """
    try:
        with (folder / METADATA).open("rb") as file:
            metadata = MetadataUnpickler(file).load()
    except OSError as error:
        raise ValueError(f"{METADATA} cannot be read ({error.strerror})") from None
    except Exception as error:  # a pickle can fail in any way
        raise ValueError(f"{METADATA} is not what this program wrote ({error})") from error
    try:
        sound = _is_sound(metadata, digests)
    except (AttributeError, TypeError):
        sound = False  # parts of other types than the format has
    if not sound:
        raise ValueError(f"{METADATA} does not describe the files of this checkpoint")
    return cast(Metadata, metadata)


def _is_sound(metadata: Metadata, digests: Mapping[str, Digest]) -> bool:
    """Return whether everything is a tensor, whole, and inside the files of the manifest."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_meta, StorageMeta):
        return False
    pieces = 0
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(tensor, TensorStorageMetadata):
            return False
        pieces += len(tensor.chunks)
        covered = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if covered != math.prod(tensor.size) or not isinstance(tensor.properties.dtype, torch.dtype):
            return False
        if any(MetadataIndex(name, chunk.offsets) not in metadata.storage_data for chunk in tensor.chunks):
            return False
    for info in metadata.storage_data.values():
        file = digests.get(info.relative_path)
        if file is None or getattr(info, "transform_descriptors", None):
            return False
        if not 0 <= info.offset <= info.offset + info.length <= file.bytes:
            return False
    return pieces > 0


def failure_of(error: BaseException) -> CheckpointError:
    """Return what to say of an error of torch.distributed.checkpoint: the lowest rank's cause, in a line."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        rank, (cause, _) = min(failures.items())
        text = str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
        return CheckpointError(f"rank {rank}: {' '.join(text.split())}")
    return CheckpointError(f"{type(error).__name__}: {' '.join(str(error).split())}")
