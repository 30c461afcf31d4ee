"""Every fault of `tests/mutants` is noticed by a test, unless the list has a reason why none can.

Layer: no process for the lists; a process for each file of source, and ranks over gloo.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import ROOT
from tests.mutants import Mutant, Source, run
from tests.mutants.lists import SOURCES

FILES = [source.file for source in SOURCES]


def test_each_file_is_listed_once() -> None:
    assert [name for name, count in Counter(FILES).items() if count > 1] == []


@pytest.mark.parametrize("source", SOURCES, ids=FILES)
def test_each_text_is_found_once_and_its_mutant_is_python(source: Source) -> None:
    """A text that has moved is an error, because its mutant would change nothing."""
    text, wrong = (ROOT / source.file).read_text(), []
    for mutant in source.mutants:
        if text.count(mutant.old) != 1:
            wrong.append(f"{mutant.old!r} is found {text.count(mutant.old)} times")
            continue
        changed = ast.dump(ast.parse(text.replace(mutant.old, mutant.new)))
        if changed == ast.dump(ast.parse(text)):
            wrong.append(f"{mutant.new!r} for {mutant.old!r} changes nothing")
    assert wrong == []


def names_of_tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}


def test_each_test_that_is_named_exists() -> None:
    """Without it pytest would end with an error, in the slow test only."""
    nodes = {node for source in SOURCES for node in source.tests}
    nodes |= {node for source in SOURCES for mutant in source.mutants for node in mutant.tests}
    for node in sorted(nodes):
        path, _, name = node.partition("::")
        assert (ROOT / path).exists(), node
        assert not name or name.partition("[")[0] in names_of_tests(ROOT / path), node


def test_a_mutant_is_as_listed_only_if_a_test_fails() -> None:
    listed, survivor = Mutant("a", "b"), Mutant("a", "b", survives="for a reason")
    failed = "FAILED tests/test_a.py::test_b[c] - AssertionError\n1 failed in 2.00s"
    assert run.verdict(listed, 1, failed) == (True, "is noticed by tests/test_a.py::test_b[c]")
    assert run.verdict(listed, 0, "1 passed in 2.00s") == (False, "survives")
    assert run.verdict(survivor, 0, "1 passed in 2.00s") == (True, "survives")
    assert run.verdict(survivor, 1, failed)[0] is False
    for code in (2, 3, 4, 5):  # interrupted, internal error, usage, nothing collected
        assert run.verdict(listed, code, "")[0] is False


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("source", SOURCES, ids=FILES)
def test_no_mutant_survives_unless_it_is_listed(source: Source) -> None:
    if not run.selected([source.file]):
        pytest.skip("the package that it adapts is not installed: make test-deepspeed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants.run", source.file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
