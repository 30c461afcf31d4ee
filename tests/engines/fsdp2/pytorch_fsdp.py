"""Run PyTorch's own tests of FSDP2 twice, plain and with the library attached, and compare.

`make test-pytorch PYTORCH=folder` takes a checkout of PyTorch, of the release that is installed; nothing of
it is part of this repository. The tests run on CPU tensors over gloo, whose ranks stand for accelerators:
tests that skip without GPUs run too, and those that need a GPU's streams or memory fail plain and are not
compared.

The second run attaches the library to every root FSDP module at its first forward, with replicas in full
precision: what a test sees then equals plain FSDP2 bit for bit. This module is the program, and the pytest
plugin that it starts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

FOLDER = Path("test/distributed/_composable/fsdp")
DIFFERENT = {
    "TestFullyShardGradientAccumulation::test_gradient_accumulation": "counts collectives",
}
"""Tests that pass plain, and need not pass attached: why."""
_PRELOADED = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.testing._internal.common_fsdp",
    "torch.testing._internal.distributed._tensor.common_dtensor",
    "sdp4bit",
]


# -- the plugin ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the processes of a test are told."""

    attach: bool
    ranks: int
    log: str
    test: str = ""


def pretend_accelerators(ranks: int) -> None:
    """CPU tensors stand for those of an accelerator, `ranks` of which there are."""
    import torch
    from torch.testing._internal import common_distributed, common_fsdp, common_utils

    def run_if_enough(needed: int, **_: Any) -> Callable[[Any], Any]:
        return pytest.mark.skipif(needed > ranks, reason=f"needs {needed} ranks")

    common_distributed.skip_if_lt_x_gpu = run_if_enough
    common_fsdp.DEVICE_COUNT = ranks
    common_utils.device_sleep = lambda *_: None  # it delays streams, of which a host has none
    current = torch.accelerator.current_accelerator
    torch.accelerator.current_accelerator = lambda *args, **kw: current(*args, **kw) or torch.device("cpu")
    torch.accelerator.device_count = torch.cpu.device_count = lambda: ranks
    parallel = torch.nn.parallel.DistributedDataParallel
    init = parallel.__init__

    def init_without_devices(self: Any, module: Any, device_ids: Any = None, **options: Any) -> None:
        init(self, module, **options)  # on the host it takes none

    parallel.__init__ = init_without_devices  # type: ignore[method-assign]


def limit_ranks(case: type, ranks: int) -> None:
    """A test case runs on this many ranks at most."""
    for kind in case.__mro__:
        wanted = vars(kind).get("world_size")
        if isinstance(wanted, property):
            case.world_size = property(lambda self, get=wanted.fget: min(get(self), ranks))  # type: ignore[attr-defined]
            return


_attached: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def attach_to_roots(settings: Callable[[], Settings]) -> None:
    """Attach the library to every root FSDP module as soon as FSDP2 knows that it is one."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.utils._python_dispatch import _disable_current_modes

    import sdp4bit

    config = sdp4bit.SDP4BitConfig(weights=sdp4bit.WeightConfig(bits=None), gradients=None)
    lazy_init = FSDPState._lazy_init

    def lazy_init_and_attach(self: Any) -> None:
        is_new = self._is_root is None
        lazy_init(self)
        if is_new and any(state._fsdp_param_groups for state in self._state_ctx.all_states):
            (root,) = self._modules
            with _disable_current_modes():
                _attached[root] = sdp4bit.quantize_communication(root, topology=1, config=config)
            told = settings()
            with open(told.log, "a") as log:
                log.write(f"{told.test}\n")

    FSDPState._lazy_init = lazy_init_and_attach  # type: ignore[method-assign]


def run_rank(
    settings: Settings, module: str, case: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Be one rank of a test: what PyTorch's test case would start, in a process prepared for it."""
    pretend_accelerators(settings.ranks)
    if settings.attach:
        attach_to_roots(lambda: settings)
    started = getattr(importlib.import_module(module), case)
    limit_ranks(started, settings.ranks)
    started._run(*args, **kwargs)


class Plugin:
    """Runs PyTorch's test cases with processes and threads that are prepared for it."""

    def __init__(self, settings: Settings, outcomes: str) -> None:
        self.settings, self.outcomes = settings, outcomes
        self.test = ""
        self.results: dict[str, tuple[str, str]] = {}

    def current(self) -> Settings:
        """Return the settings with the name of the test that is running."""
        return replace(self.settings, test=self.test)

    def prepare(self) -> None:
        """Everything that a test module may import is replaced before the first is imported."""
        from torch.testing._internal.common_distributed import MultiProcessTestCase

        pretend_accelerators(self.settings.ranks)
        if self.settings.attach:
            attach_to_roots(self.current)  # tests whose ranks are threads of this process
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOADED, __name__])

        def make(*, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
            case = target.__self__
            told = (self.current(), case.__module__, case.__qualname__, args, kwargs)
            return context.Process(target=run_rank, args=told, name=name)

        MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(make)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for case in {item.cls for item in items if isinstance(item, pytest.Function) and item.cls}:
            limit_ranks(case, self.settings.ranks)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid.partition("::")[2]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = "" if report.outcome == "passed" else str(report.longrepr)
            self.results[self.test] = report.outcome, text

    def pytest_sessionfinish(self) -> None:
        Path(self.outcomes).write_text(json.dumps(self.results))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options by which the program talks to its plugin."""
    parser.addoption("--attach", action="store_true")
    parser.addoption("--ranks", type=int, required=True)
    parser.addoption("--outcomes", required=True)


def pytest_configure(config: pytest.Config) -> None:
    """The plugin is ready before tests are collected."""
    outcomes = config.getoption("--outcomes")
    settings = Settings(
        attach=config.getoption("--attach"), ranks=config.getoption("--ranks"), log=f"{outcomes}.log"
    )
    plugin = Plugin(settings, outcomes)
    plugin.prepare()
    config.pluginmanager.register(plugin)


# -- the program ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one test of PyTorch ended."""

    outcome: str
    text: str = ""
    attached: bool = False
    """The library has been attached to at least one root, on at least one rank."""


def run_file(file: Path, *, attach: bool, ranks: int, select: str, timeout: float) -> dict[str, Outcome]:
    """Return how the tests of a file end; all of them fail if the file cannot be imported."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes, settings = Path(folder, "outcomes"), Path(folder, "pytest.ini")
        settings.write_text("[pytest]\n")
        options = [
            "-q",
            "-c",
            str(settings),
            "--rootdir",
            str(file.parent),
            "-p",
            "tests.engines.fsdp2.pytorch_fsdp",
        ]
        options += ["-p", "no:cacheprovider", "--noconftest", "--timeout", "0", "--outcomes", str(outcomes)]
        options += ["--ranks", str(ranks), *(["--attach"] if attach else []), "-k", select]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, str(file)],
            env={**os.environ, "PYTHONPATH": path, "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(timeout))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        log = Path(f"{outcomes}.log")
        attached = set(log.read_text().splitlines()) if log.exists() else set()
        if not outcomes.exists() or done.returncode not in (0, 1, 5):
            return {"(file)": Outcome(outcome="failed", text=done.stdout)}
        results = json.loads(outcomes.read_text())
    return {
        name: Outcome(outcome=outcome, text=text, attached=name in attached)
        for name, (outcome, text) in results.items()
    }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The tests of one file, plain and attached."""

    file: str
    plain: dict[str, Outcome]
    attached: dict[str, Outcome]

    def named(self, outcome: str) -> list[str]:
        """Return the tests that end like this in a plain run."""
        return [name for name, result in self.plain.items() if result.outcome == outcome]

    @property
    def kept(self) -> list[str]:
        """The tests that pass with the library attached, of those that pass without."""
        return [name for name in self.named("passed") if self._attached(name).outcome == "passed"]

    @property
    def lost(self) -> dict[str, str]:
        """The tests that do not, and what they say."""
        return {
            name: _summary(self._attached(name)) for name in self.named("passed") if name not in self.kept
        }

    @property
    def idle(self) -> list[str]:
        """The tests to which there was nothing to attach: no FSDP module with parameters ran."""
        return [name for name in self.kept if not self._attached(name).attached]

    def _attached(self, name: str) -> Outcome:
        return self.attached.get(name, Outcome(outcome="failed", text="has not run"))


def _summary(outcome: Outcome) -> str:
    """Return the line of a failure that tells most: the last exception of a rank."""
    lines = [line.removeprefix("E").strip() for line in outcome.text.splitlines()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    ours = [line for line in raised if "sdp4bit" in line]
    return [*lines, *raised, *ours][-1][:200] if lines else outcome.outcome


def table(comparisons: Sequence[Comparison]) -> str:
    """Return what was compared, and every test that differs with its reason."""
    rows = [("tests", "pass plain", "pass attached", "of these not attached", "fail plain", "skip")]
    counts = [
        [len(names) for names in (c.named("passed"), c.kept, c.idle, c.named("failed"), c.named("skipped"))]
        for c in comparisons
    ]
    totals = [sum(column) for column in zip(*counts, strict=True)]
    named = [*zip([c.file for c in comparisons], counts, strict=True), ("all", totals)]
    rows += [(name, *map(str, numbers)) for name, numbers in named]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for c in comparisons:
        text += [
            f"{c.file} {name}: {DIFFERENT.get(name, 'NOT EXPECTED')}: {said}" for name, said in c.lost.items()
        ]
    for c in comparisons:
        text += [
            f"not compared, fails plain: {c.file} {name}: {_summary(c.plain[name])}"
            for name in c.named("failed")
        ]
    return "\n".join(line.rstrip() for line in text)


def main() -> int:
    """Print the table; return 1 if a test fails with the library attached that has no reason to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a checkout of PyTorch")
    parser.add_argument("--ranks", type=int, default=2, help="at most so many processes for a test")
    parser.add_argument("--files", default="test_fully_shard_*.py", help="which files of the folder")
    parser.add_argument("--select", default="", help="which tests: pytest's -k")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one test")
    options = parser.parse_args()
    files = sorted((options.checkout / FOLDER).glob(options.files))
    if not files:
        parser.error(f"no {options.files} in {options.checkout / FOLDER}")
    comparisons = []
    for file in files:
        plain, attached = (
            run_file(
                file.resolve(),
                attach=attach,
                ranks=options.ranks,
                select=options.select,
                timeout=options.timeout,
            )
            for attach in (False, True)
        )
        comparisons.append(Comparison(file=file.stem, plain=plain, attached=attached))
        print(f"{file.stem}: {len(comparisons[-1].lost)} of {len(plain)} tests differ", flush=True)
    print(table(comparisons))
    return int(any(name not in DIFFERENT for c in comparisons for name in c.lost))


if __name__ == "__main__":
    raise SystemExit(main())
