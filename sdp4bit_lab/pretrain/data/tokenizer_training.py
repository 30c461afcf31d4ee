"""`sdp4bit tokenizer`: a byte-level BPE, learned from documents."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from sdp4bit_lab.common.settings import SettingError, option, require, require_at_least
from sdp4bit_lab.pretrain.data.corpus import SMALLEST_VOCABULARY, FileCorpus
from sdp4bit_lab.pretrain.data.document_files import find_files, read_pieces
from sdp4bit_lab.pretrain.data.tokenizer import TRAINING_CHARACTERS, BytePairTokenizer

TOKENIZER, VOCABULARY, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
_SAMPLE_CHARACTERS = 1 << 20
_PARSED = (".jsonl", ".gz", ".zst", ".parquet")


@dataclass(frozen=True, kw_only=True)
class TokenizerTrainingConfig:
    """What to learn a tokenizer from, and where to write it."""

    input: tuple[str, ...]
    """Files or patterns such as 'pile/*.jsonl.zst': .jsonl (one object a line), also as .gz or .zst,
    .parquet, or plain text (one document a file; documents may be separated by <|endoftext|>)."""
    out: Path
    """Folder for tokenizer.json, and for vocab.json and merges.txt, the same in GPT-2's format."""
    vocabulary_size: Annotated[int, option("vocab-size", "vocabulary-size")] = 50257
    """Tokens to learn, the 256 bytes and <|endoftext|> included; fewer come out if the text repeats too
    little."""
    json_key: str = "text"
    """Member of the objects, or column, that holds the text."""
    characters: int = TRAINING_CHARACTERS
    """Characters to learn from, from the beginning of the input: more changes little and takes minutes."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace a tokenizer that is there."""

    def __post_init__(self) -> None:
        require(bool(self.input), "--input: give the files that hold the documents")
        require_at_least(SMALLEST_VOCABULARY, self, "vocabulary_size")
        require_at_least(1, self, "characters")
        there = [name for name in (TOKENIZER, VOCABULARY, MERGES) if (self.out / name).exists()]
        require(
            self.overwrite or not there,
            f"--out {self.out} holds {', '.join(there)}: choose another folder, or --overwrite",
        )


def train_tokenizer(config: TokenizerTrainingConfig, *, console: Console | None = None) -> None:
    """Write the tokenizer, and print how much text a token of it holds.

    Raises:
        SettingError: an input is missing, damaged or has a line without text, there is no text, or the folder
            cannot be written.
    """
    console = console or Console()
    start = time.perf_counter()
    sample: list[str] = []
    characters = 0

    def documents() -> Iterator[str]:
        nonlocal characters
        for text in _documents(config):
            if characters < _SAMPLE_CHARACTERS:
                sample.append(text[: _SAMPLE_CHARACTERS - characters])
            characters += len(text)
            yield text

    tokenizer = BytePairTokenizer.train(
        documents(), vocabulary_size=config.vocabulary_size, characters=config.characters
    )
    require(characters > 0, f"--input {' '.join(config.input)}: the documents hold no text")
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        tokenizer.save_all(config.out)
    except OSError as error:
        raise SettingError(f"cannot write --out {config.out}: {error}") from error
    size, tokens = tokenizer.vocabulary_size, sum(map(len, tokenizer.encode(sample)))
    lines = [
        f"{size:,} tokens from {min(characters, config.characters):,} characters in "
        f"{time.perf_counter() - start:.1f} s; a token holds {sum(map(len, sample)) / tokens:.2f} of them",
        f"written to {config.out}: {TOKENIZER}; {VOCABULARY} and {MERGES}, the same in GPT-2's format",
        f"next: sdp4bit pretrain --data-path ... --tokenizer-model {config.out}",
    ]
    if size < config.vocabulary_size:
        lines.insert(1, f"fewer than --vocab-size {config.vocabulary_size:,}: the text repeats nothing more")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _documents(config: TokenizerTrainingConfig) -> Iterator[str]:
    for path in find_files(config.input):
        if path.suffix in _PARSED:
            for piece in read_pieces(path, keys=(config.json_key,)):
                for (texts,) in piece.documents((config.json_key,)):
                    yield from texts
        else:
            yield from FileCorpus((path,)).documents()
