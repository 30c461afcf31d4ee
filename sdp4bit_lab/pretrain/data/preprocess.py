"""`sdp4bit preprocess`: tokenize documents into Megatron's .bin/.idx files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from sdp4bit.addresses import page
from sdp4bit_lab.common.settings import require, require_at_least
from sdp4bit_lab.pretrain.data.config import TokenizerConfig
from sdp4bit_lab.pretrain.data.documents import find_files, read_documents
from sdp4bit_lab.pretrain.data.indexed import token_dtype
from sdp4bit_lab.pretrain.data.indexed_writer import IndexedWriter
from sdp4bit_lab.pretrain.data.tokenizer import BytePairTokenizer

_Keys = Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--columns"])]
_ENCODED_AT_ONCE = 1 << 22
"""Characters per call of the tokenizer, whose threads share the documents."""


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(TokenizerConfig):
    """Documents to tokenize for Megatron's file format."""

    input: tuple[str, ...]
    """Files or patterns such as 'pile/*.jsonl': .jsonl or .json (one object per line), or plain text (one
    document per file, or several separated by <|endoftext|>). Compressed .gz and .zst files and .parquet
    files need the package datasets."""
    output_prefix: Path
    """Prefix of the output files: PREFIX_KEY_document.bin and .idx for each of --json-keys."""
    json_keys: _Keys = ("text",)
    """Members or columns that contain text. A list of strings becomes several sequences."""
    append_eod: bool = False
    """Append the end-of-document token to every document."""
    workers: int | None = None
    """Tokenizer threads. Default: the number of cores."""
    overwrite: bool = False
    """Replace existing files."""
    log_interval: int = 100_000
    """Documents between printed lines."""
    dataset_impl: Literal["mmap"] = "mmap"
    """Output format; only mmap is supported."""
    split: str | None = None
    """Accepted for compatibility with the reference implementation; has no effect."""
    torch_backend: str | None = None
    """Accepted for compatibility with the reference implementation; has no effect."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.input), "--input: give at least one file")
        require(
            self.has_tokenizer,
            "give a tokenizer: --vocab-file and --merge-file, or --tokenizer-model; to train one: "
            f"{page('data#preprocessing')}",
        )
        require(
            bool(self.json_keys) and len(set(self.json_keys)) == len(self.json_keys),
            f"--json-keys {' '.join(self.json_keys)}: give at least one, without repetition",
        )
        require_at_least(1, self, "workers", "log_interval")

    def prefix(self, key: str) -> Path:
        return self.output_prefix.with_name(f"{self.output_prefix.name}_{key}_document")


def preprocess(config: PreprocessConfig, *, console: Console | None = None) -> None:
    """Write the files of every key; on SettingError no new files are left."""
    console = console or Console(stderr=True)
    for name in ("split", "torch_backend"):
        if getattr(config, name) is not None:
            console.print(
                f"--{name.replace('_', '-')} {getattr(config, name)} has no effect here", style="yellow"
            )
    if config.workers is not None:
        # The tokenizers library reads it at its first call.
        os.environ["RAYON_NUM_THREADS"] = str(config.workers)
    files, tokenizer = find_files(config.input), config.tokenizer
    assert tokenizer is not None
    dtype = token_dtype(tokenizer.vocabulary_size)
    start, count, tokens = time.perf_counter(), 0, 0
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedWriter(config.prefix(key), dtype=dtype, overwrite=config.overwrite))
            for key in config.json_keys
        ]
        documents = (texts for path in files for texts in read_documents(path, keys=config.json_keys))
        for batch in _batched(documents):
            for index, writer in enumerate(writers):
                texts = [keys[index] for keys in batch]
                for document in encode(texts, tokenizer=tokenizer, append_eod=config.append_eod):
                    writer.add(document)
            tokens = sum(writer.tokens for writer in writers)
            before, count = count, count + len(batch)
            if count // config.log_interval > before // config.log_interval:
                rate = tokens / (time.perf_counter() - start)
                console.print(f"{count:,} documents, {tokens:,} tokens, {rate:,.0f}/s", highlight=False)
        require(tokens > 0, f"--input {' '.join(config.input)}: the {count} documents have no text")
        for writer in writers:
            writer.finish()
    seconds = time.perf_counter() - start
    console.print(
        f"{count:,} documents, {tokens:,} tokens in {seconds:.1f} s ({tokens / seconds:,.0f} tokens/s); "
        f"{', '.join(str(config.prefix(key)) for key in config.json_keys)} (.bin and .idx, {dtype.name})",
        highlight=False,
        soft_wrap=True,
    )


def encode(
    documents: Sequence[Sequence[str]], *, tokenizer: BytePairTokenizer, append_eod: bool
) -> Iterator[list[list[int]]]:
    """Yield the tokens of each sentence of each document.

    As in Megatron, sentences without tokens are skipped. A document without tokens stays empty and gets no
    end-of-document token.
    """
    end = [tokenizer.require_end_of_text()] if append_eod else []
    encoded = iter(tokenizer.encode([sentence for sentences in documents for sentence in sentences]))
    for sentences in documents:
        sequences = [tokens for tokens in islice(encoded, len(sentences)) if tokens]
        if sequences:
            sequences[-1] = sequences[-1] + end
        yield sequences


def _batched(documents: Iterable[list[list[str]]]) -> Iterator[list[list[list[str]]]]:
    batch: list[list[list[str]]] = []
    characters = 0
    for keys in documents:
        batch.append(keys)
        characters += sum(len(sentence) for sentences in keys for sentence in sentences)
        if characters >= _ENCODED_AT_ONCE:
            yield batch
            batch, characters = [], 0
    yield batch
