"""Starting the ranks of a run on this machine, and ending all of them when one fails."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore

from sdp4bit.collectives.errors import ExchangeError
from sdp4bit_lab.common.launch.child_processes import (
    end_with_parent,
    start_from_one_import,
    start_server_without,
)
from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.launch.signals import REPEAT_SIGNAL_SECONDS, SIGNALS, listen
from sdp4bit_lab.common.ranks import Ranks, join_ranks
from sdp4bit_lab.common.settings import SettingError

C = TypeVar("C")
C_contra = TypeVar("C_contra", contravariant=True)

EXIT_SETTING = 2
EXIT_FAILED = 1
_WAIT_FOR_RANK_0 = 2.0
_WAIT_FOR_OTHER_FAILURES = 0.3


class Program(Protocol[C_contra]):
    """What every rank runs; a function of a module, so that new processes can import it."""

    def __call__(self, config: C_contra, *, ranks: Ranks) -> object:
        """Run the program on this rank."""
        ...


def run_on_ranks(program: Program[C], *, config: C, parallel: RanksConfig, leaves_early: bool = True) -> int:
    """Return the exit code after the program has run on all ranks.

    Under torchrun this process is one of the ranks. Otherwise they are started here; when one fails, the
    others are stopped at once, and none outlives this call.

    Args:
        leaves_early: the program asks whether a signal has come, and leaves; else a signal ends the ranks.

    Returns:
        0, also of a program that has left because of SIGTERM or SIGUSR1; 130 if it was SIGINT; 1 or 2 if it
        has failed; 128 and the signal's number if a signal has ended the ranks at once.

    Raises:
        SettingError: the number of processes does not fit the other settings; nothing has been started.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _run_under_torchrun(program, config, parallel.timeout, leaves_early=leaves_early)
    size = parallel.processes(torch.cuda.device_count())
    parallel.check_world(size)
    ranks = _StartedRanks(leaves_early=leaves_early)
    with tempfile.TemporaryDirectory(prefix="sdp4bit-") as name, ranks.receiving_signals():
        folder = Path(name)
        context = start_from_one_import([program.__module__, __name__])
        start_server_without(SIGNALS)
        # Kept here, so that no rank has to guess a free port.
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        try:
            for rank in range(size):
                environment = _environment(rank, size=size, port=store.port)
                arguments = (program, config, parallel.timeout, folder, environment)
                ranks.start(context.Process(target=_run_started, args=arguments))
            failed = ranks.join()
        finally:
            ranks.kill()
        if failed and ranks.ended_by is not None:
            _say(f"{ranks.ended_by.name} has ended the ranks at once")
            return 128 + ranks.ended_by
        if failed:
            return _report_failure(failed, folder=folder)
    return 128 + signal.SIGINT if ranks.asked_by == signal.SIGINT else 0


def _environment(rank: int, *, size: int, port: int) -> dict[str, str]:
    """Return what torchrun would tell a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        # The store is there already: rank 0 is not to start it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


class _StartedRanks:
    """The processes of the ranks, and the signals that come while they run."""

    def __init__(self, *, leaves_early: bool) -> None:
        self.asked_by: signal.Signals | None = None
        """The first signal that has asked the ranks to leave."""
        self.ended_by: signal.Signals | None = None
        """The signal that has ended them at once."""
        self._leaves_early = leaves_early
        self._processes: list[ForkServerProcess] = []
        self._signals, self._signals_in = -1, -1
        self._first_at: float | None = None

    @contextmanager
    def receiving_signals(self) -> Iterator[None]:
        """Hold signals back inside the block for `join`, which alone acts on them, once all ranks are there.

        What a handler does at any moment could disturb what it interrupts, and miss a rank that starts.
        """
        self._signals, self._signals_in = os.pipe()
        os.set_blocking(self._signals_in, False)
        try:
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            previous = {number: signal.signal(number, lambda *_: None) for number in handled}
            # Written whichever thread gets the signal.
            woken = signal.set_wakeup_fd(self._signals_in)
            try:
                yield
            finally:
                signal.set_wakeup_fd(woken)
                for number, handler in previous.items():
                    signal.signal(number, handler)
        finally:
            os.close(self._signals)
            os.close(self._signals_in)

    def start(self, process: ForkServerProcess) -> None:
        """Start the next rank."""
        process.start()
        self._processes.append(process)

    def join(self) -> dict[int, int]:
        """Return the exit codes of the ranks that have failed, the first ones first; others may still run."""
        while running := [process for process in self._processes if process.exitcode is None]:
            if self._signals in wait([*(process.sentinel for process in running), self._signals]):
                for number in os.read(self._signals, 64):
                    if number in SIGNALS:
                        self._receive(signal.Signals(number))
            if failed := self._failed():
                # Others fail at the same moment, and one of them may say why.
                time.sleep(_WAIT_FOR_OTHER_FAILURES)
                return {**failed, **self._failed()}
        return self._failed()

    def kill(self) -> None:
        """End all that still run."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _failed(self) -> dict[int, int]:
        return {rank: process.exitcode for rank, process in enumerate(self._processes) if process.exitcode}

    def _receive(self, received: signal.Signals) -> None:
        """Ask all ranks to leave; end them at another SIGTERM or SIGINT, or at the first if it must be."""
        if received != signal.SIGUSR1:
            now = time.monotonic()
            self._first_at = now if self._first_at is None else self._first_at
            if now - self._first_at > REPEAT_SIGNAL_SECONDS or not self._leaves_early:
                self.ended_by = received
                self.kill()
                return
        if self.asked_by is None:
            self.asked_by = received
            sys.stderr.write(
                f"sdp4bit: {received.name}: the ranks leave after this step; a second one ends them\n"
            )
        for process in self._processes:
            if process.exitcode is None and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, received)


def _run_under_torchrun(program: Program[C], config: C, timeout: timedelta, *, leaves_early: bool) -> int:
    try:
        with join_ranks(timeout=timeout) as ranks:
            if leaves_early:
                # Not earlier: a rank that joins has nothing to save, and may wait for one that has ended.
                listen()
            program(config, ranks=ranks)
    except ExchangeError as error:
        _say(f"{error} (--distributed-timeout-minutes)")
        return EXIT_FAILED
    except SettingError as error:
        rank = int(os.environ["RANK"])
        if rank:
            # Rank 0 says it for all; torchrun then ends this process. It speaks if rank 0 has not failed.
            time.sleep(_WAIT_FOR_RANK_0)
        _say(f"{error}" if rank == 0 else f"rank {rank}: {error}")
        return EXIT_SETTING
    return 0


def _run_started(
    program: Program[C], config: C, timeout: timedelta, folder: Path, environment: Mapping[str, str]
) -> None:
    """Run one rank; leave a setting error in the folder, for the parent to report once."""
    listen()
    end_with_parent()
    os.environ.update(environment)
    try:
        with join_ranks(timeout=timeout) as ranks:
            program(config, ranks=ranks)
    except SettingError as error:
        working = folder / f".{os.getpid()}"
        working.write_text(str(error), encoding="utf-8")
        working.replace(folder / f"error-{int(os.environ['RANK']):05d}")
        sys.exit(EXIT_SETTING)
    except ExchangeError as error:
        _say(f"{error} (--distributed-timeout-minutes)")
        # Mostly another rank has ended: the launcher, which names the first one that it sees, is to see that.
        time.sleep(_WAIT_FOR_RANK_0)
        sys.exit(EXIT_FAILED)
    except Exception:
        traceback.print_exc()
        sys.exit(EXIT_FAILED)


def _report_failure(failed: Mapping[int, int], *, folder: Path) -> int:
    messages = sorted(folder.glob("error-*"))
    if messages:
        _say(messages[0].read_text(encoding="utf-8"))
        return EXIT_SETTING
    # A rank that a signal has ended comes first: the others fail for want of it, at about the same time.
    rank, exit_code = min(failed.items(), key=lambda item: item[1] >= 0)
    _say(f"rank {rank} failed ({_ending(exit_code)}); the other ranks have been stopped")
    return EXIT_FAILED


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def _say(message: str) -> None:
    sys.stderr.write(f"sdp4bit: error: {message}\n")
