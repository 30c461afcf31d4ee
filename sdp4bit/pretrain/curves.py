"""Loss curves of several runs in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from sdp4bit.pretrain.trainer import TrainingResult

_STYLES = ("-", "--", ":", "-.")


def draw_curves(results: Sequence[TrainingResult], *, path: Path) -> None:
    """The PNG file shows training loss (smoothed, lines) and validation loss (points) of every run.

    One colour per strategy, one line style per seed.
    """
    colours = mpl.color_sequences["tab10"]
    strategies = list(dict.fromkeys(result.strategy for result in results))
    seeds = list(dict.fromkeys(result.seed for result in results))
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    lowest, highest = np.inf, -np.inf
    for result in results:
        colour = colours[strategies.index(result.strategy) % len(colours)]
        style = _STYLES[seeds.index(result.seed) % len(_STYLES)]
        name = result.strategy if len(seeds) == 1 else f"{result.strategy}, seed {result.seed}"
        steps = np.array([metrics.step for metrics in result.steps])
        losses = smoothed([metrics.loss for metrics in result.steps])
        axes.plot(steps, losses, color=colour, linestyle=style, linewidth=1.6, label=name)
        axes.plot(
            *zip(*result.validation, strict=True),
            color=colour,
            linestyle="none",
            marker="o" if strategies.index(result.strategy) == 0 else "x",
            markersize=7,
            markeredgewidth=1.8,
            markerfacecolor="none",
            label=f"{name}, validation" if result.seed == seeds[0] else None,
        )
        # The first tenth falls so steeply that the rest would be a flat line.
        shown = losses[len(losses) // 10 :].tolist() + [loss for _, loss in result.validation]
        lowest, highest = min(lowest, *shown), max(highest, *shown)
    margin = 0.05 * (highest - lowest) or 0.05
    axes.set_ylim(lowest - margin, highest + margin)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("cross entropy (nats per token)")
    axes.set_title("Training loss (lines, smoothed) and validation loss (points)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    working = path.with_name(f".{path.name}")
    figure.savefig(working, format="png", dpi=130)
    working.replace(path)


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Return the mean over a window around every value: a twentieth of all, narrower at the ends."""
    values = np.asarray(losses, dtype=np.float64)
    half = max(1, len(values) // 40)
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])
