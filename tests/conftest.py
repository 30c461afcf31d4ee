"""Options and fixtures of all tests, and the two marks of each: its package and its kind.

`lab` and `ecosystem` follow from the folder (`FOLDERS`) or from a mark in the file. A test is `gloo` if it
is marked so, or decorated with `on_ranks`: it starts processes, or threads that communicate. All others are
`lib` and `unit`. A unit test that starts a process fails.
"""

from __future__ import annotations

import platform
import signal
import sys
from collections.abc import Generator, Iterator
from importlib.util import find_spec

import pytest

from sdp4bit.quantization import ops
from tests import mutations, ranks

FOLDERS = {
    "tests/lab/": "lab",
    "tests/ecosystem/": "ecosystem",
    "tests/megatron/": "ecosystem",
    "tests/deepspeed/": "ecosystem",
    "tests/kernels/": "ecosystem",
}
"""The mark that a folder gives to its tests."""

_running_unit: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that breaks the communication."""
    parser.addoption("--mutations", action="store_true", help="break the communication on purpose")


def kind_of(item: pytest.Item) -> str:
    """Return `ecosystem`, `gloo` or `unit`."""
    if item.get_closest_marker("ecosystem"):
        return "ecosystem"
    on_ranks = hasattr(getattr(item, "function", None), "in_rank")
    return "gloo" if on_ranks or item.get_closest_marker("gloo") else "unit"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test. Files whose tests start processes or compile come first: they take long, and the
    short ones behind them fill the rest of the last worker's time."""
    for item in items:
        for folder, mark in FOLDERS.items():
            if item.nodeid.startswith(folder):
                item.add_marker(mark)
        if not item.get_closest_marker("lab"):
            item.add_marker("lib")
        item.add_marker(kind_of(item))
    long = {item.path for item in items if not item.get_closest_marker("unit")}
    items.sort(key=lambda item: item.path not in long)
    if config.getoption("--mutations"):
        ranks.before_functions.append(mutations.search)
        items[:] = [item for item in items if item.get_closest_marker("like_plain")]


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen" and arguments[0] == "fc-list":
        return  # matplotlib, the first time on a machine
    if _running_unit and event in (ranks.STARTED, "subprocess.Popen", "os.fork", "os.posix_spawn"):
        raise AssertionError(f"{_running_unit[-1]} starts a process ({event}): mark it with gloo")


if find_spec("hypothesis"):  # not in the trainers' environment
    from hypothesis import settings

    # The same cases in every run: a change is not refused for a case that its parent would fail, too.
    # New cases are tried every night, and by `pytest --hypothesis-profile=random`.
    settings.register_profile("random", derandomize=False)
    settings.register_profile("fixed", derandomize=True)
    settings.load_profile("fixed")

# Shells without job control start background commands with SIGINT ignored; the tests' processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
platform.processor()  # asks a program, once in a process
sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note that a unit test is running, with its fixtures."""
    if item.get_closest_marker("unit") is None:
        return (yield)
    _running_unit.append(item.name)
    try:
        return (yield)
    finally:
        _running_unit.pop()


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
