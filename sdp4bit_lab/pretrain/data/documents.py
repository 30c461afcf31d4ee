"""Read documents from JSON lines, plain text, compressed JSON lines and Parquet."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from sdp4bit.addresses import install
from sdp4bit_lab.common.settings import SettingError, require

END_OF_TEXT = "<|endoftext|>"
_JSON_LINES = (".json", ".jsonl")
_ONE_PER_LINE = "Each line must be one object; `jq -c '.[]' FILE > FILE.jsonl` converts an array"
_MOST_DIGITS = 600
_DATASETS_FORMATS = {".gz": "json", ".zst": "json", ".parquet": "parquet"}


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Expand patterns in order; SettingError if nothing matches or the package datasets is missing."""
    files: list[Path] = []
    for pattern in patterns:
        paths = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        matching = [Path(path) for path in paths if Path(path).is_file()]
        require(bool(matching), f"--input {pattern}: no such file")
        files += matching
    for path in files:
        if path.suffix in _DATASETS_FORMATS:
            _import_datasets(path)
    return files


def read_documents(
    path: Path, *, keys: Sequence[str] = ("text",), skip: Callable[[SettingError], object] | None = None
) -> Iterator[list[list[str]]]:
    """Yield the sentences of each key of each document; an undivided text is one sentence.

    Args:
        skip: called with the error of an invalid document, which is then left out. Without it, the error is
            raised.
    """
    try:
        for where, document in _documents(path):
            try:
                members = _parse(document, where=where) if isinstance(document, bytes) else document
                sentences = [_sentences(members, key, where=where) for key in keys]
            except SettingError as error:
                if skip is None:
                    raise
                skip(error)
            else:
                yield sentences
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error}") from error


def _documents(path: Path) -> Iterator[tuple[str, Mapping[str, object] | bytes]]:
    """Yield the location of each document, for messages, and its members or its line of JSON."""
    if path.suffix in _DATASETS_FORMATS:
        for number, row in enumerate(_datasets_rows(path), start=1):
            yield f"{path}, row {number}", row
    elif path.suffix in _JSON_LINES:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}, line {number}", line
    else:
        try:
            # A byte order mark, which editors on Windows write, is no text.
            texts = path.read_text(encoding="utf-8-sig").split(END_OF_TEXT)
        except UnicodeDecodeError as error:
            raise SettingError(f"{path} is not UTF-8 text: {error}") from error
        for number, text in enumerate(filter(None, texts), start=1):
            yield f"{path}, document {number}", {"text": text}


def _datasets_rows(path: Path) -> Iterator[Mapping[str, object]]:
    datasets, kind = _import_datasets(path), _DATASETS_FORMATS[path.suffix]
    try:
        yield from datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
    except Exception as error:  # several packages decompress and parse
        raise SettingError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _import_datasets(path: Path) -> Any:
    try:
        return import_module("datasets")
    except ImportError:
        raise SettingError(f"{path} needs the package datasets: {install('data')}") from None


def _parse(line: bytes, *, where: str) -> dict[str, object]:
    try:
        members = json.loads(line, parse_int=_integer)
    except RecursionError:
        raise SettingError(f"{where}: the JSON is nested too deeply to be read") from None
    except ValueError as error:
        # The first line of a file that is one value over many lines.
        is_part = line.strip() in (b"[", b"{", b"[{") or line.lstrip().startswith(b"[")
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


def _sentences(members: Mapping[str, object], key: str, *, where: str) -> list[str]:
    require(
        key in members,
        f'{where}: no "{key}" among {", ".join(map(repr, members))}: convert the file with '
        f"`sdp4bit preprocess --json-keys {next(iter(members), 'KEY')}`",
    )
    value = members[key]
    sentences: list[str] = []
    for sentence in value if isinstance(value, list) else [value]:
        if not isinstance(sentence, str):
            raise SettingError(f'{where}: "{key}" is {type(sentence).__name__}, not a string')
        try:
            sentence.encode()
        except UnicodeEncodeError as error:
            raise SettingError(f'{where}: "{key}" is not valid text: {error}') from None
        sentences.append(sentence)
    return sentences
