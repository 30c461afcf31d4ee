"""Finished runs in folders: those a comparison need not train again, and those of several to be merged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdp4bit_lab.common.settings import SettingError, require
from sdp4bit_lab.compare.finished_run import RESULT, RunRecord, first_difference
from sdp4bit_lab.pretrain.config.communication import STRATEGIES


@dataclass(frozen=True, kw_only=True)
class PlannedFolder:
    """Where a run belongs, and what it must have been if it has been done."""

    folder: Path
    strategy: str
    settings: dict[str, Any]
    quantization: dict[str, Any]
    """The library's settings, the seed included."""


def find_finished(planned: Sequence[PlannedFolder]) -> dict[Path, RunRecord]:
    """Return the runs that are done already, by their folder.

    Raises:
        SettingError: a folder holds the result of a run with other settings.
    """
    found = {}
    for plan in planned:
        if not (plan.folder / RESULT).is_file():
            continue
        record = RunRecord.read(plan.folder)
        difference = first_difference(
            {"strategy": record.run.strategy, **record.settings, "quantization": record.quantization},
            {"strategy": plan.strategy, **plan.settings, "quantization": plan.quantization},
        )
        if difference is not None:
            name, before, now = difference
            raise SettingError(
                f"{plan.folder} has the result of a run with other settings, {name} {before} (now {now}): "
                "choose another --out, or delete that folder to train the run anew"
            )
        found[plan.folder] = record
    return found


def merge_finished(folders: Sequence[Path]) -> list[RunRecord]:
    """Return the finished runs of several comparisons, in the order of the strategies and their seeds.

    Raises:
        SettingError: a folder without runs, a run that is there twice with different results, or runs whose
            settings differ in more than strategy and seed.
    """
    first: tuple[Path, RunRecord] | None = None
    found: dict[tuple[str, int], tuple[Path, RunRecord]] = {}
    quantizations: dict[str, tuple[Path, RunRecord]] = {}
    for path, record in _records(folders):
        first = first or (path, record)
        _require_equal(first, (path, record), of="settings")
        strategy, seed = record.run.strategy, record.run.seed
        _require_equal(
            quantizations.setdefault(strategy, (path, record)),
            (path, record),
            of="quantization",
            apart="seed",
        )
        other, known = found.setdefault((strategy, seed), (path, record))
        if repr(known) != repr(record):  # NaN differs from itself, but its text does not
            raise SettingError(
                f"{other} and {path} are two runs of {record.run.name}, with different results: merge "
                "one of them"
            )
    return sorted((record for _, record in found.values()), key=_place)


def _records(folders: Sequence[Path]) -> Iterator[tuple[Path, RunRecord]]:
    for folder in folders:
        paths = sorted(path.parent for path in folder.glob(f"*/{RESULT}"))
        require(
            bool(paths),
            f"--merge {folder}: there is no finished run (a folder with {RESULT}): give the --out folders of "
            "`sdp4bit compare`",
        )
        for path in paths:
            yield path, RunRecord.read(path)


def _require_equal(
    one: tuple[Path, RunRecord], other: tuple[Path, RunRecord], *, of: str, apart: str = ""
) -> None:
    contents = [
        {name: value for name, value in getattr(record, of).items() if name != apart}
        for _, record in (one, other)
    ]
    difference = first_difference(*contents)
    if difference is not None:
        name, left, right = difference
        raise SettingError(
            f"--merge: {one[0]} has {name} {left}, {other[0]} has {right}: runs can be compared if they "
            "differ in strategy and seed alone"
        )


def _place(record: RunRecord) -> tuple[int, str, int]:
    label = record.run.strategy
    names = [str(name) for name in STRATEGIES]
    return names.index(label.partition(":")[0]), label, record.run.seed
