"""Runs the tests of mutants: `python -m tests.mutants.run [NAME ...]`.

A name is a part of that of a source file or of a test; without one, all mutants run.
Each mutant is applied to one copy of the packages and the tests, in a folder that comes first on the path.
Its tests run in a copy of this process, which has imported PyTorch but nothing of the library. Ranks are
copies of that process, so most mutants take 2 or 3 seconds of CPU time.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import ROOT
from tests.mutants import Mutant, Source
from tests.mutants.lists import SOURCES

COPIED = ("sdp4bit", "sdp4bit_deepspeed", "sdp4bit_lab", "sdp4bit_megatron", "tests")
NOT_LINKED = (".git", "build", "dist", "runs")
IMPORTED = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    *("torch.testing._internal.distributed.fake_pg", "numpy", "hypothesis"),
    *("_hypothesis_pytestplugin", "pytest_timeout"),
)
"""Imported once; a package that is not installed here is left to the tests."""
ADAPTED = {"deepspeed": "tests/deepspeed/", "megatron": "tests/megatron/"}
"""Packages, and the folder of the tests that need them."""
LIMIT = 400
"""Seconds after which a test is taken to hang, which notices a mutant, too."""

_stamps = itertools.count(1_000_000_000)


def put(path: Path, text: str) -> None:
    """Write a source file; Python compiles it again because its time differs from all before."""
    path.write_text(text)
    stamp = next(_stamps)
    os.utime(path, (stamp, stamp))


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """Yield a folder like the root of the project, with copies of the packages and links to the rest."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        for each in ROOT.iterdir():
            if each.name in COPIED:
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(each, folder / each.name, ignore=ignored)
            elif each.name not in NOT_LINKED and not each.name.startswith(".venv"):
                (folder / each.name).symlink_to(each)
        yield folder


def _in_copy(folder: Path, tests: Sequence[str], output: Path) -> None:
    """Run tests in this process, which is a copy, and end it."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path[:] = [str(folder), *(each for each in sys.path if Path(each or ".").resolve() != ROOT)]
    for name in [name for name in sys.modules if name.split(".")[0] in COPIED]:
        del sys.modules[name]
    ranks = importlib.import_module("tests.ranks")
    ranks.copies = lambda modules: multiprocessing.get_context("fork")
    options = ["-q", "-x", "--tb=short", "--timeout", str(LIMIT)]
    if all("::" in test for test in tests):  # a slow test runs if it is named
        options += ["-m", "slow or not slow"]
    for plugin in ("cacheprovider", "xdist", "anyio"):
        options += ["-p", f"no:{plugin}"]
    code = pytest.main([*options, *tests])
    sys.stdout.flush()
    os._exit(int(code))


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Return the exit status of pytest and its output."""
    output = folder / "output.txt"
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        try:
            _in_copy(folder, tests, output)
        finally:
            os._exit(3)  # pytest has raised
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), output.read_text(errors="replace")


def verdict(mutant: Mutant, code: int, output: str) -> tuple[bool, str]:
    """Return whether the result of the tests is the one that is expected, and the result in words."""
    if code == 0:
        return bool(mutant.survives), "survives"
    if code != 1:
        return False, f"is not tested: pytest ended with {code}\n{output[-3000:]}"
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    found = f"is noticed by {first[1] if first else 'a test that hangs'}"
    return not mutant.survives, found + (", but is listed as a survivor" if mutant.survives else "")


def check(source: Source, folder: Path) -> list[str]:
    """Run the tests of a file without and with each of its mutants; return the differences from the list."""
    path = folder / source.file
    text, wrong = path.read_text(), list[str]()
    for tests in dict.fromkeys(mutant.tests or source.tests for mutant in source.mutants):
        code, output = run_tests(folder, tests)
        if code or " passed" not in output.splitlines()[-1]:
            return [f"{source.file}: its tests fail or skip without a mutant\n{output[-3000:]}"]
    for mutant in source.mutants:
        start, before = time.monotonic(), os.times()
        put(path, text.replace(mutant.old, mutant.new))
        try:
            code, output = run_tests(folder, mutant.tests or source.tests)
        finally:
            put(path, text)
        after = os.times()
        seconds = after.children_user + after.children_system - before.children_user - before.children_system
        is_right, found = verdict(mutant, code, output)
        shown = f"{source.file}: {mutant.new!r} for {mutant.old!r} {found}"
        print(
            f"{'' if is_right else 'WRONG '}{shown} ({seconds:.1f} CPU s, {time.monotonic() - start:.0f} s)"
        )
        sys.stdout.flush()
        if not is_right:
            wrong.append(shown)
    return wrong


def can_run(tests: Sequence[str]) -> bool:
    """Return whether the packages of adapters that tests need are installed."""
    return all(
        find_spec(name) for name, folder in ADAPTED.items() for test in tests if test.startswith(folder)
    )


def selected(chosen: Sequence[str]) -> list[Source]:
    """Return the mutants that can run, of files or with tests whose name holds one of these texts."""
    found = []
    for source in SOURCES:
        mutants = [
            mutant
            for mutant in source.mutants
            if can_run(mutant.tests or source.tests)
            and (
                not chosen
                or any(t in n for t in chosen for n in (source.file, *(mutant.tests or source.tests)))
            )
        ]
        if mutants:
            found.append(replace(source, mutants=tuple(mutants)))
    return found


def main(chosen: Sequence[str]) -> int:
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sources = selected(chosen)
    assert sources, f"no mutant can run of {chosen}"
    with copied() as folder:
        wrong = [each for source in sources for each in check(source, folder)]
    print("\n".join([f"{len(wrong)} mutants are not as listed", *wrong]))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
