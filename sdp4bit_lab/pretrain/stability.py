"""Whether a run trains stably: steps whose gradient norm far exceeds those before them."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

SPIKE_RATIO = 4.0
"""Norm over the median of the norms before it, from which a step counts as a spike."""
_WINDOW = 50
_FEWEST = 10
"""Norms that a median needs: the first steps of a run differ by more than this ratio."""


class GradientSpike(NamedTuple):
    """A step whose gradient was far larger than those before it."""

    step: int
    norm: float
    """Of the whole model, before clipping."""
    median: float
    """Of the norms of up to 50 steps before."""

    @property
    def ratio(self) -> float:
        """How many times the usual gradient this one is."""
        return self.norm / self.median

    def __str__(self) -> str:
        return f"gradient norm {self.norm:.3g} at step {self.step}, {self.ratio:.0f} times the median before"


class SpikeDetector:
    """Compares every step's gradient norm with those of the steps before."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, step: int, norm: float) -> GradientSpike | None:
        """Take the norm of the next step; return the spike that it is, or None.

        A norm that is not finite is left out.
        """
        if not math.isfinite(norm):
            return None
        spike = None
        if len(self._norms) >= _FEWEST:
            median = statistics.median(self._norms)
            if norm > SPIKE_RATIO * median:
                spike = GradientSpike(step, norm, median)
        self._norms.append(norm)
        return spike


def gradient_spikes(norms: Iterable[tuple[int, float]]) -> list[GradientSpike]:
    """Return the spikes among steps and their gradient norms, given in the order of training."""
    detector = SpikeDetector()
    spikes = (detector.observe(step, norm) for step, norm in norms)
    return [spike for spike in spikes if spike is not None]
