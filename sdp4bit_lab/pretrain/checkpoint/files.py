"""Files of a checkpoint: written once, with their digests known, and read without executing anything."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.data.indexed_writer import sync_folder

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_BUFFER_BYTES = 1 << 20


class CheckpointError(SettingError):
    """A checkpoint that was not saved; the message holds the path, the bytes and the way out, in one line."""


@dataclass(frozen=True, kw_only=True)
class Digest:
    """What a file must hold."""

    bytes: int
    sha256: str


class HashedFile(io.RawIOBase):
    """A new file: its digest is known when it is closed, and an error says where and after how much."""

    def __init__(self, path: Path, *, expected_bytes: int = 0) -> None:
        self._path = path
        self._expected_bytes = expected_bytes
        self._hash = hashlib.sha256()
        self._written = 0
        self.failure: CheckpointError | None = None
        try:
            self._file = path.open("wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise self._explained(error) from error

    def write(self, content: ReadableBuffer, /) -> int:
        """Write the content behind what has been written."""
        size = memoryview(content).nbytes
        try:
            self._file.write(content)
        except OSError as error:
            raise self._explained(error) from error
        self._hash.update(content)
        self._written += size
        return size

    def tell(self) -> int:
        """Return how many bytes have been written."""
        return self._written

    def flush(self) -> None:
        """Hand everything that was written to the operating system."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._explained(error) from error

    def fileno(self) -> int:
        """Return the descriptor, for os.fsync; everything that was written is behind it."""
        self.flush()
        return self._file.fileno()

    def close(self) -> None:
        """Complete the file, on the disk to stay."""
        if self.closed:
            return
        try:
            os.fsync(self.fileno())
            self._file.close()
        except OSError as error:
            raise self._explained(error) from error

    def discard(self) -> None:
        """Give the descriptor back; what could not be written is lost."""
        with suppress(OSError):
            # Closing writes what is left in the buffer; on a full disk that fails again.
            self._file.close()

    @property
    def closed(self) -> bool:
        """Whether the file is complete, was given up, or could not be made."""
        return not hasattr(self, "_file") or self._file.closed

    @property
    def digest(self) -> Digest:
        """What has been written."""
        return Digest(bytes=self._written, sha256=self._hash.hexdigest())

    def _explained(self, error: OSError) -> CheckpointError:
        expected = f", of about {self._expected_bytes:,}" if self._expected_bytes else ""
        self.failure = CheckpointError(
            f"cannot write {self._path}: {error.strerror or error} after {self._written:,} bytes{expected}; "
            f"{free_bytes(self._path)}"
        )
        return self.failure


def free_bytes(path: Path) -> str:
    """Return how many bytes are free where the path is, in words."""
    try:
        return f"{shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        return "how much is free there is not known"


def write_file(path: Path, content: bytes) -> Digest:
    """Return the digest of a new file of this content, which is on the disk to stay."""
    file = HashedFile(path, expected_bytes=len(content))
    try:
        file.write(content)
        file.close()
    finally:
        file.discard()
    return file.digest


def replace_file(path: Path, content: str) -> None:
    """Replace the file's content; also after a crash a reader sees the old or the new one, never a part."""
    working = path.with_name(f".{path.name}.partial")
    write_file(working, content.encode())
    working.replace(path)
    sync_folder(path.parent)


def digest_file(path: Path) -> Digest:
    """Return the digest of an existing file; OSError if it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BUFFER_BYTES):
            digest.update(block)
        return Digest(bytes=file.tell(), sha256=digest.hexdigest())


def write_manifest(folder: Path, digests: Mapping[str, Digest]) -> None:
    """Write the manifest of these files, as the last one: a folder without it is incomplete."""
    files = {name: asdict(digests[name]) for name in sorted(digests)}
    content = json.dumps({"format": FORMAT_VERSION, "files": files}, indent=1) + "\n"
    write_file(folder / MANIFEST, content.encode())


def read_manifest(folder: Path) -> dict[str, Digest]:
    """Return what each file of the folder must hold.

    Raises:
        ValueError: there is no manifest of this format.
    """
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise ValueError(f"it has no {MANIFEST}" if folder.is_dir() else "it is not there") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from None
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"{MANIFEST} is of format {version!r}, this version reads {FORMAT_VERSION}")
    digests = {}
    files = content.get("files")
    for name, entry in files.items() if isinstance(files, dict) else ():
        match entry:
            case {"bytes": int(size), "sha256": str(sha256)} if name == Path(name).name:
                digests[name] = Digest(bytes=size, sha256=sha256)
            case _:
                raise ValueError(f"{MANIFEST} has no size and checksum for {name!r}")
    return digests


def damage(folder: Path, digests: Mapping[str, Digest], *, names: Iterable[str]) -> str | None:
    """Return what is wrong with these files of the folder, or None if they hold what they must."""
    for name in names:
        expected, path = digests[name], folder / name
        try:
            size = path.stat().st_size
            if size != expected.bytes:
                return f"{name} has {size:,} bytes instead of {expected.bytes:,}"
            if digest_file(path).sha256 != expected.sha256:
                return f"{name} does not have the checksum it was written with"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None
