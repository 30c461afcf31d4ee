"""`sdp4bit preprocess`: tokenize documents into Megatron's .bin/.idx files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console

from sdp4bit_lab.common.settings import SettingError, option, require, require_at_least
from sdp4bit_lab.pretrain.data.config import TokenizerConfig
from sdp4bit_lab.pretrain.data.corpus import SMALLEST_VOCABULARY
from sdp4bit_lab.pretrain.data.documents import find_files, read_documents
from sdp4bit_lab.pretrain.data.indexed import token_dtype
from sdp4bit_lab.pretrain.data.indexed_writer import IndexedWriter
from sdp4bit_lab.pretrain.data.tokenizer import BytePairTokenizer

_SHOWN = 10
"""Skipped documents that are listed."""
_ENCODED_AT_ONCE = 1 << 22
"""Characters per call of the tokenizer, whose threads share the documents."""


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(TokenizerConfig):
    """Documents to tokenize for Megatron's file format."""

    input: tuple[str, ...]
    """Files or patterns such as 'pile/*.jsonl': JSON lines (one object per line), Parquet or plain text (one
    document per file, or several separated by <|endoftext|>), also compressed by gzip, bzip2, xz or zstd. The
    content decides, not the name."""
    output_prefix: Path
    """Prefix of the output files: PREFIX_KEY_document.bin and .idx for each of --json-keys."""
    json_keys: Annotated[tuple[str, ...], option("json-keys", "columns")] = ("text",)
    """Members or columns that contain text. A list of strings becomes several sequences."""
    append_eod: bool = False
    """Append the end-of-document token to every document."""
    parse_special_tokens: bool = False
    """Replace the spelling of a special token in a text, such as </s>, by this token. Off: it stays text, and
    only --append-eod ends a document."""
    train_tokenizer: int | None = None
    """Train a byte-level BPE of at most this many tokens on the documents, instead of giving a tokenizer. The
    file PREFIX_tokenizer.json is for --tokenizer-model."""
    skip_invalid: bool = False
    """Leave out documents that cannot be read, and list their lines. Off: the first one is an error."""
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
        size = self.train_tokenizer
        require(
            self.has_tokenizer != (size is not None),
            "give a tokenizer: --vocab-file and --merge-file, or --tokenizer-model, or train one with "
            "--train-tokenizer and the number of its tokens",
        )
        require(
            size is None or SMALLEST_VOCABULARY <= size <= 1 << 20,
            f"--train-tokenizer {size} must be between {SMALLEST_VOCABULARY} and {1 << 20}",
        )
        require(
            not self.parse_special_tokens or self.vocab_file is None,
            "--parse-special-tokens has no effect with --vocab-file, whose tokenizer has no special tokens",
        )
        require(
            bool(self.json_keys) and len(set(self.json_keys)) == len(self.json_keys),
            f"--json-keys {' '.join(self.json_keys)}: give at least one, without repetition",
        )
        require_at_least(1, self, "workers", "log_interval")

    @property
    def parses_special_tokens(self) -> bool:
        return self.parse_special_tokens

    @property
    def tokenizer_path(self) -> Path:
        """File of a tokenizer that is trained."""
        return self.output_prefix.with_name(f"{self.output_prefix.name}_tokenizer.json")

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
    prefix = config.output_prefix
    require(not prefix.is_dir(), f"--output-prefix {prefix} is a folder: add a name, as in {prefix}/corpus")
    files = find_files(config.input)
    skipped = 0

    def skip(error: SettingError) -> None:
        nonlocal skipped
        if not config.skip_invalid:
            raise SettingError(f"{error}. Nothing is written; --skip-invalid leaves out such documents")
        skipped += 1
        if skipped <= _SHOWN:
            console.print(f"skipped {error}", highlight=False, soft_wrap=True, markup=False)

    tokenizer = config.tokenizer or _train_tokenizer(config, files)
    end, dtype = tokenizer.end_of_text, token_dtype(tokenizer.vocabulary_size)
    start, count, tokens, ended, spelled = time.perf_counter(), 0, 0, 0, 0
    with _explained_interruption(console), ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedWriter(config.prefix(key), dtype=dtype, overwrite=config.overwrite))
            for key in config.json_keys
        ]
        documents = (
            texts for path in files for texts in read_documents(path, keys=config.json_keys, skip=skip)
        )
        for batch in _batched(documents):
            for index, writer in enumerate(writers):
                texts = [keys[index] for keys in batch]
                for document in encode(texts, tokenizer=tokenizer, append_eod=config.append_eod):
                    writer.add(document)
                    ended += bool(document) and document[-1][-1] == end
                spelled += sum(tokenizer.count_spelled(text) for sentences in texts for text in sentences)
            tokens = sum(writer.tokens for writer in writers)
            before, count = count, count + len(batch)
            if count // config.log_interval > before // config.log_interval:
                rate = tokens / (time.perf_counter() - start)
                console.print(f"{count:,} documents, {tokens:,} tokens, {rate:,.0f}/s", highlight=False)
        require(tokens > 0, f"--input {' '.join(config.input)}: no text in {count} documents")
        if config.train_tokenizer is not None:
            tokenizer.save(config.tokenizer_path)
        for writer in writers:
            writer.finish()
    seconds = time.perf_counter() - start
    written = [f"{config.prefix(key)} (.bin and .idx, {dtype.name})" for key in config.json_keys]
    written += [str(config.tokenizer_path)] * (config.train_tokenizer is not None)
    ends = (
        "no token ends a document" if end is None else f"{tokenizer.end_of_text_name} ends {ended:,} of them"
    )
    meaning = "became tokens" if config.parse_special_tokens else "stayed text (--parse-special-tokens)"
    console.print(
        f"{tokens:,} tokens in {seconds:.1f} s ({tokens / seconds:,.0f} tokens/s); {', '.join(written)}\n"
        f"{count:,} documents, {skipped:,} invalid and left out; {ends}; "
        f"{spelled:,} spelled special tokens {meaning}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def _train_tokenizer(config: PreprocessConfig, files: Sequence[Path]) -> BytePairTokenizer:
    """Train a tokenizer on the documents; SettingError if its file exists."""
    assert config.train_tokenizer is not None
    path = config.tokenizer_path
    require(
        config.overwrite or not path.exists(),
        f"{path} exists: remove it, give --overwrite or another prefix, or use it as --tokenizer-model",
    )
    # Invalid documents are reported when all are read.
    texts = (
        text
        for file in files
        for keys in read_documents(file, keys=config.json_keys, skip=lambda _: None)
        for sentences in keys
        for text in sentences
    )
    return BytePairTokenizer.train(texts, vocabulary_size=config.train_tokenizer)


@contextmanager
def _explained_interruption(console: Console) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        console.print(
            "interrupted: nothing is written, and the same command starts again. To keep parts, write each "
            "file of --input to its own --output-prefix",
            soft_wrap=True,
        )
        raise


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
