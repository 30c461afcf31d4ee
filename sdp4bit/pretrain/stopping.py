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

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Batch systems send these some time before they end a job."""
_INTERVAL, _DURATION, _FIRST_SIGNAL = 1, 2, 3


class StopRequests:
    """Knows whether to leave after a step; one answer for all ranks."""

    def __init__(self, config: TrainingConfig, *, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._start = time.monotonic()
        self._received = 0

    @contextmanager
    def listening(self) -> Iterator[StopRequests]:
        """Inside the block the signals ask to leave instead of ending the process.

        Only a process's main thread can listen; in other threads signals do what they did before.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {number: signal.signal(number, self._remember) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def after_step(self, step: int) -> str | None:
        """Return why the run is to end after this step, or None; a collective of one number."""
        found = torch.tensor(self._find(step), device=self._device)
        with naming(f"agreement on whether to leave after step {step}"):
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        code = int(found.item())
        if code == _INTERVAL:
            return f"--exit-interval {self._config.exit_interval}"
        if code == _DURATION:
            return f"--exit-duration-in-mins {self._config.exit_duration_in_mins:g}"
        return SIGNALS[code - _FIRST_SIGNAL].name if code else None

    def _find(self, step: int) -> int:
        """Return what this rank knows of; clocks differ, so the answers of all are put together."""
        if self._received:
            return self._received
        minutes = self._config.exit_duration_in_mins
        if minutes is not None and time.monotonic() - self._start > 60 * minutes:
            return _DURATION
        interval = self._config.exit_interval
        return _INTERVAL if interval is not None and step % interval == 0 else 0

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self._received = _FIRST_SIGNAL + SIGNALS.index(signal.Signals(number))
