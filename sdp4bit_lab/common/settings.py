"""Check settings and map them to option names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

EXIT_FAILED, EXIT_SETTING, EXIT_DIVERGED = 1, 2, 3
"""Exit codes; docs/faults.md lists their causes."""


class RunError(Exception):
    """End a run with one line and an exit code, on all ranks."""

    exit_code = EXIT_SETTING


class SettingError(RunError):
    """Report an invalid setting and its remedy."""


class TrainingDivergedError(RunError):
    """Report a loss, gradients or weights that are NaN or infinite."""

    exit_code = EXIT_DIVERGED


def require(condition: bool, message: str) -> None:
    """Raise SettingError unless the condition holds."""
    if not condition:
        raise SettingError(message)


def require_folder(path: Path, *, flag: str = "", remedy: str = "") -> None:
    """Raise SettingError unless the path is a folder.

    Args:
        flag: option that gave the path.
        remedy: sentence that follows.
    """
    problem = "not a folder" if path.exists() else "no such folder"
    require(path.is_dir(), f"{flag} {path}: {problem}".lstrip() + f". {remedy}" * bool(remedy))


def require_at_least(minimum: float, settings: object, *names: str) -> None:
    """Raise SettingError if a field is set and below the minimum."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < minimum:
            flag = option_flags(type(settings))[name][0]
            raise SettingError(f"{flag} {value} must be at least {minimum}")


def require_positive(settings: object, *names: str) -> None:
    """Raise SettingError if a field is set and not positive."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise SettingError(f"{option_flags(type(settings))[name][0]} {value} must be positive")


def option(*names: str) -> object:
    """Name an option differently from its field, primary name first, or with the field's name and others."""
    return tuple(f"--{name}" for name in names)


def positional(name: str) -> object:
    """Let a field be an argument without a name; help has this one."""
    return (name,)


def option_flags(settings: type) -> dict[str, Sequence[str]]:
    """Map the fields of a settings class to their flags, primary flag first."""
    hints = get_type_hints(settings, include_extras=True)
    own = {field.name: (f"--{field.name.replace('_', '-')}",) for field in fields(settings)}
    return {name: getattr(hints[name], "__metadata__", (flags,))[0] for name, flags in own.items()}
