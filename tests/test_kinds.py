"""Tests that start ranks are known as such, and a unit test cannot start any unnoticed. Layer: no process."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import slices_of, starts_processes
from tests.ranks import STARTED, on_ranks


@on_ranks(2)
def on_two_ranks() -> None:
    """Do nothing, on each of two ranks."""


def calls_it() -> None:
    on_two_ranks()


def test_what_runs_on_ranks_is_no_unit_test() -> None:
    assert starts_processes(on_two_ranks) and starts_processes(calls_it)
    assert not starts_processes(test_a_unit_test_that_starts_ranks_fails)


def test_slices_spread_the_cases_of_a_function_and_keep_what_shares_a_fixture_together() -> None:
    cases = [("a.py::test_one", f"case {n}") for n in range(14)]
    together = [("b.py::runs", "")] * 3
    alone = [(f"c.py::test_{n}", "") for n in range(100)]
    found = slices_of([*cases, *together, *alone], count=7)
    assert sorted(found[:14]) == sorted([*range(1, 8)] * 2)
    assert len(set(found[14:17])) == 1
    assert set(found[17:]) == set(range(1, 8))
    # A new function moves none of the others.
    assert slices_of([("a.py::test_new", ""), *cases, *together, *alone], count=7)[1:] == found


def test_a_unit_test_that_starts_ranks_fails() -> None:
    with pytest.raises(AssertionError, match="marked unit, but starts a process"):
        sys.audit(STARTED, None)
