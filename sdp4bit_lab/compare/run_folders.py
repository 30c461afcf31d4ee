"""Find finished runs of this comparison, or of several that are merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdp4bit_lab.common.settings import SettingError, require
from sdp4bit_lab.common.strategies import STRATEGIES
from sdp4bit_lab.compare.finished_run import RESULT, FinishedRun, first_difference


def find_finished(planned: Mapping[Path, dict[str, Any]]) -> dict[Path, FinishedRun]:
    """Return the finished runs by folder.

    Args:
        planned: by folder, the strategy, settings and quantization of its run.

    Raises:
        SettingError: a folder has a result with other settings.
    """
    finished = {folder: FinishedRun.read(folder) for folder in planned if (folder / RESULT).is_file()}
    for folder, run in finished.items():
        difference = first_difference({name: getattr(run, name) for name in planned[folder]}, planned[folder])
        if difference is not None:
            name, before, now = difference
            raise SettingError(
                f"{folder} has a result with other settings, {name} {before} (now {now}): "
                "choose another --out, or delete that folder to repeat the run"
            )
    return finished


def merge_finished(folders: Sequence[Path]) -> list[FinishedRun]:
    """Return the finished runs of several comparisons, ordered by strategy and seed.

    Raises:
        SettingError: a folder without runs, a run with two different results, or runs whose settings differ
        in more than strategy and seed.
    """
    runs: dict[Path, FinishedRun] = {}
    for folder in folders:
        results = sorted(path.parent for path in folder.glob(f"*/{RESULT}"))
        require(
            bool(results),
            f"--merge {folder}: no finished run (a folder with {RESULT}): give --out folders of "
            "`sdp4bit compare`",
        )
        runs |= {path: FinishedRun.read(path) for path in results}
    by_name: dict[str, Path] = {}
    by_strategy: dict[str, Path] = {}
    for path, run in runs.items():
        first = next(iter(runs))
        _require_equal(first, path, *({"settings": runs[p].settings} for p in (first, path)))
        first = by_strategy.setdefault(run.strategy, path)
        _require_equal(first, path, *({**runs[p].quantization, "seed": None} for p in (first, path)))
        other = by_name.setdefault(run.name, path)
        if repr(runs[other]) != repr(run):  # as text, because NaN differs from itself
            raise SettingError(
                f"{other} and {path} have different results of {run.name}: merge only one of them"
            )
    names = list[str](STRATEGIES)

    def place(run: FinishedRun) -> tuple[bool, int, str, int]:
        name = run.strategy.partition(":")[0]
        return name != "baseline", names.index(name), run.strategy, run.seed

    return sorted((runs[path] for path in by_name.values()), key=place)


def _require_equal(first: Path, second: Path, one: dict[str, Any], other: dict[str, Any]) -> None:
    difference = first_difference(one, other)
    if difference is not None:
        name, left, right = difference
        raise SettingError(
            f"--merge: {first} has {name} {left}, {second} has {right}: only strategy and seed may differ"
        )
