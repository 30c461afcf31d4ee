"""Record signals that ask a run to stop after the current step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Batch systems send the first two some time before they end a job. The third is Ctrl-C."""
REPEAT_SIGNAL_SECONDS = 1.0
"""Time in which a repeated signal is a duplicate: `timeout` signals its child, then the process group."""

# Process-wide, like signals: one that arrives between two runs applies to the second.
_received: signal.Signals | None = None
_ends_after: float | None = None
_is_kept = False


def ignore() -> None:
    """Ignore the signals, so that a repeated one does not kill the process during shutdown."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def keeping_handlers(*, restores: bool = True) -> Iterator[None]:
    """Keep the handlers of `listen` until the end of the block, then restore the earlier ones.

    Has no effect in another such block or outside the main thread.

    Args:
        restores: False keeps them until the process ends.
    """
    global _received, _ends_after, _is_kept
    if _is_kept or threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    _is_kept = True
    try:
        yield
    finally:
        if restores:
            for number, handler in previous.items():
                signal.signal(number, handler)
            _received, _ends_after, _is_kept = None, None, False


def listen() -> None:
    """Record the signals instead of terminating, until `keeping_handlers` ends; without it, do nothing.

    Pending blocked signals arrive now. Ignored ones stay ignored, as for background jobs of shells without
    job control.
    """
    if _is_kept:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _remember)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _remember(number: int, _frame: FrameType | None) -> None:
    global _received, _ends_after
    _received = _received or signal.Signals(number)
    if number == signal.SIGUSR1 or "RANK" in os.environ:
        return  # the launcher kills its ranks itself
    if _ends_after is None:
        _ends_after = time.monotonic() + REPEAT_SIGNAL_SECONDS
    elif time.monotonic() > _ends_after:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def received() -> signal.Signals | None:
    """Return the first recorded signal, or None."""
    return _received
