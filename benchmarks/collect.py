"""Collect finished runs or plans into the files of results/ that benchmarks/tables.py reads.

    python -m benchmarks.collect accuracy RUNS [RUNS ...] --title TEXT --command TEXT --commit HASH
    python -m benchmarks.collect planning

`accuracy` reads --out folders of `sdp4bit compare` with equal settings and writes results/accuracy.json.
`planning` predicts the gain for several models, numbers of nodes and link rates and writes
results/planning.json. Both describe this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import cluster_report
from benchmarks.tables import FULL, RESULTS, encoded_bytes
from sdp4bit_lab.common.files import write_atomically
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.compare.finished_run import finite
from sdp4bit_lab.compare.run_folders import merge_finished
from sdp4bit_lab.plan.config import ClusterConfig, PlanConfig
from sdp4bit_lab.plan.layout import ParallelLayout
from sdp4bit_lab.plan.model import PlanModelConfig

MODELS: dict[str, dict[str, Any]] = {
    "1.3B": {"model_card": "1.3B"},
    "6.7B": {"model_card": "6.7B"},
    "70B": {"layers": 80, "hidden": 8192, "heads": 64},
}
NODES = (2, 4, 8)
GBITS = (1, 10, 25, 100, 400, 800)
SEQUENCES = 4
"""Sequences of 2,048 tokens per GPU and step."""


def accuracy(folders: Sequence[Path], *, title: str, command: str, commit: str) -> dict[str, Any]:
    """Return the runs of comparisons with equal settings, and the bytes that each strategy sends."""
    runs = merge_finished(folders)
    rows, sent = [], {}
    for run in runs:
        fields = (
            "strategy",
            "seed",
            "intra_bytes_per_step",
            "inter_bytes_per_step",
            "seconds",
            "diverged_at",
        )
        rows.append(
            {name: getattr(run, name) for name in fields}
            | {"train_loss": finite(run.train_loss), "spikes": [list(spike) for spike in run.spikes]}
            | {"validation": [[step, finite(loss)] for step, loss in run.validation]}
        )
        sent[run.strategy] = {
            f"{part}_bytes": encoded_bytes(
                *((chosen[f"{level}bits"], chosen[f"{level}group_size"]) if chosen else (None, 0)),
                full=FULL[part],
            )
            for part, level in (("gradient", "inter_"), ("weight", ""))
            for chosen in [run.quantization[f"{part}s"]]
        }
    settings = runs[0].settings
    return {"title": title, **_facts(command, commit), "settings": settings, "bytes": sent, "runs": rows}


def planning() -> dict[str, Any]:
    """Return the predicted gains of FSDP2 on H100 nodes."""
    rows = []
    for name, model in MODELS.items():
        for nodes in NODES:
            for gbit in GBITS:
                config = PlanConfig(
                    model=PlanModelConfig(**model),
                    cluster=ClusterConfig(
                        **{"device": "h100", "nodes": nodes, "devices_per_node": 8, "device_tflops": 400},
                        inter_bandwidth=gbit / 8,
                    ),
                    layout=ParallelLayout(micro_batch_size=SEQUENCES),
                )
                plan = config.plan(config.cluster.resolve(model=config.model_name))
                rows.append(
                    {
                        **{"model": name, "nodes": nodes, "gbit": gbit},
                        "over_fp32": plan.speedups(plan.baseline),
                        "over_bf16": plan.speedups(plan.bf16_baseline),
                        # None if no replica of the model fits a node.
                        "over_hsdp": plan.hybrid and plan.speedups(plan.hybrid.plain),
                        "step_seconds": plan.quantized.step_seconds,
                        "fits": plan.fits,
                        "memory_bytes": plan.quantized.total_memory,
                    }
                )
    assumptions = (
        f"Nodes of 8 H100 that sustain 400 TFLOP/s each, {2048 * SEQUENCES:,} tokens per GPU and step. One "
        "end of a range hides no communication behind computation, the other end all that fits."
    )
    return {"assumptions": assumptions, **_facts("python -m benchmarks.collect planning", None), "rows": rows}


def _facts(command: str, commit: str | None) -> dict[str, Any]:
    machine = cluster_report.describe_machine([])
    facts = {name: machine[name] for name in ("versions", "date")}
    place = f"{machine['cores']} cores, {machine['cpu']}"
    return facts | {"command": command, "commit": commit or machine["commit"], "machine": place}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collect", description=__doc__.split("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    runs = kinds.add_parser("accuracy", help="validation losses of finished runs")
    runs.add_argument("runs", nargs="+", type=Path, help="--out folders of sdp4bit compare")
    runs.add_argument("--title", required=True, help="heading of the table")
    runs.add_argument("--command", required=True, help="command that made the runs")
    runs.add_argument("--commit", required=True, help="commit that made the runs")
    runs.add_argument("--out", type=Path, default=RESULTS / "accuracy.json")
    plans = kinds.add_parser("planning", help="gains that the planner predicts")
    plans.add_argument("--out", type=Path, default=RESULTS / "planning.json")
    chosen = vars(parser.parse_args(arguments))
    kind, out = chosen.pop("kind"), chosen.pop("out")
    try:
        content = planning() if kind == "planning" else accuracy(chosen.pop("runs"), **chosen)
    except SettingError as error:
        print(f"benchmarks.collect: {error}", file=sys.stderr)
        return 2
    write_atomically(out, json.dumps(content, indent=1, allow_nan=False, default=asdict) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
