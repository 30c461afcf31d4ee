"""What every source of tokens offers: numbered samples of one length, without an end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


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
