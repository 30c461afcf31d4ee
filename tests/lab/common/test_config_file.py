"""A file of options and a command line: the same settings, or the same error. Layer: no process."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("yaml")

from sdp4bit_lab.common.config_file import expand_config_file
from sdp4bit_lab.common.options import opposite_flags, parse, primary_flags
from sdp4bit_lab.common.settings import SettingError


@dataclass(frozen=True, kw_only=True)
class Nested:
    """A section."""

    rate: float = 0.5
    """A number."""
    names: tuple[str, ...] = ()
    """Texts."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One option of every kind."""

    count: int | None = None
    """An integer."""
    path: Path | None = None
    """A path."""
    kind: Literal["on", "off", "2"] = "on"
    """A choice."""
    fast: bool = False
    """A switch."""
    nested: Nested = field(default_factory=Nested)


# Texts that YAML or TOML have types of their own for, or need quotes for.
_SPECIAL = """
    yes no on off True null ~ 010 0x1f 1_000 1e-3 .5 1:30 2020-01-01 -3 nan inf 2 # ' " { --fast \\n = @x ä
"""
TEXTS = st.sampled_from(_SPECIAL.split()) | st.text(
    st.characters(codec="utf-8", max_codepoint=0xFFFF, exclude_categories=["C"]), max_size=5
)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "count": TEXTS | st.integers(-(10**20), 10**20).map(str),
        "path": TEXTS,
        "kind": TEXTS,
        "rate": TEXTS | st.floats().map(repr),
        "unknown": TEXTS,
        "fast": st.booleans(),
        "names": st.lists(TEXTS.filter(lambda text: not text.startswith("-")), min_size=1, max_size=3),
    },
)
_TOML_FLOAT = r"[+-]?(0|[1-9]\d*)(\.\d+|(\.\d+)?e[+-]?\d+)|[+-]?(inf|nan)"


def yaml(value: object) -> str:
    """Write a value in YAML, without quotes where that is the same text."""
    if isinstance(value, str):
        # A dash alone starts a sequence, and a colon at the end a mapping.
        # json's escapes are those of YAML's double quotes.
        is_plain = re.fullmatch(r"(?!-$|null$)[\w.+/-]([\w.+:/-]*[\w.+/-])?", value, re.ASCII)
        return value if is_plain else json.dumps(value)
    return f"[{', '.join(map(yaml, value))}]" if isinstance(value, list) else str(value).lower()


def toml(value: object) -> str:
    """Write a value in TOML, numbers as numbers."""
    if isinstance(value, str):
        is_number = re.fullmatch(rf"{_TOML_FLOAT}|0|-?[1-9]\d*", value, re.ASCII)
        return value if is_number else json.dumps(value, ensure_ascii=False)
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else str(value).lower()


def parsed(arguments: list[str]) -> Settings | str:
    try:
        return parse(Settings, arguments, prog="test")
    except SettingError as error:
        return str(error)


def command_line(values: Mapping[str, object]) -> list[str]:
    arguments = []
    for name, value in values.items():
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            arguments += [f"--{name}", *value]
        else:
            arguments.append(f"--{name}={value}")
    return arguments


@settings(deadline=None, max_examples=60)
@given(values=VALUES)
def test_a_file_and_a_command_line_give_the_same_settings_or_the_same_error(
    values: Mapping[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = repr(parsed(command_line(values)))
    folder = tmp_path_factory.getbasetemp()
    top = {name: value for name, value in values.items() if name not in ("rate", "names")}
    section = {name: value for name, value in values.items() if name in ("rate", "names")}
    for suffix, written, head, sign in (("yaml", yaml, "nested:", ": "), ("toml", toml, "[nested]", " = ")):
        file = folder / f"options.{suffix}"
        lines = [f"{name}{sign}{written(value)}" for name, value in top.items()]
        lines += (
            [head, *(f"  {name}{sign}{written(value)}" for name, value in section.items())] if section else []
        )
        file.write_text("\n".join(lines), encoding="utf-8")
        arguments = expand_config_file(
            [f"--config-file={file}"], names=primary_flags(Settings), switches=opposite_flags(Settings)
        )
        # repr, because nan differs from itself.
        assert repr(parsed(arguments)) == expected, file.read_text()


@settings(deadline=2000, max_examples=200)
@given(text=st.text(st.sampled_from("ab:- \n[]{}&*!|>'\"#%@`,?=.0\\\t")) | st.text())
def test_any_text_is_options_or_an_error_that_names_the_file(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for suffix in ("yaml", "toml"):
        file = tmp_path_factory.getbasetemp() / f"any.{suffix}"
        file.write_bytes(text.encode("utf-8", errors="surrogatepass"))
        message = str(file)
        try:
            expand_config_file(["--config-file", str(file)], names={}, switches={})
        except SettingError as error:
            message = str(error)
        assert str(file) in message and "\n" not in message
