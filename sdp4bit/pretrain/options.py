"""What all settings share: the error of a wrong one, the checks that raise it, and names of options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import tyro


class SettingError(Exception):
    """A setting that cannot work; the message holds the numbers and the way out, in one line.

    Not a ValueError: the option parser would catch those and put its own words around them.
    """


def require(condition: bool, message: str) -> None:
    """The condition is known to be true; SettingError with the message otherwise."""
    if not condition:
        raise SettingError(message)


def require_at_least(name: str, value: float | None, minimum: float) -> None:
    """The value, if there is one, is known to reach the minimum."""
    require(value is None or value >= minimum, f"{name} {value} must be at least {minimum}")


def option(name: str, *aliases: str) -> Any:
    """Return the annotation of a field whose option has another name than the field, and further names."""
    return tyro.conf.arg(name=name, aliases=[f"--{alias}" for alias in aliases])


def option_flags(settings: type) -> dict[str, list[str]]:
    """Return the options of each field of a settings class, the one to name in messages first."""
    hints = get_type_hints(settings, include_extras=True)
    flags = {}
    for field in fields(settings):
        names = [field.name.replace("_", "-")]
        for mark in getattr(hints[field.name], "__metadata__", ()):
            if getattr(mark, "name", None):
                names = [mark.name]
            names += [alias.removeprefix("--") for alias in getattr(mark, "aliases", None) or ()]
        flags[field.name] = [f"--{name}" for name in names]
    return flags
