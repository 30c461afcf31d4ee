"""Hold what quantized gradients cost in loss against their squared error: is it one line through zero?

    python -m experiments.law.run runs/compare [runs/more ...] --out runs/law

reads finished comparisons whose runs include the baseline, and takes the strategies that quantize gradients
alone. The error of a run is the mean over its steps of the squared relative error that telemetry samples on
rank 0 (0 where a step's gradients were not quantized); the cost is the difference of the validation loss to
the baseline with the same seed. Writes law.md and law.png: cost over error with 95 % intervals, and the line
that fits them best, each weighted by its interval.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.curve import costs, write_findings
from sdp4bit_lab.common.files import save_figure, write_atomically
from sdp4bit_lab.common.settings import SettingError, require
from sdp4bit_lab.compare.paired import FEWEST_PAIRS, PairedDifference, paired_difference
from sdp4bit_lab.report.answers import validated_together
from sdp4bit_lab.report.runs import Run, find_runs

@dataclass(frozen=True, kw_only=True)
class Point:
    """A way to quantize gradients: how large its error is, and what it costs."""

    label: str
    squared_error: float
    difference: PairedDifference

    @property
    def half_interval(self) -> float:
        """Half of the 95 % interval of the cost, in percent."""
        interval = self.difference.percent_interval
        assert interval is not None
        return (interval[1] - interval[0]) / 2


def points(runs: Sequence[Run]) -> list[Point]:
    """Return one point per strategy that quantizes gradients alone, from the smallest error to the largest.

    Raises:
        SettingError: no strategy has three seeds or more in common with the baseline.
    """
    found = [
        Point(label=label, squared_error=statistics.fmean(map(squared_error, mine)), difference=difference)
        for label, (mine, difference) in costs(runs).items()
        if _quantizes_gradients_alone(mine[0])
    ]
    require(bool(found), "no strategy that quantizes gradients alone has three seeds of the baseline")
    return sorted(found, key=lambda point: point.squared_error)


def squared_error(run: Run) -> float:
    """Return the mean over the steps of the squared relative error of the gradient."""
    errors = run.column("gradient_error")
    return float(np.mean(np.nan_to_num(errors) ** 2))


def slope(found: Sequence[Point]) -> float:
    """Return the slope of the line through zero: percent of loss per unit of squared error."""
    weights = [1 / max(point.half_interval, 1e-6) ** 2 for point in found]
    costs = [point.difference.mean_percent for point in found]
    errors = [point.squared_error for point in found]
    product = sum(w * x * y for w, x, y in zip(weights, errors, costs, strict=True))
    return product / sum(w * x * x for w, x in zip(weights, errors, strict=True))


def table(found: Sequence[Point]) -> str:
    """Return error, cost and what the line says, as Markdown."""
    rate = slope(found)
    text = "| strategy | seeds | squared error | cost | 95 % interval | the line |\n" + "| --- " * 6 + "|\n"
    for point in found:
        low, high = point.difference.percent_interval or (0.0, 0.0)
        cells = (
            *(point.label, str(len(point.difference.by_seed)), f"{point.squared_error:.4f}"),
            *(f"{point.difference.mean_percent:+.3f} %", f"{low:+.3f} to {high:+.3f} %"),
            f"{rate * point.squared_error:+.3f} %",
        )
        text += "| " + " | ".join(cells) + " |\n"
    return text + f"\nThe line: {rate:.2f} % of the loss per unit of relative squared error.\n"


def draw(found: Sequence[Point], path: Path) -> None:
    """Write the picture of cost over error."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for point in found:
        axes.errorbar(
            *(point.squared_error, point.difference.mean_percent),
            yerr=point.half_interval,
            fmt="o",
            capsize=3,
            label=point.label,
        )
    end = 1.1 * max(point.squared_error for point in found)
    axes.plot([0, end], [0, slope(found) * end], color="grey", linewidth=1, label="line through zero")
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xlim(0, end)
    axes.set_xlabel("relative squared error of the gradients, mean over the run")
    axes.set_ylabel("difference of the validation loss to the baseline (%)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, path, dpi=110)


def _quantizes_gradients_alone(run: Run) -> bool:
    gradients, weights = (run.setting("quantization", part) for part in ("gradients", "weights"))
    return gradients is not None and weights is None


if __name__ == "__main__":
    sys.exit(write_findings("law", __doc__, points=points, table=table, draw=draw))
