"""Collect finished runs or plans into the files of results/ that benchmarks/tables.py reads.

    python -m benchmarks.collect accuracy RUNS [RUNS ...] --title TEXT --command TEXT --commit HASH
    python -m benchmarks.collect planning

`accuracy` reads --out folders of `sdp4bit compare` with equal settings and writes results/accuracy.json.
`planning` calculates gains, links, decisions and memory by `sdp4bit plan`'s model and writes
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

from benchmarks import cluster_report, planning
from benchmarks.tables import FULL, RESULTS, encoded_bytes
from sdp4bit_lab.common.files import write_atomically
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.compare.finished_run import finite
from sdp4bit_lab.compare.run_folders import merge_finished


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


def planned() -> dict[str, Any]:
    """Return the planner's tables."""
    return {**_facts("python -m benchmarks.collect planning", None), **planning.everything()}


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
    plans = kinds.add_parser("planning", help="tables that the planner calculates")
    plans.add_argument("--out", type=Path, default=RESULTS / "planning.json")
    chosen = vars(parser.parse_args(arguments))
    kind, out = chosen.pop("kind"), chosen.pop("out")
    try:
        content = planned() if kind == "planning" else accuracy(chosen.pop("runs"), **chosen)
    except SettingError as error:
        print(f"benchmarks.collect: {error}", file=sys.stderr)
        return 2
    write_atomically(out, json.dumps(content, indent=1, allow_nan=False, default=asdict) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
