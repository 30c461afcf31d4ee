"""Predictions of the second call over NCCL beside the measurements.

    python -m benchmarks.gpu_predictions results/gpu/NAME
    python -m benchmarks.gpu_predictions --planned PLAN.json --source "sdp4bit plan of 2026-12-01"

The first prints both. The second adds planned seconds, {part: {strategy: {rate: seconds}}}, to
results/gpu/predictions-second.json; those of the same source are replaced. Add them before the run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

ROOT = Path(__file__).resolve().parent.parent
PREDICTIONS = ROOT / "results" / "gpu" / "predictions-second.json"
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
    parser.add_argument("--planned", type=Path, help="file of planned seconds to add")
    parser.add_argument("--source", help="of the planned seconds, in words")
    parser.add_argument("--file", type=Path, default=PREDICTIONS)
    chosen = parser.parse_args(arguments)
    content = read(chosen.file)
    if chosen.planned is not None:
        if not chosen.source:
            parser.error("--planned needs --source: say in words where the seconds come from")
        planned = json.loads(chosen.planned.read_text(encoding="utf-8"))
        content = add_planned(content, planned, source=chosen.source)
        chosen.file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(compared(content, chosen.folder or chosen.file.parent))


if __name__ == "__main__":
    main()
