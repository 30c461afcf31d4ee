"""Mutants of the source: faults of one line, each of which a test must notice.

A fault of the sums, of a sign or of a counter may pass a test whose bound is wide, or whose case gives the
same number with a wrong formula. The modules of this package list such faults by source file, with the tests
nearest to it. `run.py` applies each to a copy of the packages and runs these tests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A text that is found exactly once in its file, and the text that replaces it."""

    old: str
    new: str
    survives: str = ""
    """The reason why no test can notice it; "" if one must."""
    tests: tuple[str, ...] = ()
    """Of this mutant alone; () for those of the file."""


@dataclass(frozen=True)
class Source:
    """A file with its mutants, and the tests that are run with each until one fails."""

    file: str
    tests: tuple[str, ...]
    mutants: tuple[Mutant, ...]


M = Mutant
