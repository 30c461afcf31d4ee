"""Seconds per step and speed of the operators, as tables and a figure; see benchmarks/tables.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cluster_report
from benchmarks.kernels import PRICE
from benchmarks.markdown import RATES, ink, origin, save_figure, table

SHOWN = {"fair": "fp32 gradients", "fair-bf16": "bf16 gradients", "sdp4bit": "sdp4bit"}
SHOWN_NCCL = {"fsdp2": "fp32 gradients", "fsdp2-bf16": "bf16 gradients", "sdp4bit": "sdp4bit"}
"""Strategies of the README's table and figure, by the names of benchmarks/cluster_strategies.py."""


_NCCL_RATES = ("1gbit", "10gbit", "40gbit")


def cluster_results(folder: Path) -> list[dict[str, Any]]:
    """Return one result per layout of the emulated cluster, combined over its runs."""
    layouts: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        layouts.setdefault((result["nodes"], result["ranks_per_node"]), []).append(result)
    return [cluster_report.combine(same) if len(same) > 1 else same[0] for _, same in sorted(layouts.items())]


def seconds_of(result: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the rows by strategy and rate."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        rows.setdefault(row["strategy"], {})[row["rate"]] = row
    return rows


def rates_of(result: dict[str, Any]) -> list[str]:
    """Return the link rates, slowest first."""
    return list(dict.fromkeys(row["rate"] for row in result["rows"]))


def _ratio(result: dict[str, Any], *, rate: str, reference: str, strategy: str) -> dict[str, Any] | None:
    wanted = {"rate": rate, "reference": reference, "strategy": strategy}
    return next((ratio for ratio in result["ratios"] if wanted.items() <= ratio.items()), None)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def layout_of(result: dict[str, Any]) -> str:
    """Return the numbers of nodes and of ranks per node in words."""
    return f"{_plural(result['nodes'], 'node')} x {_plural(result['ranks_per_node'], 'rank')}"


def cluster_section(
    result: dict[str, Any],
    *,
    heading: str | None = None,
    predicted: Mapping[tuple[str, str], float] | None = None,
    quartiles: bool = False,
) -> str:
    """Return ratios, seconds and bytes of one layout, with their origin.

    Args:
        heading: default: the layout.
        predicted: seconds by strategy and rate, which are shown beside the measured ones.
        quartiles: whether lower quartiles are shown before medians.
    """
    expected = predicted or {}
    rates = rates_of(result)
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
    by_strategy = seconds_of(result)
    slowest_first = sorted(by_strategy, key=lambda name: -by_strategy[name][rates[0]]["seconds_per_step"])
    for strategy in slowest_first:
        of = by_strategy[strategy]
        cells = [
            (f"{of[rate]['lower_quartile']:.3f}, " if quartiles else "")
            + f"{of[rate]['seconds_per_step']:.3f}"
            + (f" ({expected[strategy, rate]:.3f})" if (strategy, rate) in expected else "")
            if rate in of
            else ""
            for rate in rates
        ]
        first = of[rates[0]]
        counted = first["reported_bytes_per_node_per_step"]
        sent = f"{first['tx_bytes_per_node_per_step'] / 1e6:.2f}"
        rows.append([f"`{strategy}`", *cells, sent, "" if counted is None else f"{counted / 1e6:.2f}"])
    heading = heading or layout_of(result)
    note = f"{result['note'][0].upper()}{result['note'][1:]}.\n\n" if result.get("note") else ""
    return (
        f"## {heading}\n\n{result['parameters'] / 1e6:.1f} million parameters.\n\n"
        f"{table(['times faster', *titles], faster)}\n"
        f"{table(['seconds per step', *titles, 'MB', 'counted'], rows)}\n{note}{origin(result)}\n"
    )


def profile_section(results: Sequence[dict[str, Any]]) -> str:
    """Return the parts of a step's time on the host, a column per profile."""
    profiles = [profile for result in results for profile in result["profiles"]]
    rows = [[part, *(f"{of['ms'].get(part, 0):.1f}" for of in profiles)] for part in profiles[0]["ms"]]
    rows.append(["total", *(f"{sum(of['ms'].values()):.1f}" for of in profiles)])
    titles = [f"`{of['strategy']}`" for of in profiles]
    return (
        f"## Profile of a step\n\nMilliseconds of rank 0 at {RATES[profiles[0]['rate']]}, "
        f"{layout_of(results[0])}, under PyTorch's profiler, which makes a step some 10 % longer.\n\n"
        f"{table(['part', *titles], rows)}\n{origin(results[-1])}\n"
    )


def draw_step_times(result: dict[str, Any], path: Path, *, digest: str) -> None:
    """Draw three bars per rate: full precision with fp32 and bf16 gradients, and sdp4bit.

    Args:
        result: "cpu": the emulated cluster over gloo; "gpu": over NCCL, on one GPU.
    """
    from matplotlib.figure import Figure

    cpu, gpu = result["cpu"], result["gpu"]
    columns = [(cpu, SHOWN, "fair-bf16", rates_of(cpu)), (gpu, SHOWN_NCCL, "fsdp2-bf16", [*_NCCL_RATES])]
    figure = Figure(figsize=(8.6, 1.15 * len(_NCCL_RATES) + 0.5), layout="constrained")
    for half, (cluster, shown, reference, rates) in zip(figure.subfigures(1, 2), columns, strict=True):
        gpu_name = (cluster["machine"].get("gpu") or "").removeprefix("NVIDIA ").partition(" ")[0]
        about = f"NCCL, ranks share an {gpu_name}" if gpu_name else "gloo, CPUs"
        half.suptitle(f"{about}: {cluster['parameters'] / 1e6:.0f} million parameters", fontsize=10)
        for axes, rate in zip(half.subplots(len(rates), 1, squeeze=False).flat, rates, strict=True):
            _draw_rate(axes, cluster, rate, shown=shown, reference=reference)
    save_figure(figure, path, digest=digest)


def _draw_rate(
    axes: Any, cluster: dict[str, Any], rate: str, *, shown: dict[str, str], reference: str
) -> None:
    by_strategy = seconds_of(cluster)
    seconds = [by_strategy[name][rate]["seconds_per_step"] for name in shown]
    longest = max(seconds)
    colors = ["tab:gray", "darkgray", "tab:green"]
    axes.barh(list(shown.values()), [each / longest for each in seconds], color=colors, height=0.75)
    for number, (name, taken) in enumerate(zip(shown, seconds, strict=True)):
        ratio = _ratio(cluster, rate=rate, reference=reference, strategy=name)
        text = f"{taken:.2f} s" + (f", {_factor(ratio['ratio'])}" if ratio else "")
        inside = taken / longest > 0.6
        axes.text(
            taken / longest + (-0.02 if inside else 0.02),
            number,
            text,
            **{"va": "center", "ha": "right" if inside else "left", "fontsize": 9},
            color="white" if inside and number != 1 else ("black" if inside else ink()),
            weight="bold" if name == "sdp4bit" else None,
        )
    axes.set_title(RATES[rate], fontsize=9, loc="left", pad=2)
    axes.set_xlim(0, 1.02)
    axes.invert_yaxis()
    axes.tick_params(length=0, labelsize=9)
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def _factor(ratio: float) -> str:
    return f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x slower"


def kernels_page(runs: Sequence[dict[str, Any]]) -> str:
    """Return times of all operators, and their shares of a copy, over all runs on each device."""
    text = (
        "[How this is measured](../benchmarks.md). Medians over runs, with the lowest and the highest share "
        "of a copy.\n\n"
    )
    by_device: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_device.setdefault(run["machine"]["gpu"] or run["machine"]["cpu"], []).append(run)
    for device, same in by_device.items():
        text += f"## {device}\n\n{_kernels_of_device(same)}\n"
    return text


def _kernels_of_device(runs: Sequence[dict[str, Any]]) -> str:
    found: dict[int, dict[tuple[str, float], list[dict[str, Any]]]] = {}
    for row in (row for run in runs for row in run["rows"]):
        name = row["op"], row["bits"] or (32 if row["op"] == "copy" else 8)
        found.setdefault(row["elements"], {}).setdefault(name, []).append(row)
    text = ""
    for elements, by_name in sorted(found.items(), reverse=True):
        cells, prices = [], ""
        for (name, bits), rows in sorted(by_name.items(), key=lambda item: (item[0][0], -item[0][1])):
            seconds = statistics.median(row["seconds"] for row in rows)
            times = f"{1e3 * seconds:.3g}", f"{1e9 * seconds / elements:.2g}"
            shares = [100 * row["share_of_copy"] for row in rows]
            share = f"{statistics.median(shares):.0f} %"
            if len(rows) > 1:
                share += f" ({min(shares):.0f}–{max(shares):.0f})"
            cells.append([f"`{name}`", f"{bits:g}", *times, share, f"{len(rows)}"])
            if priced := [row[PRICE] for row in rows if PRICE in row]:  # older runs have no such ratio
                ratio = statistics.median(each["ratio"] for each in priced)
                lowest = min(each["lowest"] for each in priced)
                highest = max(each["highest"] for each in priced)
                prices += (
                    f"\n`{name}` takes {ratio:.2f} times the seconds that it takes without the transform "
                    f"({lowest:.2f}–{highest:.2f} in single rounds).\n"
                )
        titles = ["operator", "bits", "ms", "ns per value", "share of a copy", "runs"]
        text += f"### {elements / 1e6:.1f} million values\n\n{table(titles, cells)}{prices}\n"
    return text + "\n".join(map(origin, runs))
