"""`sdp4bit preprocess`: documents to Megatron's .bin/.idx files."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from sdp4bit_lab.common.settings import SettingError, require, require_at_least
from sdp4bit_lab.pretrain.data.config import TokenizerConfig
from sdp4bit_lab.pretrain.data.document_files import Piece, find_files, read_pieces
from sdp4bit_lab.pretrain.data.encoding import PieceEncoder, encode_in_order
from sdp4bit_lab.pretrain.data.indexed import idx_path
from sdp4bit_lab.pretrain.data.indexed_writer import EncodedDocuments, IndexedWriter

_Keys = Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--columns"])]


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(TokenizerConfig):
    """Documents to tokens, in the files that Megatron reads."""

    input: tuple[str, ...]
    """Files or patterns such as 'pile/*.jsonl.zst': .jsonl (one object a line), also as .gz or .zst, or
    .parquet."""
    output_prefix: Path
    """Where to write: PREFIX_KEY_document.bin and .idx for each of --json-keys."""
    json_keys: _Keys = ("text",)
    """Members of the objects, or columns, that hold text; a list of strings becomes several sequences."""
    append_eod: bool = False
    """End every document with the token for it."""
    workers: int | None = None
    """Processes that tokenize; as many as cores when not given."""
    overwrite: bool = False
    """Replace files that are there."""
    log_interval: int = 100_000
    """Documents between printed lines when the output is not a terminal."""
    dataset_impl: Literal["mmap"] = "mmap"
    """Kind of output; the reference's mmap is the only one."""
    split: str | None = None
    """Taken for the reference's command line, without effect: all documents of the input are used."""
    torch_backend: str | None = None
    """Taken for the reference's command line, without effect: processes need no torch backend."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.input), "--input: give the files that hold the documents")
        require(
            self.tokenizer_files is not None,
            "give the tokenizer: --vocab-file and --merge-file, or --tokenizer-model; `sdp4bit "
            "tokenizer` makes one from text",
        )
        require(
            bool(self.json_keys) and len(set(self.json_keys)) == len(self.json_keys),
            f"--json-keys {' '.join(self.json_keys)}: give at least one, each one once",
        )
        require_at_least(1, self, "workers", "log_interval")

    def prefix(self, key: str) -> Path:
        """Return the prefix of the files of a key."""
        return self.output_prefix.with_name(f"{self.output_prefix.name}_{key}_document")


@dataclass(kw_only=True)
class _Totals:
    documents: int = 0
    tokens: int = 0
    bytes_read: int = 0

    def add(self, piece: Piece, keys: list[EncodedDocuments]) -> None:
        self.documents += len(keys[0].sequences)
        self.tokens += sum(int(documents.lengths.sum()) for documents in keys)
        self.bytes_read += piece.bytes_read


def preprocess(config: PreprocessConfig, *, console: Console | None = None) -> None:
    """Write the files of every key, complete.

    Raises:
        SettingError: an input is missing, damaged or has a line without text, or an output cannot be written;
            then there are no new files.
    """
    console = console or Console(stderr=True)
    tokenizer = config.tokenizer_files
    assert tokenizer is not None
    for name in ("split", "torch_backend"):
        if getattr(config, name) is not None:
            console.print(
                f"--{name.replace('_', '-')} {getattr(config, name)} has no effect here", style="yellow"
            )
    inputs = find_files(config.input)
    dtype = PieceEncoder(tokenizer, keys=config.json_keys, append_eod=config.append_eod).dtype
    workers = config.workers or len(os.sched_getaffinity(0))
    start, totals = time.perf_counter(), _Totals()
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedWriter(config.prefix(key), dtype=dtype, overwrite=config.overwrite))
            for key in config.json_keys
        ]
        pieces = (piece for path in inputs for piece in read_pieces(path, keys=config.json_keys))
        encoded = encode_in_order(
            pieces, files=tokenizer, keys=config.json_keys, append_eod=config.append_eod, workers=workers
        )
        report = stack.enter_context(
            _Report(console, size=sum(path.stat().st_size for path in inputs), interval=config.log_interval)
        )
        for piece, keys in encoded:
            for writer, documents in zip(writers, keys, strict=True):
                writer.add(documents)
            totals.add(piece, keys)
            report.update(totals)
        if not totals.tokens:
            raise SettingError(
                f"--input {' '.join(config.input)}: the {totals.documents} documents hold no text"
            )
        for writer in writers:
            writer.finish()
    seconds = time.perf_counter() - start
    console.print(
        f"{totals.documents:,} documents, {totals.tokens:,} tokens in {seconds:.1f} s "
        f"({totals.tokens / seconds:,.0f} tokens/s) with {workers} workers; "
        f"{', '.join(str(idx_path(config.prefix(key)).with_suffix('')) for key in config.json_keys)} "
        f"(.bin and .idx, {dtype.name})",
        highlight=False,
        soft_wrap=True,
    )


class _Report:
    """A progress bar on a terminal, lines elsewhere."""

    def __init__(self, console: Console, *, size: int, interval: int) -> None:
        self._console = console
        self._interval = interval
        self._next = interval
        self._start = time.perf_counter()
        self._bar = Progress(
            BarColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[tokens]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=size, tokens="")

    def __enter__(self) -> _Report:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update(self, totals: _Totals) -> None:
        """Show what has been done."""
        seconds = time.perf_counter() - self._start
        tokens = f"{totals.tokens:,} tokens, {totals.tokens / seconds:,.0f}/s"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=totals.bytes_read, tokens=tokens)
        elif totals.documents >= self._next:
            self._next = totals.documents - totals.documents % self._interval + self._interval
            self._console.print(f"{totals.documents:,} documents, {tokens}", highlight=False)
