"""Files of documents as they come: JSON lines, plain, .gz or .zst, and Parquet, read in pieces.

zstandard and pyarrow are optional: only who gives such files needs them.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from sdp4bit_lab.common.settings import SettingError, require

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PIECE_BYTES = 1 << 20
_READ_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some consecutive documents of a file, as many as one worker encodes at a time."""

    path: str
    first: int
    """Number of the first line or row, counted from 1."""
    content: Sequence[bytes | Mapping[str, object]]
    """Lines that are not parsed yet, or rows of a table."""
    bytes_read: int
    """How much of the file on the disk it is."""

    def documents(self, keys: Sequence[str]) -> Iterator[list[list[str]]]:
        """Yield the texts of each key of each document; SettingError names the line or row that has none.

        A text may be given as a list of its sentences.
        """
        for number, document in enumerate(self.content, start=self.first):
            where = f"{self.path}, {'line' if isinstance(document, bytes) else 'row'} {number}"
            if isinstance(document, bytes):
                if not document.strip():
                    continue
                document = _parsed(document, where=where)
            yield [_texts(document, key, where=where) for key in keys]


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Return the files in the order of the patterns, those of one pattern by name.

    Raises:
        SettingError: nothing is there, or a package for a file is missing.
    """
    found: list[Path] = []
    for pattern in patterns:
        if Path(pattern).is_file():
            found.append(Path(pattern))
            continue
        matching = sorted(Path(path) for path in glob.glob(pattern, recursive=True))
        files = [path for path in matching if path.is_file()]
        require(bool(files), f"--input {pattern}: there is no such file")
        found += files
    for path in found:
        if path.suffix == ".zst":
            _package("zstandard", path=path)
        elif path.suffix == ".parquet":
            _package("pyarrow.parquet", path=path)
    return found


def read_pieces(path: Path, *, keys: Sequence[str]) -> Iterator[Piece]:
    """Yield the documents of a file in order.

    Raises:
        SettingError: the file is damaged, cut off, or lacks a column.
    """
    try:
        yield from _table_pieces(path, keys) if path.suffix == ".parquet" else _line_pieces(path)
    except (OSError, EOFError, zlib.error) as error:
        raise SettingError(f"{path} cannot be read: {error}") from error


def _line_pieces(path: Path) -> Iterator[Piece]:
    with path.open("rb") as file:
        first, read = 1, 0
        lines: list[bytes] = []
        size = 0
        for line in _decompressed(file, path):
            lines.append(line)
            size += len(line)
            if size >= PIECE_BYTES:
                position = file.tell()
                yield Piece(path=str(path), first=first, content=lines, bytes_read=position - read)
                first, read = first + len(lines), position
                lines, size = [], 0
        yield Piece(path=str(path), first=first, content=lines, bytes_read=path.stat().st_size - read)


def _decompressed(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the lines of the text."""
    if path.suffix == ".gz":
        with gzip.open(file, "rb") as content:
            yield from content
    elif path.suffix == ".zst":
        yield from io.BufferedReader(_ZstandardReader(file, path), _READ_AT_ONCE)
    else:
        yield from file


class _Frame(Protocol):
    """What zstandard has of a frame that it decompresses."""

    eof: bool
    unused_data: bytes

    def decompress(self, data: bytes, /) -> bytes:
        """Return what the bytes that come next decompress to."""
        ...


class _ZstandardReader(io.RawIOBase):
    """Decompressed bytes; a file that ends within a frame is an error, which zstandard lets pass."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._package = _package("zstandard", path=path)
        self._frame: _Frame | None = None
        self._compressed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        target = memoryview(buffer)
        while not self._content:
            self._compressed = self._compressed or self._file.read(_READ_AT_ONCE)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the last frame is cut off")
                return 0
            self._frame = self._frame or self._package.ZstdDecompressor().decompressobj()
            try:
                self._content = memoryview(self._frame.decompress(self._compressed))
            except self._package.ZstdError as error:
                raise OSError(str(error)) from error
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        count = min(len(target), len(self._content))
        target[:count] = self._content[:count]
        self._content = self._content[count:]
        return count


def _table_pieces(path: Path, keys: Sequence[str]) -> Iterator[Piece]:
    parquet = _package("pyarrow.parquet", path=path)
    arrow = import_module("pyarrow")
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            for key in keys:
                require(
                    key in names, f'{path} has no column "{key}", but {", ".join(names)}: set --json-keys'
                )
            total, size, first = max(1, table.metadata.num_rows), path.stat().st_size, 1
            for batch in table.iter_batches(batch_size=1024, columns=list(keys)):
                rows = batch.to_pylist()
                before, after = ((first - 1 + n) * size // total for n in (0, len(rows)))
                yield Piece(path=str(path), first=first, content=rows, bytes_read=after - before)
                first += len(rows)
    except arrow.ArrowException as error:
        raise SettingError(f"{path} cannot be read: {error}") from error


def _parsed(line: bytes, *, where: str) -> dict[str, object]:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise SettingError(f"{where}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise SettingError(f"{where}: a JSON object is expected, not {type(document).__name__}")
    return document


def _texts(document: Mapping[str, object], key: str, *, where: str) -> list[str]:
    if key not in document:
        raise SettingError(
            f'{where}: there is no "{key}", but {", ".join(map(repr, document))}: set --json-keys of '
            "sdp4bit preprocess"
        )
    value = document[key]
    texts = []
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str):
            raise SettingError(f'{where}: "{key}" is {type(text).__name__}, not a string')
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SettingError(f'{where}: "{key}" is no text: {error}') from None
        texts.append(text)
    return texts


def _package(name: str, *, path: Path) -> Any:
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise SettingError(f'{path} needs the package {package}: pip install "sdp4bit[data]"') from None
