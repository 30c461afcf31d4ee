"""Read Megatron's data files: tokens in PREFIX.bin, and the start of each document in PREFIX.idx.

Numbers are little-endian and arrays are unaligned:

    PREFIX.bin   tokens of all sequences, concatenated

    PREFIX.idx    0  9 bytes   MMIDIDX and two zero bytes
                  9  u64       version, 1
                 17  u8        dtype of the tokens
                 18  u64       S, number of sequences
                 26  u64       D, number of document boundaries: documents + 1
                 34  S x i32   tokens of each sequence
                     S x i64   byte in PREFIX.bin where each sequence starts
                     D x i64   first sequence of each document, then S
                     S x i8    mode of each sequence; in multimodal data only

A document is one sequence, unless it was split into sentences or is empty.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sdp4bit_lab.common.settings import SettingError, require

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
DTYPE_CODES = {np.dtype(name): code for code, name in _CODES.items()}
_SMALL_VOCABULARY = 65500
"""Vocabulary size from which Megatron writes 4 bytes per token."""
_CHECKED_AT_ONCE = 1 << 20
_SAMPLED_BLOCKS = 64
_SAMPLED_BYTES = 1 << 16


def token_dtype(vocabulary_size: int) -> np.dtype[np.integer]:
    """Return the token dtype for a vocabulary."""
    return np.dtype("<u2" if vocabulary_size < _SMALL_VOCABULARY else "<i4")


def bin_path(prefix: Path) -> Path:
    """Return the path of the tokens."""
    return prefix.with_name(f"{prefix.name}.bin")


def idx_path(prefix: Path) -> Path:
    """Return the path of the index."""
    return prefix.with_name(f"{prefix.name}.idx")


def is_indexed(path: str | Path) -> bool:
    """Return whether a path names .bin/.idx files, by their prefix or by one of their names."""
    return Path(path).suffix in (".bin", ".idx") or any(
        Path(f"{path}{suffix}").exists() for suffix in (".idx", ".bin")
    )


def is_weight(path: str | Path) -> bool:
    """Return whether an argument of --data-path is a weight, not the path of data that exists."""
    try:
        float(str(path))
    except ValueError:
        return False
    return not Path(path).exists() and not is_indexed(path)


class IndexedTokens:
    """Memory-mapped documents of one PREFIX.bin and PREFIX.idx."""

    def __init__(self, prefix: Path) -> None:
        """Map the files and check header and sizes; SettingError names file and field."""
        self.prefix = prefix
        path, data = idx_path(prefix), bin_path(prefix)
        require(
            prefix.suffix not in (".bin", ".idx"),
            f"{prefix}: remove {prefix.suffix}: give the common prefix of both files",
        )
        for file, other in ((path, data), (data, path)):
            though = f", but {other} exists" if other.exists() else ""
            require(file.is_file(), f"{file}: no such file{though}")
        try:
            self._open(path, data)
        except OSError as error:
            raise SettingError(f"cannot read {prefix}.bin and .idx: {error}") from error

    def _open(self, path: Path, data: Path) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(HEADER.size)
        require(
            len(header) == HEADER.size, f"{path}: header: the file has only {size} of {HEADER.size} bytes"
        )
        magic, version, code, sequences, boundaries = HEADER.unpack(header)
        require(magic == MAGIC, f"{path}: magic: the file starts with {magic!r} instead of {MAGIC!r}")
        require(version == VERSION, f"{path}: version: {version} instead of {VERSION}")
        dtype = np.dtype(_CODES.get(code, "V1"))
        require(
            np.issubdtype(dtype, np.integer), f"{path}: dtype: code {code} is not an integer type (1-5, 8)"
        )
        require(boundaries >= 1, f"{path}: document count: 0 boundaries instead of at least 1")
        needed = HEADER.size + sequences * 12 + boundaries * 8
        require(
            size in (needed, needed + sequences),
            f"{path}: arrays: {sequences} sequences and {boundaries} document boundaries need {needed} bytes "
            f"(or {needed + sequences} with modes), but the file has {size}: truncated, or another format",
        )
        self.dtype: np.dtype[np.integer] = dtype
        start = HEADER.size
        self._lengths = _map(path, "<i4", sequences, offset=start)
        self._pointers = _map(path, "<i8", sequences, offset=start + 4 * sequences)
        self._boundaries = _map(path, "<i8", boundaries, offset=start + 12 * sequences)
        self.tokens = 0
        if sequences:
            self.tokens = int(self._pointers[-1]) // dtype.itemsize + int(self._lengths[-1])
        size, needed = data.stat().st_size, self.tokens * dtype.itemsize
        if size != needed:
            # An index in another order is not a wrong size.
            self._check_sequences()
        require(
            size == needed,
            f"{data}: size: the file has {size} bytes, but {path.name} lists {self.tokens} tokens of "
            f"{dtype.itemsize} bytes ({needed})",
        )
        self._tokens: npt.NDArray[np.integer] = _map(data, dtype, self.tokens, offset=0)

    @property
    def documents(self) -> int:
        """Number of documents, including empty ones."""
        return len(self._boundaries) - 1

    @property
    def sequences(self) -> int:
        """Number of sequences: one per document, unless documents were split into sentences."""
        return len(self._lengths)

    def starts(self, documents: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Return the first token of each document; for the index past the last, the number of tokens."""
        sequences = np.asarray(self._boundaries[documents], np.int64)
        starts = np.full(sequences.shape, self.tokens, np.int64)
        inside = sequences < len(self._pointers)
        starts[inside] = self._pointers[sequences[inside]] // self.dtype.itemsize
        return starts

    def lengths(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each document in a range."""
        return np.diff(self.starts(np.arange(first, last + 1)))

    def read(self, start: int, count: int) -> npt.NDArray[np.integer]:
        """Return a range of tokens as a view."""
        return self._tokens[start : start + count]

    def check(self) -> None:
        """Check the complete index, 1 or 2 s for 100 million documents; SettingError names the number."""
        self._check_sequences()
        path, sequences = idx_path(self.prefix), self.sequences
        previous = 0
        for start in range(0, len(self._boundaries), _CHECKED_AT_ONCE):
            boundaries = np.asarray(self._boundaries[start : start + _CHECKED_AT_ONCE])
            right = (boundaries >= np.append(previous, boundaries[:-1])) & (boundaries <= sequences)
            rule = f"ascending from 0 to {sequences}"
            _check(f"{path}: document indices", boundaries, right, start=start, rule=rule)
            previous = int(boundaries[-1])
        for position, expected in ((0, 0), (len(self._boundaries) - 1, sequences)):
            value = self._boundaries[position]
            require(
                value == expected, f"{path}: document indices: number {position} is {value}, not {expected}"
            )

    def _check_sequences(self) -> None:
        path, item = idx_path(self.prefix), self.dtype.itemsize
        offset = 0
        for start in range(0, self.sequences, _CHECKED_AT_ONCE):
            lengths = np.asarray(self._lengths[start : start + _CHECKED_AT_ONCE], np.int64)
            _check(f"{path}: sequence lengths", lengths, lengths >= 0, start=start, rule="at least 0")
            pointers = self._pointers[start : start + _CHECKED_AT_ONCE]
            ends = offset + np.cumsum(lengths) * item
            right = pointers == ends - lengths * item
            rule = (
                "the bytes of the sequences before. An index in another order or with gaps, which Megatron "
                "reads, is not supported: preprocess the documents again"
            )
            _check(f"{path}: sequence pointers", pointers, right, start=start, rule=rule)
            offset = int(ends[-1])

    def fingerprint(self) -> str:
        """Return a hash of both files: of all bytes, or of 64 blocks spread over a large file."""
        digest = hashlib.sha256()
        for path in (idx_path(self.prefix), bin_path(self.prefix)):
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with path.open("rb") as file:
                if size <= _SAMPLED_BLOCKS * _SAMPLED_BYTES:
                    digest.update(file.read())
                    continue
                for offset in (
                    np.linspace(0, size - _SAMPLED_BYTES, _SAMPLED_BLOCKS).astype(np.int64).tolist()
                ):
                    file.seek(offset)
                    digest.update(file.read(_SAMPLED_BYTES))
        return digest.hexdigest()


def _map(path: Path, dtype: npt.DTypeLike, count: int, *, offset: int) -> npt.NDArray[np.integer]:
    # An empty range cannot be mapped.
    if count == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))


def _check(
    field: str, values: npt.NDArray[np.integer], right: npt.NDArray[np.bool_], *, start: int, rule: str
) -> None:
    if not right.all():
        position = int(np.argmin(right))
        raise SettingError(f"{field}: number {start + position} is {values[position]}; it must be {rule}")
