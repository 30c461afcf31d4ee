"""What every source of tokens offers: numbered samples of one length, without an end; and synthetic ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sdp4bit_lab.pretrain.data.tokenizer import BytePairTokenizer

Tokens = npt.NDArray[np.int64]

MOCK_SAMPLES = 1 << 40
"""Synthetic samples there are; more than anybody reads."""
_VALIDATION_SEED = (1 << 64) - 1
_JUMPS = 64


class Samples(Protocol):
    """Numbered samples; which tokens a number means depends on the seed and the number alone."""

    @property
    def count(self) -> int:
        """Samples until all tokens have been seen once; larger numbers see them again."""
        ...

    def rows(self, numbers: Iterable[int]) -> Tokens:
        """Return the tokens of these samples and the token that follows each; [samples, length + 1]."""
        ...


class Split(Protocol):
    """The tokens for one purpose: training, validation or test."""

    @property
    def tokens(self) -> int:
        """Tokens there are."""
        ...

    def samples(self, *, sequence_length: int, seed: int | None) -> Samples:
        """Return the samples in the order of a seed; None: that of validation, always the same."""
        ...


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Tokens to train and validate on."""

    key: str
    """Equal for equal tokens and splits."""
    train: Split
    validation: Split
    test: Split | None = None
    needs_test: bool = True
    """Whether a test that is too short is an error; else the run goes without."""
    tokenizer: BytePairTokenizer | None = None
    masked_token: int | None = None
    """Token after which the loss does not count."""


@dataclass(frozen=True, kw_only=True)
class MockSplit:
    """Tokens that count up from a random one and jump to another about every 64 tokens."""

    vocabulary: int
    number: int = 0
    """Training, validation and test have different ones."""

    @property
    def tokens(self) -> int:
        """More tokens than anybody reads."""
        return MOCK_SAMPLES

    def samples(self, *, sequence_length: int, seed: int | None) -> MockSamples:
        """Return the samples of a seed; those of validation are none of these."""
        return MockSamples(
            vocabulary=self.vocabulary,
            sequence_length=sequence_length,
            seed=_VALIDATION_SEED if seed is None else seed,
            split=self.number,
        )


@dataclass(frozen=True, kw_only=True)
class MockSamples:
    """Numbered synthetic samples: the same for the same seed, from nothing but the numbers of split and
    sample."""

    vocabulary: int
    sequence_length: int
    seed: int
    split: int = 0
    count: int = MOCK_SAMPLES

    def rows(self, numbers: Iterable[int]) -> Tokens:
        """Return the tokens of these samples and the token that follows each; [samples, length + 1]."""
        return np.stack([self._row(number) for number in numbers])

    def _row(self, number: int) -> Tokens:
        # Raw bits of a counter-based generator: frozen in NumPy, and no two pairs of numbers share any.
        length = self.sequence_length + 1
        generator = np.random.Philox(key=self.seed, counter=[0, 0, number, self.split])
        bits = generator.random_raw(2 * length).reshape(2, length)
        steps = np.where(bits[0] % _JUMPS == 0, bits[1] % self.vocabulary, 1).astype(np.int64)
        steps[0] = int(bits[1, 0] % self.vocabulary)
        return np.cumsum(steps) % self.vocabulary
