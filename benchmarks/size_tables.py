"""Tables and figure of the study of loss against the number of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.markdown import save_figure, table

BITS = {"2 bits": "tab:orange", "4 bits": "tab:blue"}


def size_table(result: dict[str, Any], *, predicted: bool) -> str:
    """Return the measured sizes, or the prediction for larger ones."""
    chosen = result["tables"][int(predicted)]
    return table(chosen["columns"], chosen["rows"])


def draw_sizes(result: dict[str, Any], path: Path, *, digest: str) -> None:
    """Draw losses with 95 % intervals over the number of parameters, and the fit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.subplots()
    for bits, color in BITS.items():
        points = result["points"][bits]
        axes.errorbar(
            [parameters for parameters, _, _ in points],
            [mean for _, mean, _ in points],
            yerr=[half for _, _, half in points],
            **{"fmt": "o", "capsize": 2, "markersize": 4, "color": color},
            label=f"{bits} between nodes",
        )
        sizes, means, halves = zip(*result["fit"][bits], strict=True)
        axes.plot(sizes, means, "--", color=color, linewidth=0.8, label=result["fit_labels"][bits])
        lower = [mean - half for mean, half in zip(means, halves, strict=True)]
        upper = [mean + half for mean, half in zip(means, halves, strict=True)]
        axes.fill_between(sizes, lower, upper, color=color, alpha=0.12, linewidth=0)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xscale("log")
    axes.set_xlabel("parameters", fontsize=9)
    axes.set_ylabel("% of the validation loss", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    save_figure(figure, path, digest=digest)
