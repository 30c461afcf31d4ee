"""Join losses and seconds of `benchmarks.frontier` into two tables and a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import RATES, ink, origin, percent, save_figure, table
from sdp4bit_lab.compare.paired import confidence_interval

BASELINE = "fsdp2"
COMPUTE = "compute"
"""Strategy without communication, whose time is that of a local step."""
ALLOWANCE = 0.005
"""Fraction of the baseline's final loss that a method may be above it when it counts as reached."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method that people choose."""

    label: str
    strategy: str
    """Name of the strategy that is trained."""
    timed: str
    """Name of the strategy whose steps are timed."""
    every: int = 1
    """Steps from one timed exchange to the next."""
    asks: str
    """Demands on the user, beside more memory."""
    style: str | None = None
    """Color and line of the figures; None for a method that is not drawn."""


def _method(
    label: str, strategy: str, asks: str, style: str | None = None, *, timed: str = "", every: int = 1
) -> Method:
    return Method(
        label=label, strategy=strategy, timed=timed or strategy, every=every, asks=asks, style=style
    )


_NEW_ALGORITHM = "an outer optimizer with its own rates"
METHODS: dict[str, Method] = {
    "fsdp2": _method("FSDP2, gloo's own collectives", "fsdp2", "nothing", "black -"),
    "fsdp2-pairwise": _method(
        "FSDP2, pairwise exchange", "fsdp2", "collectives that gloo does not have", "black --", timed="fair"
    ),
    "fsdp2-bf16": _method("FSDP2, bf16 gradients", "fair-bf16", "one setting", "tab:gray -"),
    "ddp": _method("DDP", "ddp", "a model that fits one device"),
    "ddp-bf16": _method("DDP, bf16 hook", "ddp-bf16", "DDP, one line", "tab:gray --"),
    **{
        f"powersgd-{rank}": _method(
            f"DDP, PowerSGD of rank {rank}", strategy, "DDP, one line, a rank and a start step", style
        )
        for rank, strategy, style in (
            (4, "ddp-powersgd", "tab:orange -"),
            (32, "ddp-powersgd-32", "tab:orange --"),
        )
    },
    **{
        f"local-{every}{suffix}": _method(
            f"DiLoCo, {every} local steps, {messages}",
            f"local-{every}{suffix}",
            _NEW_ALGORITHM,
            style if every == 30 else None,
            timed=f"local-1{suffix}",
            every=every,
        )
        for suffix, messages, style in (("", "fp32", "tab:blue -"), ("-4bit", "4 bits", "tab:blue --"))
        for every in (8, 30, 100)
    },
    "zeropp": _method("ZeRO++'s formats on FSDP2", "zeropp", "DeepSpeed ZeRO-3, settings", "tab:red -"),
    "sdp4bit": _method("sdp4bit on FSDP2", "sdp4bit", "a package, one line", "tab:green -"),
    "ddp-sdp4bit": _method("sdp4bit on DDP", "ddp-sdp4bit", "DDP, a package, one line"),
    **{
        name: _method(f"sdp4bit, preset {name}", name, "a package, one line, a preset", style)
        for name, style in (
            ("sdp4bit-paper", None),
            ("sdp4bit-w3g3.5", None),
            ("sdp4bit-w2g3", None),
            ("sdp4bit-w2g2", "tab:green --"),
        )
    },
}
"""Methods by name; sdp4bit's own last."""


# -- join ------------------------------------------------------------------------------------------------


def final_loss(run: dict[str, Any]) -> float:
    """Return the last validation loss; infinite if the run has diverged."""
    loss = run["losses"][-1][1]
    return math.inf if loss is None else float(loss)


def rates_tried(runs: Sequence[dict[str, Any]], strategy: str, *, seed: int) -> dict[float, float]:
    """Map the learning rates of the seed that tunes a strategy to their final losses."""
    return {
        run["learning_rate"]: final_loss(run)
        for run in runs
        if (run["strategy"], run["seed"]) == (strategy, seed)
    }


def best_rate(runs: Sequence[dict[str, Any]], strategy: str, *, seed: int) -> float:
    """Return the learning rate with the lowest final loss of the seed that tunes it."""
    tried = rates_tried(runs, strategy, seed=seed)
    return min(tried, key=lambda rate: tried[rate])


@dataclass(frozen=True, kw_only=True)
class Line:
    """A method with its losses by steps, and its seconds by rates of the link."""

    method: Method
    learning_rate: float
    at_edge: bool
    """Whether the learning rate is the lowest or the highest that was tried."""
    curve: list[tuple[int, float]]
    """Step and mean loss of the seeds; infinite if one has diverged."""
    percents: list[float]
    """Final losses relative to the baseline's of the same seeds."""
    seconds: dict[str, float]
    """Of a step, by rates."""
    bytes: float
    """That a node sends, per parameter and step."""
    peak: float
    """Bytes of a rank's memory in a step, per parameter: the median of all runs, because the first one of a
    process includes memory of modules that it loads."""

    @property
    def percent(self) -> float:
        return sum(self.percents) / len(self.percents)

    def steps_to(self, target: float) -> float | None:
        """Return the steps after which the mean loss is at most the target, between evaluations linearly."""
        before: tuple[int, float] | None = None
        for step, loss in self.curve:
            if loss <= target:
                if before is None:
                    return float(step)
                share = (before[1] - target) / (before[1] - loss) if math.isfinite(before[1]) else 1.0
                return before[0] + share * (step - before[0])
            before = (step, loss)
        return None

    def seconds_to(self, target: float, rate: str) -> float | None:
        """Return the seconds until the target; None if it is not reached."""
        steps = self.steps_to(target)
        return None if steps is None else steps * self.seconds[rate]


def rates_of(result: dict[str, Any]) -> list[str]:
    """Return the rates of the link in the order in which they were measured."""
    return list(dict.fromkeys(row["rate"] for row in result["seconds"]))


def lines_of(result: dict[str, Any]) -> dict[str, Line]:
    """Join the runs and the seconds of a result, by names of methods, lowest loss first."""
    rows = {(row["strategy"], row["rate"]): row for row in result["seconds"]}
    tuned: dict[str, dict[int, dict[str, Any]]] = {}
    for strategy in dict.fromkeys(run["strategy"] for run in result["runs"]):
        rate = best_rate(result["runs"], strategy, seed=result["seeds"][0])
        tuned[strategy] = {
            run["seed"]: run
            for run in result["runs"]
            if (run["strategy"], run["learning_rate"]) == (strategy, rate) and run["seed"] in result["seeds"]
        }
    references = tuned[METHODS[BASELINE].strategy]
    peaks: dict[str, list[float]] = {}
    for run in result["runs"]:
        peaks.setdefault(run["strategy"], []).append(run["peak_bytes"])
    lines = {}
    for name, method in METHODS.items():
        runs = tuned.get(method.strategy, {})
        rates = [rate for rate in rates_of(result) if (method.timed, rate) in rows]
        if len(runs) < len(result["seeds"]) or not rates:
            continue  # not finished
        learning_rate = runs[result["seeds"][0]]["learning_rate"]
        tried = rates_tried(result["runs"], method.strategy, seed=result["seeds"][0])
        lines[name] = Line(
            method=method,
            learning_rate=learning_rate,
            at_edge=learning_rate in (min(tried), max(tried)),
            curve=_mean_curve(list(runs.values())),
            percents=[100 * (final_loss(runs[s]) / final_loss(references[s]) - 1) for s in result["seeds"]],
            seconds={rate: _seconds(rows, method, rate) for rate in rates},
            bytes=rows[method.timed, rates[0]]["tx_bytes_per_node_per_step"]
            / (method.every * result["parameters"]),
            peak=statistics.median(peaks[method.strategy]) / result["parameters"],
        )
    return dict(sorted(lines.items(), key=lambda item: item[1].percent))


def _mean_curve(runs: list[dict[str, Any]]) -> list[tuple[int, float]]:
    curve = []
    for points in zip(*(run["losses"] for run in runs), strict=True):
        losses = [math.inf if loss is None else loss for _, loss in points]
        curve.append((points[0][0], sum(losses) / len(losses)))
    return curve


def _seconds(rows: dict[tuple[str, str], dict[str, Any]], method: Method, rate: str) -> float:
    """Return the mean seconds of a step: of local steps and their share of an exchange."""
    timed = float(rows[method.timed, rate]["seconds_per_step"])
    if method.every == 1:
        return timed
    local = float(rows[COMPUTE, rate]["seconds_per_step"])
    return local + max(0.0, timed - local) / method.every


def target_of(lines: dict[str, Line]) -> float:
    """Return the loss that counts as the baseline's final one."""
    return lines[BASELINE].curve[-1][1] * (1 + ALLOWANCE)


# -- words -----------------------------------------------------------------------------------------------


def _percent_text(line: Line) -> str:
    if not math.isfinite(line.percent):
        return "diverges"
    interval = confidence_interval(line.percents)
    if line.method.strategy == METHODS[BASELINE].strategy or interval is None:
        return percent(line.percent, digits=2)
    return f"{percent(line.percent, digits=2)} ({interval[0]:+.2f} to {interval[1]:+.2f})"


def _time_text(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"


def frontier_losses(result: dict[str, Any]) -> str:
    """Return the table of losses after equal steps, lowest first, and the best learning rates."""
    lines = list(lines_of(result).values())
    rows = [
        [
            *(line.method.label, _percent_text(line), f"{line.bytes:.2f}", f"{line.peak:.0f}"),
            line.method.asks,
        ]
        for line in lines
    ]
    by_rate: dict[str, list[str]] = {}
    for line in lines:
        rate = f"{line.learning_rate:g}{' (at an end of the grid)' * line.at_edge}"
        by_rate.setdefault(rate, []).append(line.method.label)
    common, *others = sorted(by_rate, key=lambda rate: -len(by_rate[rate]))
    best = [common, *(f"{rate} of {', '.join(by_rate[rate])}" for rate in others)]
    rates = f"The best learning rate of all methods is {'; except '.join(best)}."
    return f"{table(['method', 'loss', 'bytes', 'memory', 'needs'], rows)}\n\n{rates}"


def frontier_seconds(result: dict[str, Any]) -> str:
    """Return the table of seconds per step and until the baseline's loss, fastest at the first rate first."""
    lines, rates = lines_of(result), rates_of(result)
    target = target_of(lines)
    names = [RATES.get(rate, rate) for rate in rates]
    titles = ["method", *(f"{name}, to the loss" for name in names), *(f"{name}, per step" for name in names)]
    rows = [
        [
            line.method.label,
            *(_time_text(line.seconds_to(target, rate)) for rate in rates),
            *(f"{line.seconds[rate]:.3f}" for rate in rates),
        ]
        for line in sorted(
            lines.values(),
            key=lambda line: (line.steps_to(target) is None, line.seconds_to(target, rates[0]) or 0.0),
        )
    ]
    return table(titles, rows)


def frontier_conditions(result: dict[str, Any]) -> str:
    """Return model, data, hardware and command."""
    workload, seeds = result["workload"], result["seeds"]
    tokens = workload["sequence_length"] * workload["micro_batch"]
    return (
        f"A GPT of {result['parameters'] / 1e6:.2f} million parameters ({workload['layers']} layers, width "
        f"{workload['hidden']}, vocabulary {workload['vocabulary']}) on {workload['text']}. "
        f"{workload['decay_steps']} steps of {tokens} tokens per rank, seeds {', '.join(map(str, seeds))}. "
        f"{result['nodes']} nodes x {result['ranks_per_node']} rank on CPUs, over gloo. AdamW with a "
        f"beta2 of 0.95, gradients clipped to a norm of {workload['clip']:g}, "
        f"{workload['warmup_steps']} steps of warm-up and a cosine to a tenth. Learning rates: "
        f"{', '.join(f'{rate:g}' for rate in result['learning_rates'])}, and further ones for a method whose "
        f"best one was the lowest or the highest.\n\n{origin(result)}"
    )


# -- figures ---------------------------------------------------------------------------------------------


def write_report(result: dict[str, Any], folder: Path) -> None:
    """Write report.md with the tables and the conditions, and its figure."""
    parts = [frontier_losses(result), frontier_seconds(result), frontier_conditions(result)]
    parts.insert(2, "![Loss against seconds](loss-over-seconds.png)\n")
    text = "\n".join(["# Loss against seconds\n", *parts])
    (folder / "report.md").write_text(f"{text}\n", encoding="utf-8")
    draw_frontier(result, folder / "loss-over-seconds.png", digest="")


def draw_frontier(result: dict[str, Any], path: Path, *, digest: str) -> None:
    """Draw the validation loss over the seconds, at every rate of the link."""
    from matplotlib.figure import Figure

    lines, rates = lines_of(result), rates_of(result)
    figure = Figure(figsize=(3.4 * len(rates) + 0.4, 4.6), layout="constrained")
    panels = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    target = target_of(lines)
    for axes, rate in zip(panels, rates, strict=True):
        for line in (lines[name] for name in METHODS if name in lines):
            if line.method.style is None:
                continue
            color, dashes = line.method.style.replace("black", ink()).split(" ")
            points = [(step * line.seconds[rate], loss) for step, loss in line.curve if math.isfinite(loss)]
            axes.plot(*zip(*points, strict=True), dashes, color=color, linewidth=1.3, label=line.method.label)
            axes.plot(*points[-1], "o", color=color, markersize=4)
        axes.axhline(target, color=ink(), linewidth=0.5)
        axes.set_xlim(left=0.0)
        axes.set_title(RATES.get(rate, rate), fontsize=9)
        axes.set_xlabel("seconds of training", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    panels[0].set_ylim(top=min(panels[0].get_ylim()[1], 1.15 * target))
    panels[0].set_ylabel("validation loss", fontsize=9)
    labels = panels[0].get_legend_handles_labels()
    figure.legend(*labels, fontsize=8, loc="outside lower center", ncols=3)
    save_figure(figure, path, digest=digest)
