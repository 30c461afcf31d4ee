"""Option parser of the standard library, for the command that has to run without tyro."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeVar, get_args, get_origin

from sdp4bit_lab.common.help import sections, value_type

T = TypeVar("T")


def parse_plainly(settings: type[T], options: Sequence[str], *, prog: str) -> T:
    """Return the settings that options with one value each ask for; exits with 2 if they are no options.

    Raises:
        SettingError: options that contradict each other.
    """
    parser = argparse.ArgumentParser(
        prog=prog, usage="%(prog)s [options]; --help shows them", add_help=False, allow_abbrev=False
    )
    for title, members in sections(settings):
        for field, option in members.items():
            kind = value_type(option.type)
            is_choice = get_origin(kind) is Literal
            parser.add_argument(
                *option.flags,
                dest=f"{title}.{field}",
                type=str if is_choice else kind,
                choices=get_args(kind) if is_choice else None,
                default=argparse.SUPPRESS,
            )
    # As tyro takes them: --nproc_per_node is --nproc-per-node.
    names = [option.partition("=") for option in options]
    spelled = [
        (name.replace("_", "-") if name.startswith("--") else name) + rest + value
        for name, rest, value in names
    ]
    given: dict[str, dict[str, object]] = {}
    for place, value in vars(parser.parse_args(spelled)).items():
        title, field = place.split(".")
        given.setdefault(title, {})[field] = value
    own = given.pop("", {})
    defaults = settings()
    parts = {title: replace(getattr(defaults, title), **values) for title, values in given.items()}
    return settings(**own, **parts)
