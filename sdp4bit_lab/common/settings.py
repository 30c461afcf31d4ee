"""The error of a wrong setting, the checks that raise it, and the names of options."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, get_type_hints

# The self-test makes settings without tyro; `option_flags` then reads the attributes of these marks alone.
try:
    from tyro.conf import arg as arg  # noqa: PLC0414  re-exported
except ModuleNotFoundError:
    if not TYPE_CHECKING:
        from types import SimpleNamespace as arg

EXIT_SETTING = 2
"""Exit code of a command with a wrong setting."""


class SettingError(Exception):
    """A setting that cannot work; the message has the numbers and the way out, in one line.

    Not a ValueError: the option parser would catch those and put its own words around them.
    """


def require(condition: bool, message: str) -> None:
    """Raise SettingError with the message unless the condition is true."""
    if not condition:
        raise SettingError(message)


def require_at_least(minimum: float, settings: object, *names: str) -> None:
    """Raise SettingError if one of these fields has a value and it is below the minimum."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < minimum:
            flag = option_flags(type(settings))[name][0]
            raise SettingError(f"{flag} {value} must be at least {minimum}")


def require_positive(settings: object, *names: str) -> None:
    """Raise SettingError if one of these fields has a value and it is not positive."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise SettingError(f"{option_flags(type(settings))[name][0]} {value} must be positive")


def option(name: str, *aliases: str) -> object:
    """Annotate a field whose option has another name than the field, and further names."""
    return arg(name=name, aliases=[f"--{alias}" for alias in aliases])


def option_flags(settings: type) -> dict[str, list[str]]:
    """Map the fields of a settings class to their flags, the primary flag first."""
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
