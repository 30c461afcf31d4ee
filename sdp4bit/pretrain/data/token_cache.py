"""Text that is tokenized at the start of a run: its tokens on disk, and the order of reading them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers

from sdp4bit.pretrain.data.config import DataConfig
from sdp4bit.pretrain.data.corpus import (
    Corpus,
    CorpusSplit,
    FileCorpus,
    StandardLibraryCorpus,
    split_corpus,
)
from sdp4bit.pretrain.data.samples import Tokens
from sdp4bit.pretrain.data.tokenizer import BytePairTokenizer
from sdp4bit.pretrain.options import SettingError

FORMAT_VERSION = 2
_ENCODE_DOCUMENTS = 256


class TokenFile:
    """Tokens of many documents, one after another, read through memory mapping."""

    def __init__(self, path: Path, *, dtype: npt.DTypeLike) -> None:
        self._tokens = np.memmap(path, dtype=dtype, mode="r")

    def windows(self, sequence_length: int) -> int:
        """Return how many sequences and their next tokens fit."""
        return max(0, (self.tokens - 1) // sequence_length)

    @property
    def tokens(self) -> int:
        """Tokens there are."""
        return len(self._tokens)

    def samples(self, *, sequence_length: int, seed: int | None) -> WindowSamples:
        """Return the windows in the order of a seed; for validation in that of the text."""
        return WindowSamples(self, sequence_length=sequence_length, seed=seed)

    def rows(self, windows: Iterable[int], *, sequence_length: int) -> Tokens:
        """Return the tokens of these windows and the token that follows each; [windows, length + 1]."""
        rows = [self._tokens[w * sequence_length : (w + 1) * sequence_length + 1] for w in windows]
        return np.stack(rows).astype(np.int64)


class SampleOrder:
    """Which window a global sample number means: all windows shuffled, then all in another order."""

    def __init__(self, *, windows: int, seed: int) -> None:
        self._windows = windows
        self._seed = seed
        self._epoch = -1
        self._permutation: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def window(self, sample: int) -> int:
        """Return the window of a global sample number."""
        epoch, position = divmod(sample, self._windows)
        if epoch != self._epoch:
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(self._windows)
            self._epoch = epoch
        return int(self._permutation[position])


class WindowSamples:
    """Windows of a token file, in an order or one after another."""

    def __init__(self, file: TokenFile, *, sequence_length: int, seed: int | None) -> None:
        self._file = file
        self._sequence_length = sequence_length
        self.count = file.windows(sequence_length)
        self._order = None if seed is None else SampleOrder(windows=self.count, seed=seed)

    def rows(self, numbers: Iterable[int]) -> Tokens:
        """Return the tokens of these samples and the token that follows each; [samples, length + 1]."""
        order = self._order
        windows = (number % self.count if order is None else order.window(number) for number in numbers)
        return self._file.rows(windows, sequence_length=self._sequence_length)


@dataclass(frozen=True, kw_only=True)
class TokenizedText:
    """Training and validation tokens of a text, and the tokenizer that made them."""

    key: str
    """Name of the cache entry: equal for equal documents and settings."""
    train: TokenFile
    validation: TokenFile
    tokenizer: BytePairTokenizer
    end_of_text: int
    """Token after every document."""


def fill_cache(config: DataConfig) -> Path:
    """Return the cache folder that holds the tokenized text, after writing it if it was not there.

    The folder appears under its name complete or not at all, whoever else writes it at the same time.
    """
    paths = tuple(Path(path) for path in config.data_path)
    corpus: Corpus = FileCorpus(paths) if paths else StandardLibraryCorpus()
    split = split_corpus(corpus, validation_fraction=config.held_out)
    settings = {
        "format": FORMAT_VERSION,
        "corpus": split.digest,
        "vocabulary_size": config.vocabulary,
        "validation_fraction": config.held_out,
        "tokenizers": tokenizers.__version__,
    }
    if config.tokenizer is not None:
        settings["tokenizer"] = config.tokenizer.digest()
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:20]
    cache = config.cache_folder()
    folder = cache / key
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        working = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=cache))
    except OSError as error:
        raise SettingError(
            f"cannot write the cache folder {cache} ({error}): set --data-cache-path"
        ) from error
    try:
        _tokenize(corpus, split=split, config=config, folder=working)
        (working / "settings.json").write_text(json.dumps(settings, indent=2) + "\n")
        working.chmod(0o755)
        try:
            working.rename(folder)
        except OSError:
            # Another process was first; its files are the same.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return folder


def open_cache(folder: Path) -> TokenizedText:
    """Return the tokens of a cache folder."""
    counts = json.loads((folder / "tokens.json").read_text())
    dtype = np.dtype(counts["dtype"])
    return TokenizedText(
        key=folder.name,
        train=TokenFile(folder / "train.bin", dtype=dtype),
        validation=TokenFile(folder / "validation.bin", dtype=dtype),
        tokenizer=BytePairTokenizer.load(folder / "tokenizer.json"),
        end_of_text=counts["end_of_text"],
    )


def _tokenize(corpus: Corpus, *, split: CorpusSplit, config: DataConfig, folder: Path) -> None:
    """The folder holds tokenizer.json, train.bin, validation.bin and tokens.json."""
    training_text = (text for text, held_out in split.read(corpus) if not held_out)
    tokenizer = config.tokenizer or BytePairTokenizer.train(training_text, vocabulary_size=config.vocabulary)
    tokenizer.save(folder / "tokenizer.json")
    dtype = np.dtype(np.uint16 if config.vocabulary <= 1 << 16 else np.uint32)
    counts = {"train": 0, "validation": 0}
    with (
        (folder / "train.bin").open("wb") as train,
        (folder / "validation.bin").open("wb") as validation,
    ):
        for documents in _batched(split.read(corpus)):
            encoded = tokenizer.encode_documents([text for text, _ in documents])
            for (_, held_out), tokens in zip(documents, encoded, strict=True):
                (validation if held_out else train).write(np.array(tokens, dtype).tobytes())
                counts["validation" if held_out else "train"] += len(tokens)
        for file in (train, validation):
            file.flush()
            os.fsync(file.fileno())
    description = {"dtype": dtype.name, "end_of_text": tokenizer.end_of_text, **counts}
    (folder / "tokens.json").write_text(json.dumps(description) + "\n")


def _batched(documents: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    while batch := list(islice(documents, _ENCODE_DOCUMENTS)):
        yield batch
