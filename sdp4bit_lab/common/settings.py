"""Check settings and map them to option names."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

# The self-test runs without tyro; only the attributes of these marks are read then.
try:
    from tyro.conf import arg as arg  # noqa: PLC0414
except ModuleNotFoundError:
    if not TYPE_CHECKING:
        from types import SimpleNamespace as arg

EXIT_FAILED, EXIT_SETTING, EXIT_DIVERGED = 1, 2, 3
"""Exit codes; docs/faults.md lists their causes."""


class RunError(Exception):
    """End a run with one line and an exit code, on all ranks."""

    exit_code = EXIT_SETTING


class SettingError(RunError):
    """Report an invalid setting and its remedy; not a ValueError, which tyro would reword."""


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


def option(name: str, *aliases: str) -> object:
    """Name an option differently from its field, with optional aliases."""
    return arg(name=name, aliases=[f"--{alias}" for alias in aliases])


def option_flags(settings: type) -> dict[str, list[str]]:
    """Map the fields of a settings class to their flags, primary flag first."""
    hints = get_type_hints(settings, include_extras=True)
    flags: dict[str, list[str]] = {}
    for field in fields(settings):
        names = [f"--{field.name.replace('_', '-')}"]
        for mark in getattr(hints[field.name], "__metadata__", ()):
            if getattr(mark, "name", None):
                names = [f"--{mark.name}"]
            names += getattr(mark, "aliases", None) or ()
        flags[field.name] = names
    return flags
