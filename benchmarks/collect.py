"""Collect finished runs into the files of results/ that benchmarks/tables.py reads.

    python -m benchmarks.collect accuracy RUNS [RUNS ...] --title TEXT --command TEXT --commit HASH
    python -m benchmarks.collect nodes RUNS [RUNS ...] --title TEXT --command TEXT --commit HASH

`accuracy` reads --out folders of `sdp4bit compare` with equal settings and writes results/accuracy.json.
`nodes` reads folders of runs with one rank per node that differ in the number of simulated ranks and writes
results/accuracy-nodes.json.
Both describe this machine.
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
from benchmarks.loss_tables import FULL
from benchmarks.tables import RESULTS, encoded_bytes
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


def nodes(folders: Sequence[Path], *, title: str, command: str, commit: str) -> dict[str, Any]:
    """Return the accuracy results of each number of nodes, and the numbers of the error law."""
    by_nodes: dict[int, list[Path]] = {}
    for folder in folders:
        parallel = merge_finished([folder])[0].settings["parallel"]
        if parallel["ranks_per_node"] != 1:
            raise SettingError(f"{folder}: {parallel['ranks_per_node']} ranks per node instead of 1")
        by_nodes.setdefault(parallel["simulated_ranks"], []).append(folder)
    layouts = []
    for count, of_count in sorted(by_nodes.items()):
        result = accuracy(of_count, title=f"{count} nodes", command=command, commit=commit)
        kept = {name: result[name] for name in ("title", "settings", "bytes", "runs")}
        layouts.append({"nodes": count, **kept})
    study = json.loads((RESULTS.parent / "experiments" / "vnmse" / "result.json").read_text(encoding="utf-8"))
    columns, rows = study["tables"][0]["columns"], study["tables"][0]["rows"]
    (of_two,) = (float(row[columns.index("mean of 4 ranks")]) for row in rows if row[0] == "`sdp4bit`")
    law = {"percent_per_squared_error": float(study["slope"]), "squared_error_of_two_nodes": of_two}
    return {"title": title, **_facts(command, commit), **law, "layouts": layouts}


def _facts(command: str, commit: str | None) -> dict[str, Any]:
    machine = cluster_report.describe_machine([])
    facts = {name: machine[name] for name in ("versions", "date")}
    place = f"{machine['cores']} cores, {machine['cpu']}"
    return facts | {"command": command, "commit": commit or machine["commit"], "machine": place}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collect", description=__doc__.split("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, about, file in (
        ("accuracy", "validation losses of finished runs", "accuracy.json"),
        ("nodes", "the same for several numbers of nodes", "accuracy-nodes.json"),
    ):
        runs = kinds.add_parser(kind, help=about)
        runs.add_argument("runs", nargs="+", type=Path, help="--out folders of sdp4bit compare")
        runs.add_argument("--title", required=True, help="heading of the table")
        runs.add_argument("--command", required=True, help="command that made the runs")
        runs.add_argument("--commit", required=True, help="commit that made the runs")
        runs.add_argument("--out", type=Path, default=RESULTS / file)
    chosen = vars(parser.parse_args(arguments))
    kind, out = chosen.pop("kind"), chosen.pop("out")
    try:
        collected = {"accuracy": accuracy, "nodes": nodes}[kind]
        content = collected(chosen.pop("runs"), **chosen)
    except SettingError as error:
        print(f"benchmarks.collect: {error}", file=sys.stderr)
        return 2
    write_atomically(out, json.dumps(content, indent=1, allow_nan=False, default=asdict) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
