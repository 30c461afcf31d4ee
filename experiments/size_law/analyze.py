"""Fit the cost in loss against the number of parameters, and write analysis.json.

    python -m experiments.size_law.analyze RUNS ERRORS experiments/size_law

ERRORS has runs of `sdp4bit` and of the coarse strategy with metrics.jsonl, for their squared errors.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from experiments.size_law.run import COARSE, LENGTH, NODES, SIZES

TARGETS = {"125M": 1.25e8, "1B": 1e9}
NAMES = {"sdp4bit": "4 bits", COARSE: "2 bits"}


def read(folder: Path) -> dict[tuple[str, str], dict[int, Any]]:
    """Return the finished runs by size and strategy, and by seed."""
    runs: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    for path in sorted(folder.glob("*/*/result.json")):
        run = json.loads(path.read_text())
        runs[path.parts[-3], run["strategy"]][run["seed"]] = run
    return runs


def squared_error(folder: Path, size: str, strategy: str) -> float | None:
    """Return the mean squared relative error of a node's gradient in the measured steps, without the first if there are others."""
    for path in (folder / size).glob("*/metrics.jsonl"):
        if ("inter=2" in path.parent.name) == (strategy == COARSE):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            errors = [line["gradient_error"] for line in lines if line.get("gradient_error")]
            seen = [error for error, before in zip(errors, [None, *errors]) if error != before]
            return statistics.mean(error**2 for error in seen[1:] or seen)
    return None


def gaps(runs: dict[tuple[str, str], dict[int, Any]], strategy: str) -> dict[str, dict[int, float]]:
    """Return the percent of loss over the baseline, by size and seed."""
    found: dict[str, dict[int, float]] = {}
    for size in SIZES:
        ours, plain = runs[size, strategy], runs[size, "baseline"]
        found[size] = {
            seed: 100 * (ours[seed]["validation"][-1][1] / plain[seed]["validation"][-1][1] - 1)
            for seed in sorted(ours.keys() & plain.keys())
        }
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval; 0 for fewer than three values, which give none."""
    if len(values) < 3:
        return statistics.mean(values), 0.0
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), float(half)


class Line:
    """A line through percent against log10 of the parameters, by least squares over all runs."""

    def __init__(self, found: dict[str, dict[int, float]]) -> None:
        points = [
            (SIZES[size].parameters, gap) for size, by_seed in found.items() for gap in by_seed.values()
        ]
        x, y = np.log10([count for count, _ in points]), np.array([gap for _, gap in points])
        design = np.stack([np.ones_like(x), x], 1)
        self.weights = np.linalg.lstsq(design, y, rcond=None)[0]
        rest = len(x) - 2
        self.covariance = ((y - design @ self.weights) ** 2).sum() / rest * np.linalg.inv(design.T @ design)
        self.quantile = stats.t.ppf(0.975, rest)

    def at(self, parameters: float) -> tuple[float, float]:
        """Return the mean at a size and half of its 95 % interval."""
        row = np.array([1, math.log10(parameters)])
        return float(row @ self.weights), float(self.quantile * math.sqrt(row @ self.covariance @ row))

    @property
    def slope(self) -> tuple[float, float]:
        return float(self.weights[1]), float(self.quantile * math.sqrt(self.covariance[1, 1]))


def _signed(mean: float, half: float, digits: int = 2) -> str:
    if not half:
        return f"{mean:+.{digits}f} %"
    return f"{mean:+.{digits}f} % ({mean - half:+.{digits}f} to {mean + half:+.{digits}f})"


def curve(line: Line, scale: float) -> list[list[float]]:
    """Return parameters, percent and half of the interval along a line."""
    sizes = np.logspace(5.4, 9.1, 40)
    return [[round(float(x)), *(round(scale * value, 5) for value in line.at(x))] for x in sizes]


def main() -> None:
    """Write the result."""
    folder, errors, out = map(Path, sys.argv[1:])
    runs = read(folder)
    found = {strategy: gaps(runs, strategy) for strategy in NAMES}
    lines = {strategy: Line(found[strategy]) for strategy in NAMES}
    rows, shares = [], []
    for name, size in SIZES.items():
        plain = runs[name, "baseline"]
        tokens = size.sequences * NODES * LENGTH
        steps = plain[1]["validation"][-1][0]
        fine, coarse = (squared_error(errors, name, each) for each in NAMES)
        if fine and coarse:
            shares.append(fine / coarse)
        cells = [
            f"{size.parameters / 1e6:.1f}M",
            f"{tokens:,}",
            f"{steps:,}",
            f"{statistics.mean(run['validation'][-1][1] for run in plain.values()):.3f}",
        ]
        for strategy, error in (("sdp4bit", fine), (COARSE, coarse)):
            values = list(found[strategy][name].values())
            cells += [f"{_signed(*interval(values))}, n {len(values)}", f"{error:.4f}" if error else ""]
        rows.append(cells)
    ratio = statistics.mean(shares[-2:])  # of the largest sizes, because it falls with the size
    all_fine = [gap for by_seed in found["sdp4bit"].values() for gap in by_seed.values()]
    predicted = []
    for name, count in TARGETS.items():
        mean, half = lines[COARSE].at(count)
        predicted.append(
            [
                name,
                _signed(mean, half, 1),
                _signed(mean * ratio, half * ratio, 3),
                _signed(*lines["sdp4bit"].at(count)),
            ]
        )
    seeds = [
        [size, strategy, str(seed), f"{run['validation'][-1][1]:.5f}", "yes" if run["spikes"] else ""]
        for (size, strategy), by_seed in sorted(runs.items())
        for seed, run in sorted(by_seed.items())
    ]
    result = {
        "slope_per_decade": {NAMES[each]: lines[each].slope for each in NAMES},
        "mean_of_4_bits": interval(all_fine),
        "runs_of_4_bits": len(all_fine),
        "ratio_of_squared_errors": ratio,
        "tables": [
            {
                "columns": [
                    "parameters",
                    "tokens per step",
                    "steps",
                    "loss",
                    "4 bits",
                    "squared error",
                    "2 bits",
                    "squared error",
                ],
                "rows": rows,
            },
            {
                "columns": ["predicted for", "2 bits", "4 bits, from 2 bits", "4 bits, their own line"],
                "rows": predicted,
            },
            {
                "columns": ["size", "strategy", "seed", "validation loss", "gradient norm jumped"],
                "rows": seeds,
            },
        ],
    }
    result["points"] = {
        NAMES[each]: [[SIZES[size].parameters, *interval(list(found[each][size].values()))] for size in SIZES]
        for each in NAMES
    }
    result["fit"] = {
        NAMES[COARSE]: curve(lines[COARSE], 1.0),
        NAMES["sdp4bit"]: curve(lines[COARSE], ratio),
    }
    result["fit_labels"] = {NAMES[COARSE]: "line", NAMES["sdp4bit"]: "line times the ratio of squared errors"}
    (out / "analysis.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(json.dumps(result, indent=1)[:5000])


if __name__ == "__main__":
    main()
