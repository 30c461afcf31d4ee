"""Summarize samples of an emulated cluster: rows, ratios of steps of one round, bytes.

    python -m benchmarks.cluster_report RUN1.json RUN2.json RUN3.json

prints several runs of the same command: the median of the runs' medians, the lowest and the highest. `python
-m benchmarks.tables` writes results/cluster into the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import kernels
from benchmarks.markdown import table
from benchmarks.step_profile import sentence, table_rows

if TYPE_CHECKING:
    from benchmarks.cluster_strategies import Cluster

FASTEST = "sdp4bit"
TOLERATED_BYTES, TOLERATED_PER_STEP = 0.03, 50_000
"""Allowances for TCP headers and acknowledgements, and for the barriers around a step."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One step of one strategy."""

    strategy: str
    rate: str
    round: int
    seconds: float
    tx_bytes: float
    """Counted by the interfaces, per node."""
    reported_bytes: float | None
    """Counted by the strategy, per node; None if it does not count."""
    loss: float
    issued: float | None = None
    """Seconds after which the host had issued the step."""


def summarize(
    samples: Sequence[Sample],
    *,
    cluster: Cluster,
    parameters: int,
    arguments: Sequence[str] | None,
    device: str = "cpu",
    sharing: str = "",
) -> dict[str, Any]:
    """Return machine, rows, ratios to the full-precision references, and the check of the bytes.

    Args:
        sharing: how the ranks share a GPU, as a sentence; "" for a CPU.
    """
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.rate, sample.strategy), []).append(sample)
    rows = [_row(group) for group in groups.values()]
    names = {name for _, name in groups}
    # With several ranks per node a flat exchange is not a fair reference: the hierarchy alone gains much.
    references = [
        name
        for name in (
            *("hierarchical", "fair", "fair-bf16", "ddp", "ddp-bf16", "hsdp-bf16", "hsdp-bf16-deferred"),
            *("fsdp2", "fsdp2-bf16"),
        )
        if name in names
    ]
    targets = [name for name in names if FASTEST in name]
    ratios = [
        _ratio(groups[rate, reference], groups[rate, target])
        for rate in dict.fromkeys(rate for rate, _ in groups)
        for target in sorted(targets)
        for reference in references
        if {(rate, target), (rate, reference)} <= groups.keys()
    ]
    machine = describe_machine(arguments)
    shares = f"NCCL, {cluster.ranks} ranks share one {machine['gpu']}" if device == "cuda" else "gloo, CPU"
    return {
        "label": f"emulated cluster, TCP, {shares}",
        "transport": "nccl" if device == "cuda" else "gloo",
        "device": device,
        "ranks": cluster.ranks,
        **({"sharing": sharing} if sharing else {}),
        "machine": machine,
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "parameters": parameters,
        "rows": rows,
        "ratios": ratios,
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, fastest, slowest, and the spread relative to the median."""
    median, fastest, slowest = statistics.median(seconds), min(seconds), max(seconds)
    return {
        "seconds_per_step": median,
        "spread": (slowest - fastest) / median,
        "fastest": fastest,
        "slowest": slowest,
    }


def lower_quartile(seconds: Sequence[float]) -> float:
    """Return the time that a quarter of the steps needed at most: other programs only lengthen a step."""
    return statistics.quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]


def _row(group: Sequence[Sample]) -> dict[str, Any]:
    sent = statistics.median(sample.tx_bytes for sample in group)
    reported = group[0].reported_bytes
    issued = [sample.issued for sample in group if sample.issued is not None]
    return {
        "strategy": group[0].strategy,
        "rate": group[0].rate,
        **_spread([sample.seconds for sample in group]),
        "lower_quartile": lower_quartile([sample.seconds for sample in group]),
        **({"issued_seconds": statistics.median(issued)} if issued else {}),
        "tx_bytes_per_node_per_step": sent,
        "loss": group[-1].loss,
        "rounds": len(group),
        "reported_bytes_per_node_per_step": reported,
        "bytes_agree": (
            abs(sent - reported) <= TOLERATED_BYTES * reported + TOLERATED_PER_STEP if reported else None
        ),
    }


def _ratio(reference: Sequence[Sample], target: Sequence[Sample]) -> dict[str, Any]:
    # Strategies that were built one after the other may have different numbers of rounds.
    pairs = zip(reference, target, strict=False)
    ratios = sorted(slow.seconds / fast.seconds for slow, fast in pairs)
    quartiles = [lower_quartile([sample.seconds for sample in of]) for of in (reference, target)]
    return {
        "rate": reference[0].rate,
        "reference": reference[0].strategy,
        "strategy": target[0].strategy,
        "ratio": statistics.median(ratios),
        "ratio_of_lower_quartiles": quartiles[0] / quartiles[1],
        "lowest": ratios[0],
        "highest": ratios[-1],
    }


def combine(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge runs of the same command: median, lowest and highest; ValueError if they differ."""
    kinds = [(r["nodes"], r["ranks_per_node"], r["parameters"], sorted(_by_row(r))) for r in results]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(
            "the runs differ in nodes, model, rates or strategies: give runs of the same command"
        )
    rows = []
    for row in results[0]["rows"]:
        same = [_by_row(result)[row["rate"], row["strategy"]] for result in results]
        agree = None if row["bytes_agree"] is None else all(each["bytes_agree"] for each in same)
        rounds = sum(each["rounds"] for each in same)
        row.pop("lower_quartile", None)  # of a single run
        rows.append(
            {
                **row,
                **_spread([each["seconds_per_step"] for each in same]),
                "rounds": rounds,
                "bytes_agree": agree,
            }
        )
    ratios = []
    # Runs of the same command have the same ratios in the same order.
    for same in zip(*(result["ratios"] for result in results), strict=True):
        medians = [ratio["ratio"] for ratio in same]
        middle = statistics.median(medians)
        ratios.append({**same[0], "ratio": middle, "lowest": min(medians), "highest": max(medians)})
    return {**results[0], "rows": rows, "ratios": ratios}


def _by_row(result: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["rate"], row["strategy"]): row for row in result["rows"]}


def describe_machine(arguments: Sequence[str] | None) -> dict[str, Any]:
    """Return hardware, versions, date, command and commit."""
    machine = kernels.describe_machine()
    versions = {name: machine["versions"][name] for name in ("python", "torch", "numba", "triton", "sdp4bit")}
    given = sys.argv[1:] if arguments is None else arguments
    return {
        "cpu": machine["cpu"],
        "gpu": machine["gpu"],
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "versions": versions | {"linux": platform.release().partition("-")[0]},
        "date": machine["date"],
        "commit": machine["commit"],
        "command": shlex.join(["python", "-m", "benchmarks.cluster", *given]),
    }


def print_tables(result: dict[str, Any]) -> None:
    """Print rows and ratios as Markdown."""
    machine = result["machine"]
    print(
        f"\n{result['label']}: {result['nodes']} nodes x {result['ranks_per_node']} ranks, "
        f"{result['parameters'] / 1e6:.1f} million parameters; {machine['cores']} cores, {machine['cpu']}, "
        f"torch {machine['versions']['torch']}\n"
    )
    print("| rate | strategy | s | lower quartile | spread | MB sent per node | own count | loss | rounds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in result["rows"]:
        counted = row["reported_bytes_per_node_per_step"]
        quartile = f"{row['lower_quartile']:.3f}" if "lower_quartile" in row else ""  # not of several runs
        own = "" if counted is None else f"{counted / 1e6:.3f}"
        if row["bytes_agree"] is False:
            own += " DIFFERS"
        print(
            f"| {row['rate']} | {row['strategy']} | {row['seconds_per_step']:.3f} | "
            f"{quartile} | {row['spread']:.0%} | "
            f"{row['tx_bytes_per_node_per_step'] / 1e6:.3f} | {own} | {row['loss']:.4f} | {row['rounds']} |"
        )
    print("\n| rate | reference | strategy | times faster (lowest to highest round) |\n|---|---|---|---|")
    for ratio in result["ratios"]:
        print(
            f"| {ratio['rate']} | {ratio['reference']} | {ratio['strategy']} | "
            f"{ratio['ratio']:.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f}) |"
        )
    if profiles := result.get("profiles"):
        print(f"\n{table(*table_rows(profiles))}")
        for each in profiles:
            if each["device"] is not None:
                print(f"{each['strategy']}: {sentence(each['device'])}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster_report",
        description="Show several runs of benchmarks.cluster as one.",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="files written by --json")
    chosen = parser.parse_args(arguments)
    try:
        result = combine([json.loads(path.read_text()) for path in chosen.runs])
    except (OSError, ValueError, KeyError) as error:
        print(f"benchmarks.cluster_report: {error}", file=sys.stderr)
        return 2
    print_tables(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
