"""Order the documents and samples of a .bin/.idx corpus.

Every epoch has its own order, which depends on the seed and the epoch alone. Because it is independent of the
number of steps and ranks, a run can resume from any sample.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.data.indexed import IndexedTokens
from sdp4bit_lab.pretrain.data.samples import Tokens

FORMAT_VERSION = 1
CACHED_FROM = 1 << 22
"""Documents plus samples from which an order is cached on disk; below, recomputing takes a second or two."""
_VALIDATION_SEED = 0
_Integers = npt.NDArray[np.integer]


Shuffled = Literal["documents and samples", "samples", "nothing"]
"""For .bin/.idx files; for text tokenized at the start of a run; for validation text of the latter."""


class Epoch(NamedTuple):
    """One pass over the documents."""

    documents: _Integers
    """Documents in the order of this epoch."""
    starts: _Integers
    """Number of the epoch's tokens before each of them; then the total."""
    samples: _Integers
    """Start of each sample in the epoch, in units of the sequence length, in reading order."""


def make_epoch(
    lengths: npt.NDArray[np.int64],
    *,
    first: int,
    sequence_length: int,
    seed: int,
    epoch: int,
    shuffled: Shuffled = "documents and samples",
) -> Epoch:
    """Compute the order of an epoch.

    Args:
        lengths: tokens of each document.
        first: index of the first of these documents in the corpus.
    """
    count = max(0, int(lengths.sum()) - 1) // sequence_length
    documents, samples = _numbers(len(lengths)), _numbers(count)
    if shuffled == "samples":
        # NumPy may change this stream in a release; a test records the numbers of NumPy 2.4.
        samples = np.random.default_rng([seed, epoch]).permutation(count)
    elif shuffled == "documents and samples":
        random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch])))
        random.shuffle(documents)
        random.shuffle(samples)
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths[documents], out=starts[1:])
    return Epoch(documents=documents + documents.dtype.type(first), starts=starts, samples=samples)


@dataclass(frozen=True, kw_only=True)
class IndexedSplit:
    """A range of the documents of a corpus."""

    corpus: IndexedTokens
    first: int
    last: int
    """One past the last document."""
    vocabulary: int
    fingerprint: str
    """Identifies the corpus, and its order if it is not the usual one."""
    cache: Path
    shuffled: Shuffled = "documents and samples"

    @property
    def tokens(self) -> int:
        first, last = self.corpus.starts(np.array([self.first, self.last]))
        return int(last - first)

    def samples(self, *, sequence_length: int, seed: int | None) -> IndexedSamples:
        """Return the samples in the order of a seed; None: fixed order for validation."""
        return IndexedSamples(
            self, sequence_length=sequence_length, seed=_VALIDATION_SEED if seed is None else seed
        )


class IndexedSamples:
    """Samples of a range of documents; samples span document boundaries."""

    def __init__(self, split: IndexedSplit, *, sequence_length: int, seed: int) -> None:
        self._split = split
        self._sequence_length = sequence_length
        self._seed = seed
        self._epochs: dict[int, Epoch] = {}
        self.count = max(0, split.tokens - 1) // sequence_length

    def rows(self, numbers: Iterable[int]) -> Tokens:
        """Return [samples, length + 1] tokens; SettingError if one is outside the vocabulary."""
        rows = np.stack([self._row(*divmod(number, self.count)) for number in numbers])
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= self._split.vocabulary:
            raise SettingError(
                f"{self._split.corpus.prefix}.bin has token {low if low < 0 else high}, but the vocabulary "
                f"ends at {self._split.vocabulary - 1}: give the tokenizer of the corpus, or a larger "
                "--vocab-size"
            )
        return rows

    def _row(self, epoch: int, number: int) -> Tokens:
        order, corpus = self._epoch(epoch), self._split.corpus
        begin = int(order.samples[number]) * self._sequence_length
        end = begin + self._sequence_length + 1
        # Documents with the epoch's tokens from `begin` to `end - 1`, including empty ones between.
        first, last = np.searchsorted(order.starts, (begin, end - 1), side="right").tolist()
        documents = order.documents[first - 1 : last].astype(np.int64)
        starts, stops = corpus.starts(documents), corpus.starts(documents + 1)
        starts[0] += begin - int(order.starts[first - 1])
        stops[-1] = starts[-1] + end - max(begin, int(order.starts[last - 1]))
        ranges = zip(starts.tolist(), stops.tolist(), strict=True)
        pieces = [corpus.read(start, stop - start) for start, stop in ranges]
        return np.concatenate(pieces, dtype=np.int64)

    def _epoch(self, number: int) -> Epoch:
        if number not in self._epochs:
            # A batch may span two epochs, but not more.
            self._epochs = {key: value for key, value in self._epochs.items() if abs(key - number) == 1}
            self._epochs[number] = self._find_or_make(number)
        return self._epochs[number]

    def _find_or_make(self, number: int) -> Epoch:
        split = self._split
        if split.last - split.first + self.count < CACHED_FROM:
            return self._make(number)
        settings = {
            "format": FORMAT_VERSION,
            "corpus": split.fingerprint,
            "documents": [split.first, split.last],
            "sequence_length": self._sequence_length,
            "seed": self._seed,
            "epoch": number,
        }
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:20]
        folder = split.cache / f"order-{key}"
        try:
            if not folder.is_dir():
                self._keep(number, folder)
            return Epoch(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in Epoch._fields))
        except (ValueError, EOFError) as error:
            raise SettingError(
                f"{folder} is damaged ({error}): delete it, and it is written again"
            ) from error
        except OSError as error:
            raise SettingError(
                f"cannot use the cache folder {folder} ({error}): set --data-cache-path"
            ) from error

    def _keep(self, number: int, folder: Path) -> None:
        """Write the order into the folder; other ranks of this node that need it wait."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f"{folder.name}.lock")
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if folder.is_dir():
                # The file was reopened after its creator had removed it.
                lock.unlink(missing_ok=True)
                return
            with complete_folder(folder) as working:
                epoch = self._make(number)
                for name, array in zip(Epoch._fields, epoch, strict=True):
                    np.save(working / f"{name}.npy", array)
            lock.unlink()

    def _make(self, number: int) -> Epoch:
        split = self._split
        return make_epoch(
            split.corpus.lengths(split.first, split.last),
            first=split.first,
            sequence_length=self._sequence_length,
            seed=self._seed,
            epoch=number,
            shuffled=split.shuffled,
        )


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into; rename it at the end of the block, or remove it on an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        yield working
        working.chmod(0o755)
        try:
            working.rename(folder)
        except OSError:
            # Another process was faster; its files are identical.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _numbers(count: int) -> _Integers:
    return np.arange(count, dtype=np.int32 if count <= np.iinfo(np.int32).max else np.int64)
