"""Draw loss curves and the differences of the strategies from the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sdp4bit_lab.common.files import save_figure
from sdp4bit_lab.common.smoothing import smoothed
from sdp4bit_lab.compare.finished_run import FinishedRun
from sdp4bit_lab.compare.outcomes import outcomes
from sdp4bit_lab.compare.paired import PairedDifference

_COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Distinguishable with color blindness (Okabe and Ito 2008, without the pale yellow)."""
_LINES = ("-", (0, (5, 2)), (0, (1, 1.3)))
_MARKERS = "osD^vPX"
_SKIPPED = 10
"""Fraction 1/10 of a run that the vertical axis ignores, because the loss falls steeply there."""


@dataclass(frozen=True, kw_only=True)
class _Strategy:
    label: str
    ended: list[FinishedRun]
    diverged: list[FinishedRun]
    difference: PairedDifference | None
    line: dict[str, Any]
    marker: dict[str, Any]

    @property
    def validation_steps(self) -> list[int]:
        return [step for step, _ in self.ended[0].validation]


def draw_curves(runs: Sequence[FinishedRun], *, baseline: str | None, path: Path) -> None:
    """Draw the losses into a PNG; with a baseline, also the differences from it.

    Lines are smoothed training losses and points are validation losses, averaged over the seeds. Bands span
    the seeds. A diverged run is a thin line of its own that ends in a cross.
    """
    strategies = _strategies(runs, baseline=baseline)
    compared = [strategy for strategy in strategies if strategy.difference is not None]
    rows = 2 if compared else 1
    height = max(4.5 * rows, 3 + 0.28 * len(strategies) * rows)
    figure = Figure(figsize=(13, height), layout="constrained")
    grid = figure.add_gridspec(rows, 2, width_ratios=(1.7, 1))
    losses = figure.add_subplot(grid[0, 0])
    for strategy in strategies:
        _draw_losses(losses, strategy)
    # Ignore the steep start and diverged runs.
    fitting = [run for run in runs if run.diverged_at is None] or list(runs)
    shown = [loss for run in fitting for loss in _later(smoothed(run.losses))]
    _fit(losses, [*shown, *(loss for run in fitting for _, loss in run.validation)])
    losses.set_ylabel("cross entropy (nats per token)")
    several = len({run.seed for run in runs}) > 1
    losses.set_title(
        "Training loss (lines, smoothed) and validation loss (points)"
        + ("\nmeans over the seeds; bands: minimum to maximum" if several else "")
    )
    losses.set_xlabel("optimizer step")
    losses.grid(alpha=0.3)
    names = figure.add_subplot(grid[0, 1])
    names.axis("off")
    names.legend(handles=_legend(strategies), frameon=False, loc="upper left", fontsize=9)
    if compared:
        reference = next(strategy for strategy in strategies if strategy.label == baseline)
        _draw_differences(figure.add_subplot(grid[1, 0], sharex=losses), compared, reference)
        _draw_outcomes(figure.add_subplot(grid[1, 1]), compared, reference)
    save_figure(figure, path, dpi=110)


def _strategies(runs: Sequence[FinishedRun], *, baseline: str | None) -> list[_Strategy]:
    strategies = []
    for number, outcome in enumerate(outcomes(runs, baseline=baseline)):
        labelled = [run for run in runs if run.strategy == outcome.strategy]
        colour = {"color": _COLOURS[number % len(_COLOURS)]}
        marker = _MARKERS[number % len(_MARKERS)]
        strategies.append(
            _Strategy(
                label=outcome.strategy,
                ended=[run for run in labelled if run.diverged_at is None],
                diverged=[run for run in labelled if run.diverged_at is not None],
                difference=outcome.difference,
                line=colour | {"linestyle": _LINES[number // len(_COLOURS) % len(_LINES)]},
                marker=colour | {"marker": marker, "markersize": 6, "markerfacecolor": "none"},
            )
        )
    return strategies


def _legend(strategies: Sequence[_Strategy]) -> list[Line2D]:
    entries = []
    for strategy in strategies:
        seeds = ", ".join(str(run.seed) for run in strategy.diverged)
        label = strategy.label + (f" (diverged: seed {seeds})" if seeds else "")
        entries.append(Line2D([], [], linewidth=1.6, label=label, **strategy.marker | strategy.line))
    return entries


def _draw_losses(axes: Any, strategy: _Strategy) -> None:
    if strategy.ended:
        _draw_mean(axes, [smoothed(run.losses) for run in strategy.ended], strategy)
        points = np.mean([_validation(run) for run in strategy.ended], axis=0)
        axes.plot(strategy.validation_steps, points, linestyle="none", **strategy.marker)
    for run in strategy.diverged:
        curve = smoothed(run.losses)
        axes.plot(_steps(curve), curve, **strategy.line, linewidth=0.8)
        known = np.flatnonzero(np.isfinite(curve))
        if len(known):
            cross = {"color": strategy.line["color"], "marker": "x", "markersize": 9}
            axes.plot(known[-1] + 1, curve[known[-1]], **cross)


def _draw_mean(axes: Any, curves: Sequence[np.ndarray], strategy: _Strategy) -> None:
    steps = _steps(curves[0])
    axes.plot(steps, np.mean(curves, axis=0), **strategy.line, linewidth=1.6)
    if len(curves) > 1:
        least, most = np.min(curves, axis=0), np.max(curves, axis=0)
        axes.fill_between(steps, least, most, color=strategy.line["color"], alpha=0.12, linewidth=0)


def _draw_differences(axes: Any, compared: Sequence[_Strategy], reference: _Strategy) -> None:
    references = {run.seed: run for run in reference.ended}
    shown = [0.0]
    for strategy in compared:
        pairs = [(run, references[run.seed]) for run in strategy.ended if run.seed in references]
        curves = [smoothed(run.losses) - smoothed(other.losses) for run, other in pairs]
        points = np.mean([_validation(run) - _validation(other) for run, other in pairs], axis=0)
        _draw_mean(axes, curves, strategy)
        axes.plot(strategy.validation_steps, points, linestyle="none", **strategy.marker)
        shown += [*_later(np.mean(curves, axis=0)), *_later(points)]
    axes.axhline(0, color="0.3", linewidth=1)
    _fit(axes, shown)
    axes.set_title(f"Difference from {reference.label} with the same seed")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("nats per token")
    axes.grid(alpha=0.3)


def _draw_outcomes(axes: Any, compared: Sequence[_Strategy], reference: _Strategy) -> None:
    """Draw the difference of every strategy's last validation loss from the baseline's."""
    for row, strategy in enumerate(compared):
        difference, colour = strategy.difference, strategy.line["color"]
        assert difference is not None
        seeds = list(difference.by_seed.values())
        axes.plot(seeds, [row] * len(seeds), linestyle="none", marker="|", color=colour, markersize=8)
        if difference.interval is not None:
            axes.plot(difference.interval, (row, row), **strategy.line, linewidth=1.6)
        axes.plot(difference.mean, row, color=colour, marker=strategy.marker["marker"], markersize=7)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(compared)), [strategy.label for strategy in compared], fontsize=8)
    axes.set_ylim(len(compared) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=5)
    axes.set_title("Last validation loss: mean, 95 % interval, seeds (|)", fontsize=10)
    axes.set_xlabel(f"difference from {reference.label} (nats per token)")
    axes.grid(alpha=0.3, axis="x")


def _fit(axes: Any, shown: Sequence[float]) -> None:
    shown = [value for value in shown if math.isfinite(value)]
    if shown:
        margin = 0.07 * (max(shown) - min(shown)) or 0.01
        axes.set_ylim(min(shown) - margin, max(shown) + margin)


def _validation(run: FinishedRun) -> np.ndarray:
    return np.array([loss for _, loss in run.validation])


def _steps(curve: np.ndarray) -> np.ndarray:
    return np.arange(1, len(curve) + 1)


def _later(curve: np.ndarray) -> np.ndarray:
    return curve[len(curve) // _SKIPPED :]
