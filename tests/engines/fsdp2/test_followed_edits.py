"""FSDP2 integration: weights that change without an optimizer step, in every way users know.

Layer: real processes over gloo, 2 nodes x 1 rank, and 2 x 2 for one of the ways. Each way of
`weight_edits.py` and `weight_loads.py` is tried with plain FSDP2, with replicas in full precision (equal bit
for bit) and with the default method. docs/fsdp2.md lists the ways; a test keeps the list up to date.
"""

from __future__ import annotations

import re
import warnings

import pytest

import tests.engines.fsdp2.weight_edits
import tests.engines.fsdp2.weight_loads
from tests import ROOT
from tests.engines.fsdp2.edited_runs import WAYS, faults_of
from tests.ranks import run_ranks

PRELOAD = [
    tests.engines.fsdp2.weight_edits.__name__,
    tests.engines.fsdp2.weight_loads.__name__,
]  # they register the ways


def find_faults(names: list[str], topology: int) -> dict[str, list[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: faults_of(name, topology) for name in names}


def merged(ranks: list[dict[str, list[str]]]) -> dict[str, list[str]]:
    return {
        name: [f"rank {rank}: {fault}" for rank, faults in enumerate(ranks) for fault in faults[name]]
        for name in ranks[0]
    }


@pytest.fixture(scope="module")
def faults() -> dict[str, list[str]]:
    return merged(run_ranks(find_faults, 2, list(WAYS), 1, timeout=280))


@pytest.mark.parametrize("name", WAYS)
def test_edits_are_followed_as_by_plain_fsdp2(faults: dict[str, list[str]], name: str) -> None:
    assert not faults[name], "\n".join(faults[name])


def test_nodes_of_two_ranks_follow_too() -> None:
    name = "averages_copied_in_and_out"
    assert merged(run_ranks(find_faults, 4, [name], 2)) == {name: []}


def test_the_documentation_lists_exactly_these_ways() -> None:
    page = (ROOT / "docs" / "fsdp2.md").read_text()
    section = page.partition("\n## What we follow\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(WAYS)
