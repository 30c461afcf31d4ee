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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

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
ATTACH, RANKS, OUTCOMES = "SDP4BIT_ATTACH", "SDP4BIT_RANKS", "SDP4BIT_OUTCOMES"
"""Variables of the environment by which the program tells its plugin, and the ranks that this starts, whether
to attach, how many ranks a test has at most, and the file for outcomes; the file's name with ".log" lists the
tests in which a rank has attached."""


# -- the plugin ---------------------------------------------------------------------------------------


def pretend_accelerators() -> None:
    """CPU tensors stand for those of an accelerator; there is one for each rank."""
    import torch
    from torch.testing._internal import common_distributed, common_fsdp, common_utils

    ranks = int(os.environ[RANKS])

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


def limit_ranks(case: type) -> None:
    """A test case runs on as many ranks as there are, at most."""
    for kind in case.__mro__:
        wanted = vars(kind).get("world_size")
        if isinstance(wanted, property):
            least = property(lambda self, get=wanted.fget: min(get(self), int(os.environ[RANKS])))
            case.world_size = least  # type: ignore[attr-defined]
            return


_attached: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def attach_to_roots(test: Callable[[], str]) -> None:
    """Attach the library, if asked for, to every root FSDP module as soon as FSDP2 knows that it is one."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.utils._python_dispatch import _disable_current_modes

    import sdp4bit

    if ATTACH not in os.environ:
        return
    config = sdp4bit.SDP4BitConfig(weights=sdp4bit.WeightConfig(bits=None), gradients=None)
    lazy_init = FSDPState._lazy_init

    def lazy_init_and_attach(self: Any) -> None:
        is_new = self._is_root is None
        lazy_init(self)
        if is_new and any(state._fsdp_param_groups for state in self._state_ctx.all_states):
            (root,) = self._modules
            with _disable_current_modes():
                _attached[root] = sdp4bit.quantize_communication(root, topology=1, config=config)
            with open(f"{os.environ[OUTCOMES]}.log", "a") as log:
                log.write(f"{test()}\n")

    FSDPState._lazy_init = lazy_init_and_attach  # type: ignore[method-assign]


def run_rank(test: str, module: str, case: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Be one rank of a test: what PyTorch's test case would start, in a process prepared for it."""
    from sdp4bit.quantization import ops

    pretend_accelerators()
    attach_to_roots(lambda: test)
    started = getattr(importlib.import_module(module), case)
    limit_ranks(started)
    with ops.checked():
        started._run(*args, **kwargs)


class Plugin:
    """Runs PyTorch's test cases with processes and threads that are prepared for it."""

    def __init__(self) -> None:
        """Replace everything that a test module may import, before the first is imported."""
        from torch.testing._internal.common_distributed import MultiProcessTestCase

        self.test = ""
        self.results: dict[str, tuple[str, str]] = {}
        pretend_accelerators()
        attach_to_roots(lambda: self.test)  # tests whose ranks are threads of this process
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOADED, __name__])

        def make(*, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
            case = target.__self__
            told = (self.test, case.__module__, case.__qualname__, args, kwargs)
            return context.Process(target=run_rank, args=told, name=name)

        MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(make)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for case in {item.cls for item in items if isinstance(item, pytest.Function) and item.cls}:
            limit_ranks(case)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid.partition("::")[2]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = "" if report.outcome == "passed" else str(report.longrepr)
            self.results[self.test] = report.outcome, text

    def pytest_sessionfinish(self) -> None:
        Path(os.environ[OUTCOMES]).write_text(json.dumps(self.results))


def pytest_configure(config: pytest.Config) -> None:
    """The plugin is ready before tests are collected."""
    config.pluginmanager.register(Plugin())


# -- the program ----------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """How one test of PyTorch ended, and whether the library was attached to a root on any rank."""

    outcome: str
    text: str = ""
    attached: bool = False


Outcomes = dict[str, Outcome]


def run_file(file: Path, *, attach: bool, ranks: int, select: str, timeout: float) -> Outcomes:
    """Return how the tests of a file end; all of them fail if the file cannot be imported."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes, settings = Path(folder, "outcomes"), Path(folder, "pytest.ini")
        settings.write_text("[pytest]\n")
        options = ["-q", "-c", str(settings), "--rootdir", str(file.parent), "-p", "no:cacheprovider"]
        options += ["-p", "tests.engines.fsdp2.pytorch_fsdp", "--noconftest", "--timeout", "0", "-k", select]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(timeout)),
            RANKS: str(ranks),
            OUTCOMES: str(outcomes),
            **({ATTACH: "1"} if attach else {}),
        }
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, str(file)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if not outcomes.exists() or done.returncode not in (0, 1, 5):
            return {"(file)": Outcome("failed", done.stdout)}
        log = Path(f"{outcomes}.log")
        attached = set(log.read_text().splitlines()) if log.exists() else set()
        results = json.loads(outcomes.read_text())
    return {name: Outcome(*result, name in attached) for name, result in results.items()}


def lost(plain: Outcomes, attached: Outcomes) -> dict[str, str]:
    """Return the tests that pass plain and do not pass attached, and what they say."""
    ends = {
        name: attached.get(name, Outcome("failed", "has not run"))
        for name, before in plain.items()
        if before.outcome == "passed"
    }
    return {name: _summary(end) for name, end in ends.items() if end.outcome != "passed"}


def _summary(outcome: Outcome) -> str:
    """Return the line of a failure that tells most: the last exception of a rank."""
    lines = [line.removeprefix("E").strip() for line in outcome.text.splitlines()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    ours = [line for line in raised if "sdp4bit" in line]
    return [*lines, *raised, *ours][-1][:200] if lines else outcome.outcome


def report(plain: Outcomes, attached: Outcomes) -> Iterable[str]:
    """Yield how many tests of a file were compared, and every test that differs with its reason."""
    ends = [result.outcome for result in plain.values()]
    differing = lost(plain, attached)
    passed = [name for name, result in plain.items() if result.outcome == "passed"]
    idle = [name for name in passed if name not in differing and not attached[name].attached]
    yield (
        f"{len(passed)} pass plain, {len(passed) - len(differing)} of them attached ({len(idle)} of these "
        f"have nothing to attach to); {ends.count('failed')} fail plain, {ends.count('skipped')} are skipped"
    )
    for name, said in differing.items():
        yield f"{name}: {DIFFERENT.get(name, 'NOT EXPECTED')}: {said}"
    for name, result in plain.items():
        if result.outcome == "failed":
            yield f"not compared, fails plain: {name}: {_summary(result)}"


def main() -> int:
    """Print what differs; return 1 if a test fails with the library attached that has no reason to."""
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
    settings = {"ranks": options.ranks, "select": options.select, "timeout": options.timeout}
    unexpected = set()
    for file in files:
        plain, attached = (run_file(file.resolve(), attach=attach, **settings) for attach in (False, True))
        for line in report(plain, attached):
            print(f"{file.stem}: {line}", flush=True)
        unexpected |= lost(plain, attached).keys() - DIFFERENT.keys()
    return int(bool(unexpected))


if __name__ == "__main__":
    raise SystemExit(main())
