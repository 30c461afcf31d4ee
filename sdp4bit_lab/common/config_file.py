"""Read options from a YAML or TOML file, as if they came first on the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sdp4bit_lab.common.settings import SettingError, require

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPTION = "--config-file"


def expand_config_file(arguments: Sequence[str]) -> list[str]:
    """Replace --config-file FILE by the options in the file.

    Options on the command line come later and win. Keys are option names, with - or _, in any section;
    section names have no meaning.

    Raises:
        SettingError: the file cannot be read or parsed, or repeats an option.
    """
    rest: list[str] = []
    loaded: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == OPTION or argument.startswith(f"{OPTION}="):
            path = argument.partition("=")[2] or next(remaining, "")
            require(bool(path), f"{OPTION} needs a file")
            loaded += _read(Path(path))
        else:
            rest.append(argument)
    return loaded + rest


def _read(path: Path) -> list[str]:
    require(
        path.suffix in (".toml", ".yaml", ".yml"),
        f"{OPTION} {path}: the name must end in .yaml, .yml or .toml",
    )
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            content: Any = tomllib.loads(text)
        else:
            import yaml

            content = yaml.safe_load(text) or {}
    except Exception as error:  # every parser has its own error types
        raise SettingError(f"{OPTION} {path} cannot be read: {' '.join(str(error).split())}") from error
    require(
        isinstance(content, dict), f"{path} must contain a mapping of options, not {type(content).__name__}"
    )
    arguments: list[str] = []
    names = set()
    for key, value in _flatten(content):
        name = key.replace("_", "-")
        require(name not in names, f"{path}: {name} is given more than once")
        names.add(name)
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        elif value is not None:
            arguments += [f"--{name}", str(value)]
    return arguments


def _flatten(content: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flatten(value)
        else:
            yield str(key), value
