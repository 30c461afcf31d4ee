"""Warnings that point at the user's line, however many functions of the library are between."""

from __future__ import annotations

import sys
import warnings


def warn_user(text: str) -> None:
    """Warn at the innermost line outside of the library."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "sdp4bit":
        level, frame = level + 1, frame.f_back
    warnings.warn(f"sdp4bit: {text}", stacklevel=level)
