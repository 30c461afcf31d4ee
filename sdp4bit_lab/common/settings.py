"""What all settings share: the error of a wrong one, the checks that raise it, and names of options."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, cast, get_args, get_type_hints

from sdp4bit_lab.common.marks import Positional, Switch, arg

if TYPE_CHECKING:
    from tyro.constructors import PrimitiveConstructorSpec


class SettingError(Exception):
    """A setting that cannot work; the message holds the numbers and the way out, in one line.

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
    """Return the annotation of a field whose option has another name than the field, and further names."""
    return arg(name=name, aliases=[f"--{alias}" for alias in aliases])


def reader_of(kind: object) -> PrimitiveConstructorSpec[Any]:
    """Return what reads values of a type from a command line, and names them in help: tyro's."""
    from tyro.constructors import ConstructorRegistry, PrimitiveTypeInfo, UnsupportedTypeAnnotationError

    reader = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(cast(type, kind), set()))
    assert not isinstance(reader, UnsupportedTypeAnnotationError)
    return reader


@dataclass(frozen=True, kw_only=True)
class Option:
    """A field of a settings class, as the command line has it."""

    flags: list[str]
    """The one to name in messages first."""
    type: object
    """Annotation of the field, without what is said to tyro."""
    is_switch: bool
    """Whether the flag alone says it all."""
    has_opposite: bool
    """Whether there is a --no- form of a switch."""
    default: object
    """Value when not given; dataclasses.MISSING if it must be."""
    metavar: str | None
    """What stands for the value in `--help`, where it does not follow from the type."""
    is_positional: bool
    """Whether the value stands without a flag."""
    help: str | None
    """What `--help` says, where it is not the docstring below the field."""

    def parse(self, text: str) -> object:
        """Return the text as a value of the type, as tyro reads it; SettingError with what is possible."""
        reader = reader_of(self.type)
        try:
            return reader.instance_from_str([text])
        except ValueError:
            raise SettingError(f"{text} is not possible: give {reader.metavar}") from None


def options_of(settings: type) -> dict[str, Option]:
    """Return the option of each field of a settings class."""
    hints = get_type_hints(settings, include_extras=True)
    found = {}
    for field in fields(settings):
        marks = getattr(hints[field.name], "__metadata__", ())
        flags, text, metavar = [field.name.replace("_", "-")], None, None
        for mark in marks:
            if getattr(mark, "name", None):
                flags = [mark.name]
            flags += [alias.removeprefix("--") for alias in getattr(mark, "aliases", None) or ()]
            text = text or getattr(mark, "help", None)
            metavar = metavar or getattr(mark, "metavar", None)
        is_switch = isinstance(field.default, bool)
        found[field.name] = Option(
            flags=[f"--{flag}" for flag in flags],
            type=get_args(hints[field.name])[0] if marks else hints[field.name],
            is_switch=is_switch,
            has_opposite=is_switch and Switch not in marks,
            default=field.default,
            metavar=metavar,
            is_positional=Positional in marks,
            help=text,
        )
    return found


def docstrings(settings: type) -> dict[str, str]:
    """Return the docstring below each field, in one line; those of base classes too."""
    found: dict[str, str] = {}
    for each in reversed([base for base in settings.__mro__ if is_dataclass(base)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, below in itertools.pairwise(definition.body):
            match statement, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split())
    return found


def option_flags(settings: type) -> dict[str, list[str]]:
    """Return the flags of each field of a settings class, the one to name in messages first."""
    return {name: option.flags for name, option in options_of(settings).items()}
