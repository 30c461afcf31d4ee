"""The error of a wrong setting, the checks that raise it, and the names and help of options."""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

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


def sections(settings: type) -> Iterator[tuple[str, type]]:
    """Yield the class itself under the name "", then the settings classes among its fields by name."""
    yield "", settings
    for field in fields(settings):
        part = section_type(field)
        if part is not None:
            yield field.name, part


def section_type(field: Field[Any]) -> type | None:
    """Return the settings class of a field that has one; None for an option."""
    if field.default_factory is MISSING:
        return None
    default = field.default_factory()
    return type(default) if is_dataclass(default) else None


def docstrings(settings: type) -> dict[str, str]:
    """Map the fields of a settings class and its bases to the docstrings below them, in one line."""
    texts: dict[str, str] = {}
    for base in reversed([base for base in settings.__mro__ if is_dataclass(base)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, below in itertools.pairwise(definition.body):
            match statement, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = " ".join(text.split())
    return texts


def short_help(settings: type, *, prog: str, description: str, shown: Sequence[str]) -> str:
    """Format the primary flag and one sentence for each of the fields `shown`."""
    parser = argparse.ArgumentParser(
        prog=prog, usage="%(prog)s [options]", description=description, add_help=False
    )
    for _, part in sections(settings):
        texts = docstrings(part)
        for field in fields(part):
            if field.name in shown and section_type(field) is None:
                sentence = re.split(r"[.;:](?= |$)", texts[field.name], maxsplit=1)[0]
                default = "" if field.default in (None, False, ()) else f" (default: {field.default})"
                flag = option_flags(part)[field.name][0]
                parser.add_argument(flag, action="store_true", help=f"{sentence}.{default}")
    parser.add_argument("--help-all", action="store_true", help="Show all options.")
    return parser.format_help()
