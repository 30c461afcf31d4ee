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

from benchmarks import cluster_report
from sdp4bit_lab.common.files import write_atomically
from sdp4bit_lab.compare.finished_run import FinishedRun
from sdp4bit_lab.compare.outcomes import outcomes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
NOTICE = "<!-- Written by `python -m benchmarks.tables`. -->\n\n"
MARKED = re.compile(r"(<!-- result ([\w-]+) -->\n?).*?(<!-- end -->)", re.DOTALL)
BASELINE = "baseline"
FEWEST_DRAWN = 5
"""Strategies in the figure of losses, not counting the baseline."""
FULL = {"gradient": 4.0, "weight": 2.0}
"""Bytes of a gradient in fp32 and of a weight in bf16."""
STUDIES = ("finetuning", "two_roundings")
"""Folders of experiments/ with results of the current library."""
RATES = {"100mbit": "100 Mbit/s", "250mbit": "250 Mbit/s", "1gbit": "1 Gbit/s", "1000mbit": "1 Gbit/s"}
SHOWN = {"fair": "fp32 gradients", "fair-bf16": "bf16 gradients", "sdp4bit": "sdp4bit"}
"""Strategies of the README's table and figure, by the names of benchmarks/cluster_strategies.py."""


def encoded_bytes(bits: float | None, group_size: int, *, full: float) -> float:
    """Return the bytes of one value with its share of a scale; `full` without quantization."""
    return full if bits is None else bits / 8 + 2 / group_size


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a Markdown table with the first `left` columns left-aligned and the others right-aligned."""
    assert all(len(row) == len(titles) for row in rows), titles
    rows = [
        [re.sub(r"(?<=\d) (?=%|to [+-]?\d)|(?<=\d to) (?=[+-]?\d)", "\N{NO-BREAK SPACE}", c) for c in r]
        for r in rows
    ]
    rule = ["---"] * left + ["---:"] * (len(titles) - left)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (titles, rule, *rows))


def percent(value: float, *, digits: int = 3) -> str:
    """Format a signed percentage without a line-break opportunity."""
    return f"{value:+.{digits}f}\N{NO-BREAK SPACE}%"


def origin(result: dict[str, Any]) -> str:
    """Return command, commit, machine, versions and date of a result."""
    machine = result["machine"]
    if isinstance(machine, dict):
        result = {"commit": None, **machine, "machine": f"{machine['cores']} cores, {machine['cpu']}"}
    shown = {name: version for name, version in result["versions"].items() if name != "linux"}
    versions = ", ".join(f"{name} {version}" for name, version in shown.items())
    commit = f", commit {result['commit']}" if result["commit"] else ""
    facts = f"{result['machine']}; {versions}; {result['date'][:10]}{commit}."
    command = f"<details><summary>Command</summary><pre><code>{result['command']}</code></pre></details>\n"
    return f"{facts[0].upper()}{facts[1:]}\n\n{command}"


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
    titles = [
        "strategy",
        "bytes",
        "gradient",
        "weight",
        "seeds",
        "loss",
        "difference",
        "95 % interval",
        "stable seeds only",
        "verdict",
    ]
    rows = [
        [
            *(
                f"`{loss.name}`",
                f"{loss.bytes:.2f}",
                f"{loss.gradient_bytes:.3f}",
                f"{loss.weight_bytes:.3f}",
            ),
            *(str(loss.seeds), "" if loss.loss is None else f"{loss.loss:.4f}"),
            *(percent(loss.percent), loss.interval_text(), quiet(stable.get(loss.strategy)), loss.verdict),
        ]
        for loss in found
    ]
    empty = [column for column in range(len(titles)) if not any(row[column] for row in rows)]
    titles, *rows = [[c for n, c in enumerate(row) if n not in empty] for row in (titles, *rows)]
    note = f"{result['note']}\n\n" if result.get("note") else ""
    if unstable:
        seeds = ", ".join(map(str, unstable))
        note += f"The gradient norm of the baseline jumps with seed {seeds}: it is not stable.\n\n"
    return f"## {result['title']}\n\n{table(titles, rows)}\n{note}{origin(result)}\n"


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
    _save(figure, path, digest=digest)


# -- seconds per step ------------------------------------------------------------------------------------


def cluster_results(folder: Path) -> list[dict[str, Any]]:
    """Return one result per layout of the emulated cluster, combined over its runs."""
    layouts: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        layouts.setdefault((result["nodes"], result["ranks_per_node"]), []).append(result)
    return [cluster_report.combine(same) if len(same) > 1 else same[0] for _, same in sorted(layouts.items())]


def _seconds(result: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        rows.setdefault(row["strategy"], {})[row["rate"]] = row
    return rows


def _rates(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["rate"] for row in result["rows"]))


def _ratio(result: dict[str, Any], *, rate: str, reference: str, strategy: str) -> dict[str, Any] | None:
    wanted = {"rate": rate, "reference": reference, "strategy": strategy}
    return next((ratio for ratio in result["ratios"] if wanted.items() <= ratio.items()), None)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def cluster_section(result: dict[str, Any]) -> str:
    """Return ratios, seconds and bytes of one layout, with their origin."""
    rates = _rates(result)
    titles = [RATES[rate] for rate in rates]
    pairs = dict.fromkeys((ratio["strategy"], ratio["reference"]) for ratio in result["ratios"])
    faster = []
    for strategy, reference in pairs:
        cells = []
        for rate in rates:
            ratio = _ratio(result, rate=rate, reference=reference, strategy=strategy)
            cells.append(
                f"{ratio['ratio']:.2f} ({ratio['lowest']:.2f}–{ratio['highest']:.2f})" if ratio else ""
            )
        faster.append([f"`{strategy}` over `{reference}`", *cells])
    rows = []
    by_strategy = _seconds(result)
    slowest_first = sorted(by_strategy, key=lambda name: -by_strategy[name][rates[0]]["seconds_per_step"])
    for strategy in slowest_first:
        of = by_strategy[strategy]
        cells = [f"{of[rate]['seconds_per_step']:.3f}" if rate in of else "" for rate in rates]
        first = of[rates[0]]
        counted = first["reported_bytes_per_node_per_step"]
        sent = f"{first['tx_bytes_per_node_per_step'] / 1e6:.2f}"
        rows.append([f"`{strategy}`", *cells, sent, "" if counted is None else f"{counted / 1e6:.2f}"])
    heading = f"{_plural(result['nodes'], 'node')} x {_plural(result['ranks_per_node'], 'rank')}"
    note = f"{result['note'][0].upper()}{result['note'][1:]}.\n\n" if result.get("note") else ""
    return (
        f"## {heading}\n\n{result['parameters'] / 1e6:.1f} million parameters.\n\n"
        f"{table(['times faster', *titles], faster)}\n"
        f"{table(['seconds per step', *titles, 'MB', 'counted'], rows)}\n{note}{origin(result)}\n"
    )


def overlap_section(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return seconds and gains of a commit and of the one before it, run in turn."""
    rates = _rates(after)
    rows = []
    for strategy in _seconds(after):
        cells = []
        for rate in rates:
            for result in (before, after):
                seconds = _seconds(result)[strategy][rate]["seconds_per_step"]
                ratio = _ratio(result, rate=rate, reference="fair", strategy=strategy)
                cells.append(f"{seconds:.3f}" + (f" ({ratio['ratio']:.2f}x)" if ratio else ""))
        rows.append([f"`{strategy}`", *cells])
    titles = [f"{RATES[rate]}, {when}" for rate in rates for when in ("before", "after")]
    return (
        "## Overlap with the backward pass\n\nSeconds per step before and after gradients on the host were "
        "exchanged during the backward pass, 2 nodes x 1 rank, and the gain over `fair` of the same run. "
        "Medians of three runs of either commit, in turn.\n\n"
        f"{table(['strategy', *titles], rows)}\nBefore: {origin(before)}\nAfter: {origin(after)}\n"
    )


def profile_section(results: Sequence[dict[str, Any]]) -> str:
    """Return where the time of a step goes, a column per result."""
    parts = results[0]["profile"]["ms"]
    rows = [[part, *(f"{result['profile']['ms'][part]:.1f}" for result in results)] for part in parts]
    rows.append(["total", *(f"{sum(result['profile']['ms'].values()):.1f}" for result in results)])
    titles = [f"`{result['profile']['strategy']}`" for result in results]
    rate = RATES[results[0]["profile"]["rate"]]
    return (
        f"## Profile of a step\n\nMilliseconds of rank 0 at {rate}, 2 nodes x 1 rank, under PyTorch's "
        f"profiler, which makes a step some 10 % longer.\n\n"
        f"{table(['part', *titles], rows)}\n{origin(results[-1])}\n"
    )


def draw_step_times(result: dict[str, Any], path: Path, *, digest: str) -> None:
    """Draw three bars per rate: full precision with fp32 and bf16 gradients, and sdp4bit."""
    from matplotlib.figure import Figure

    by_strategy, rates = _seconds(result), _rates(result)
    figure = Figure(figsize=(4.0, 1.15 * len(rates) + 0.2), layout="constrained")
    for axes, rate in zip(figure.subplots(len(rates), 1, squeeze=False).flat, rates, strict=True):
        seconds = [by_strategy[name][rate]["seconds_per_step"] for name in SHOWN]
        colors = ["tab:gray", "darkgray", "tab:green"]
        axes.barh(
            list(SHOWN.values()), [1, *(s / seconds[0] for s in seconds[1:])], color=colors, height=0.75
        )
        for number, (name, taken) in enumerate(zip(SHOWN, seconds, strict=True)):
            ratio = _ratio(result, rate=rate, reference="fair", strategy=name)
            factor = ratio["ratio"] if ratio else seconds[0] / taken
            text = f"{taken:.2f} s" + (f", {factor:.1f}x faster" if number else "")
            inside = taken / seconds[0] > 0.6
            axes.text(
                taken / seconds[0] + (-0.02 if inside else 0.02),
                number,
                text,
                **{"va": "center", "ha": "right" if inside else "left", "fontsize": 9},
                color="white" if inside and number == 0 else "black",
                weight="bold" if name == "sdp4bit" else None,
            )
        axes.set_title(RATES[rate], fontsize=9, loc="left", pad=2)
        axes.set_xlim(0, 1.02)
        axes.invert_yaxis()
        axes.tick_params(length=0, labelsize=9)
        axes.set_xticks([])
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
    _save(figure, path, digest=digest)


def _save(figure: Any, path: Path, *, digest: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=200, metadata={"Source": digest, "Software": None})


# -- plans and studies -----------------------------------------------------------------------------------


def planning_page(result: dict[str, Any]) -> str:
    """Return the planner's predicted gains by model, nodes and link rate."""
    rates = list(dict.fromkeys(row["gbit"] for row in result["rows"]))
    cells: dict[tuple[str, int], list[str]] = {}
    for row in result["rows"]:
        least, most = sorted(row["over_bf16"])
        text = f"{least:.1f}" if f"{least:.1f}" == f"{most:.1f}" else f"{least:.1f} to {most:.1f}"
        cells.setdefault((row["model"], row["nodes"]), []).append(text if row["fits"] else "no memory")
    rows = [[model, str(nodes), *texts] for (model, nodes), texts in cells.items()]
    return (
        f"{NOTICE}# Predicted gains\n\nTimes faster than FSDP2 with bf16 gradients, by the link rate of "
        f"a node in Gbit/s. {result['assumptions']} **Arithmetic, not a measurement**: "
        "[planning](../planning.md) states the assumptions.\n\n"
        f"{table(['model', 'nodes', *(f'{rate:g}' for rate in rates)], rows)}\n{origin(result)}"
    )


def section(result: dict[str, Any]) -> str:
    """Return a result that contains its tables, with their origin."""
    # Losses of single runs are raw data.
    shown = [each for each in result["tables"] if "seed" not in each["columns"]]
    tables = [table(each["columns"], each["rows"]) for each in shown]
    note = [f"{result['note']}\n"] if "note" in result else []
    return "\n".join([f"## {result['title']}\n", *tables, *note, origin(result)])


def studies_page(folder: Path) -> str:
    """Return the tables of the studies."""
    text = f"{NOTICE}# Studies\n\nEach folder of `experiments/` has the script and a page of text.\n"
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

    @cached_property
    def accuracy(self) -> list[dict[str, Any]]:
        """Accuracy results, latest recipe first."""
        names = ("accuracy.json", "accuracy-first-recipe.json")
        return [self._read(name) for name in names if (self.root / "results" / name).exists()]

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
        sections = "\n".join([*map(loss_section, self.accuracy), section(self._read("longer.json"))])
        folder = self.root / "results"
        overlap = [cluster_results(folder / "overlap" / when)[0] for when in ("before", "after")]
        profiles = [self._read(f"profile/{name}.json") for name in ("fair", "sdp4bit")]
        speed = "\n".join(
            [*map(cluster_section, self.clusters), overlap_section(*overlap), profile_section(profiles)]
        )
        pages = {
            "docs/results/accuracy.md": f"{NOTICE}# Loss of all strategies\n\n{bytes_text}\n\n{sections}",
            "docs/results/speed.md": f"{NOTICE}# Seconds per step\n\n"
            "[How this is measured](../speed.md). Medians of several runs, with the lowest and the highest. "
            f"MB: sent by a node per step.\n\n{speed}",
            "docs/results/planning.md": planning_page(self._read("planning.json")),
            "docs/results/studies.md": studies_page(self.root / "experiments"),
        }
        return {path: f"{text.rstrip()}\n" for path, text in pages.items()}

    def fragment(self, name: str) -> str:
        """Return the text for a marker; ValueError if no result has this name."""
        kind, _, detail = name.partition("-")
        if kind == "loss":
            return self._loss(detail or "sdp4bit")
        if kind == "gain":
            gains = self._gains(int(detail))
            return f"{min(gains):.1f} to {max(gains):.1f}"
        if name == "lora":
            return self._lora()
        if name == "summary":
            return self._summary()
        raise ValueError(
            f"<!-- result {name} --> names no result: use summary, lora, loss-STRATEGY or gain-GBIT"
        )

    def _loss(self, strategy: str) -> str:
        every = (loss for result in self.accuracy for loss in losses(result, only_stable=True))
        loss = next((loss for loss in every if loss.strategy == strategy), None)
        if loss is None:
            raise ValueError(f"no accuracy result has three seeds of {strategy}")
        return f"{percent(loss.percent, digits=2)} ({loss.interval_text(digits=2)})"

    def _gains(self, gbit: int) -> list[float]:
        rows = (row for row in self._read("planning.json")["rows"] if row["gbit"] == gbit and row["fits"])
        return [gain for row in rows for gain in row["over_bf16"]]

    def _lora(self) -> str:
        path = self.root / "experiments" / "finetuning" / "result.json"
        rows: list[list[str]] = json.loads(path.read_text(encoding="utf-8"))["tables"][0]["rows"]
        return next(row[-1] for row in rows if row[0] == "LoRA, sdp4bit")

    def _summary(self) -> str:
        cluster = self.clusters[0]
        by_strategy, rates = _seconds(cluster), _rates(cluster)
        loss = next(each for each in losses(self.headline, only_stable=True) if each.strategy == "sdp4bit")
        cost = percent(loss.percent, digits=2)
        bytes_of = {"fair": "6", "fair-bf16": "4", "sdp4bit": f"{loss.bytes:.2f}"}
        rows = []
        for strategy, name in SHOWN.items():
            seconds = [
                f"{by_strategy[strategy][rate]['seconds_per_step']:.2f}\N{NO-BREAK SPACE}s" for rate in rates
            ]
            ours = strategy == "sdp4bit"
            cells = [name, bytes_of[strategy], *seconds, cost if ours else ""]
            rows.append([f"**{cell}**" if ours and column < 2 else cell for column, cell in enumerate(cells)])
        titles = [
            "2 nodes",
            "bytes",
            *(RATES[rate].replace(" ", "\N{NO-BREAK SPACE}") for rate in rates),
            "loss",
        ]
        return table(titles, rows)

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
