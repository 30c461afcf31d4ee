"""Write Megatron's data files atomically."""

from __future__ import annotations

import fcntl
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from sdp4bit_lab.common.files import sync
from sdp4bit_lab.common.settings import SettingError, require
from sdp4bit_lab.pretrain.data.indexed import DTYPE_CODES, HEADER, MAGIC, VERSION, bin_path, idx_path

_WRITTEN_AT_ONCE = 1 << 20
_LONGEST = np.iinfo(np.int32).max


class IndexedWriter:
    """Write a pair of files; PREFIX.bin and PREFIX.idx appear only after `finish`.

    Until then the tokens are in PREFIX.bin.partial. The next writer overwrites leftovers of a killed one.
    """

    def __init__(self, prefix: Path, *, dtype: np.dtype[np.integer], overwrite: bool = False) -> None:
        """Open the files; SettingError if they exist, are being written, or cannot be written."""
        self._prefix = prefix
        self._dtype = dtype
        self._partial_bin = prefix.with_name(f"{prefix.name}.bin.partial")
        self._partial_idx = prefix.with_name(f"{prefix.name}.idx.partial")
        for path in (bin_path(prefix), idx_path(prefix)):
            require(
                overwrite or not path.exists(),
                f"{path} exists: remove it, or give --overwrite or another prefix",
            )
        # 4-byte integers, because a corpus may have 200 million documents.
        self._lengths, self._sequences = array("i"), array("i")
        self.tokens = 0
        try:
            prefix.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial_bin.open("ab")
            if not _lock(self._file, self._partial_bin):
                self._file.close()
                raise SettingError(f"{self._partial_bin} is being written by another process")
            self._file.truncate(0)
        except OSError as error:
            raise SettingError(f"cannot write {self._partial_bin}: {error}") from error
        self._finished = False

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._finished:
            self._partial_idx.unlink(missing_ok=True)
            self._partial_bin.unlink(missing_ok=True)
        self._file.close()

    def add(self, document: Sequence[Sequence[int]]) -> None:
        """Append the token sequences of a document; an empty document has none."""
        try:
            for tokens in document:
                require(
                    len(tokens) <= _LONGEST,
                    f"{self._prefix}: a text has {len(tokens)} tokens, more than the limit of {_LONGEST}",
                )
                self._file.write(np.array(tokens, self._dtype).tobytes())
                self._lengths.append(len(tokens))
                self.tokens += len(tokens)
        except OSError as error:
            raise SettingError(f"cannot write {self._partial_bin}: {error}") from error
        self._sequences.append(len(document))

    def finish(self) -> None:
        """Flush both files to disk and rename them.

        1. Write tokens and index under temporary names.
        2. Remove an existing index, so that a crash leaves the new pair or none.
        3. Rename the tokens, then the index.
        """
        target_bin, target_idx = bin_path(self._prefix), idx_path(self._prefix)
        try:
            _flush(self._file)
            with self._partial_idx.open("wb") as index:
                self._write_index(index)
                _flush(index)
            target_idx.unlink(missing_ok=True)
            self._partial_bin.rename(target_bin)
            self._partial_idx.rename(target_idx)
            self._finished = True
            sync(self._prefix.parent)
        except OSError as error:
            raise SettingError(f"cannot write {target_bin} and {target_idx.name}: {error}") from error

    def _write_index(self, file: BinaryIO) -> None:
        lengths, sequences = (np.array(values, "<i4") for values in (self._lengths, self._sequences))
        file.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[self._dtype], len(lengths), len(sequences) + 1))
        file.write(lengths.tobytes())
        _write_sums(file, lengths, scale=self._dtype.itemsize)
        _write_sums(file, sequences, scale=1)
        file.write(int(sequences.sum(dtype=np.int64)).to_bytes(8, "little"))


def _write_sums(file: BinaryIO, values: npt.NDArray[np.int32], *, scale: int) -> None:
    """Write the exclusive prefix sums of the values."""
    total = 0
    for start in range(0, len(values), _WRITTEN_AT_ONCE):
        part = values[start : start + _WRITTEN_AT_ONCE].astype(np.int64) * scale
        ends = total + np.cumsum(part)
        file.write((ends - part).astype("<i8").tobytes())
        total = int(ends[-1])


def _lock(file: BinaryIO, path: Path) -> bool:
    """Lock the file; return False if it is locked or a finished writer has renamed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
