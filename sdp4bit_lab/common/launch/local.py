"""Start the ranks of a run on this machine and stop all of them when one fails.

`torch.distributed.launcher.api.elastic_launch` was tried. Users would notice the change. After a signal, its
agent kills the ranks 30 seconds later, although they may be saving, and raises an error. It ends ranks that a
signal reaches during their imports, does not forward SIGUSR1 by default, and prints a traceback of its own
for a rank that has reported its error. Its children import torch before they can show a phase.

Python's fork server was tried, too. Four ranks on two cores then start in 12 instead of 19 s, with 14 instead
of 33 s of CPU time, and two ranks with 12 instead of 17. But the server imports modules of the working
directory, and its socket fails with a long TMPDIR. The launcher does not see signals while the server
imports, and is no shorter.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from sdp4bit_lab.common.files import note
from sdp4bit_lab.common.launch.child import run_child
from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.launch.link import INTERFACE, Link
from sdp4bit_lab.common.launch.rank import report_error, run_rank
from sdp4bit_lab.common.launch.signals import (
    REPEAT_SIGNAL_SECONDS,
    SIGNALS,
    keeping_handlers,
    received,
)
from sdp4bit_lab.common.progress import end_progress, phase, start_progress
from sdp4bit_lab.common.ranks import ranks_listen
from sdp4bit_lab.common.settings import EXIT_FAILED

_HERE = "127.0.0.1"
_POLL = 0.1
_WAIT_FOR_OTHER_FAILURES = 0.3


def run_on_ranks(
    program: str,
    *,
    config: object,
    parallel: RanksConfig,
    leaves_early: bool = True,
    link: Link | None = None,
    variables: Callable[[int], Mapping[str, str]] | None = None,
) -> int:
    """Run a program on all ranks and return the exit code.

    Under torchrun, or with a single rank, this process is the rank. Otherwise the ranks are child processes;
    if one fails, the others are killed. None outlives this call.

    Args:
        program: function of `config` and `ranks=` as module:name, imported by the ranks alone.
        leaves_early: whether the program stops by itself after a signal; if not, a signal kills the ranks.
        link: nodes that each run half of the ranks.
        variables: returns more environment variables of a rank; they are set before it imports torch.

    Returns:
        0, also after stopping for SIGTERM or SIGUSR1; 130 after SIGINT; 1, 2 or 3 after a failure;
        128 + signal if a signal killed the ranks.

    Raises:
        SettingError: the number of processes conflicts with other settings; nothing was started.
    """
    settings: dict[str, Any] = {"config": config, "timeout": parallel.timeout}
    if "RANK" in os.environ:
        return run_rank(program, **settings)
    size = parallel.processes(torch.cuda.device_count())
    parallel.check_world(size)
    if size > 1:
        child = partial(run_child, program, link=link, **settings)
        with nullcontext() if link is None else link.on_first_node():
            return _run_processes(child, size=size, leaves_early=leaves_early, link=link, variables=variables)
    with keeping_handlers():
        code = run_rank(program, **settings)
        return 128 + signal.SIGINT if code == 0 and received() == signal.SIGINT else code


def _run_processes(
    child: Callable[..., None],
    *,
    size: int,
    leaves_early: bool,
    link: Link | None,
    variables: Callable[[int], Mapping[str, str]] | None,
) -> int:
    host, interface = (
        (_HERE, os.environ.get("GLOO_SOCKET_IFNAME", "lo")) if link is None else (link.address(0), INTERFACE)
    )
    began = start_progress(f"starting {size} processes")
    # Handled in `_join`, because a handler could miss a rank that is being started.
    signals: list[signal.Signals] = []
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: signals.append(signal.Signals(number)))
    # Hosted here, so that no rank has to guess a free port; on loopback, so that no other machine reaches it.
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    network = {"MASTER_ADDR": host, "GLOO_SOCKET_IFNAME": interface}
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=child,
            kwargs={
                "environment": {
                    **_environment(rank, size, store.port),
                    **network,
                    **(variables(rank) if variables else {}),
                },
                "began": began,
            },
        )
        for rank in range(size)
    ]
    try:
        start(*processes)
        end_progress()  # the first rank prints them now
        return _join(processes, signals, listens=lambda: leaves_early and ranks_listen(store))
    finally:
        started = [process for process in processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()


def start(*processes: SpawnProcess) -> None:
    """Start children that miss no signal: one to the process group stays pending until they listen."""
    # Started first, because starting it unblocks two signals.
    resource_tracker.ensure_running()
    # Children inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for process in processes:
        process.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_PORT": str(port),
        # The launcher hosts the store, so rank 0 must not.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _join(
    processes: Sequence[SpawnProcess], signals: list[signal.Signals], *, listens: Callable[[], bool]
) -> int:
    """Wait for the ranks, forward signals to them, and return the exit code. Ranks may still be running.

    Args:
        listens: returns whether the ranks record signals; until then, the first one ends them.
    """
    asked_by: signal.Signals | None = None
    first_at: float | None = None
    is_ending = False
    while running := [process for process in processes if process.exitcode is None]:
        # Not before the first rank has ended, which shows its own phases.
        if not is_ending and processes[0].exitcode is not None:
            is_ending = True
            phase("waiting for the processes to exit")
        wait([process.sentinel for process in running], timeout=_POLL)
        if _failed(processes):
            return _report_failure(processes)
        while signals:
            number = signals.pop(0)
            if asked_by is None and not listens():
                report_error(f"{number.name}: killed the ranks, which had nothing to save")
                return 128 + number
            if number != signal.SIGUSR1:
                first_at = first_at or time.monotonic()
                if time.monotonic() - first_at > REPEAT_SIGNAL_SECONDS:
                    report_error(f"{number.name}: killed the ranks")
                    return 128 + number
            if asked_by is None:
                asked_by = number
                note(f"{number.name}: the ranks stop after this step; a second one kills them")
            for process in running:
                if process.exitcode is None and process.pid is not None:
                    os.kill(process.pid, number)
    if _failed(processes):
        return _report_failure(processes)
    return 128 + signal.SIGINT if asked_by == signal.SIGINT else 0


def _failed(processes: Sequence[SpawnProcess]) -> dict[int, int]:
    """Map failed ranks to their exit codes."""
    return {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}


def _report_failure(processes: Sequence[SpawnProcess]) -> int:
    first = _failed(processes)
    # Other ranks may fail at the same time, and one of them may be the cause.
    time.sleep(_WAIT_FOR_OTHER_FAILURES)
    failed = {**first, **_failed(processes)}
    reported = [code for code in failed.values() if code > EXIT_FAILED]
    if reported:
        return reported[0]  # the rank has printed the error
    # Prefer a rank killed by a signal: the others fail because of it.
    rank, code = min(failed.items(), key=lambda item: item[1] >= 0)
    ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    report_error(f"rank {rank} failed ({ending}); the other ranks were stopped")
    return EXIT_FAILED
