"""Starts the ranks of a distributed test: processes over gloo, or threads for large worlds."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import multiprocessing
import os
import pickle  # by value: a tensor of a process that has ended cannot be shared
import re
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Container, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ForkServer
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from sdp4bit.quantization import ops

_PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "sdp4bit",
    "tests.ranks",
    "tests.lab.pretrain.tiny_runs",
]


STARTED = "tests.ranks"
"""Event of `sys.audit` for processes and threads that are started here; Python has none."""


before_functions: list[Callable[[], None]] = []
"""Called by every rank that is started, before its function."""


def guard(seconds: float) -> float:
    """Return the time limit of a program: a guard against hangs, no measure.

    Other workers and other programs may take most of the processors.
    """
    return seconds * (10 if before_functions else 3)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 240.0,
    backend: ops.BackendName = "reference",
    checked: bool = True,
) -> list[Any]:
    """Call function(*args) in world_size processes joined by gloo; return each rank's result.

    A failure or a timeout ends all processes and raises with the traceback of every rank that has one.
    The processes are copies of one that has imported `_PRELOADED`, and the function's module's `PRELOAD`.

    Args:
        function: a module-level function.
        backend: the back end of the operators, by default the reference, which needs no compilation.
        checked: whether collectives call the operators that check their arguments. In training they do not.
    """
    sys.audit(STARTED, function)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = copies(getattr(sys.modules[function.__module__], "PRELOAD", []))
    before = [*before_functions]
    timeout = guard(timeout)
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank,
                args=(sender, folder, rank, world_size, timeout, backend, checked, before, function, args),
                daemon=True,
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            return _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def on_ranks(
    world_size: int, *, timeout: float = 240.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that each of so many ranks calls with the same arguments; see `run_ranks`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def test(*args: Any, **kwargs: Any) -> None:
            run_ranks(test, world_size, *signature.bind(*args, **kwargs).args, timeout=timeout)

        test.ranks = world_size  # type: ignore[attr-defined]
        test.in_rank = function  # type: ignore[attr-defined]  # by which conftest.py knows that it is gloo
        return test

    return decorate


@contextlib.contextmanager
def first_rank_warns(pattern: str, *, firsts: Container[int] = (0,)) -> Iterator[None]:
    """Expect exactly one matching warning on the first rank of each group, and none on others; collective."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    own = [str(each.message) for each in caught if re.search(pattern, str(each.message))]
    texts: list[list[str]] = [own] * dist.get_world_size()
    dist.all_gather_object(texts, own)
    assert [len(each) for each in texts] == [int(rank in firsts) for rank in range(len(texts))], texts


_servers: dict[tuple[str, ...], ForkServer] = {}
"""The servers that ranks are copies of, by the modules that each has imported besides `_PRELOADED`."""


def copies(modules: list[str]) -> ForkServerContext:
    """Return a context of processes that are copies of one that has imported `_PRELOADED` and these modules.

    The server of each set of modules stays; multiprocessing knows only one, so it is told which.
    """
    server = _servers.setdefault(tuple(modules), ForkServer())
    server.set_forkserver_preload([*_PRELOADED, *modules, "tests.frozen"])
    forkserver.connect_to_new_process = server.connect_to_new_process  # type: ignore[attr-defined]
    return multiprocessing.get_context("forkserver")


def users_of(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """Return the tests of this run that use the fixture, which works for these only."""
    in_file = (item for item in request.session.items if item.nodeid.startswith(f"{request.node.nodeid}::"))
    return [item for item in in_file if request.fixturename in getattr(item, "fixturenames", ())]


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_pipes = dict(enumerate(pipes))
    while open_pipes:
        # After the first failure the others only get a moment to fail for the same reason.
        limit = min(deadline, time.monotonic() + 3.0) if failures else deadline
        ready = wait(open_pipes.values(), timeout=max(0.0, limit - time.monotonic()))
        if not ready:
            for rank in open_pipes:
                failures.setdefault(rank, "did not finish in time (its stack is on stderr)")
            break
        for rank, pipe in list(open_pipes.items()):
            if pipe in ready:
                del open_pipes[rank]
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    ok, value = False, "ended without a result"
                (results if ok else failures)[rank] = value
    if failures:
        raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
    return [results[rank] for rank in sorted(results)]


def _run_rank(
    sender: Connection,
    folder: str,
    rank: int,
    world_size: int,
    timeout: float,
    backend: ops.BackendName,
    checked: bool,
    before: list[Callable[[], None]],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    faulthandler.dump_traceback_later(max(1.0, timeout - 2.0))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        for each in before:
            each()
        with patch.object(ops, "_is_checked", checked), ops.use_backend(backend):
            result = getattr(function, "in_rank", function)(*args)
        dist.barrier()
        dist.destroy_process_group()
        sender.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
        raise SystemExit(1) from None


def run_threads(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240.0
) -> list[Any]:
    """Call function(*args) in world_size threads of this process, with real data through c10d."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    sys.audit(STARTED, function)
    results: list[Any] = [None] * world_size
    failures: list[str] = []
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    world = threaded._install_threaded_pg()  # kept referenced: torch holds it weakly
    store = dist.HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = function(*args)
        except BaseException as failure:
            failures.append(f"rank {rank}: {traceback.format_exc()}")
            with contextlib.suppress(RuntimeError):  # other threads may fail at the same moment
                threaded.ProcessLocalGroup.exception_handle(failure)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    try:
        with ops.use_backend("reference"):
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + timeout
            for thread in threads:
                limit = min(deadline, time.monotonic() + 3.0) if failures else deadline
                thread.join(max(0.0, limit - time.monotonic()))
    finally:
        del world
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    hanging = sum(thread.is_alive() for thread in threads)
    if failures or hanging:
        raise AssertionError("\n".join([*failures[:3], f"{hanging} threads hang"]))
    return results


@contextlib.contextmanager
def one_rank() -> Iterator[dist.ProcessGroup | None]:
    """Make this process a world of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def fake_world(ranks: int, *, rank: int) -> Iterator[None]:
    """Make this process a rank of a world whose collectives send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with ops.use_backend("reference"):
            yield
    finally:
        dist.destroy_process_group()
