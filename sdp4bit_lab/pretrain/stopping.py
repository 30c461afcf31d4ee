"""Stop a run early, on all ranks after the same step: on a signal, after a time, at a step."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit_lab.common.launch.signals import SIGNALS, received
from sdp4bit_lab.pretrain.config.training import TrainingConfig

_INTERVAL, _DURATION, _FIRST_SIGNAL = 1, 2, 3
OUTPUT_FAILED = _FIRST_SIGNAL + len(SIGNALS)
"""Stop code of a rank that cannot write its output; larger than those of all requests."""


class StopRequests:
    """Reasons to stop early; the ranks combine their codes at every step."""

    def __init__(self, config: TrainingConfig, *, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._start = time.monotonic()

    def before_first_step(self) -> str | None:
        """Return the signal that stops the run before its first step, or None; a collective."""
        code = torch.tensor(_signal_code(), device=self._device)
        with comm_error_context("agreement on whether to leave before the first step"):
            dist.all_reduce(code, op=dist.ReduceOp.MAX)
        return self.reason(int(code.item()))

    def reason(self, code: int) -> str | None:
        """Describe the largest code of all ranks; None for 0."""
        if code == _INTERVAL:
            return f"--exit-interval {self._config.exit_interval}"
        if code == _DURATION:
            return f"--exit-duration-in-mins {self._config.exit_duration_in_mins:g}"
        return SIGNALS[code - _FIRST_SIGNAL].name if code else None

    def code(self, step: int) -> int:
        """Return this rank's reason to stop after a step; 0 for none."""
        if code := _signal_code():
            return code
        minutes = self._config.exit_duration_in_mins
        if minutes is not None and time.monotonic() - self._start > 60 * minutes:
            return _DURATION
        interval = self._config.exit_interval
        return _INTERVAL if interval is not None and step % interval == 0 else 0


def _signal_code() -> int:
    number = received()
    return 0 if number is None else _FIRST_SIGNAL + SIGNALS.index(number)
