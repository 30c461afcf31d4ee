"""Tables and figures of losses: of strategies, over the number of nodes, and over that of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import ink, origin, percent, save_figure, table
from sdp4bit_lab.compare.finished_run import FinishedRun
from sdp4bit_lab.compare.outcomes import outcomes

BASELINE = "baseline"
FULL = {"gradient": 4.0, "weight": 2.0}
"""Bytes of a gradient in fp32 and of a weight in bf16."""
BITS = {"2 bits": "tab:orange", "4 bits": "tab:blue"}


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Validation loss of a strategy relative to the baseline with the same seeds."""

    strategy: str
    gradient_bytes: float
    weight_bytes: float
    seeds: int
    percent: float
    interval: tuple[float, float]
    verdict: str = ""
    loss: float | None = None

    @property
    def bytes(self) -> float:
        """Inter-node bytes per parameter and step."""
        return self.gradient_bytes + self.weight_bytes

    @property
    def name(self) -> str:
        """Strategy with abbreviated options: 3-bit weights in groups of 128 are `w3/128`."""
        name, *options = self.strategy.split(":")
        chosen = dict(option.split("=") for option in options)
        short = []
        for letter, bits, group in (
            ("w", "weight-quantization-bits", "wq-group-size"),
            ("g", "gradient-quantization-bits-inter", "gq-group-size-inter"),
        ):
            if {bits, group} & chosen.keys():
                size = chosen.pop(group, None)
                short.append(f"{letter}{chosen.pop(bits, 4)}" + (f"/{size}" if size else ""))
        if chosen.pop("gradient-rounding-inter", None):
            short.append("dither")
        short += [
            f"from step {step}" for step in [chosen.pop("gradients-quantization-start-iteration", 0)] if step
        ]
        return ", ".join([name, *short, *(f"{key} {value}" for key, value in chosen.items())])

    def interval_text(self, *, digits: int = 3) -> str:
        low, high = self.interval
        return f"{low:+.{digits}f} to {percent(high, digits=digits)}".replace(" ", "\N{NO-BREAK SPACE}")


def unstable_seeds(result: dict[str, Any]) -> list[int]:
    """Return the seeds whose baseline has spikes of the gradient norm."""
    return sorted(
        run["seed"] for run in result.get("runs", ()) if run["strategy"] == BASELINE and run["spikes"]
    )


def losses(result: dict[str, Any], *, only_stable: bool = False) -> list[Loss]:
    """Return the losses of an accuracy result without the baseline, most bytes first.

    A result has runs, or only differences and intervals if the runs were not kept. Strategies with fewer than
    three seeds have no meaningful interval and are omitted.
    """
    if "outcomes" in result:
        found = [Loss(**{**row, "interval": tuple(row["interval"])}) for row in result["outcomes"]]
    else:
        left_out = unstable_seeds(result) if only_stable else []
        runs = [FinishedRun(losses=(), **run) for run in result["runs"] if run["seed"] not in left_out]
        found = [
            Loss(
                strategy=outcome.strategy,
                **result["bytes"][outcome.strategy],
                seeds=len(difference.by_seed),
                percent=difference.mean_percent,
                interval=difference.percent_interval,
                verdict=difference.significance,
                loss=outcome.validation_loss,
            )
            for outcome in outcomes(runs, baseline=BASELINE)
            if (difference := outcome.difference) is not None
            and difference.significance is not None
            and difference.percent_interval is not None
        ]
    return sorted(found, key=lambda loss: -loss.bytes)


def loss_section(result: dict[str, Any]) -> str:
    """Return the table of an accuracy result with its origin."""

    def quiet(loss: Loss | None) -> str:
        return "" if loss is None else f"{percent(loss.percent)} ({loss.interval_text()})"

    found, unstable = losses(result), unstable_seeds(result)
    stable = {loss.strategy: loss for loss in losses(result, only_stable=True)} if unstable else {}
    # The verdict stands left of the numbers that a narrow screen cuts off.
    titles = [
        "strategy",
        "bytes",
        "seeds",
        "difference",
        "95 % interval",
        "verdict",
        "stable seeds only",
        "loss",
    ]
    rows = [
        [
            *(f"`{loss.name}`", f"{loss.bytes:.2f}", str(loss.seeds)),
            *(percent(loss.percent), loss.interval_text(), loss.verdict, quiet(stable.get(loss.strategy))),
            "" if loss.loss is None else f"{loss.loss:.4f}",
        ]
        for loss in found
    ]
    empty = [column for column in range(len(titles)) if not any(row[column] for row in rows)]
    titles, *rows = [[c for n, c in enumerate(row) if n not in empty] for row in (titles, *rows)]
    note = f"{result['note']}\n\n" if result.get("note") else ""
    if unstable:
        seeds = ", ".join(map(str, unstable))
        plural = "s" * (len(unstable) > 1)
        note += f"The gradient norm of the baseline jumps with seed{plural} {seeds}: it is not stable.\n\n"
    return f"## {result['title']}\n\n{table(titles, rows)}\n{steps_table(result)}{note}{origin(result)}\n"


def steps_table(result: dict[str, Any]) -> str:
    """Return the differences after every evaluation; empty if runs have one evaluation or were not kept."""
    runs = result.get("runs", ())
    steps = sorted({step for run in runs for step, _ in run["validation"]})
    if len(steps) < 2:
        return ""
    rows = []
    for step in steps:
        until = [
            run | {"validation": [loss for loss in run["validation"] if loss[0] <= step]} for run in runs
        ]
        found = losses(result | {"runs": until})
        rows.append([f"{step:,}", *(f"{percent(loss.percent)} ({loss.interval_text()})" for loss in found)])
    return table(["difference after step", *(f"`{loss.name}`" for loss in losses(result))], rows) + "\n"


def draw_losses(result: dict[str, Any], path: Path, *, digest: str) -> None:
    """Draw loss over bytes with 95 % intervals and labels."""
    from matplotlib.figure import Figure

    chosen = result.get("figure")
    found = [loss for loss in losses(result) if chosen is None or loss.strategy in chosen]
    figure = Figure(figsize=(4.4, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot([sum(FULL.values())], [0], "o", color=ink())
    axes.annotate(
        BASELINE, (sum(FULL.values()), 0), (-4, 7), textcoords="offset points", ha="right", fontsize=8
    )
    for loss in found:
        ours = loss.strategy.startswith("sdp4bit") and loss.strategy != "sdp4bit-paper"
        color = "tab:green" if ours else "tab:blue"
        error = [[loss.percent - loss.interval[0]], [loss.interval[1] - loss.percent]]
        axes.errorbar([loss.bytes], [loss.percent], yerr=error, fmt="o", color=color, capsize=2, markersize=4)
        right = 0.95 < loss.bytes < 4
        axes.annotate(
            loss.name,
            (loss.bytes, loss.percent),
            (5 if right else -5, 3 if loss.percent > 0.002 else -12),
            textcoords="offset points",
            ha="left" if right else "right",
            color=color,
            fontsize=8,
            weight="bold" if loss.strategy == "sdp4bit" else None,
        )
    axes.axhline(0, color=ink(), linewidth=0.6)
    axes.set_xscale("log")
    axes.set_xlim(0.25, 9)
    axes.set_xticks([0.5, 1, 2, 4, 6], ["0.5", "1", "2", "4", "6"])
    axes.minorticks_off()
    # Linear up to 0.1 %, which covers most strategies, and logarithmic beyond.
    axes.set_yscale("symlog", linthresh=0.1)
    bottom, top = min(loss.interval[0] for loss in found), 1.4 * max(loss.interval[1] for loss in found)
    axes.set_ylim(min(bottom, -0.02) - 0.01, top)
    ticks = [tick for tick in (0.0, 0.05, 0.1, 0.2, 0.5, 1.0) if tick < top]
    axes.set_yticks(ticks, [f"{tick:g} %" for tick in ticks])
    axes.set_xlabel("bytes per parameter and step between nodes", fontsize=9)
    axes.set_ylabel("validation loss over full precision", fontsize=9)
    axes.set_title(result["title"], fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    save_figure(figure, path, digest=digest)


def _finish(axes: Any, of: str) -> None:
    """Label the axes of losses over something, and add the zero line, grid and legend."""
    axes.axhline(0, color=ink(), linewidth=0.6)
    axes.set_xlabel(of, fontsize=9)
    axes.set_ylabel("% of the validation loss", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


# -- loss against the number of nodes ---------------------------------------------------------------------


def predicted_percent(result: dict[str, Any], count: int) -> float:
    """Return the cost of sdp4bit that the error law predicts for a number of nodes, in percent of the loss.

    A node's own gradient stays exact, so (n - 1) / n of the squared error remains: half of it with two nodes.
    """
    error: float = result["squared_error_of_two_nodes"] * 2 * (count - 1) / count
    return float(result["percent_per_squared_error"]) * error


def nodes_section(result: dict[str, Any]) -> str:
    """Return the table of losses by number of nodes, beside the prediction of the error law."""
    rows, outside = [], []
    for layout in result["layouts"]:
        for loss in losses(layout):
            predicted = ""
            if loss.strategy == "sdp4bit":
                value = predicted_percent(result, layout["nodes"])
                predicted = percent(value)
                if not loss.interval[0] <= value <= loss.interval[1]:
                    outside.append(str(layout["nodes"]))
            found = percent(loss.percent), loss.interval_text(), predicted, loss.verdict
            rows.append([str(layout["nodes"]), f"`{loss.name}`", str(loss.seeds), *found])
    titles = ["nodes", "strategy", "seeds", "difference", "95 % interval", "predicted", "verdict"]
    unstable = sorted({seed for layout in result["layouts"] for seed in unstable_seeds(layout)})
    note = (
        f"The prediction is outside of the interval with {', '.join(outside)} nodes.\n\n" if outside else ""
    )
    if unstable:
        plural = "s" * (len(unstable) > 1)
        note += f"The baseline's gradient norm jumps with seed{plural} {', '.join(map(str, unstable))}.\n\n"
    return (
        f"## {result['title']}\n\n![Loss against the number of nodes](../images/loss-over-nodes.png)\n\n"
        "One rank per node, the same sequences per step with any number of nodes. Prediction: "
        f"{result['percent_per_squared_error']:.1f} % of the loss per unit of the squared error of the mean "
        f"gradient, {result['squared_error_of_two_nodes']:g} with two nodes (study `vnmse`), times "
        "2 (n - 1)/n because a node's own gradient stays exact.\n\n"
        f"{table(titles, rows)}\n{note}{origin(result)}\n"
    )


def draw_nodes(result: dict[str, Any], path: Path, *, digest: str) -> None:
    """Draw losses with 95 % intervals over the number of nodes, and the prediction."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, 3.0), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(loss.strategy for layout in result["layouts"] for loss in losses(layout)))
    for number, name in enumerate(names):
        points = [
            (layout["nodes"], loss)
            for layout in result["layouts"]
            for loss in losses(layout)
            if loss.strategy == name
        ]
        axes.errorbar(
            [count * 1.05**number for count, _ in points],  # side by side
            [loss.percent for _, loss in points],
            yerr=[
                [loss.percent - loss.interval[0] for _, loss in points],
                [loss.interval[1] - loss.percent for _, loss in points],
            ],
            **{"fmt": "o", "capsize": 2, "markersize": 4, "label": points[0][1].name},
        )
    counts = [layout["nodes"] for layout in result["layouts"]]
    predictions_of = [predicted_percent(result, count) for count in counts]
    axes.plot(counts, predictions_of, "--", color="gray", label="predicted, sdp4bit")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    _finish(axes, "nodes")
    save_figure(figure, path, digest=digest)


# -- loss against the number of parameters ----------------------------------------------------------------


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
    axes.set_xscale("log")
    _finish(axes, "parameters")
    save_figure(figure, path, digest=digest)
