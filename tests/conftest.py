"""Options and fixtures of all tests, and the kind of each: `unit`, `gloo` or `ecosystem`, by its calls.

A test is `ecosystem` if `ECOSYSTEM` lists it, `gloo` if it starts processes or threads that communicate,
itself or through a fixture or a function of the tests, and `unit` otherwise. A unit test that starts a
process fails: then something is missing in `STARTERS`.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from types import CodeType, FunctionType
from typing import Any

import pytest

from sdp4bit.quantization import ops
from tests import mutations, ranks

ECOSYSTEM = (
    "tests/deepspeed/",
    "tests/ecosystem/",
    "tests/megatron/",
    "tests/kernels/",
    "tests/lab/report/test_page.py",
)
"""Where tests need another package's programs or compilers: Megatron-Core, numba and Triton, a
browser, trainers."""
LAB = ("tests/lab/", "tests/test_docs.py")
"""Tests of the programs and of texts about both packages; the others are tests of the library."""
STARTERS = (
    ranks.run_ranks,
    ranks.run_threads,
    subprocess.run,
    subprocess.Popen,
    subprocess.check_output,
    multiprocessing.get_context,
    os.fork,
)
FOLLOWED = (
    *("tests.", "benchmarks.", "sdp4bit_lab.common.launch.link"),
    *("sdp4bit_lab.common.launch.shared_gpu", "sdp4bit_lab.selftest.sharing"),
)
"""Modules whose functions may call them."""

_running_unit: list[str] = []


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@cache
def starts_processes(function: object) -> bool:
    """Return whether a function of the tests calls one of `STARTERS`, or another one that does."""
    return _calls(function, STARTERS, set())


def _calls(function: object, targets: tuple[object, ...], seen: set[int]) -> bool:
    if function in targets or (targets is STARTERS and hasattr(function, "in_rank")):
        return True
    drawn = getattr(function, "hypothesis", None)  # of @given, which calls the test that it decorates
    function = drawn.inner_test if drawn is not None else getattr(function, "__wrapped__", function)
    if isinstance(function, type):
        parts = [part for part in vars(function).values() if isinstance(part, FunctionType)]
        return any(_calls(part, targets, seen) for part in parts)
    if not isinstance(function, FunctionType) or id(function) in seen:
        return False
    seen.add(id(function))
    if not function.__module__.startswith(FOLLOWED):
        return False
    names = list(_names(function.__code__))
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    # subprocess.run and other attributes of modules.
    modules = [each for each in found if type(each).__name__ == "module"]
    found += [vars(module)[name] for module in modules for name in names if name in vars(module)]
    return any(_calls(each, targets, seen) for each in found if callable(each))


def _functions_of(item: pytest.Item) -> list[object]:
    """Return the functions of a test and of its fixtures."""
    definitions: dict[str, Any] = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
    return [getattr(item, "function", None), *(each[-1].func for each in definitions.values())]


def kind_of(item: pytest.Item) -> str:
    """Return whether a collected test is `ecosystem`, `gloo` or `unit`."""
    if item.nodeid.startswith(ECOSYSTEM):
        return "ecosystem"
    return "gloo" if any(starts_processes(function) for function in _functions_of(item)) else "unit"


def claims_to_train_like_plain(item: pytest.Item) -> bool:
    """Return whether a collected test calls an oracle that can look for mutations."""
    oracle = (mutations.check_that_mutations_are_noticed,)
    return any(_calls(function, oracle, set()) for function in _functions_of(item))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the slow tests."""
    parser.addoption("--mutations", action="store_true", help="break the communication on purpose")
    parser.addoption(
        "--slow-slice",
        metavar="I/N",
        help="of the slow tests run only the I-th of N parts; every slow test is in one of them",
    )


def slices_of(units: Sequence[tuple[str, str]], *, count: int) -> list[int]:
    """Return the part, 1 to count, that each slow test belongs to.

    Cases of a function take turns, as they take about as long as each other; where a function begins follows
    from its name alone, so that a new test moves no other. Tests that share the
    processes of a fixture of their module stay together.

    Args:
        units: of each test its function, and the case of it; an empty case keeps all of a function together.
    """
    cases: dict[str, int] = {}
    found = []
    for function, case in units:
        place = cases.get(function, 0)
        cases[function] = place + bool(case)
        found.append((zlib.crc32(function.encode()) + place) % count + 1)
    return found


def _unit(item: pytest.Item) -> tuple[str, str]:
    """Return the function and the case of a test, for `slices_of`."""
    definitions: dict[str, Any] = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
    shared = sorted(name for name, found in definitions.items() if found[-1].scope in ("module", "class"))
    path, _, name = item.nodeid.partition("::")
    if shared:
        return f"{path}::{' '.join(shared)}", ""
    return f"{path}::{name.partition('[')[0]}", name


def _leave_out_other_slices(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("--slow-slice")
    if chosen is None:
        return
    part, _, count = chosen.partition("/")
    if not (part.isdecimal() and count.isdecimal() and 1 <= int(part) <= int(count)):
        raise pytest.UsageError(f"--slow-slice={chosen!r} must be I/N, such as 3/7, with I from 1 to N")
    slow = [item for item in items if item.get_closest_marker("slow")]
    parts = dict(zip(slow, slices_of([_unit(item) for item in slow], count=int(count)), strict=True))
    others = [item for item in slow if parts[item] != int(part)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if parts.get(item) in (None, int(part))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the kind of every test. Files whose tests start processes or compile come first: they take long,
    and the short ones behind them fill the rest of the last worker's time."""
    kinds = {item: kind_of(item) for item in items}
    for item, kind in kinds.items():
        item.add_marker(kind)
        item.add_marker("lab" if item.nodeid.startswith(LAB) else "lib")
    long = {item.path for item, kind in kinds.items() if kind != "unit"}
    items.sort(key=lambda item: item.path not in long)
    if config.getoption("--mutations"):
        ranks.before_functions.append(mutations.search)
        items[:] = [item for item in items if claims_to_train_like_plain(item)]
    _leave_out_other_slices(config, items)


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen" and arguments[0] == "fc-list":
        return  # matplotlib, the first time on a machine
    if _running_unit and event in (ranks.STARTED, "subprocess.Popen", "os.fork", "os.posix_spawn"):
        raise AssertionError(f"{_running_unit[-1]} is marked unit, but starts a process ({event})")


# Shells without job control start background commands with SIGINT ignored; the tests' processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
platform.processor()  # asks a program, once in a process
sys.addaudithook(_refuse_processes)


@pytest.fixture(autouse=True)
def _only_others_start_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Note that a unit test is running, once the fixtures of wider scope are there."""
    if request.node.get_closest_marker("unit"):
        _running_unit.append(request.node.name)
        yield
        _running_unit.pop()
    else:
        yield


@pytest.fixture(autouse=True, scope="session")
def _operators_check_their_arguments() -> Iterator[None]:
    """Bind the checked operators, because CPU kernels take raw addresses; `ranks` does so, too."""
    with ops.checked():
        yield


PACKAGES = ("rich", "matplotlib", "tokenizers", "scipy", "jinja2", "yaml")
MISSING = [name for name in PACKAGES if find_spec(name) is None]
NEEDING = (
    *("compare/*", "report/*", "plan/test_[cdp]*.py"),
    *("pretrain/test_*.py", "pretrain/config/*", "pretrain/model/*", "pretrain/step/*"),
)
collect_ignore_glob = [*NEEDING] if MISSING else []


def pytest_report_header() -> str:
    return f"left out, as {', '.join(MISSING)} is missing: tests of the programs" if MISSING else ""
