"""Tests that start ranks are known as such, and a unit test cannot start any unnoticed. Layer: no process."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import starts_processes
from tests.ranks import STARTED, on_ranks


@on_ranks(2)
def on_two_ranks() -> None:
    """Do nothing, on each of two ranks."""


def calls_it() -> None:
    on_two_ranks()


def test_what_runs_on_ranks_is_no_unit_test() -> None:
    assert starts_processes(on_two_ranks) and starts_processes(calls_it)
    assert not starts_processes(test_a_unit_test_that_starts_ranks_fails)


def test_a_unit_test_that_starts_ranks_fails() -> None:
    with pytest.raises(AssertionError, match="marked unit, but starts a process"):
        sys.audit(STARTED, None)
