"""Read the files of training runs: metrics.jsonl, config.json, and a comparison's summary.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sdp4bit_lab.common.files import read_json_object
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.stability import GradientSpike, gradient_spikes

METRICS = "metrics.jsonl"
SETTINGS = "config.json"
SUMMARY = "summary.json"
LAST_STEP = 2**53
"""Larger steps are not exact in a browser."""
SHOWN = ("loss", "grad_norm", "step_seconds", "intra_bytes", "inter_bytes", "compression_ratio")
"""Numbers of an event that the page reads. Others are left alone, as those of a newer version may be."""

Fields = dict[str, float | None]
"""Numbers by name; None for null and for numbers that are not finite."""


class Alert(NamedTuple):
    """Warning of a run; group is None for the whole model."""

    step: int
    group: str | None
    message: str


@dataclass(kw_only=True)
class Run:
    """Settings and measurements of one training run."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Content of config.json; empty without the file."""
    train: dict[int, Fields] = field(default_factory=dict)
    """Numbers of every optimizer step, in order."""
    validation: dict[int, Fields] = field(default_factory=dict)
    alerts: list[Alert] = field(default_factory=list)
    resumes: list[int] = field(default_factory=list)
    """Completed steps at each start from a checkpoint."""
    group_bytes: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Bytes of rank 0 by level (inter_bytes, intra_bytes) and parameter group, of every measured step."""

    def column(self, name: str) -> np.ndarray:
        """Return one number per training step; NaN for null and missing ones."""
        return np.array([fields.get(name) for fields in self.train.values()], dtype=np.float64)

    def validation_losses(self) -> np.ndarray:
        """Return one loss per validation; NaN for null."""
        return np.array([fields.get("loss") for fields in self.validation.values()], dtype=np.float64)

    def setting(self, *path: str) -> Any:
        """Return a member of config.json by path; None if it is missing or null."""
        value: Any = self.settings
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    @property
    def label(self) -> str | None:
        """Strategy with the options that a comparison varies; None if not recorded."""
        label = self.setting("label") or self.setting("strategy")
        return None if label is None else str(label)

    @property
    def seed(self) -> int | None:
        seed = self.setting("seed")
        return seed if isinstance(seed, int) else None

    @property
    def simulated_ranks(self) -> int | None:
        """Simulated data-parallel ranks; None for real ranks."""
        ranks = self.setting("parallel", "simulated_ranks")
        return ranks if isinstance(ranks, int) else None

    @property
    def ranks(self) -> str:
        """Description of the ranks and ranks per node."""
        count = self.simulated_ranks or self.setting("ranks") or self.setting("parallel", "nproc_per_node")
        per_node = self.setting("parallel", "ranks_per_node")
        text = f"{count or 'not recorded'}" + (" simulated" if self.simulated_ranks else "")
        return f"{text}\n{per_node} per node" if per_node else text

    def spikes(self) -> list[GradientSpike]:
        """Return the spikes of the gradient norm, largest first."""
        norms = zip(self.train, self.column("grad_norm").tolist(), strict=True)
        return sorted(gradient_spikes(norms), key=lambda spike: -spike.ratio)


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Return the runs in the folders or their subfolders; SettingError names the damaged file and line."""
    folders: dict[Path, Path] = {}
    for path in paths:
        for folder in _run_folders(path):
            folders.setdefault(folder.resolve(), folder)
    names = _names(list(folders))
    return [read_run(folder, name=name) for folder, name in zip(folders.values(), names, strict=True)]


def read_run(folder: Path, *, name: str) -> Run:
    """Return the run of a folder; errors as in `find_runs`."""
    settings = read_json_object(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    run = Run(name=name, settings=settings)
    path = folder / METRICS
    lines = path.read_bytes().split(b"\n")
    # A line without a line break is still being written, or its run was killed.
    for number, line in enumerate(lines[:-1], start=1):
        if line.strip():
            _add(run, line, f"{path}, line {number}")
    return run


def _run_folders(path: Path) -> list[Path]:
    if (path / METRICS).is_file():
        return [path]
    if (path / SETTINGS).is_file():
        raise SettingError(f"{path} has {SETTINGS} but no {METRICS}: rerun without --no-jsonl")
    folders = {folder.name: folder for folder in sorted(path.iterdir()) if (folder / METRICS).is_file()}
    if not folders:
        raise SettingError(f"neither {path} nor its subfolders contain {METRICS}: give an --out folder")
    first = [name for name in _summary_order(path / SUMMARY) if name in folders]
    # An unfinished comparison has no summary; put its baseline first.
    rest = sorted(folders.keys() - set(first), key=lambda name: (not name.startswith("baseline"), name))
    return [folders[name] for name in (*first, *rest)]


def _summary_order(path: Path) -> list[str]:
    """Return the run folders of a comparison in training order."""
    runs = read_json_object(path).get("runs") if path.is_file() else None
    if not isinstance(runs, list):
        return []
    return [f"{run.get('strategy')}-seed{run.get('seed')}" for run in runs if isinstance(run, dict)]


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest path suffixes that are all different."""
    for length in range(1, max(len(folder.parts) for folder in folders)):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _add(run: Run, line: bytes, where: str) -> None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError) as error:
        shown = line[:40].decode(errors="replace")
        raise SettingError(f"{where}: not JSON ({error}): {shown!r}; remove the line") from error
    kind = event.get("event") if isinstance(event, dict) else None
    # The page does not show other events.
    if kind not in ("train", "validation", "alert", "resume", "communication"):
        return
    step = event.get("step")
    if not isinstance(step, int) or not 0 <= step < LAST_STEP:
        raise SettingError(f'{where}: "step" is {step!r}, not a step; remove the line')
    if kind == "alert":
        group = event.get("group")
        message = str(event.get("message", ""))
        run.alerts.append(Alert(step, None if group is None else str(group), message))
    elif kind == "resume":
        run.resumes.append(step)
    elif kind == "communication":
        for group in event.get("groups") or ():
            for level in ("inter_bytes", "intra_bytes"):
                size = _number(level, group.get(level), where)
                if size is not None:
                    run.group_bytes.setdefault(level, {}).setdefault(str(group.get("name")), []).append(size)
    else:
        steps = run.train if kind == "train" else run.validation
        steps[step] = {name: _number(name, event[name], where) for name in SHOWN if name in event}


def _number(name: str, value: Any, where: str) -> float | None:
    if value is not None and not isinstance(value, int | float):
        raise SettingError(f'{where}: "{name}" is {value!r}, not a number; remove the line')
    # Python writes NaN, which JSON lacks. Integers beyond 1e308 do not fit a float.
    return None if value is None or not abs(value) < 1e308 else float(value)
