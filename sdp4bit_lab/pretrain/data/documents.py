"""Read documents from JSON lines, Parquet and text, compressed or not: content decides, not the name."""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from sdp4bit.addresses import install
from sdp4bit_lab.common.settings import SettingError, require

END_OF_TEXT = "<|endoftext|>"
_ONE_PER_LINE = "Each line must be one object; `jq -c '.[]' FILE > FILE.jsonl` converts an array"
_MOST_DIGITS = 600
_HEAD = 1 << 16
_JSON = re.compile(rb'(\xef\xbb\xbf)?\s*((\[\s*)?\{\s*["}]|\[\s*")')
_JSON_NAMES = {".json", ".jsonl", ".ndjson", ".jsonlines"}
_BINARY_NAMES = {".gz", ".bz2", ".xz", ".zst", ".parquet"}
_REFUSED = {
    "an encrypted Parquet file": (rb"PARE", "decrypt it"),
    "a tar archive": (rb".{257}ustar", "extract its files"),
    "a zip archive, as torch.save and numpy.savez write, too": (rb"PK[\x03\x05]", "extract its texts"),
    "a 7-Zip or RAR archive": (rb"7z\xbc\xaf|Rar!", "extract its files"),
    "compressed by LZ4 or Snappy": (rb'\x04"M\x18|\xff\x06\0\0sNaPpY', "use zstd or gzip instead"),
    "a NumPy array": (rb"\x93NUMPY", "write its texts as JSON lines"),
    "an Arrow file": (rb"ARROW1|\xff{4}..\0\0|FEA1", "datasets.load_from_disk(FOLDER).to_parquet(FILE)"),
    "an Avro, ORC or HDF5 file": (rb"Obj\x01|ORC|\x89HDF", "convert it to Parquet"),
    "an SQLite database": (rb"SQLite format 3\0", "write its texts as JSON lines"),
    "a token file of llm.c or modded-nanogpt": (rb"\x88\xd8\x34\x01", "give the texts that it was made of"),
    "an index of Megatron's tokens": (rb"MMIDIDX", "`sdp4bit pretrain --data-path` reads it, without .idx"),
    "a safetensors file": (rb'.{4}\0{4}\{"', "give a corpus instead of a model"),
    "a GGUF file": (rb"GGUF", "give a corpus instead of a model"),
    "a pickle": (rb"\x80[\x02-\x05]", "write its texts as JSON lines"),
    "a PDF": (rb"%PDF-", "extract its text"),
    "a picture, sound or film": (
        rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF|ID3|OggS|fLaC|.{4}ftyp",
        "give a corpus of text",
    ),
    "UTF-16 or UTF-32 text": (rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff", "`iconv -f UTF-16 -t UTF-8` converts it"),
    "a MediaWiki dump": (rb"<mediawiki", "WikiExtractor converts it to JSON lines"),
    "a WARC file": (rb"WARC/", "extract its texts, for example by trafilatura"),
    "a pointer of Git LFS": (rb"version https://git-lfs", "`git lfs pull` replaces it by the file"),
}
"""Formats that people have: their first bytes, and the remedy."""

_COMPRESSIONS = {
    "gzip": rb"\x1f\x8b",
    "bzip2": b"BZh[1-9]",
    "xz": rb"\xfd7zXZ\0",
    "zstd": rb"\(\xb5/\xfd|[P-_]\*M\x18",
}


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Expand patterns in order.

    Raises:
        SettingError: nothing matches, a file is of another format, or the package pyarrow is missing.
    """
    files: list[Path] = []
    for pattern in patterns:
        paths = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        matching = [Path(path) for path in paths if Path(path).is_file()]
        is_folder = Path(pattern).is_dir()
        problem = f"is a folder: give its files, as in '{pattern}/*'" if is_folder else "matches no file"
        require(bool(matching), f"--input {pattern} {problem}")
        files += matching
    for path in files:
        with _explained(path):
            _inspect(path)
    return files


def read_documents(
    path: Path, *, keys: Sequence[str] = ("text",), skip: Callable[[SettingError], object] | None = None
) -> Iterator[list[list[str]]]:
    """Yield the sentences of each key of each document; an undivided text is one sentence.

    Args:
        skip: called with the error of an invalid document, which is then left out. Without it, the error is
            raised.

    Raises:
        SettingError: the file is damaged or of another format.
    """
    for where, document in _documents(path, keys=keys):
        try:
            members = _parse(document, where=where)
            sentences = [_sentences(members, key, where=where) for key in keys]
        except SettingError as error:
            if skip is None:
                raise
            skip(error)
        else:
            yield sentences


def _documents(path: Path, *, keys: Sequence[str]) -> Iterator[tuple[str, bytes | Mapping[str, Any]]]:
    """Yield the location of each document, for messages, and its line of JSON or its members."""
    with _explained(path):
        kind, compression = _inspect(path)
        if kind == "Parquet":
            yield from _rows(path, keys=keys)
            return
        with _open(path, compression) as file:
            if kind == "JSON":
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield f"{path}, line {number}", line
                return
            content = file.read()
        _require_text(path, content)
        # A byte order mark, which editors on Windows write, is no text.
        texts = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read().split(END_OF_TEXT)
        for number, text in enumerate(filter(None, texts), start=1):
            yield f"{path}, document {number}", {"text": text}


def _rows(path: Path, *, keys: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the location and the members of each row; those of `keys` are Arrow's scalars, others None."""
    file, number = _arrow(path, "pyarrow.parquet").ParquetFile(path), 0
    names = file.schema_arrow.names
    for batch in file.iter_batches(batch_size=256, columns=[name for name in names if name in keys]):
        for index in range(batch.num_rows):
            number += 1
            # Of two columns with one name the last is taken, as of two members in JSON.
            read = dict(zip(batch.schema.names, (column[index] for column in batch.columns), strict=True))
            yield f"{path}, row {number}", dict.fromkeys(names) | read


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise SettingError(f"{path} is not UTF-8 text: {error}") from error
    except (OSError, EOFError, ValueError, NotImplementedError, zlib.error, lzma.LZMAError) as error:
        raise SettingError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _inspect(path: Path) -> tuple[str, str]:
    """Return "Parquet", "JSON" or "text", and the compression or ""; SettingError for other formats."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    compression = _compression(head)
    if compression:
        with _open(path, compression) as file:
            head = file.read(_HEAD)
        inner = "Parquet" if head.startswith(b"PAR1") else _compression(head)
        require(not inner, f"{path} is {inner} inside {compression}: decompress it once")
    elif head.startswith(b"PAR1"):
        _arrow(path, "pyarrow.parquet")
        return "Parquet", ""
    inside = compression and f" inside {compression}"
    for name, (magic, remedy) in _REFUSED.items():
        require(not re.match(magic, head, re.DOTALL), f"{path} is {name}{inside}: {remedy}")
    lines = [bool(_JSON.match(line)) for line in head.splitlines() if line.strip()]
    if not head or _JSON.match(head) or 2 * sum(lines) > len(lines):
        return "JSON", compression
    _require_text(path, head)
    suffixes = {suffix.lower() for suffix in path.suffixes}
    require(
        not suffixes & (_BINARY_NAMES if not compression else {".parquet"}),
        f"{path} is text{inside}, in spite of its name: perhaps a failed download",
    )
    require(
        not suffixes & {".csv", ".tsv"}, f"{path} is a table{inside}: convert it to JSON lines or Parquet"
    )
    return "JSON" if suffixes & _JSON_NAMES else "text", compression


def _compression(head: bytes) -> str:
    return next((name for name, magic in _COMPRESSIONS.items() if re.match(magic, head)), "")


def _open(path: Path, compression: str) -> Any:
    """Open the decompressed content."""
    if compression == "zstd":
        # It reads several frames and notices a cut one. The package zstandard does neither by itself.
        return io.BufferedReader(_arrow(path, "pyarrow").CompressedInputStream(path, "zstd"))
    return {"gzip": gzip, "bzip2": bz2, "xz": lzma, "": io}[compression].open(path, "rb")


def _arrow(path: Path, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise SettingError(f"{path} needs the package pyarrow: {install('data')}") from None


def _require_text(path: Path, content: bytes) -> None:
    place = content.find(b"\0")
    require(
        place < 0,
        f"{path} is not text, because byte {place} is NUL: give the texts that its numbers were made of, or "
        "for Megatron's .bin the name without .bin to `pretrain --data-path`",
    )


def _parse(document: bytes | Mapping[str, Any], *, where: str) -> Mapping[str, Any]:
    """Return the members of a line of JSON."""
    if not isinstance(document, bytes):
        return document
    require(b"\0" not in document, f"{where}: a NUL byte, so the file is damaged or no text")
    try:
        # Python would take bytes for UTF-16 or UTF-32 by their zeros.
        members = json.loads(document.decode("utf-8-sig", "surrogatepass"), parse_int=_integer)
    except RecursionError:
        raise SettingError(f"{where}: the JSON is nested too deeply to be read") from None
    except ValueError as error:
        # The first line of a file that is one value over many lines.
        is_part = document.strip() in (b"[", b"{", b"[{") or document.lstrip().startswith(b"[")
        hint = f". {_ONE_PER_LINE}" if is_part else ""
        raise SettingError(f"{where}: not JSON: {error}{hint}") from error
    is_list = isinstance(members, list)
    require(
        isinstance(members, dict),
        f"{where}: expected a JSON object, not {type(members).__name__}" + f". {_ONE_PER_LINE}" * is_list,
    )
    return dict(members)


def _integer(text: str) -> float:
    # Python limits the digits of an integer, JSON does not.
    return int(text) if len(text) < _MOST_DIGITS else float(text)


def _sentences(members: Mapping[str, Any], key: str, *, where: str) -> list[str]:
    require(
        key in members,
        f'{where}: no "{key}" among {", ".join(map(repr, members))}. If all documents are like that, '
        f"`sdp4bit preprocess --json-keys {next(iter(members), 'KEY')}` reads them",
    )
    value = members[key]
    try:
        value = value.as_py() if hasattr(value, "as_py") else value
        sentences: list[str] = value if isinstance(value, list) else [value]
        for sentence in sentences:
            if not isinstance(sentence, str):
                raise SettingError(f'{where}: "{key}" is {type(sentence).__name__}, not a string')
            sentence.encode()
    except UnicodeError as error:
        raise SettingError(f'{where}: "{key}" is not valid text: {error}') from None
    return sentences
