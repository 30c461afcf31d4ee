"""Synthetic tokens: the same for the same seed, from nothing but the number of a sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sdp4bit.pretrain.data.samples import Tokens

COUNT = 1 << 40
"""Samples there are; more than anybody reads."""
_VALIDATION_SEED = (1 << 64) - 1
_JUMPS = 64


@dataclass(frozen=True, kw_only=True)
class MockSplit:
    """Tokens that count up from a random one and jump to another about every 64 tokens."""

    vocabulary: int

    @property
    def tokens(self) -> int:
        """More tokens than anybody reads."""
        return COUNT

    def samples(self, *, sequence_length: int, seed: int | None) -> MockSamples:
        """Return the samples of a seed; those of validation are none of these."""
        return MockSamples(
            vocabulary=self.vocabulary,
            sequence_length=sequence_length,
            seed=_VALIDATION_SEED if seed is None else seed,
        )


@dataclass(frozen=True, kw_only=True)
class MockSamples:
    """Numbered synthetic samples."""

    vocabulary: int
    sequence_length: int
    seed: int
    count: int = COUNT

    def rows(self, numbers: Iterable[int]) -> Tokens:
        """Return the tokens of these samples and the token that follows each; [samples, length + 1]."""
        return np.stack([self._row(number) for number in numbers])

    def _row(self, number: int) -> Tokens:
        # Raw bits of a counter-based generator: frozen in NumPy, and no two numbers share any.
        length = self.sequence_length + 1
        generator = np.random.Philox(key=self.seed, counter=[0, 0, number, 0])
        bits = generator.random_raw(2 * length).reshape(2, length)
        steps = np.where(bits[0] % _JUMPS == 0, bits[1] % self.vocabulary, 1).astype(np.int64)
        steps[0] = int(bits[1, 0] % self.vocabulary)
        return np.cumsum(steps) % self.vocabulary
