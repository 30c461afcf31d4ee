"""The plots of a report as data: curves with few enough points to draw, heat maps, and why one is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sdp4bit_lab.common.smoothing import smoothed
from sdp4bit_lab.report.pairs import reference_of
from sdp4bit_lab.report.runs import TIMES, Run

POINTS = 6_000
"""Points of all runs' curves in one plot together, from which the number per run follows."""
POINTS_PER_RUN = (80, 1000)
"""Fewest and most points of one run."""
CELLS = 60_000
"""Cells of all heat maps together, from which the number of columns follows."""
_NO_TIMES = "its simulated ranks took turns in one process, so that times mean nothing"
COLUMNS = (12, 160)
"""Fewest and most columns of a heat map."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot over the steps, as curves or as heat maps of the FSDP groups."""

    key: str
    """Name of the number in the files, or of the plot."""
    title: str
    about: str
    """What is drawn, in one or two sentences."""
    unit: str = "number"
    """How the page writes values: number, loss, difference, bytes, seconds, count."""
    curves: list[dict[str, Any]] = field(default_factory=list)
    maps: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """One sentence for each run that is not drawn, saying why."""


def loss_plots(runs: Sequence[Run]) -> list[Plot]:
    """Return training loss, validation loss, and both less those of the first run."""
    validation = Plot(
        key="validation",
        title="Validation loss",
        about="Mean cross entropy over the validation batches, in nats per token.",
        unit="loss",
    )
    difference = Plot(
        key="difference",
        title=f"Difference to {runs[0].label or runs[0].name}, same seed",
        about="Loss less that of the compared run with the same seed at the same step: training (faint), "
        "smoothed (line), validation (points). Above zero is worse.",
        unit="difference",
    )
    points = _points_per_run(runs)
    for index, run in enumerate(runs):
        found = _validation(run)
        if np.isfinite(found[1]).any():
            validation.curves.append(_curve(index, "points", *found, points=points))
        else:
            validation.missing.append(f"{run.name}: {_why_no_validation(run)}")
    for index, run in enumerate(runs):
        reference = reference_of(run, runs)
        if reference is run:
            continue
        if reference is None:
            difference.missing.append(f"{run.name}: no run of {runs[0].label} has its seed")
            continue
        steps, values = _less(_train(run, "loss"), _train(reference, "loss"))
        if len(steps) == 0:
            difference.missing.append(f"{run.name}: no step in common with {reference.name}")
            continue
        if not np.isfinite(values).any():
            difference.missing.append(f"{run.name}: at no common step are both losses numbers")
            continue
        difference.curves.extend(_raw_and_smoothed(index, steps, values, points=points))
        found = _less(_validation(run), _validation(reference))
        if np.isfinite(found[1]).any():
            difference.curves.append(_curve(index, "points", *found, points=points))
    if len(runs) == 1:
        difference.missing.append("There is one run only: give a second one to compare with the first.")
    training = _train_plot(
        runs,
        key="loss",
        title="Training loss",
        about="Cross entropy of each global batch (faint) and its mean over a twentieth of the steps (line), "
        "in nats per token.",
        unit="loss",
        smooth=True,
    )
    return [training, validation, difference]


def optimizer_plots(runs: Sequence[Run]) -> list[Plot]:
    """Return the learning rate and the norm of the gradient."""
    return [
        _train_plot(runs, key="lr", title="Learning rate", about="As set before each step."),
        _train_plot(
            runs,
            key="grad_norm",
            title="Gradient norm",
            about="Of the whole model, before clipping; smoothed over a twentieth of the steps (line).",
            smooth=True,
        ),
    ]


def traffic_plots(runs: Sequence[Run]) -> list[Plot]:
    """Return the bytes of each step by level, and what compression saved."""
    return [
        _train_plot(
            runs,
            key="inter_bytes",
            title="Inter-node bytes",
            about="Bytes that all ranks together sent inter-node in each step.",
            unit="bytes",
        ),
        _train_plot(
            runs,
            key="intra_bytes",
            title="Intra-node bytes",
            about="Bytes that all ranks together sent intra-node in each step.",
            unit="bytes",
        ),
        _train_plot(
            runs,
            key="compression_ratio",
            title="Compression ratio",
            about="Bytes that plain FSDP2 would have sent inter-node, over those sent; rank 0's.",
        ),
    ]


def time_plots(runs: Sequence[Run]) -> list[Plot]:
    """Return the seconds of each step."""
    return [
        _train_plot(
            runs,
            key="step_seconds",
            title="Step time",
            about="Wall-clock time of each step (faint), smoothed over a twentieth of the steps (line).",
            unit="seconds",
            smooth=True,
        ),
    ]


def quantization_plots(runs: Sequence[Run]) -> list[Plot]:
    """Return the error of the gradients and the drift of the weights of the whole model."""
    return [
        _train_plot(
            runs,
            key="gradient_error",
            title="Gradient quantization error",
            about="Relative error of quantizing a sample of the gradients; rank 0's.",
            smooth=True,
        ),
        _train_plot(
            runs,
            key="weight_drift",
            title="Weight drift",
            about="Distance of the gathered weights from the main weights, relative; rank 0's.",
            smooth=True,
        ),
    ]


def group_plots(runs: Sequence[Run]) -> list[Plot]:
    """Return the heat maps: one row per FSDP group, one column per report or several."""
    kinds = (
        ("gradient_error", "Gradient quantization error by group", "number"),
        ("weight_error", "Weight quantization error by group", "number"),
        ("weight_drift", "Weight drift by group", "number"),
        ("nonfinite_groups", "Non-finite groups", "count"),
    )
    abouts = {
        "gradient_error": "Relative error of quantizing the group's gradients.",
        "weight_error": "Relative error of quantizing the group's weight differences, or weights.",
        "weight_drift": "Distance of the group's gathered weights from its main weights, relative.",
        "nonfinite_groups": "Quantization groups with a value that was not a finite number.",
    }
    return [
        _heat_plot(runs, key=key, title=title, unit=unit, about=abouts[key], kinds=len(kinds))
        for key, title, unit in kinds
    ]


def decimated(steps: np.ndarray, values: np.ndarray, *, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most about as many points: of every range its least, its largest and its first NaN.

    The first and the last point stay, so no extreme and no gap of the whole curve is lost.
    """
    if len(steps) <= points:
        return steps, values
    kept = {0, len(steps) - 1}
    for part in np.array_split(np.arange(len(steps)), max(1, points // 2)):
        finite = np.isfinite(values[part])
        if finite.any():
            kept.add(int(part[finite][np.argmin(values[part][finite])]))
            kept.add(int(part[finite][np.argmax(values[part][finite])]))
        if not finite.all():
            kept.add(int(part[~finite][0]))
    order = np.array(sorted(kept))
    return steps[order], values[order]


def short(value: float) -> float | int | None:
    """Return the number with seven digits, an integer if it is one; None for NaN."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.7g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


def _points_per_run(runs: Sequence[Run]) -> int:
    return int(np.clip(POINTS // len(runs), *POINTS_PER_RUN))


Points = tuple[np.ndarray, np.ndarray]


def _train(run: Run, key: str) -> Points:
    return np.array(list(run.train), dtype=np.int64), run.column(key)


def _validation(run: Run) -> Points:
    losses = {step: numbers.get("loss") for step, numbers in run.validation.items()}
    steps = np.array(list(losses), dtype=np.int64)
    return steps, np.array([math.nan if loss is None else loss for loss in losses.values()], dtype=np.float64)


def _less(one: Points, other: Points) -> Points:
    steps, first, second = np.intersect1d(one[0], other[0], return_indices=True)
    return steps, one[1][first] - other[1][second]


def _curve(run: int, kind: str, steps: np.ndarray, values: np.ndarray, *, points: int) -> dict[str, Any]:
    steps, values = decimated(steps, values, points=points)
    return {"run": run, "kind": kind, "x": steps.tolist(), "y": [short(value) for value in values.tolist()]}


def _raw_and_smoothed(
    run: int, steps: np.ndarray, values: np.ndarray, *, points: int
) -> Iterable[dict[str, Any]]:
    yield _curve(run, "raw", steps, values, points=points)
    yield _curve(run, "line", steps, smoothed(values), points=points // 3)


def _train_plot(
    runs: Sequence[Run], *, key: str, title: str, about: str, unit: str = "number", smooth: bool = False
) -> Plot:
    plot = Plot(key=key, title=title, about=about, unit=unit)
    points = _points_per_run(runs)
    for index, run in enumerate(runs):
        steps, values = _train(run, key)
        reason = _why_missing(run, key, values)
        if reason is not None:
            plot.missing.append(f"{run.name}: {reason}")
        elif smooth:
            plot.curves.extend(_raw_and_smoothed(index, steps, values, points=points))
        else:
            plot.curves.append(_curve(index, "line", steps, values, points=points))
    return plot


def _why_missing(run: Run, key: str, values: np.ndarray) -> str | None:
    if not run.train:
        return "no step has been finished"
    if _is_no_time(run, key):
        return _NO_TIMES
    if not run.records(key):
        return f'its steps have no "{key}"'
    return None if np.isfinite(values).any() else _why_null(key)


def _is_no_time(run: Run, key: str) -> bool:
    return key in TIMES and run.simulated_ranks is not None


def _why_null(key: str) -> str:
    return {
        "weight_drift": "weights are not quantized",
        "weight_error": "weights are not quantized",
        "gradient_error": "gradients are not quantized",
    }.get(key, "no value is a finite number")


def _why_no_validation(run: Run) -> str:
    if run.validation:
        return "no validation loss is a finite number"
    interval = run.setting("training", "eval_interval")
    done = max(run.train, default=0)
    if isinstance(interval, int) and done < interval:
        return f"validation is every {interval} steps, and {done} are done"
    return "no validation is in the file"


def _heat_plot(runs: Sequence[Run], *, key: str, title: str, about: str, unit: str, kinds: int) -> Plot:
    plot = Plot(key=f"group_{key}", title=title, about=about, unit=unit)
    names_of = [_group_names(run) for run in runs]
    rows = sum(map(len, names_of)) * kinds
    columns = int(np.clip(CELLS // max(rows, 1), *COLUMNS))
    for index, run in enumerate(runs):
        names = names_of[index]
        table = np.array(
            [[_or_nan(groups.get(name, {}).get(key)) for groups in run.groups.values()] for name in names],
            dtype=np.float64,
        )
        reason = _why_no_map(run, key, table)
        if reason is not None:
            plot.missing.append(f"{run.name}: {reason}")
            continue
        plot.maps.append({"run": index, "groups": names, **_columns(list(run.groups), table, columns)})
    return plot


def _group_names(run: Run) -> list[str]:
    return list(dict.fromkeys(name for groups in run.groups.values() for name in groups))


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _why_no_map(run: Run, key: str, table: np.ndarray) -> str | None:
    if not run.groups:
        return "it wrote no communication events"
    if not any(key in numbers for groups in run.groups.values() for numbers in groups.values()):
        return f'its communication events have no "{key}"'
    if not np.isfinite(table).any():
        return _why_null(key)
    if key == "nonfinite_groups" and not np.nansum(table):
        return f"none in {len(run.groups)} reports of {len(table)} groups"
    return None


def _columns(steps: list[int], table: np.ndarray, columns: int) -> dict[str, Any]:
    """Return the table with neighbouring reports merged: each cell is the largest of its reports."""
    parts = np.array_split(np.arange(len(steps)), min(columns, len(steps)))
    merged = np.stack([_largest(table[:, part]) for part in parts], axis=1)
    return {
        "from": [steps[int(part[0])] for part in parts],
        "to": [steps[int(part[-1])] for part in parts],
        "values": [[_rough(value) for value in row] for row in merged.tolist()],
    }


def _largest(part: np.ndarray) -> np.ndarray:
    filled = np.where(np.isfinite(part), part, -np.inf).max(axis=1)
    return np.where(np.isfinite(filled), filled, math.nan)


def _rough(value: float) -> float | int | None:
    return short(float(f"{value:.4g}")) if math.isfinite(value) else None


PLOTS: dict[str, Callable[[Sequence[Run]], list[Plot]]] = {
    "Loss": loss_plots,
    "Optimizer": optimizer_plots,
    "Bytes": traffic_plots,
    "Time": time_plots,
    "Quantization": quantization_plots,
    "By FSDP group": group_plots,
}
"""The plots by section of the page."""
