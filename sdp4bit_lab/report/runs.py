"""What a training run has left behind: settings and measurements, read from the files of its folder."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from sdp4bit_lab.common.settings import SettingError, with_current_names

METRICS = "metrics.jsonl"
SETTINGS = "config.json"
SUMMARY = "summary.json"
TIMES = ("step_seconds", "tokens_per_second")
"""Numbers of a step that say how long it took."""
LAST_STEP = 2**53
"""Larger steps are not exact in the page."""
MAX_ALERTS_OF_A_STEP = 100
"""How far back an alert is looked for that is written again because a step was trained again."""

Fields = dict[str, float | None]
"""Numbers by name; None where the file says null or names a number that is not finite."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """What a run warned about."""

    step: int
    group: str | None
    """FSDP group; None where the alert concerns the whole run."""
    message: str
    numbers: Fields


@dataclass(kw_only=True)
class Run:
    """One training run as its files tell it; of a step that was trained twice, the last time counts."""

    name: str
    folder: Path
    written: datetime
    """When metrics.jsonl was last written to."""
    settings: dict[str, Any] = field(default_factory=dict)
    """config.json; empty without one."""
    train: dict[int, Fields] = field(default_factory=dict)
    """Numbers of every optimizer step, in order."""
    validation: dict[int, Fields] = field(default_factory=dict)
    test: dict[int, Fields] = field(default_factory=dict)
    groups: dict[int, dict[str, Fields]] = field(default_factory=dict)
    """Per step with a communication event: numbers by FSDP group."""
    alerts: list[Alert] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    """Steps with which training began anew after later ones had been done."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Events that this version does not know, with how often each occurs."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know about the files."""

    def column(self, name: str) -> np.ndarray:
        """Return one number per step of `train`; NaN where it is null or absent."""
        values = [numbers.get(name) for numbers in self.train.values()]
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)

    def records(self, name: str) -> bool:
        """Return whether any step names this number, be it null."""
        return any(name in numbers for numbers in self.train.values())

    def setting(self, *path: str) -> Any:
        """Return a member of config.json; None where it is missing or null."""
        value: Any = self.settings
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    @property
    def strategy(self) -> str | None:
        """The strategy's name; None if config.json does not give it."""
        name = self.setting("strategy")
        return None if name is None else str(name)

    @property
    def label(self) -> str | None:
        """The strategy with the options that a comparison gave it alone; None if it is not recorded."""
        label = self.setting("label")
        return self.strategy if label is None else str(label)

    @property
    def seed(self) -> int | None:
        """The seed of weights, samples and rounding; None if config.json does not give it."""
        seed = self.setting("seed")
        return seed if isinstance(seed, int) else None

    @property
    def simulated_ranks(self) -> int | None:
        """How many data-parallel ranks one process stood for; None for real ranks."""
        ranks = self.setting("parallel", "simulated_ranks")
        return ranks if isinstance(ranks, int) else None

    def validation_losses(self) -> dict[int, float]:
        """Return the validation losses that are numbers, by step."""
        found = {step: numbers.get("loss") for step, numbers in self.validation.items()}
        return {step: loss for step, loss in found.items() if loss is not None}


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Return the runs of the folders: of each one its own, or those of its subfolders; every folder once.

    Raises:
        SettingError: a folder holds no run, or a file cannot be understood; names the file and the line.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        for folder in _run_folders(path):
            folders.setdefault(folder.resolve(), folder)
    names = _names(list(folders))
    return [read_run(folder, name=name) for folder, name in zip(folders.values(), names, strict=True)]


def read_run(folder: Path, *, name: str) -> Run:
    """Return the run of a folder; what is missing or incomplete is noted in it.

    Raises:
        SettingError: a file cannot be read or understood; names the file and the line.
    """
    path = folder / METRICS
    try:
        content = path.read_bytes()
        written = datetime.fromtimestamp(path.stat().st_mtime).astimezone()
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error}") from error
    run = Run(name=name, folder=folder, written=written)
    _read_settings(run, folder / SETTINGS)
    _read_metrics(run, path, content)
    _note_gaps(run)
    return run


def _run_folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise SettingError(f"{path} is not a folder: give the --out of pretrain, compare or demo")
    if (path / METRICS).is_file():
        return [path]
    if (path / SETTINGS).is_file():
        raise SettingError(
            f"{path} has {SETTINGS} but no {METRICS}: the run had --no-jsonl, so rerun without"
        )
    found = {folder.name: folder for folder in sorted(path.iterdir()) if (folder / METRICS).is_file()}
    if not found:
        raise SettingError(f"neither {path} nor a folder in it has {METRICS}: give the --out of a run")
    first = [name for name in _summary_order(path / SUMMARY) if name in found]
    # A comparison that has not finished may lack its summary; the baseline is what others are compared with.
    rest = sorted(found.keys() - set(first), key=lambda name: (not name.startswith("baseline"), name))
    return [found[name] for name in (*first, *rest)]


def _summary_order(path: Path) -> list[str]:
    """Return the names of a comparison's run folders in the order they were trained."""
    if not path.is_file():
        return []
    runs = _read_object(path).get("runs")
    if not isinstance(runs, list):
        return []
    return [f"{run.get('strategy')}-seed{run.get('seed')}" for run in runs if isinstance(run, dict)]


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest endings of the paths by which all can be told apart."""
    for length in range(1, max((len(folder.parts) for folder in folders), default=1) + 1):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise SettingError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SettingError(f"{path}, line 1: not a JSON object but {type(value).__name__}")
    return value


def _read_settings(run: Run, path: Path) -> None:
    if path.is_file():
        run.settings = with_current_names(_read_object(path))
    else:
        run.notes.append(f"{SETTINGS} is missing, so what was trained is not known")


def _read_metrics(run: Run, path: Path, content: bytes) -> None:
    lines = content.split(b"\n")
    # What follows the last line break is empty, or a line that the run was killed in.
    last = lines.pop()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            _add(run, _parse(line, where), where)
    if last.strip():
        where = f"{path}, line {len(lines) + 1}"
        try:
            event = _parse(last, where)
        except SettingError:
            run.notes.append(
                f"the last line ({len(lines) + 1}) is incomplete and left out: the run was killed"
            )
        else:
            _add(run, event, where)
    if not content.strip():
        run.notes.append(f"{METRICS} is empty: no step was finished")


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError) as error:
        shown = line[:40].decode(errors="replace")
        raise SettingError(f"{where}: not JSON ({error}): {shown!r}; remove the line to go on") from error
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise SettingError(f'{where}: not an object with a member "event"; remove the line to go on')
    return event


def _add(run: Run, event: dict[str, Any], where: str) -> None:
    kind = event["event"]
    if kind == "train":
        step = _step(event, where)
        if run.train and step <= next(reversed(run.train)):
            run.restarts.append(step)
            _forget_after(run, step)
        run.train[step] = _numbers(event, where)
    elif kind == "validation":
        run.validation[_step(event, where)] = _numbers(event, where)
    elif kind == "test":
        run.test[_step(event, where)] = _numbers(event, where)
    elif kind == "communication":
        run.groups[_step(event, where)] = _group_numbers(event, where)
    elif kind == "alert":
        alert = _alert(event, where)
        if alert not in run.alerts[-MAX_ALERTS_OF_A_STEP:]:
            run.alerts.append(alert)
    else:
        run.unknown[kind] += 1


def _forget_after(run: Run, step: int) -> None:
    """Forget what the run says of later steps, and of this one, which is about to be said again."""
    per_step: tuple[dict[int, Any], ...] = (run.train, run.validation, run.test, run.groups)
    for entries in per_step:
        for later in [s for s in entries if s > step]:
            del entries[later]
    run.train.pop(step, None)
    run.alerts = [alert for alert in run.alerts if alert.step <= step]


def _group_numbers(event: dict[str, Any], where: str) -> dict[str, Fields]:
    groups = event.get("groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise SettingError(f'{where}: "groups" is not a list of objects')
    if not all(isinstance(group.get("name"), str) for group in groups):
        raise SettingError(f'{where}: a group has no "name"')
    return {group["name"]: _numbers(group, where) for group in groups}


def _alert(event: dict[str, Any], where: str) -> Alert:
    message, group = event.get("message"), event.get("group")
    if not isinstance(message, str):
        raise SettingError(f'{where}: the alert has no "message"')
    return Alert(
        step=_step(event, where),
        group=None if group is None else str(group),
        message=message,
        numbers={name: value for name, value in _numbers(event, where).items() if name != "group"},
    )


def _step(event: Mapping[str, Any], where: str) -> int:
    step = event.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < LAST_STEP:
        raise SettingError(f'{where}: "step" is {step!r}, not a number of steps')
    return step


def _numbers(event: Mapping[str, Any], where: str) -> Fields:
    """Return the numbers of an event; what else is in it is described elsewhere or another version's."""
    found: Fields = {}
    for name, value in event.items():
        if name == "step":
            continue
        if value is None or isinstance(value, bool):
            found[name] = None if value is None else float(value)
        elif isinstance(value, int | float):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            found[name] = number if math.isfinite(number) else None
        elif name in _MEASURED:
            raise SettingError(f'{where}: "{name}" is {value!r}, not a number')
    return found


_MEASURED = frozenset(
    (
        *("samples", "loss", "lr", "grad_norm", "tokens_per_second", "tflops_per_device", "step_seconds"),
        *("intra_bytes", "inter_bytes", "compression_ratio", "weight_drift", "gradient_error"),
        *("weight_error", "nonfinite_groups", "loss_scale"),
    )
)


def _note_gaps(run: Run) -> None:
    steps = list(run.train)
    if steps and steps[0] > 1:
        run.notes.append(f"begins with step {steps[0]}: earlier steps are in another folder or were removed")
    missing = [(a + 1, b - 1) for a, b in itertools.pairwise(steps) if b > a + 1]
    if missing:
        first, last = missing[0]
        run.notes.append(
            f"{sum(b - a + 1 for a, b in missing)} steps are missing, the first of them {first} to {last}"
        )
    for step in run.restarts:
        run.notes.append(f"continued at step {step}; what had been written of later steps is left out")
