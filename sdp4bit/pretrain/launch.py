"""Starting the ranks of a run on this machine, and ending all of them when one fails."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sdp4bit.collectives.exchange_error import ExchangeError
from sdp4bit.pretrain.child_processes import end_with_parent, start_from_one_import
from sdp4bit.pretrain.parallel_config import ParallelConfig
from sdp4bit.pretrain.ranks import Ranks, join_ranks
from sdp4bit.pretrain.settings import SettingError
from sdp4bit.pretrain.stopping import SIGNALS

C = TypeVar("C")
C_contra = TypeVar("C_contra", contravariant=True)

EXIT_SETTING = 2
EXIT_FAILED = 1
_WAIT_FOR_FIRST_RANK = 2.0


class Program(Protocol[C_contra]):
    """What every rank runs; a function of a module, so that new processes can import it."""

    def __call__(self, config: C_contra, *, ranks: Ranks) -> object:
        """The program has run on this rank."""
        ...


def run_on_ranks(program: Program[C], *, config: C, parallel: ParallelConfig) -> int:
    """Return the exit code after the program has run on all ranks.

    Under torchrun this process is one of the ranks. Otherwise they are started here; when one fails, the
    others are stopped at once, and none outlives this call.

    Raises:
        SettingError: the number of processes does not fit the other settings; nothing has been started.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _run_under_torchrun(program, config, parallel.timeout)
    processes = 1 if parallel.virtual_ranks else parallel.nproc_per_node or torch.cuda.device_count() or 1
    parallel.check_world(processes)
    # Failures are reported below, once; the launcher would add its own account in many lines.
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    start_from_one_import([program.__module__, __name__])
    with tempfile.TemporaryDirectory(prefix="sdp4bit-") as folder:
        launch = elastic_launch(
            LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=processes,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                run_id="sdp4bit",
                max_restarts=0,
                start_method="forkserver",
                local_addr="localhost",
                # SIGTERM is passed on to the ranks instead, see _passing_on_signals.
                signals_to_handle="SIGINT,SIGHUP,SIGQUIT",
            ),
            entrypoint=_run_started,
        )
        try:
            with _passing_on_signals():
                launch(program, config, parallel.timeout, Path(folder))
        except ChildFailedError as error:
            return _report_failure(error, folder=Path(folder))
        except SignalException as error:
            return 128 + int(error.sigval)
        except KeyboardInterrupt:
            return 128 + int(signal.SIGINT)
    return 0


@contextmanager
def _passing_on_signals() -> Iterator[None]:
    """Inside the block SIGUSR1 and SIGTERM go on to the ranks, which save and leave; a second SIGTERM ends
    them at once.
    """
    terminated = False

    def pass_on(number: int, _frame: FrameType | None) -> None:
        nonlocal terminated
        if terminated and number == signal.SIGTERM:
            raise SignalException("a second SIGTERM", signal.SIGTERM)
        terminated = terminated or number == signal.SIGTERM
        for process in multiprocessing.active_children():
            if process.pid is not None:
                os.kill(process.pid, number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run_under_torchrun(program: Program[C], config: C, timeout: timedelta) -> int:
    try:
        with join_ranks(timeout=timeout) as ranks:
            program(config, ranks=ranks)
    except ExchangeError as error:
        _say(str(error))
        return EXIT_FAILED
    except SettingError as error:
        rank = int(os.environ["RANK"])
        if rank:
            # Rank 0 says it for all; torchrun then ends this process. It speaks if rank 0 has not failed.
            time.sleep(_WAIT_FOR_FIRST_RANK)
        _say(f"{error}" if rank == 0 else f"rank {rank}: {error}")
        return EXIT_SETTING
    return 0


def _run_started(program: Program[C], config: C, timeout: timedelta, folder: Path) -> None:
    """Run one rank; a setting error is left in the folder, for the parent to report once."""
    end_with_parent()
    try:
        with join_ranks(timeout=timeout) as ranks:
            program(config, ranks=ranks)
    except SettingError as error:
        working = folder / f".{os.getpid()}"
        working.write_text(str(error), encoding="utf-8")
        working.replace(folder / f"error-{int(os.environ['RANK']):05d}")
        sys.exit(EXIT_SETTING)
    except ExchangeError as error:
        _say(str(error))
        # Mostly another rank has ended: the launcher, which names the first one that it sees, is to see that.
        time.sleep(_WAIT_FOR_FIRST_RANK)
        sys.exit(EXIT_FAILED)
    except Exception:
        traceback.print_exc()
        sys.exit(EXIT_FAILED)


def _report_failure(error: ChildFailedError, *, folder: Path) -> int:
    messages = sorted(folder.glob("error-*"))
    if messages:
        _say(messages[0].read_text(encoding="utf-8"))
        return EXIT_SETTING
    # A rank that a signal has ended comes first: the others fail for want of it, at about the same time.
    rank, failure = min(
        error.failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp, item[0])
    )
    _say(f"rank {rank} failed ({_ending(failure.exitcode)}); the other ranks have been stopped")
    return EXIT_FAILED


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def _say(message: str) -> None:
    sys.stderr.write(f"sdp4bit: error: {message}\n")
