"""What a setting that cannot work raises, and the checks that raise it."""

from __future__ import annotations


class SettingError(Exception):
    """A setting that cannot work; the message holds the numbers and the way out, in one line.

    Not a ValueError: the option parser would catch those and put its own words around them.
    """


def require(condition: bool, message: str) -> None:
    """The condition holds; SettingError with the message otherwise."""
    if not condition:
        raise SettingError(message)


def require_at_least(name: str, value: float | None, minimum: float) -> None:
    """The value of an option is none or large enough; SettingError otherwise."""
    require(value is None or value >= minimum, f"{name} {value} must be at least {minimum}")
