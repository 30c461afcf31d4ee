"""Compare the settings and versions of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from sdp4bit.collectives.errors import ranks_in_words
from sdp4bit.config import VERSION
from sdp4bit_lab.common.ranks import gather_over_ranks
from sdp4bit_lab.common.settings import SettingError, option_flags
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig

# These depend on the machine. Data paths may differ too; their content is compared when opened.
_MAY_DIFFER = {"--nproc-per-node", "--out", "--data-cache-path", "--tensorboard-dir"}
_ONE_FOLDER = {"--save", "--load"}
_SHOWN = 5


def check_same_settings(config: PretrainConfig) -> None:
    """Raise SettingError on all ranks unless all have equal versions and settings."""
    local = {"sdp4bit": VERSION, "torch": str(torch.__version__), **dict(_settings(config))}
    by_rank = gather_over_ranks(local, what="comparison of the settings")
    lines = []
    for name in dict.fromkeys(name for values in by_rank for name in values):
        ranks_of: dict[str, list[int]] = {}
        for rank, values in enumerate(by_rank):
            ranks_of.setdefault(values.get(name, "unknown"), []).append(rank)
        if len(ranks_of) > 1:
            places = (f"{value} on {ranks_in_words(ranks)}" for value, ranks in ranks_of.items())
            lines.append(f"{name} is {', '.join(places)}")
    if lines:
        more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise SettingError(
            f"the ranks differ: {'; '.join(lines[:_SHOWN])}{more}. Use the same command line and versions on "
            "all nodes"
        )


def _settings(settings: Any) -> Iterator[tuple[str, str]]:
    flags = option_flags(type(settings))
    for field in fields(settings):
        value, name = getattr(settings, field.name), flags[field.name][0]
        is_place = isinstance(value, Path) or name.endswith("-path") or name in _MAY_DIFFER
        if is_dataclass(value):
            yield from _settings(value)
        elif name in _ONE_FOLDER or not is_place:
            yield name, str(value)
