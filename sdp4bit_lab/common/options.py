"""List the options of a settings class, format `--help`, and report parsing errors in one line."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import inspect
import io
import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from sdp4bit_lab.common.settings import SettingError, option_flags, require

T = TypeVar("T")
_NEAR = 0.8
"""Similarity from which a known option is suggested, as in difflib; --wandb-project is not near --no-json."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """Describe one field of a settings class as a command-line option."""

    section: str
    """Field that holds its settings class; empty for the command's own class."""
    name: str
    flags: list[str]
    """Primary flag first; a word without dashes for a positional argument."""
    value: str
    """Type or choices; empty for a switch."""
    default: str
    """Default value, or the text after "Default:" in the docstring; empty for none."""
    text: str
    is_required: bool = False


def options_of(settings: type) -> Iterator[Option]:
    """Yield the options of a settings class and of its nested settings classes."""
    for section, part in sections(settings):
        hints, flags, texts = get_type_hints(part, include_extras=True), option_flags(part), docstrings(part)
        for field in fields(part):
            if section_type(field) is not None:
                continue
            is_positional = "Positional" in repr(hints[field.name])
            text, _, default = texts[field.name].partition(" Default: ")
            yield Option(
                section=section,
                name=field.name,
                flags=[field.name.upper()] if is_positional else flags[field.name],
                value=_value(get_type_hints(part)[field.name]),
                default=default.rstrip(".") or _default(field.default),
                text=text,
                is_required=field.default is MISSING and field.default_factory is MISSING,
            )


def _default(default: Any) -> str:
    if default in (MISSING, None, ()) or default is False:
        return ""
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return "on" if default is True else str(default)


def _value(hint: Any) -> str:
    """Describe the type of a value, or list its choices."""
    if hint is bool:
        return ""
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if get_origin(hint) is tuple:
        return f"{_value(get_args(hint)[0])} ..."
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    if kinds:
        return _value(kinds[-1])
    return {int: "N", float: "X", Path: "PATH"}.get(hint, "TEXT")


def sections(settings: type) -> Iterator[tuple[str, type]]:
    """Yield the class itself under the name "", then its nested settings classes by field name."""
    yield "", settings
    for field in fields(settings):
        part = section_type(field)
        if part is not None:
            yield field.name, part


def section_type(field: Field[Any]) -> type | None:
    """Return the settings class that a field holds; None for an option."""
    if field.default_factory is MISSING:
        return None
    default = field.default_factory()
    return type(default) if is_dataclass(default) else None


def docstrings(settings: type) -> dict[str, str]:
    """Map the fields of a settings class and its bases to their docstrings, each in one line."""
    texts: dict[str, str] = {}
    for base in reversed([base for base in settings.__mro__ if is_dataclass(base)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, below in itertools.pairwise(definition.body):
            match statement, below:
                case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text)))):
                    texts[name] = " ".join(text.split())
    return texts


def format_help(
    settings: type, *, prog: str, description: str, shown: Sequence[str] = (), others: Sequence[str] = ()
) -> str:
    """Format the help: all options, or only the fields `shown`, each with its first sentence.

    Args:
        others: paragraphs about further options, which follow all options.
    """
    parser = argparse.ArgumentParser(
        prog=prog, usage="%(prog)s [options]", description=description, add_help=False
    )
    groups: dict[str, Any] = {}
    for each in options_of(settings):
        if shown and each.name not in shown:
            continue
        title = "" if shown else each.section
        if title not in groups:
            groups[title] = parser.add_argument_group(f"{title.replace('_', ' ')} options".strip())
        text, value, flags = each.text, each.value, each.flags
        if shown:
            text = re.split(r"[.;:](?= |$)", text, maxsplit=1)[0]
            # Long lists of choices would push every text to the right.
            text += f": {value.strip('{}').replace(',', ', ')}." if value.startswith("{") else "."
            value, flags = "NAME" if value.startswith("{") else value, flags[:1]
        text += f" (default: {each.default})" if each.default else ""
        options: dict[str, Any] = {"action": "store_true"}
        if value:
            options = {"metavar": value if flags[0].startswith("-") else flags[0]}
        groups[title].add_argument(*flags, help=text.replace("%", "%%"), **options)
    if shown:
        groups[""].add_argument("--help-all", action="store_true", help="Show all options.")
        return parser.format_help()
    below = "".join(f"\n{textwrap.fill(text, 80, subsequent_indent='  ')}\n" for text in others)
    return parser.format_help() + below


def parse_with_tyro(settings: type[T], arguments: Sequence[str], *, prog: str, default: T | None = None) -> T:
    """Build settings from options.

    Args:
        default: values of options that are not given.

    Raises:
        SettingError: unknown options, an invalid value, or conflicting options.
    """
    import tyro

    check_known(settings, arguments, prog=prog)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            # Options are named after their fields alone; a test keeps the names unique.
            config = (tyro.conf.OmitArgPrefixes,)
            if default is None:
                return tyro.cli(settings, prog=prog, args=list(arguments), config=config)
            return tyro.cli(settings, prog=prog, args=list(arguments), config=config, default=default)
    except SystemExit:
        raise SettingError(_message(printed.getvalue(), settings, arguments)) from None


def _message(box: str, settings: type, arguments: Sequence[str]) -> str:
    """Extract the message from the box that tyro prints around an error."""
    lines = [line.strip("│ ") for line in box.splitlines()]
    # The title is part of the box, or is underlined if the encoding lacks box characters.
    body = lines[1:] if box.startswith("╭") else lines[2:]
    message = " ".join(itertools.takewhile(lambda line: not line.startswith(("──", "-----", "╰")), body))
    typed = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    options = list(options_of(settings))
    missing = [each for each in options if each.is_required and not set(each.flags) & set(typed)]
    if missing:
        names = ", ".join(f"{each.flags[0]} {each.value}" for each in missing)
        return f"missing {names} (see --help)"
    found = re.search(r"--[\w-]+", message)
    option = next((each for each in options if found is not None and found[0] in each.flags), None)
    return message if option is None else _wrong_value(message, option, arguments, typed)


def _wrong_value(message: str, option: Option, arguments: Sequence[str], typed: Sequence[str]) -> str:
    """Reword an error of a parser in terms of the option as it was typed."""
    place, flag = next(
        ((i, name) for i, name in enumerate(typed) if name in option.flags), (0, option.flags[0])
    )
    _, equals, value = arguments[place].partition("=")
    value = value if equals else " ".join(arguments[place + 1 : place + 2])
    expected = {"N": "an integer", "X": "a number"}.get(option.value.removesuffix(" ..."))
    if message.startswith("Missing value"):
        return f"{flag} needs a value"
    if wrong := re.search(r"invalid choice:? '(.*?)'", message):
        # tyro lists the choices in arbitrary order.
        about_auto = next(
            (f" ({part.rstrip('.')})" for part in re.split(r"[.;] ", option.text) if part.startswith("auto")),
            "",
        )
        return f"{flag} {wrong[1]}: use one of {option.value.strip('{}').replace(',', ', ')}{about_auto}"
    if expected and re.search("Error parsing|invalid (int|float) value", message):
        return f"{flag} {value}: {expected} is expected"
    return message


def primary_flags(settings: type) -> dict[str, str]:
    """Map all flags, those that turn a switch off included, to the primary flag of their option."""
    primary = {flag: each.flags[0] for each in options_of(settings) for flag in each.flags}
    return primary | {off: primary[on] for on, off in opposite_flags(settings).items() if on in primary}


def opposite_flags(settings: type) -> dict[str, str]:
    """Map the flags of every switch, on and off, to the flag with the opposite meaning."""
    switches = [flag for each in options_of(settings) if not each.value for flag in each.flags]
    off = {flag: f"--no-{flag[2:]}" for flag in switches}
    return off | {opposite: flag for flag, opposite in off.items()}


def check_known(settings: type, arguments: Sequence[str], *, prog: str, problems: Sequence[str] = ()) -> None:
    """Raise SettingError that names all unknown options, and the problems found before."""
    known = primary_flags(settings)
    given = dict.fromkeys(argument.partition("=")[0].replace("_", "-") for argument in arguments)
    unknown = []
    for flag in given:
        if flag.startswith("--") and flag not in known:
            near = difflib.get_close_matches(flag, known, n=1, cutoff=_NEAR)
            unknown.append(f"{flag} (did you mean {near[0]}?)" if near else flag)
    if unknown:
        problems = [*problems, f"{prog} has no option {', '.join(unknown)}: see --help-all"]
    problems = [*problems, *filter(None, map(url_problem, arguments))]
    require(not problems, "; ".join(problems))


def url_problem(argument: str) -> str:
    """Describe an argument that is a URL, which `Path` would turn into a local folder; "" for others."""
    value = argument.partition("=")[2] if argument.startswith("--") else argument
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", value):
        return ""
    return f"{argument} is a URL: mount or copy it, and give a local path"


def parse_without_tyro(settings: type[T], arguments: Sequence[str], *, prog: str) -> T:
    """Build settings with the standard library alone, for options that take one value.

    Raises:
        SettingError: unknown options, an invalid value, or conflicting options.
    """
    check_known(settings, arguments, prog=prog)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for section, part in sections(settings):
        hints, flags = get_type_hints(part), option_flags(part)
        for field in fields(part):
            if section_type(field) is not None:
                continue
            hint = hints[field.name]
            is_choice = get_origin(hint) is Literal
            # The value type of int | None.
            kind = next((k for k in get_args(hint) if k is not type(None)), hint)
            parser.add_argument(
                *flags[field.name],
                dest=f"{section}.{field.name}",
                type=str if is_choice else kind,
                choices=get_args(hint) if is_choice else None,
                default=argparse.SUPPRESS,
            )
    # Like tyro, accept --nproc_per_node.
    pairs = [argument.partition("=") for argument in arguments]
    spelled = [
        (name.replace("_", "-") if name.startswith("--") else name) + equals + value
        for name, equals, value in pairs
    ]
    values: dict[str, dict[str, Any]] = {}
    try:
        parsed, rest = parser.parse_known_args(spelled)
    except argparse.ArgumentError as error:
        option = next(
            each for each in options_of(settings) if (error.argument_name or "").split("/")[0] in each.flags
        )
        names = [name for name, _, _ in pairs]
        raise SettingError(_wrong_value(str(error), option, arguments, names)) from None
    require(not rest, f"Unrecognized options: {' '.join(rest)}")
    for place, value in vars(parsed).items():
        section, name = place.split(".")
        values.setdefault(section, {})[name] = value
    top, defaults = values.pop("", {}), settings()
    return settings(**top, **{name: replace(getattr(defaults, name), **v) for name, v in values.items()})
