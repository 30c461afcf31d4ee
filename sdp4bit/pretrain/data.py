"""Tokenized text on disk and the order in which training reads it.

The order is a function of the seed and of a sample's global number alone, so that any number of ranks with
the same global batch sees the same samples in every step.
"""

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
import torch
from torch import Tensor

from sdp4bit.pretrain.config import DataConfig
from sdp4bit.pretrain.corpus import (
    Corpus,
    CorpusSplit,
    FileCorpus,
    StandardLibraryCorpus,
    split_corpus,
)
from sdp4bit.pretrain.ranks import Ranks, agree, first_rank_decides
from sdp4bit.pretrain.settings import SettingError
from sdp4bit.pretrain.tokenizer import BytePairTokenizer

FORMAT_VERSION = 1
_ENCODE_DOCUMENTS = 256


class TokenFile:
    """Tokens of many documents, one after another, read through memory mapping."""

    def __init__(self, path: Path, *, dtype: npt.DTypeLike) -> None:
        self._tokens = np.memmap(path, dtype=dtype, mode="r")

    def __len__(self) -> int:
        return len(self._tokens)

    def windows(self, sequence_length: int) -> int:
        """Return how many sequences and their next tokens fit."""
        return max(0, (len(self) - 1) // sequence_length)

    def batch(self, windows: Iterable[int], *, sequence_length: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of these windows and the token that follows each; [windows, length], int64."""
        rows = np.stack([self._tokens[w * sequence_length : (w + 1) * sequence_length + 1] for w in windows])
        tokens = torch.from_numpy(rows.astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Training and validation tokens of one corpus, and the tokenizer that made them."""

    key: str
    """Name of the cache entry: equal for equal documents and settings."""
    train: TokenFile
    validation: TokenFile
    tokenizer: BytePairTokenizer


def prepare_dataset(config: DataConfig, *, ranks: Ranks) -> Dataset:
    """Return the dataset on every rank; it is in the cache of every node.

    1. Rank 0 tokenizes the text, unless the cache has it.
    2. The first rank of every other node does, where the cache is not shared.
    3. Everybody opens the files.

    Raises:
        SettingError: on all ranks: unreadable text, or nodes that read different text.
    """
    folder = first_rank_decides(lambda: fill_cache(config))

    def fill_cache_of_node() -> None:
        if ranks.local_rank == 0 and not folder.is_dir():
            found = fill_cache(config)
            if found.name != folder.name:
                raise SettingError(
                    f"rank {ranks.rank} reads other text than rank 0 ({found.name}, {folder.name}): use the "
                    "same files, Python and tokenizers versions on all nodes, or a shared --cache-dir"
                )

    agree(fill_cache_of_node)
    return agree(lambda: open_dataset(folder))


def fill_cache(config: DataConfig) -> Path:
    """Return the cache folder that holds the tokenized text, after writing it if it was not there.

    The folder appears under its name complete or not at all, whoever else writes it at the same time.
    """
    corpus: Corpus = FileCorpus(config.data_path) if config.data_path else StandardLibraryCorpus()
    split = split_corpus(corpus, validation_fraction=config.validation_fraction)
    settings = {
        "format": FORMAT_VERSION,
        "corpus": split.digest,
        "vocabulary_size": config.vocabulary_size,
        "validation_fraction": config.validation_fraction,
        "tokenizers": tokenizers.__version__,
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:20]
    cache = config.cache_folder()
    folder = cache / key
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        working = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=cache))
    except OSError as error:
        raise SettingError(f"cannot write the cache folder {cache} ({error}): set --cache-dir") from error
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


def open_dataset(folder: Path) -> Dataset:
    """Return the dataset of a cache folder."""
    counts = json.loads((folder / "tokens.json").read_text())
    dtype = np.dtype(counts["dtype"])
    return Dataset(
        key=folder.name,
        train=TokenFile(folder / "train.bin", dtype=dtype),
        validation=TokenFile(folder / "validation.bin", dtype=dtype),
        tokenizer=BytePairTokenizer.load(folder / "tokenizer.json"),
    )


def _tokenize(corpus: Corpus, *, split: CorpusSplit, config: DataConfig, folder: Path) -> None:
    """The folder holds tokenizer.json, train.bin, validation.bin and tokens.json."""
    training_text = (text for text, held_out in split.read(corpus) if not held_out)
    tokenizer = BytePairTokenizer.train(training_text, vocabulary_size=config.vocabulary_size)
    tokenizer.save(folder / "tokenizer.json")
    dtype = np.dtype(np.uint16 if config.vocabulary_size <= 1 << 16 else np.uint32)
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
    (folder / "tokens.json").write_text(json.dumps({"dtype": dtype.name, **counts}) + "\n")


def _batched(documents: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    while batch := list(islice(documents, _ENCODE_DOCUMENTS)):
        yield batch


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


class Batches:
    """The micro batches that one rank reads of every global batch."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        sequence_length: int,
        micro_batch_size: int,
        accumulation: int,
        eval_batches: int,
        seed: int,
        ranks: Ranks,
    ) -> None:
        """The splits are known to be long enough; SettingError otherwise."""
        self._dataset = dataset
        self._sequence_length = sequence_length
        self._micro_batch_size = micro_batch_size
        self._accumulation = accumulation
        self._ranks = ranks
        windows = dataset.train.windows(sequence_length)
        if windows == 0:
            raise SettingError(
                f"the training text has {len(dataset.train)} tokens, less than one sequence of "
                f"{sequence_length} and its next token: give more text or a smaller --sequence-length"
            )
        self._order = SampleOrder(windows=windows, seed=seed)
        across = ranks.world_size * micro_batch_size
        available = dataset.validation.windows(sequence_length) // across
        if available == 0:
            raise SettingError(
                f"the validation text has {len(dataset.validation)} tokens, less than {across} sequences of "
                f"{sequence_length} for {ranks.world_size} ranks: give more text, a larger "
                "--validation-fraction, or a smaller --micro-batch-size or --sequence-length"
            )
        self._eval_micro_batches = min(eval_batches * accumulation, available)

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step, over all ranks."""
        return self._ranks.world_size * self._micro_batch_size * self._accumulation

    def training(self, first_sample: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's micro batches of the global batch that starts at a sample."""
        for micro in range(self._accumulation):
            samples = self._share(micro, first_sample=first_sample)
            yield self._batch(self._dataset.train, [self._order.window(sample) for sample in samples])

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of the validation windows, the same ones every time."""
        for micro in range(self._eval_micro_batches):
            yield self._batch(self._dataset.validation, self._share(micro, first_sample=0))

    def _share(self, micro: int, *, first_sample: int) -> range:
        start = first_sample + (micro * self._ranks.world_size + self._ranks.rank) * self._micro_batch_size
        return range(start, start + self._micro_batch_size)

    def _batch(self, tokens: TokenFile, windows: Iterable[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = tokens.batch(windows, sequence_length=self._sequence_length)
        return inputs.to(self._ranks.device), targets.to(self._ranks.device)
