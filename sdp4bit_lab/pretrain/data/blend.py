"""Blend corpora: parse weights and choose the corpus of each sample."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from sdp4bit_lab.common.settings import require
from sdp4bit_lab.pretrain.data.indexed import is_weight
from sdp4bit_lab.pretrain.data.samples import Samples, Split, Tokens


@dataclass(frozen=True, kw_only=True)
class Part:
    """One corpus of a blend."""

    prefix: Path
    weight: Fraction | None
    """Share of the samples before normalization; None for shares in proportion to size."""


def parse_blend(paths: Sequence[str | Path], *, option: str) -> list[Part]:
    """Parse `[WEIGHT] PREFIX ...`; SettingError unless all or none have a positive weight."""
    given = [str(path) for path in paths]
    weights = [_weight(text, option=option) for text in given]
    if not any(weight is not None for weight in weights):
        return [Part(prefix=Path(text), weight=None) for text in given]
    alternating = len(given) % 2 == 0 and all(
        (weight is not None) == (position % 2 == 0) for position, weight in enumerate(weights)
    )
    require(
        alternating,
        f"{option} {' '.join(given)}: give a weight before every prefix or none, as in 0.3 a 0.7 b",
    )
    return [
        Part(prefix=Path(prefix), weight=weight)
        for weight, prefix in zip(weights[::2], given[1::2], strict=True)
    ]


def _weight(text: str, *, option: str) -> Fraction | None:
    if not is_weight(text):
        return None
    number = float(text)
    require(math.isfinite(number) and number > 0, f"{option}: weight {text} must be above 0")
    return Fraction(text.replace("_", ""))  # which Python 3.10 does not accept


@dataclass(frozen=True, kw_only=True)
class BlendedSplit:
    """One split, such as training, of several corpora."""

    names: Sequence[str]
    splits: Sequence[Split]
    weights: Sequence[Fraction] | None
    """Shares of the samples; None to use up all corpora at the same time."""

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits)

    def samples(self, *, sequence_length: int, seed: int | None) -> BlendedSamples:
        """Return the mixed samples of all corpora; SettingError if one corpus has none."""
        parts = [split.samples(sequence_length=sequence_length, seed=seed) for split in self.splits]
        for name, split, part in zip(self.names, self.splits, parts, strict=True):
            require(
                part.count > 0,
                f"{name} has {split.tokens} tokens, fewer than one sequence of {sequence_length} plus the "
                "next token: remove it, or give shorter sequences or another --split",
            )
        return BlendedSamples(parts, weights=self.weights or [Fraction(part.count) for part in parts])


class BlendedSamples:
    """Samples of several sources in fixed shares.

    The first source gets its share of all numbers, evenly spread; the second its share of the remaining ones,
    and so on. Among the first n samples, the first source has its share rounded to an integer; the error of
    the others stays below the number of sources for any n. No counting up to n is needed.
    """

    def __init__(self, parts: Sequence[Samples], *, weights: Sequence[Fraction]) -> None:
        self._parts = parts
        left = [sum(weights[index:], Fraction(0)) for index in range(len(weights))]
        self._shares = [weight / rest for weight, rest in zip(weights, left, strict=True)]
        self.count = sum(part.count for part in parts)

    def rows(self, numbers: Iterable[int]) -> Tokens:
        turns = (self.turn(number) for number in numbers)
        return np.concatenate([self._parts[part].rows([number]) for part, number in turns])

    def turn(self, number: int) -> tuple[int, int]:
        """Return the source of a sample, and its number within the source."""
        for part, share in enumerate(self._shares[:-1]):
            before, after = _rounded(number * share), _rounded((number + 1) * share)
            if after > before:
                return part, before
            number -= before
        return len(self._parts) - 1, number


def _rounded(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))
