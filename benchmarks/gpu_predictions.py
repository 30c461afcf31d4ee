"""Predictions of the second call over NCCL beside the measurements.

    python -m benchmarks.gpu_predictions results/gpu/NAME
    python -m benchmarks.gpu_predictions --plan

The first prints both. The second adds the seconds of the planner's model to
results/gpu/predictions-second.json, instead of its earlier ones. Add them before the run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.planned_jobs import jobs_of
from sdp4bit_lab.plan.config import PlanConfig
from sdp4bit_lab.plan.host import host_time
from sdp4bit_lab.plan.model import PlanModelConfig

ROOT = Path(__file__).resolve().parent.parent
PREDICTIONS = ROOT / "results" / "gpu" / "predictions-second.json"
MODEL = "the model of `sdp4bit plan`, with the measured host scaled to the current code; middle of the range"
SHAPE = ("layers", "hidden", "heads", "vocabulary", "sequence_length")
Planned = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Seconds per step by part of the report, strategy and rate."""


def read(path: Path = PREDICTIONS) -> dict[str, Any]:
    """Return the predictions: seconds of steps, and statements."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def add_planned(content: dict[str, Any], planned: Planned, *, source: str) -> dict[str, Any]:
    """Return predictions with planned seconds, instead of earlier ones of the same source."""
    kept = [row for row in content["seconds"] if row["source"] != source]
    new = [
        {"part": part, "strategy": strategy, "rate": rate, "seconds": seconds, "source": source}
        for part, strategies in planned.items()
        for strategy, rates in strategies.items()
        for rate, seconds in rates.items()
    ]
    return {**content, "seconds": kept + new}


def planned_by_model(content: dict[str, Any]) -> Planned:
    """Return the planner's seconds of all predicted steps that it knows; the middle of its ranges."""
    known = {(row["part"], row["strategy"], row["rate"]): row for row in content["seconds"]}
    planned: dict[str, dict[str, dict[str, float]]] = {}
    for part in dict.fromkeys(part for part, _, _ in known):
        result, compute = _unmeasured(part, [each[1:] for each in known if each[0] == part])
        for job in jobs_of(ROOT, part, result, compute=compute, host=host_time("measured")):
            seconds = round(sum(job.planned) / 2, 3)
            planned.setdefault(part, {}).setdefault(job.strategy, {})[job.rate] = seconds
    return planned


def _unmeasured(part: str, steps: Sequence[tuple[str, str]]) -> tuple[dict[str, Any], float]:
    """Return a part as a result without times, and the seconds of its arithmetic on the H100."""
    layout = "2x2" if "2x2" in part else "2x1"
    measured = json.loads((ROOT / f"results/gpu/h100/nccl-{layout}.json").read_text(encoding="utf-8"))
    compute = min(row["fastest"] for row in measured["rows"] if row["strategy"] == "compute")
    workload = dict(measured["workload"])
    if "620m" in part:
        flops = []
        for hidden in (workload["hidden"], 2048):
            shape = PlanModelConfig(**{name: workload[name] for name in SHAPE} | {"hidden": hidden})
            flops.append(PlanConfig(model=shape).shape.flops_per_sample(workload["sequence_length"]))
        workload["hidden"], compute = 2048, compute * flops[1] / flops[0]
    times = dict.fromkeys(("fastest", "seconds_per_step", "tx_bytes_per_node_per_step", "rounds"), 0)
    rows = [{"strategy": strategy, "rate": rate, **times} for strategy, rate in steps]
    return {**measured, "workload": workload, "rows": rows}, compute


def seconds_of(content: dict[str, Any], part: str) -> dict[tuple[str, str], float]:
    """Return the predicted seconds of a part by strategy and rate; the last source of each counts."""
    rows = [row for row in content["seconds"] if row["part"] == part]
    return {(row["strategy"], row["rate"]): row["seconds"] for row in rows}


def compared(content: dict[str, Any], folder: Path) -> str:
    """Return a table of predicted seconds and lower quartiles, and the statements with their sources."""
    rows = []
    for row in content["seconds"]:
        path = folder / f"{row['part']}.json"
        found = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
        same = [each for each in found if all(each[name] == row[name] for name in ("strategy", "rate"))]
        cells = ["", ""]
        if same:
            measured = same[0]["lower_quartile"]
            cells = [f"{measured:.3f}", f"{measured / row['seconds']:.2f}"]
        rows.append(
            [row["part"], row["strategy"], row["rate"], f"{row['seconds']:.3f}", *cells, row["source"]]
        )
    titles = ["part", "strategy", "rate", "predicted s", "lower quartile s", "measured / predicted", "source"]
    statements = [
        f"* {each['part']}: {each['text']} Source: {each['source']}\n" for each in content["statements"]
    ]
    return f"{table(titles, rows, left=3)}\n{''.join(statements)}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_predictions", description=__doc__.split("\n")[0]
    )
    parser.add_argument("folder", type=Path, nargs="?", help="results of a machine")
    parser.add_argument("--plan", action="store_true", help="add the seconds of the planner's model")
    parser.add_argument("--file", type=Path, default=PREDICTIONS)
    chosen = parser.parse_args(arguments)
    content = read(chosen.file)
    if chosen.plan:
        content = add_planned(content, planned_by_model(content), source=MODEL)
        chosen.file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(compared(content, chosen.folder or chosen.file.parent))


if __name__ == "__main__":
    main()
