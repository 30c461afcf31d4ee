"""Where the time of a step goes, on all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from sdp4bit.collectives.errors import comm_error_context


class Timers:
    """Sums the durations of named parts of a step.

    Parts above the level are not timed at all. On a GPU, a timed part waits for the device before and after
    itself: timing takes away overlap and is off (level 0) unless asked for.
    """

    def __init__(self, *, level: int, device: torch.device) -> None:
        self._level = level
        self._device = device
        self._seconds: dict[str, float] = {}
        self._steps = 0

    @contextmanager
    def __call__(self, name: str, *, level: int) -> Iterator[None]:
        """Add the duration of the block to that of its name."""
        if level > self._level:
            yield
            return
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def count_step(self) -> None:
        """Count one step more, to which the timed parts belong."""
        self._steps += 1

    def summarize(self) -> dict[str, tuple[float, float]]:
        """Return the mean milliseconds per step of each part, the smallest and largest of all ranks.

        Counting starts anew. A collective, unless nothing is timed.
        """
        if not self._seconds:
            return {}
        mine = [1000 * seconds / max(1, self._steps) for seconds in self._seconds.values()]
        bounds = torch.tensor([[-value for value in mine], mine], dtype=torch.float64, device=self._device)
        with comm_error_context("bounds of the timings"):
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        least, most = (-bounds[0]).tolist(), bounds[1].tolist()
        names = list(self._seconds)
        self._seconds, self._steps = {}, 0
        return dict(zip(names, zip(least, most, strict=True), strict=True))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
