"""Detect unstable training: steps whose gradient norm far exceeds the preceding ones."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

SPIKE_RATIO = 4.0
"""Ratio of a norm to the median of the preceding norms above which it is a spike."""
_WINDOW = 50
_FEWEST = 10
"""Norms needed for a median, because the first steps of a run differ by more than the ratio."""


class GradientSpike(NamedTuple):
    """Step with an exceptionally large gradient."""

    step: int
    norm: float
    """Of the full model, before clipping."""
    median: float
    """Of the norms of up to 50 preceding steps."""

    @property
    def ratio(self) -> float:
        return self.norm / self.median

    def __str__(self) -> str:
        return f"gradient norm {self.norm:.3g} at step {self.step}, {self.ratio:.0f} times the median before"


class SpikeDetector:
    """Compare each gradient norm with the preceding ones."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, step: int, norm: float) -> GradientSpike | None:
        """Add the next norm; return the spike, if it is one. Ignores NaN and infinite norms."""
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
    """Return the spikes among (step, norm) pairs in training order."""
    detector = SpikeDetector()
    spikes = (detector.observe(step, norm) for step, norm in norms)
    return [spike for spike in spikes if spike is not None]
