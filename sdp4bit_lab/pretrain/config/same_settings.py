"""Whether all ranks run with the same settings and versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sdp4bit.collectives.errors import ranks_in_words
from sdp4bit.config import VERSION
from sdp4bit_lab.common.ranks import gather_over_ranks
from sdp4bit_lab.common.settings import SettingError, option_flags
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Of the machine, not of the run; what is read from other paths is compared where it is opened.
_MAY_DIFFER = {"--nproc-per-node", "--out", "--data-cache-path", "--tensorboard-dir"}
_MUST_BE_ONE_FOLDER = {"--save", "--load"}
_SHOWN = 5


def check_same_settings(config: PretrainConfig) -> None:
    """Check that all ranks have the same versions and the same settings; called on every rank.

    Raises:
        SettingError: the same on all ranks, with what differs and where.
    """
    here = {"sdp4bit": VERSION, "torch": str(torch.__version__), **dict(_settings(config))}
    everywhere = gather_over_ranks(here, what="comparison of the settings")
    different = [
        name
        for name in dict.fromkeys(name for values in everywhere for name in values)
        if len({values.get(name) for values in everywhere}) > 1
    ]
    if different:
        more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        raise SettingError(
            "the ranks do not run the same: "
            + "; ".join(_describe(name, everywhere) for name in different[:_SHOWN])
            + more
            + ". Give all ranks one command line and install the same versions on all nodes"
        )


def _settings(settings: DataclassInstance) -> Iterator[tuple[str, str]]:
    """Yield the options of a settings class and of those in it, with their values."""
    flags = option_flags(type(settings))
    for field in fields(settings):
        value, name = getattr(settings, field.name), flags[field.name][0]
        if is_dataclass(value) and not isinstance(value, type):
            yield from _settings(value)
        elif name in _MUST_BE_ONE_FOLDER or not (name in _MAY_DIFFER or _is_place(name, value)):
            yield name, str(value)


def _is_place(name: str, value: object) -> bool:
    return isinstance(value, Path) or name.endswith("-path")


def _describe(name: str, everywhere: Sequence[Mapping[str, str]]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, values in enumerate(everywhere):
        ranks_of.setdefault(values.get(name, "unknown"), []).append(rank)
    return f"{name} is " + ", ".join(f"{value} on {ranks_in_words(r)}" for value, r in ranks_of.items())
