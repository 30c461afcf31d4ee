"""Write the result tables and figures of the documentation from results/ and experiments/.

    python -m benchmarks.tables

writes docs/results/*.md, docs/images/loss-over-bytes.png and step-time.png, and the text between the markers
`<!-- result NAME -->` and `<!-- end -->` of README.md and docs/. Pages with unchanged results do not change.
The inputs come from benchmarks/collect.py and `benchmarks.cluster --json`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.markdown import NOTICE, origin, percent, save_figure, table
from benchmarks.plan_tables import memory_table, peak_table, planning_page, ratio_table, span
from benchmarks.size_tables import draw_sizes, size_table
from benchmarks.speed_tables import (
    RATES,
    SHOWN,
    cluster_results,
    cluster_section,
    draw_step_times,
    kernels_page,
    profile_section,
    rates_of,
    seconds_of,
)
from sdp4bit_lab.common.files import write_atomically
from sdp4bit_lab.compare.finished_run import FinishedRun
from sdp4bit_lab.compare.outcomes import outcomes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
MARKED = re.compile(r"(<!-- result ([\w-]+) -->\n?).*?(<!-- end -->)", re.DOTALL)
BASELINE = "baseline"
FEWEST_DRAWN = 5
"""Strategies in the figure of losses, not counting the baseline."""
FULL = {"gradient": 4.0, "weight": 2.0}
"""Bytes of a gradient in fp32 and of a weight in bf16."""
STUDIES = ("finetuning", "size_law", "two_roundings", "vnmse")
"""Folders of experiments/ with results of the current library."""


def encoded_bytes(bits: float | None, group_size: int, *, full: float) -> float:
    """Return the bytes of one value with its share of a scale; `full` without quantization."""
    return full if bits is None else bits / 8 + 2 / group_size


# -- loss ------------------------------------------------------------------------------------------------


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
    axes.plot([sum(FULL.values())], [0], "o", color="black")
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
    axes.axhline(0, color="black", linewidth=0.6)
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


# -- loss against the number of nodes ---------------------------------------------------------------------


def predicted_percent(result: dict[str, Any], count: int) -> float:
    """Return the cost of sdp4bit that the error law predicts for a number of nodes, in percent of the loss.

    A node's own gradient stays exact, so (n - 1) / n of the squared error remains: half of it with two nodes.
    """
    error: float = result["squared_error_of_two_nodes"] * 2 * (count - 1) / count
    return float(result["percent_per_squared_error"]) * error


def nodes_section(result: dict[str, Any]) -> str:
    """Return the table of losses by number of nodes, beside the prediction of the error law."""
    rows = []
    for layout in result["layouts"]:
        for loss in losses(layout):
            is_default = loss.strategy == "sdp4bit"
            predicted = percent(predicted_percent(result, layout["nodes"])) if is_default else ""
            found = percent(loss.percent), loss.interval_text(), predicted, loss.verdict
            rows.append([str(layout["nodes"]), f"`{loss.name}`", str(loss.seeds), *found])
    titles = ["nodes", "strategy", "seeds", "difference", "95 % interval", "predicted", "verdict"]
    unstable = sorted({seed for layout in result["layouts"] for seed in unstable_seeds(layout)})
    note = ""
    if unstable:
        plural = "s" * (len(unstable) > 1)
        note = f"The baseline's gradient norm jumps with seed{plural} {', '.join(map(str, unstable))}.\n\n"
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
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("nodes", fontsize=9)
    axes.set_ylabel("% of the validation loss", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    save_figure(figure, path, digest=digest)


# -- plans and studies -----------------------------------------------------------------------------------


def predictions(result: dict[str, Any]) -> str:
    """Return the predicted shares of a copy, for comparison with the first measurements."""
    rows = [
        [f"{cell} %" if 3 <= i <= 5 else str(cell) for i, cell in enumerate(row)] for row in result["rows"]
    ]
    return (
        f"## Prediction for GPUs\n\n**A calculation of {result['date']}, not a measurement.** "
        f"{result['note']}\n\n{table(result['columns'], rows)}"
    )


def gpu_section(reports: dict[str, dict[str, str]]) -> str:
    """Return the machines with GPUs that have sent a report, with the result of each part."""
    if not reports:
        return "No GPU has been measured.\n"
    names = list(dict.fromkeys(part for parts in reports.values() for part in parts))
    rows = [[name, *(parts.get(each, "–") for each in names)] for name, parts in reports.items()]
    return f"## Reports of machines with GPUs\n\n{table(['machine', *names], rows)}"


def tuning_section(name: str, result: dict[str, Any]) -> str:
    """Return the shares of a copy for several launch settings of the kernels."""
    rows = [[row[0], *(f"{share} %" for share in row[1:])] for row in result["rows"]]
    return f"## Launch settings, {name}\n\n{result['note']}.\n\n{table(result['columns'], rows)}"


def section(result: dict[str, Any]) -> str:
    """Return a result that contains its tables, with their origin."""
    # Losses of single runs are raw data.
    shown = [each for each in result["tables"] if "seed" not in each["columns"]]
    tables = [table(each["columns"], each["rows"]) for each in shown]
    note = [f"{result['note']}\n"] if "note" in result else []
    return "\n".join([f"## {result['title']}\n", *tables, *note, origin(result)])


def studies_page(folder: Path) -> str:
    """Return the tables of the studies."""
    text = f"{NOTICE}# Studies\n\nA page of text in `experiments/` names the commit of each script.\n"
    for name in STUDIES:
        result = json.loads((folder / name / "result.json").read_text(encoding="utf-8"))
        title = (folder / name / "README.md").read_text(encoding="utf-8").partition("\n")[0]
        more = {"machine": result["hardware"], "title": title.removeprefix("# ")}
        text += f"\n{section(result | more)}"
    return text


# -- everything ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Results:
    """Content of results/, and the documents generated from it."""

    root: Path = ROOT

    def _read(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.root / "results" / name).read_text(encoding="utf-8"))
        return content

    def _study(self, name: str) -> dict[str, Any]:
        return self._read(f"../experiments/{name}/result.json")

    @cached_property
    def accuracy(self) -> list[dict[str, Any]]:
        """Accuracy results, latest recipe first."""
        names = ("accuracy.json", "accuracy-longer.json", "accuracy-first-recipe.json")
        return [self._read(name) for name in names if (self.root / "results" / name).exists()]

    @cached_property
    def nodes(self) -> dict[str, Any]:
        """Accuracy results by the number of nodes."""
        return self._read("accuracy-nodes.json")

    @cached_property
    def headline(self) -> dict[str, Any]:
        """Accuracy result quoted by pages: the latest with the default strategy."""
        return next(
            each for each in self.accuracy if any(loss.strategy == "sdp4bit" for loss in losses(each))
        )

    @cached_property
    def widest(self) -> dict[str, Any]:
        """Accuracy result of the figure: the latest with enough strategies."""
        return next(each for each in self.accuracy if len(losses(each)) >= FEWEST_DRAWN)

    @cached_property
    def kernels(self) -> list[dict[str, Any]]:
        """Times of the operators on all devices."""
        folder = self.root / "results"
        paths = [*sorted((folder / "kernels").glob("*")), *sorted((folder / "gpu").glob("*/kernels.json"))]
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    @cached_property
    def gpu_reports(self) -> dict[str, dict[str, str]]:
        """Result of each part of `benchmarks.gpu_report`, by the names of the machines."""
        paths = sorted((self.root / "results" / "gpu").glob("*/report.json"))
        found = {path.parent.name: json.loads(path.read_text(encoding="utf-8"))["parts"] for path in paths}
        return {name: {part: each["result"] for part, each in of.items()} for name, of in found.items()}

    @cached_property
    def tuning(self) -> dict[str, dict[str, Any]]:
        """Launch settings that were varied on GPUs, by the names of the machines."""
        paths = sorted((self.root / "results" / "gpu").glob("*/tuning.json"))
        return {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}

    @cached_property
    def clusters(self) -> list[dict[str, Any]]:
        """Results of the emulated cluster, one per layout, smallest first."""
        return cluster_results(self.root / "results" / "cluster")

    def pages(self) -> dict[str, str]:
        """Return the generated pages by path."""
        bytes_text = (
            "Bytes are per parameter and step between nodes: an fp32 gradient (4) and a bf16 weight that is "
            "gathered once (2), or their quantized forms with scales. FSDP2's default gathers weights twice, "
            "which sends 2 more wherever weights are not quantized. Differences are of the validation loss, "
            "relative to the baseline with the same seeds; intervals by Student's t."
        )
        first, *others = map(loss_section, self.accuracy)
        sections = "\n".join([first, nodes_section(self.nodes), *others])
        profiles = [self._read(f"profile/{name}.json") for name in ("fair", "sdp4bit")]
        speed = "\n".join([*map(cluster_section, self.clusters), profile_section(profiles)])
        pages = {
            "docs/results/accuracy.md": f"{NOTICE}# Loss of all strategies\n\n{bytes_text}\n\n{sections}",
            "docs/results/speed.md": f"{NOTICE}# Seconds per step\n\n"
            "[How this is measured](../speed.md). Medians of several runs, with the lowest and the highest. "
            f"MB: sent by a node per step.\n\n{speed}",
            "docs/results/kernels.md": (
                f"{NOTICE}# Times of all operators\n\n{kernels_page(self.kernels)}\n"
                f"{predictions(self._read('gpu/predictions.json'))}\n{gpu_section(self.gpu_reports)}"
                + "".join(f"\n{tuning_section(*each)}" for each in self.tuning.items())
            ),
            "docs/results/planning.md": planning_page(self._read("planning.json")),
            "docs/results/studies.md": studies_page(self.root / "experiments"),
        }
        return {path: f"{text.rstrip()}\n" for path, text in pages.items()}

    def fragment(self, name: str) -> str:
        """Return the text for a marker; ValueError if no result has this name."""
        kind, _, detail = name.partition("-")
        if kind == "loss":
            return self._loss(detail or "sdp4bit")
        if kind == "nodes":
            return self._loss_of_nodes(int(detail))
        if kind in ("gain", "hsdp"):
            gains = self._gains(int(detail), over={"gain": "over_bf16", "hsdp": "over_hsdp"}[kind])
            return f"{min(gains):.1f} to {max(gains):.1f}"
        if name == "lora":
            return self._cell("finetuning", 0, ["LoRA, sdp4bit"], column=-1)
        if kind == "extra":
            return self._extra_memory(detail)
        if kind == "link":
            rows = self._read("planning.json")["boxes"]["rows"]
            gains = [
                gain
                for row in rows
                if row["link"].replace(" ", "").lower() == detail
                for gain in row["over_hybrid"]
            ]
            return span((min(gains), max(gains)))
        if kind == "box":
            return f"{self._read('planning.json')['reported_box'][detail]:.1f}"
        if name == "memory":
            return memory_table(self._read("planning.json"))
        if name == "peaks":
            return peak_table(self._read("memory.json"))
        if name == "ratios":
            return ratio_table(self._read("planning.json"))
        if name == "stock":
            row = seconds_of(self.clusters[0])["fsdp2"][rates_of(self.clusters[0])[0]]
            return f"{row['seconds_per_step']:.2f} s"
        if name == "launches":
            result = self._read("launches.json")
            return f"{sum(result['launches'].values()) / result['groups']:.0f}"
        if name in ("sizes", "predicted-sizes"):
            return size_table(self._study("size_law"), predicted=name != "sizes")
        if name == "summary":
            return self._summary()
        raise ValueError(
            f"<!-- result {name} --> names no result: use summary, stock, lora, launches, "
            "memory, peaks, ratios, sizes, predicted-sizes, extra-MODEL, link-NAME, box-NAME, loss-STRATEGY, loss-first, "
            "nodes-COUNT, gain-GBIT or hsdp-GBIT"
        )

    def _loss_of_nodes(self, count: int) -> str:
        (layout,) = (each for each in self.nodes["layouts"] if each["nodes"] == count)
        (loss,) = (each for each in losses(layout) if each.strategy == "sdp4bit")
        return f"{percent(loss.percent, digits=2)} ({loss.interval_text(digits=2)}), {loss.seeds} seeds"

    def _loss(self, strategy: str) -> str:
        results = self.accuracy
        if strategy == "first":
            strategy, results = "sdp4bit", [self._read("accuracy-first-recipe.json")]
        every = (loss for result in results for loss in losses(result, only_stable=True))
        loss = next((loss for loss in every if loss.strategy == strategy), None)
        if loss is None:
            raise ValueError(f"no accuracy result has three seeds of {strategy}")
        return f"{percent(loss.percent, digits=2)} ({loss.interval_text(digits=2)})"

    def _gains(self, gbit: int, *, over: str) -> list[float]:
        rows = (row for row in self._read("planning.json")["rows"] if row["gbit"] == gbit and row["fits"])
        return [gain for row in rows for gain in row[over] or ()]

    def _extra_memory(self, model: str) -> str:
        """Return the memory that sdp4bit needs beyond plain FSDP2 on two nodes."""
        rows = self._read("planning.json")["memory"]
        row = next(row for row in rows if (row["model"], row["nodes"]) == (model, 2))
        extra = sum(row["sdp4bit"].values()) - sum(row["fsdp2"].values())
        return f"{extra / 1e9:.1f} GB"

    def _cell(self, study: str, number: int, start: Sequence[str], *, column: int) -> str:
        """Return a cell of a study's table, from the row that starts with these cells."""
        rows: list[list[str]] = self._study(study)["tables"][number]["rows"]
        return next(cells[column] for cells in rows if cells[: len(start)] == start)

    def _summary(self) -> str:
        cluster = self.clusters[0]
        by_strategy, rates = seconds_of(cluster), rates_of(cluster)
        rows = []
        for strategy, name in SHOWN.items():
            taken = [by_strategy[strategy][rate] for rate in rates]
            sent = taken[0]["reported_bytes_per_node_per_step"] / cluster["parameters"]
            cells = [
                name,
                f"{sent:.2g}",
                *(f"{row['seconds_per_step']:.2f}\N{NO-BREAK SPACE}s" for row in taken),
            ]
            ours = strategy == "sdp4bit"
            rows.append([f"**{cell}**" if ours and column < 2 else cell for column, cell in enumerate(cells)])
        layout = f"{cluster['nodes']} nodes x {cluster['ranks_per_node']} rank"
        links = (RATES[rate].replace(" ", "\N{NO-BREAK SPACE}") for rate in rates)
        return table([layout, "bytes", *links], rows)

    def documents(self) -> Iterator[tuple[Path, str]]:
        """Yield path and content of every generated page and of every page with a marker."""
        generated = self.pages()
        yield from ((self.root / path, text) for path, text in generated.items())
        pages = [self.root / "README.md", *sorted((self.root / "docs").rglob("*.md"))]
        for path in pages:
            if str(path.relative_to(self.root)) in generated:
                continue
            text = path.read_text(encoding="utf-8")
            filled = MARKED.sub(lambda found: f"{found[1]}{self.fragment(found[2])}{found[3]}", text)
            if filled != text or MARKED.search(text):
                yield path, filled

    def figures(self) -> dict[Path, tuple[Callable[..., None], dict[str, Any]]]:
        """Return the drawing function and the result of every figure."""
        images = self.root / "docs" / "images"
        return {
            images / "loss-over-bytes.png": (draw_losses, self.widest),
            images / "loss-over-nodes.png": (draw_nodes, self.nodes),
            images / "loss-over-size.png": (draw_sizes, self._study("size_law")),
            images / "step-time.png": (draw_step_times, self.clusters[0]),
        }


def digest_of(result: dict[str, Any]) -> str:
    """Return a digest of a result, which its figure stores to reveal that it is outdated."""
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def is_current(path: Path, result: dict[str, Any]) -> bool:
    """Return whether a figure was drawn from this result."""
    return path.exists() and digest_of(result).encode() in path.read_bytes()


def main(root: Path = ROOT) -> int:
    """Write the pages and figures that have changed; return the exit code."""
    results = Results(root=root)
    for path, text in results.documents():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text)
            print(path.relative_to(root))
    for path, (draw, result) in results.figures().items():
        if not is_current(path, result):
            draw(result, path, digest=digest_of(result))
            print(path.relative_to(root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
