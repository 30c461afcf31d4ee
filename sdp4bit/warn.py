"""Warnings that point at the user's line, however many functions of the library are between."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from types import FrameType

import torch.distributed as dist

_SKIPPED = ("sdp4bit", "sdp4bit_deepspeed", "sdp4bit_megatron", "torch")


def warn_user(text: str, ranks: Iterable[int] | None = None) -> None:
    """Warn at the innermost line outside of the library, its adapters and torch, whose hooks call it.

    Args:
        ranks: ranks that all warn of the same; only the first of them does.
    """
    if ranks is not None and min(ranks) != dist.get_rank():
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _package(frame) in _SKIPPED:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"sdp4bit: {text}", stacklevel=level)


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")  # code that `exec` runs may have no name
    return name.partition(".")[0]
