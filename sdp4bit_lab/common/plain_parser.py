"""Option parser of the standard library, for the command that has to run without tyro."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from sdp4bit_lab.common.settings import docstrings, option_flags, section_type, sections

T = TypeVar("T")


def parse_without_tyro(settings: type[T], options: Sequence[str], *, prog: str, description: str) -> T:
    """Build the settings from options with one value each; exits after --help or a wrong option.

    Raises:
        SettingError: options that contradict each other.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    for title, part in sections(settings):
        hints, flags, texts = get_type_hints(part), option_flags(part), docstrings(part)
        for field in fields(part):
            if section_type(field) is not None:
                continue
            hint = hints[field.name]
            is_choice = get_origin(hint) is Literal
            # Optional values, such as int | None.
            kind = next((k for k in get_args(hint) if k is not type(None)), hint)
            parser.add_argument(
                *flags[field.name],
                dest=f"{title}.{field.name}",
                type=str if is_choice else kind,
                choices=get_args(hint) if is_choice else None,
                metavar=None if is_choice else field.name.upper(),
                default=argparse.SUPPRESS,
                help=texts[field.name].replace("%", "%%"),
            )
    # tyro takes --nproc_per_node for --nproc-per-node.
    pairs = [option.partition("=") for option in options]
    spelled = [
        (name.replace("_", "-") if name.startswith("--") else name) + equals + value
        for name, equals, value in pairs
    ]
    values: dict[str, dict[str, Any]] = {}
    for place, value in vars(parser.parse_args(spelled)).items():
        title, name = place.split(".")
        values.setdefault(title, {})[name] = value
    top, defaults = values.pop("", {}), settings()
    return settings(**top, **{title: replace(getattr(defaults, title), **v) for title, v in values.items()})
