"""Options of a command from the fields of its settings class, by argparse: parsing, `--help`, error lines.

tyro's own help and errors were tried. They list `{None}|INT` and `(default: None)`, and take up to ten lines
for a wrong value. With its subcommands, `sdp4bit --help` imports the settings of all commands. jsonargparse
names options by their section (`--training.steps`), suggests none, and takes 90 lines for a wrong one.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

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
    flags: Sequence[str]
    """Primary flag first; a word without dashes for a positional argument."""
    kinds: Sequence[Any]
    """Types of a value; values get the first type, and the help names the last."""
    is_list: bool
    default: str
    """Default value, or the text after "Default:" in the docstring; empty for none."""
    text: str
    is_required: bool

    @property
    def value(self) -> str:
        """Type or choices; empty for a switch."""
        kind, more = self.kinds[-1], " ..." if self.is_list else ""
        if get_origin(kind) is Literal:
            return "{" + ",".join(map(str, get_args(kind))) + "}" + more
        return {bool: "", int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT") + more

    def read(self, text: str, *, flag: str) -> Any:
        """Convert a value; SettingError names the flag as it was typed, and the expected values."""
        kind = self.kinds[0]
        if get_origin(kind) is Literal:
            choices = {str(choice): choice for choice in get_args(kind)}
            if text in choices:
                return choices[text]
            parts = [part for part in re.split(r"[.;] ", self.text) if part.startswith("auto")]
            about_auto = f" ({parts[0].rstrip('.')})" if parts else ""
            raise SettingError(f"{flag} {text}: use one of {', '.join(choices)}{about_auto}")
        try:
            return kind(text)
        except ValueError:
            expected = "an integer" if kind is int else "a number"
            about = re.split(r"[.;](?= |$)", self.text, maxsplit=1)[0]
            if "GB/s" in about and (gigabits := re.match(r"(\d+(?:\.\d+)?) ?G(bE|bit|bps|b)?\b", text)):
                about += f"; {gigabits[1]} Gbit/s is {float(gigabits[1]) / 8:g}"
            raise SettingError(f"{flag} {text}: {expected} is expected ({about})") from None

    def add_to(self, group: Any, *, is_short: bool) -> None:
        """Add the option to a group of argparse, with all of its text or with the first sentence."""
        flags, text, value, place = self.flags, self.text, self.value, f"{self.section}.{self.name}"
        if is_short:
            text = re.split(r"[.;:](?= |$)", text, maxsplit=1)[0]
            # Long lists of choices would push every text to the right.
            text += f": {value.strip('{}').replace(',', ', ')}." if value.startswith("{") else "."
            value, flags = "NAME" if value.startswith("{") else value, flags[:1]
        text = (text + f" (default: {self.default})" * bool(self.default)).replace("%", "%%")
        if not value:
            group.add_argument(*flags, dest=place, action="store_true", help=text)
            off = [f"--no-{flag[2:]}" for flag in flags]
            group.add_argument(*off, dest=place, action="store_false", help=argparse.SUPPRESS)
            return
        options = {"nargs": "*" if self.is_list else None, "help": text}
        if flags[0].startswith("-"):
            group.add_argument(*flags, dest=place, metavar=value.removesuffix(" ..."), **options)
        else:
            group.add_argument(place, metavar=flags[0], **options)


@cache  # reading the sources of pretrain's classes takes 0.1 s
def options_of(settings: type) -> Sequence[Option]:
    """Return the options of a settings class and of its nested settings classes."""
    options = []
    for section, part in sections(settings):
        hints, flags, texts = get_type_hints(part), option_flags(part), docstrings(part)
        for field in fields(part):
            if section_type(field) is not None:
                continue
            hint = hints[field.name]
            is_list = get_origin(hint) is tuple
            hint = get_args(hint)[0] if is_list else hint
            is_union = get_origin(hint) in (Union, UnionType)
            text, _, default = texts[field.name].partition(" Default: ")
            kinds = [kind for kind in get_args(hint) if kind is not type(None)] if is_union else [hint]
            options.append(
                Option(
                    section=section,
                    name=field.name,
                    flags=flags[field.name],
                    kinds=kinds,
                    is_list=is_list,
                    default=default.rstrip(".") or _default(field.default),
                    text=text,
                    is_required=field.default is MISSING and field.default_factory is MISSING,
                )
            )
    return tuple(options)


def _default(default: Any) -> str:
    if default in (MISSING, None, ()) or default is False:
        return ""
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return "on" if default is True else str(default)


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


def _parser(
    options: Sequence[Option], *, prog: str, description: str = "", is_short: bool = False
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [options]",
        description=description,
        argument_default=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    groups: dict[str, Any] = {}
    for each in options:
        title = "" if is_short else each.section
        if title not in groups:
            groups[title] = parser.add_argument_group(f"{title.replace('_', ' ')} options".strip())
        each.add_to(groups[title], is_short=is_short)
    if is_short:
        groups[""].add_argument("--help-all", action="store_true", help="Show all options.")
    return parser


def format_help(
    settings: type, *, prog: str, description: str, shown: Sequence[str] = (), others: Sequence[str] = ()
) -> str:
    """Format the help: all options, or only the fields `shown`, each with its first sentence.

    Args:
        others: paragraphs about further options, which follow all options.
    """
    options = [each for each in options_of(settings) if each.name in shown or not shown]
    text = _parser(options, prog=prog, description=description, is_short=bool(shown)).format_help()
    below = (f"\n{textwrap.fill(each, 80, subsequent_indent='  ')}\n" for each in others)
    return text if shown else text + "".join(below)


def parse(settings: type[T], arguments: Sequence[str], *, prog: str, default: T | None = None) -> T:
    """Build settings from options.

    Args:
        default: values of options that are not given.

    Raises:
        SettingError: unknown options, an invalid value, or conflicting options.
    """
    check_known(settings, arguments, prog=prog)
    options = options_of(settings)  # type: ignore[arg-type]
    pairs = [argument.partition("=") for argument in arguments]
    names = [name.replace("_", "-") if name.startswith("--") else name for name, _, _ in pairs]
    spelled = [name + equals + value for name, (_, equals, value) in zip(names, pairs, strict=True)]
    try:
        parsed, rest = _parser(options, prog=prog).parse_known_intermixed_args(spelled)
    except argparse.ArgumentError as error:
        known = (error.argument_name or "").split("/")
        flag = next((name for name in names if name in known), known[0])
        text = {"exp": "needs a value", "ign": "takes no value"}.get(error.message[:3], error.message)
        raise SettingError(f"{flag} {text}") from None
    require(not rest, f"Unrecognized options: {' '.join(rest)}")
    values: dict[str, dict[str, Any]] = {section: {} for section, _ in sections(settings)}
    for each in options:
        given = getattr(parsed, f"{each.section}.{each.name}", None)
        flag = next((name for name in names if name in each.flags), "")
        if isinstance(given, list):
            given = tuple(each.read(text, flag=flag) for text in given)
        elif isinstance(given, str):
            given = each.read(given, flag=flag)
        if given is not None:
            values[each.section][each.name] = given
    missing = [each for each in options if each.is_required and each.name not in values[each.section]]
    names = [f"{each.flags[0]} {each.value}" for each in missing]
    require(default is not None or not missing, f"missing {', '.join(names)} (see --help)")
    top = values.pop("")
    for field in fields(settings):  # type: ignore[arg-type]
        if given := values.get(field.name):
            assert field.default_factory is not MISSING
            part = getattr(default, field.name) if default is not None else field.default_factory()
            top[field.name] = replace(part, **given)
    return settings(**top) if default is None else replace(default, **top)  # type: ignore[type-var]


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
