"""A unit test cannot start a process, and every slow test belongs to a part. Layer: files."""

from __future__ import annotations

import re
import sys

import pytest

from tests import ROOT
from tests.ranks import STARTED


@pytest.mark.parametrize("event", [STARTED, "subprocess.Popen", "os.fork", "os.posix_spawn"])
def test_a_unit_test_that_starts_a_process_fails(event: str) -> None:
    with pytest.raises(AssertionError, match=r"starts a process .*: mark it with gloo"):
        sys.audit(event, None)


def parts() -> dict[str, list[str]]:
    """Return the folders and files of each part of the slow tests."""
    lines = re.findall(r"^SLOW_(\w+) := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {name: paths.split() for name, paths in lines}


def test_every_slow_test_is_in_one_part() -> None:
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.slow" in path.read_text()]
    found = {path: [] for path in files if path.name != "test_kinds.py"}
    for name, patterns in parts().items():
        for pattern in patterns:
            paths = list((ROOT / "tests").glob(pattern))
            assert paths, pattern
            for path in found:
                found[path] += [name for each in paths if path.is_relative_to(each)]
    assert {path.name: names for path, names in found.items() if len(names) != 1} == {}


def test_parts_of_the_slow_tests_take_turns_and_all_run_at_night() -> None:
    (nightly,) = re.findall(
        r"^ +part: \[([^]]*)\]$", (ROOT / ".github/workflows/ci.yml").read_text(), re.MULTILINE
    )
    assert sorted(re.split(r",\s+", nightly)) == sorted(parts())
    daily = re.findall(r"parts\+?=\((.*)\)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert sorted(" ".join(daily).split()) == sorted([*parts(), "ecosystem", "deepspeed"])
