"""What `--help` and `--help-all` print: the options of a settings class and of the classes in it."""

from __future__ import annotations

import argparse
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin

from sdp4bit_lab.common.settings import Option, docstrings, options_of, reader_of

HELP, HELP_ALL = ("-h", "--help"), "--help-all"
_METAVARS: dict[object, str] = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}
"""As tyro has them; the self-test has help without it."""
_WIDTH = 80
_COLUMN = 27
"""Where the text of an option begins, unless its flag is longer."""


class _Formatter(argparse.HelpFormatter):
    """Keeps the names of options in one piece."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def help_text(settings: type, *, name: str, description: str, shown: Sequence[str] = ()) -> str:
    """Return the help of a command, 80 columns wide.

    Args:
        name: of the command.
        shown: fields of which to show one flag and one sentence; without, all are shown in full.
    """
    parts = list(sections(settings))
    options = {field: option for _, members in parts for field, option in members.items()}
    derived = _derived(settings)
    positional = [option for option in options.values() if option.is_positional]
    parser = argparse.ArgumentParser(
        prog=f"sdp4bit {name}",
        usage=" ".join(["%(prog)s [options]", *map(_metavar, positional)]),
        description=description,
        add_help=False,
        formatter_class=partial(_Formatter, width=_WIDTH, max_help_position=_COLUMN),
    )
    if shown:
        group = parser.add_argument_group("options")
        for field in shown:
            option = options[field]
            sentence = re.split(r"[.;:](?= |$)", option.help or "", maxsplit=1)[0]
            _add(group, option, text=f"{sentence}.", derived=derived.get(field))
        more = len(options) - len(shown)
        group.add_argument(HELP_ALL, action="store_true", help=f"Show the other {more} options too.")
        return parser.format_help()
    for title, members in parts:
        group = parser.add_argument_group(f"{title} options".strip())
        for field, option in members.items():
            others = option.flags[1:]
            others += [_opposite(flag) for flag in option.flags if option.has_opposite]
            text = f"{option.help} Also {', '.join(others)}." if others else f"{option.help}"
            _add(group, option, text=text, derived=derived.get(field))
    return parser.format_help()


def commands_text(commands: Mapping[str, str], *, description: str) -> str:
    """Return the help of the program: its commands, by name, and what each does."""
    parser = argparse.ArgumentParser(
        prog="sdp4bit",
        usage="%(prog)s COMMAND [options]",
        description=description,
        add_help=False,
        formatter_class=partial(_Formatter, width=_WIDTH),
    )
    group = parser.add_argument_group("commands")
    for name, text in commands.items():
        group.add_argument(name, help=text)
    return parser.format_help()


def sections(settings: type) -> Iterator[tuple[str, dict[str, Option]]]:
    """Yield the options of the class itself, then those of the classes in it, with their names there."""
    options = _with_docstrings(settings)
    inner = {field.name: field.default_factory for field in fields(settings) if _is_section(field)}
    yield "", {name: option for name, option in options.items() if name not in inner}
    for name, factory in inner.items():
        yield name, _with_docstrings(type(cast(Any, factory)()))


def _with_docstrings(settings: type) -> dict[str, Option]:
    """Return the options of a class, each with what there is to say of it."""
    said = docstrings(settings)
    options = options_of(settings)
    return {name: replace(option, help=option.help or said.get(name, "")) for name, option in options.items()}


def _is_section(field: Any) -> bool:
    return field.default_factory is not MISSING and is_dataclass(field.default_factory())


def _derived(settings: type) -> dict[str, object]:
    """Return what options that are not given come to, as far as the settings class knows."""
    derive = getattr(settings, "derived", None)
    return {} if derive is None else derive(settings())


def _add(group: Any, option: Option, *, text: str, derived: object) -> None:
    default, metavar = _default(option, derived=derived), _metavar(option)
    if metavar.startswith("{") and len(f"  {option.flags[0]} {metavar}") > _WIDTH:
        text, metavar = f"{text} One of {metavar[1:-1].replace(',', ', ')}.", "NAME"
    text = (f"{text} (default: {default})" if default else text).replace("%", "%%")
    if option.is_positional:
        group.add_argument(metavar, help=text)
    elif option.is_switch:
        group.add_argument(option.flags[0], action="store_true", help=text)
    else:
        group.add_argument(option.flags[0], metavar=metavar, help=text)


def _opposite(flag: str) -> str:
    return flag.replace("--", "--no-", 1)


def _default(option: Option, *, derived: object) -> str:
    """Return the value when not given; empty if there is none, or the text says it."""
    if option.default is MISSING:
        return "" if option.is_positional else "none, it must be given"
    if option.default is None:
        return "" if derived is None else f"derived: {derived}"
    if option.is_switch:
        return "on" if option.default else ""
    return "" if option.default in ((), "") else str(option.default)


def _metavar(option: Option) -> str:
    """Return what stands for the value."""
    if option.metavar:
        return option.metavar
    kind = value_type(option.type)
    if get_origin(kind) is Literal:
        return "{" + ",".join(str(value) for value in get_args(kind)) + "}"
    return _METAVARS.get(kind) or str(reader_of(kind).metavar)


def value_type(kind: object) -> Any:
    """Return the type of what is given with an option of this type: nothing given is no value to give."""
    if get_origin(kind) in (Union, types.UnionType):
        return Union[tuple(each for each in get_args(kind) if each is not type(None))]  # noqa: UP007
    return kind
