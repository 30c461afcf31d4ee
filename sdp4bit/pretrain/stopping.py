"""Leaving a run early, on all ranks after the same step: on a signal, after a time, at a step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from sdp4bit.collectives.exchange_error import naming
from sdp4bit.pretrain.training_config import TrainingConfig

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Batch systems send the first two some time before they end a job; the third is Ctrl-C."""
AGAIN = 1.0
"""Seconds after which a signal is a second one. `timeout` signals its child and then the child's whole group:
one wish, which comes twice."""
_INTERVAL, _DURATION, _FIRST_SIGNAL = 1, 2, 3

# Of the process, as signals are: one that comes between two runs of a process concerns the second.
_received: signal.Signals | None = None


def listen() -> None:
    """From now on the signals ask this process to leave, instead of ending it.

    Those that were blocked until now arrive. A signal that is ignored, as shells without job control have it
    in the background, stays so.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _remember)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextmanager
def listening() -> Iterator[None]:
    """Inside the block the signals ask to leave; a process that listens already goes on with that.

    Only a process's main thread can listen; in other threads signals do what they did before.
    """
    global _received
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
        _received = None


def _remember(number: int, _frame: FrameType | None) -> None:
    global _received
    _received = _received or signal.Signals(number)


class StopRequests:
    """Knows whether to leave after a step; one answer for all ranks."""

    def __init__(self, config: TrainingConfig, *, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._start = time.monotonic()

    def before_first_step(self) -> str | None:
        """Return the signal for which the run is to end before it has begun, or None; as after_step."""
        return self._agree(_signal_code(), when="before the first step")

    def after_step(self, step: int) -> str | None:
        """Return why the run is to end after this step, or None; a collective of one number."""
        return self._agree(self._find(step), when=f"after step {step}")

    def _agree(self, mine: int, *, when: str) -> str | None:
        found = torch.tensor(mine, device=self._device)
        with naming(f"agreement on whether to leave {when}"):
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        code = int(found.item())
        if code == _INTERVAL:
            return f"--exit-interval {self._config.exit_interval}"
        if code == _DURATION:
            return f"--exit-duration-in-mins {self._config.exit_duration_in_mins:g}"
        return SIGNALS[code - _FIRST_SIGNAL].name if code else None

    def _find(self, step: int) -> int:
        """Return what this rank knows of; clocks differ, so the answers of all are put together."""
        if code := _signal_code():
            return code
        minutes = self._config.exit_duration_in_mins
        if minutes is not None and time.monotonic() - self._start > 60 * minutes:
            return _DURATION
        interval = self._config.exit_interval
        return _INTERVAL if interval is not None and step % interval == 0 else 0


def _signal_code() -> int:
    return 0 if _received is None else _FIRST_SIGNAL + SIGNALS.index(_received)
