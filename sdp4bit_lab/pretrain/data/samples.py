"""Define the interface of token sources, and synthetic tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

MOCK_SAMPLES = 1 << 40
"""Number of synthetic samples; more than any run reads."""
_VALIDATION_SEED = (1 << 64) - 1
_JUMPS = 64


class Samples(Protocol):
    """Numbered samples, each determined by the seed and its number."""

    @property
    def count(self) -> int:
        """Samples per epoch; larger numbers continue with the next epoch."""
        ...

    def rows(self, numbers: Iterable[int]) -> Tokens:
        """Return the tokens of these samples plus the next token, [samples, length + 1]."""
        ...


class Split(Protocol):
    """Tokens for training, validation or test."""

    @property
    def tokens(self) -> int: ...

    def samples(self, *, sequence_length: int, seed: int | None) -> Samples:
        """Return the samples in the order of a seed; None: fixed order for validation."""
        ...


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Training, validation and test data."""

    key: str
    """Equal for equal tokens and splits."""
    train: Split
    validation: Split
    test: Split | None = None
    needs_test: bool = True
    """Whether a test split that is too short is an error; if not, the test is skipped."""
    masked_token: int | None = None
    """Token whose successor is excluded from the loss."""


@dataclass(frozen=True, kw_only=True)
class MockSplit:
    """Tokens that count up and jump to a random token about every 64 tokens."""

    vocabulary: int
    number: int = 0
    """Distinguishes training, validation and test."""

    @property
    def tokens(self) -> int:
        return MOCK_SAMPLES

    def samples(self, *, sequence_length: int, seed: int | None) -> MockSamples:
        return MockSamples(
            vocabulary=self.vocabulary,
            sequence_length=sequence_length,
            seed=_VALIDATION_SEED if seed is None else seed,
            split=self.number,
        )


@dataclass(frozen=True, kw_only=True)
class MockSamples:
    """Synthetic samples, determined by the seed, the split and the sample number."""

    vocabulary: int
    sequence_length: int
    seed: int
    split: int = 0
    count: int = MOCK_SAMPLES

    def rows(self, numbers: Iterable[int]) -> Tokens:
        return np.stack([self._row(number) for number in numbers])

    def _row(self, number: int) -> Tokens:
        # Raw bits of a counter-based generator, which NumPy guarantees not to change.
        length = self.sequence_length + 1
        generator = np.random.Philox(key=self.seed, counter=[0, 0, number, self.split])
        bits = generator.random_raw(2 * length).reshape(2, length)
        steps = np.where(bits[0] % _JUMPS == 0, bits[1] % self.vocabulary, 1).astype(np.int64)
        steps[0] = int(bits[1, 0] % self.vocabulary)
        return np.cumsum(steps) % self.vocabulary
