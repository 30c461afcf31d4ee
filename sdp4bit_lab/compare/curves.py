"""Draw the loss curves of several runs, and the differences of the strategies from the baseline."""

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

_COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Can be told apart with any kind of colour vision (Okabe and Ito 2008; without their yellow, too light)."""
_LINES = ("-", (0, (5, 2)), (0, (1, 1.3)))
_MARKERS = "osD^vPX"
_SKIPPED = 10
"""The first tenth of a run falls so steeply that the rest would be a flat line."""


@dataclass(frozen=True, kw_only=True)
class _Strategy:
    label: str
    ended: list[FinishedRun]
    diverged: list[FinishedRun]
    style: dict[str, Any]
    marker: str


def draw_curves(runs: Sequence[FinishedRun], *, baseline: str | None, path: Path) -> None:
    """Draw the losses of every strategy into a PNG file; with a baseline, also the differences from it.

    Lines are training losses, smoothed, and points validation losses; both are means over the seeds. Bands
    reach from the least to the most of the seeds. A run that diverged is a thin line of its own, with a cross
    where it ends.
    """
    strategies = _strategies(runs)
    others = [strategy for strategy in strategies if strategy.label != baseline]
    has_differences = any(outcome.difference for outcome in outcomes(runs, baseline=baseline))
    rows = 2 if has_differences else 1
    height = max(4.5 * rows, 3 + 0.28 * len(strategies) * rows)
    figure = Figure(figsize=(13, height), layout="constrained")
    grid = figure.add_gridspec(rows, 2, width_ratios=(1.7, 1))
    losses = figure.add_subplot(grid[0, 0])
    for strategy in strategies:
        _draw_losses(losses, strategy)
    _limit(losses, runs)
    losses.set_ylabel("cross entropy (nats per token)")
    several = len({run.seed for run in runs}) > 1
    losses.set_title(
        "Training loss (lines, smoothed) and validation loss (points)"
        + ("\nmeans over the seeds; bands: least to most" if several else "")
    )
    losses.set_xlabel("optimizer step")
    losses.grid(alpha=0.3)
    names = figure.add_subplot(grid[0, 1])
    names.axis("off")
    names.legend(handles=_legend(strategies), frameon=False, loc="upper left", fontsize=9)
    if has_differences and baseline is not None:
        reference = next(strategy for strategy in strategies if strategy.label == baseline)
        over_steps = figure.add_subplot(grid[1, 0], sharex=losses)
        _draw_differences(over_steps, others, reference)
        _draw_outcomes(figure.add_subplot(grid[1, 1]), runs, others, baseline=baseline)
    save_figure(figure, path, dpi=110)


def _strategies(runs: Sequence[FinishedRun]) -> list[_Strategy]:
    strategies = []
    for number, label in enumerate(dict.fromkeys(run.strategy for run in runs)):
        labelled = [run for run in runs if run.strategy == label]
        colour = _COLOURS[number % len(_COLOURS)]
        line = _LINES[number // len(_COLOURS) % len(_LINES)]
        strategies.append(
            _Strategy(
                label=label,
                ended=[run for run in labelled if run.diverged_at is None],
                diverged=[run for run in labelled if run.diverged_at is not None],
                style={"color": colour, "linestyle": line},
                marker=_MARKERS[number % len(_MARKERS)],
            )
        )
    return strategies


def _legend(strategies: Sequence[_Strategy]) -> list[Line2D]:
    entries = []
    for strategy in strategies:
        seeds = ", ".join(str(run.seed) for run in strategy.diverged)
        label = strategy.label + (f" (diverged: seed {seeds})" if seeds else "")
        marker = {**_marks(strategy), **strategy.style}
        entries.append(Line2D([], [], linewidth=1.6, label=label, **marker))
    return entries


def _draw_losses(axes: Any, strategy: _Strategy) -> None:
    colour = strategy.style["color"]
    if strategy.ended:
        curves = np.array([smoothed(run.losses) for run in strategy.ended])
        _draw_mean(axes, curves, strategy)
        points = np.array([_points_of(run) for run in strategy.ended])
        axes.plot([step for step, _ in strategy.ended[0].validation], points.mean(axis=0), **_marks(strategy))
    for run in strategy.diverged:
        curve = smoothed(run.losses)
        axes.plot(_steps(curve), curve, **strategy.style, linewidth=0.8)
        known = np.flatnonzero(np.isfinite(curve))
        if len(known):
            axes.plot(known[-1] + 1, curve[known[-1]], color=colour, marker="x", markersize=9)


def _draw_mean(axes: Any, curves: np.ndarray, strategy: _Strategy) -> None:
    steps = _steps(curves[0])
    axes.plot(steps, curves.mean(axis=0), **strategy.style, linewidth=1.6)
    if len(curves) > 1:
        least, most = curves.min(axis=0), curves.max(axis=0)
        axes.fill_between(steps, least, most, color=strategy.style["color"], alpha=0.12, linewidth=0)


def _draw_differences(axes: Any, others: Sequence[_Strategy], reference: _Strategy) -> None:
    references = {run.seed: run for run in reference.ended}
    shown = [0.0]
    for strategy in others:
        pairs = [(run, references[run.seed]) for run in strategy.ended if run.seed in references]
        if not pairs:
            continue
        curves = np.array([smoothed(run.losses) - smoothed(other.losses) for run, other in pairs])
        _draw_mean(axes, curves, strategy)
        shown += _later(curves.mean(axis=0)).tolist()
        means = np.array([_points_of(run) - _points_of(other) for run, other in pairs]).mean(axis=0)
        axes.plot([step for step, _ in pairs[0][0].validation], means, **_marks(strategy))
        shown += _later(means).tolist()
    axes.axhline(0, color="0.3", linewidth=1)
    _fit(axes, shown)
    axes.set_title(f"Difference to {reference.label} with the same seed")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("nats per token")
    axes.grid(alpha=0.3)


def _draw_outcomes(
    axes: Any, runs: Sequence[FinishedRun], others: Sequence[_Strategy], *, baseline: str
) -> None:
    """Draw the last validation loss of every strategy against the baseline's: seeds, mean, interval."""
    differences = {outcome.strategy: outcome.difference for outcome in outcomes(runs, baseline=baseline)}
    shown = [strategy for strategy in others if differences[strategy.label] is not None]
    for row, strategy in enumerate(shown):
        difference = differences[strategy.label]
        if difference is None:
            continue
        colour = strategy.style["color"]
        seeds = list(difference.by_seed.values())
        axes.plot(seeds, [row] * len(seeds), linestyle="none", marker="|", color=colour, markersize=8)
        if difference.interval is not None:
            axes.plot(difference.interval, (row, row), **strategy.style, linewidth=1.6)
        axes.plot(difference.mean, row, color=colour, marker=strategy.marker, markersize=7)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(shown)), [strategy.label for strategy in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=5)
    axes.set_title("Last validation loss: mean, 95 % interval, seeds (|)", fontsize=10)
    axes.set_xlabel(f"difference to {baseline} (nats per token)")
    axes.grid(alpha=0.3, axis="x")


def _limit(axes: Any, runs: Sequence[FinishedRun]) -> None:
    """Fit the vertical axis to what comes after the first steep part, of runs that did not diverge."""
    fitting = [run for run in runs if run.diverged_at is None] or list(runs)
    shown = [loss for run in fitting for loss in _later(smoothed(run.losses))]
    shown += [loss for run in fitting for _, loss in run.validation]
    _fit(axes, shown)


def _fit(axes: Any, shown: Sequence[float]) -> None:
    shown = [value for value in shown if math.isfinite(value)]
    if shown:
        margin = 0.07 * (max(shown) - min(shown)) or 0.01
        axes.set_ylim(min(shown) - margin, max(shown) + margin)


def _marks(strategy: _Strategy) -> dict[str, Any]:
    return {
        "color": strategy.style["color"],
        "linestyle": "none",
        "marker": strategy.marker,
        "markersize": 6,
        "markerfacecolor": "none",
    }


def _points_of(run: FinishedRun) -> np.ndarray:
    return np.array([loss for _, loss in run.validation])


def _steps(curve: np.ndarray) -> np.ndarray:
    return np.arange(1, len(curve) + 1)


def _later(curve: np.ndarray) -> np.ndarray:
    return curve[len(curve) // _SKIPPED :]
