"""Signals that ask a run to leave after its step: heard by every process of the run, kept until it looks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Batch systems send the first two some time before they end a job; the third is Ctrl-C."""
REPEAT_SIGNAL_SECONDS = 1.0
"""Seconds after which a signal is a second one. `timeout` signals its child and then the child's whole group:
one wish, which comes twice."""

# Of the process, as signals are: one that comes between two runs of a process concerns the second.
_received: signal.Signals | None = None
_ends_after: float | None = None


def listen() -> None:
    """Let the signals ask this process to leave from now on, instead of ending it.

    Those that were blocked until now arrive. A signal that is ignored, as shells without job control have it
    in the background, stays so.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _remember)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def ignore() -> None:
    """Ignore the signals, so that one that comes again does not kill this process while it ends."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def listening() -> Iterator[None]:
    """Let the signals ask to leave inside the block; a process that listens already continues with that.

    Only a process's main thread can listen; in other threads signals do what they did before.
    """
    global _received, _ends_after
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is _remember:
        yield
        return
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    listen()
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _received = _ends_after = None


def _remember(number: int, _frame: FrameType | None) -> None:
    global _received, _ends_after
    _received = _received or signal.Signals(number)
    if number == signal.SIGUSR1 or "RANK" in os.environ:
        return  # a launcher ends its ranks itself
    if _ends_after is None:
        _ends_after = time.monotonic() + REPEAT_SIGNAL_SECONDS
    elif time.monotonic() > _ends_after:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def received() -> signal.Signals | None:
    """Return the first signal that has come, None before."""
    return _received
