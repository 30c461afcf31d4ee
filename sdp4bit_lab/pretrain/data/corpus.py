"""Read text documents, from files or the default corpus, and split off validation documents."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.data.documents import read_documents

SMALLEST_VOCABULARY = 257
"""The 256 bytes and the end of text."""
STANDARD_LIBRARY_BYTES = 6_000_000
"""Length of the default corpus: enough for a few million tokens of training, tokenized in seconds."""
_LEFT_OUT = frozenset(
    # Packages and tests are not always installed; the rest is tables and grammar.
    ["site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"]
)


def read_corpus(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the nonempty documents of text and .jsonl files in order.

    Without files, yield the first 6 MB of the standard library's sources, sorted by path.

    Raises:
        SettingError: a missing file, or an invalid line, which it names.
    """
    if not paths:
        yield from _standard_library(STANDARD_LIBRARY_BYTES)
    for path in paths:
        if not path.is_file():
            problem = "is a folder: name its files" if path.is_dir() else "is no file, and has no .idx"
            raise SettingError(f"--data-path {path} {problem}")
        for (sentences,) in read_documents(path, skip=_refuse):
            if text := "".join(sentences):
                yield text


def _refuse(error: SettingError) -> NoReturn:
    raise SettingError(f"{error}. `sdp4bit preprocess --skip-invalid` leaves such documents out")


def _standard_library(limit: int) -> Iterator[str]:
    size = 0
    for path in _source_files(sysconfig.get_paths()["stdlib"]):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        size += len(text)
        if size > limit:
            return
        if text:
            yield text


def _source_files(folder: str) -> Iterator[str]:
    """Yield the Python files below a folder, sorted by name within each folder."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in _LEFT_OUT:
                yield from _source_files(entry.path)
        elif entry.name.endswith(".py"):
            yield entry.path


@dataclass(frozen=True, kw_only=True)
class CorpusSplit:
    """Documents of a corpus, and those among them for validation."""

    paths: Sequence[Path]
    """Files, as for `read_corpus`."""
    digest: str
    """Hash of all documents in order."""
    documents: int
    held_out: frozenset[int]
    """Indices of the validation documents; empty for a single document, whose end is held out."""
    validation_fraction: float

    def read(self) -> Iterator[tuple[str, bool]]:
        """Yield every document, or part of a single one, and whether it is for validation."""
        for index, text in enumerate(read_corpus(self.paths)):
            if self.documents == 1:
                boundary = round(len(text) * (1 - self.validation_fraction))
                yield text[:boundary], False
                yield text[boundary:], True
            else:
                yield text, index in self.held_out


def split_corpus(paths: Sequence[Path], *, validation_fraction: float) -> CorpusSplit:
    """Hold out the documents with the smallest hashes, so that the split depends on content alone.

    They have at least `validation_fraction` of the bytes; at least one document is held out, and never all.

    Raises:
        SettingError: there is no text.
    """
    total = hashlib.sha256()
    ranked: list[tuple[bytes, int, int]] = []
    for index, text in enumerate(read_corpus(paths)):
        content = text.encode("utf-8", errors="surrogatepass")
        digest = hashlib.sha256(content).digest()
        total.update(digest)
        ranked.append((digest, index, len(content)))
    if not ranked:
        raise SettingError("the corpus has no text: give other files with --data-path")
    wanted = validation_fraction * sum(size for _, _, size in ranked)
    held_out: set[int] = set()
    held_out_size = 0
    for _, index, size in sorted(ranked)[:-1]:
        if held_out_size >= wanted:
            break
        held_out.add(index)
        held_out_size += size
    return CorpusSplit(
        paths=paths,
        digest=total.hexdigest(),
        documents=len(ranked),
        held_out=frozenset(held_out),
        validation_fraction=validation_fraction,
    )
