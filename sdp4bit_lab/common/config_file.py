"""A YAML or TOML file of options, read as if they stood on the command line before the others."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

from sdp4bit_lab.common.settings import Option, SettingError, options_of, require

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPTION = "--config-file"


def expand_config_file(arguments: Sequence[str], *, settings: type) -> list[str]:
    """Return the arguments with the file of --config-file replaced by what it holds.

    Options given beside it stand later and therefore win. Keys are the options' names, with - or _, in any
    sections; a section's own name means nothing.

    Args:
        settings: the settings class of the command; every key must be one of its options.

    Raises:
        SettingError: names the file and the key.
    """
    rest: list[str] = []
    loaded: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == OPTION or argument.startswith(f"{OPTION}="):
            path = argument.partition("=")[2] or next(remaining, "")
            require(bool(path), f"{OPTION} needs a file")
            loaded += read_arguments(Path(path), settings=settings)
        else:
            rest.append(argument)
    return loaded + rest


def read_arguments(path: Path, *, settings: type) -> list[str]:
    """Return the content of a file as arguments of a command."""
    known = _all_options(settings)
    arguments: list[str] = []
    for key, value in _flatten(_parse(path), path=path):
        flag = f"--{key.replace('_', '-')}"
        if flag not in known:
            near = difflib.get_close_matches(flag, known, n=1)
            hint = f"; did you mean {near[0].removeprefix('--')}?" if near else ""
            raise SettingError(f"{path}: {key} is not an option of this command{hint}")
        arguments += _as_arguments(known[flag], flag, value, path=path)
    return arguments


def _parse(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{OPTION} {path} cannot be read: {error}") from error
    try:
        if path.suffix == ".toml":
            table: dict[str, object] = tomllib.loads(text)
            return table
        if path.suffix in (".yaml", ".yml"):
            import yaml

            content = yaml.safe_load(text)
            require(
                content is None or isinstance(content, dict),
                f"{path} must hold options with their values, not {type(content).__name__}",
            )
            return content or {}
    except SettingError:
        raise
    except Exception as error:  # each parser has errors of its own, all of which say where
        raise SettingError(f"{path} cannot be parsed: {' '.join(str(error).split())}") from error
    raise SettingError(f"{OPTION} {path}: the name must end in .yaml, .yml or .toml")


def _flatten(content: dict[str, object], *, path: Path) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for key, value in content.items():
        if isinstance(value, dict):
            found += _flatten(value, path=path)
        else:
            found.append((str(key), value))
    names = [key.replace("_", "-") for key, _ in found]
    for name in names:
        require(names.count(name) == 1, f"{path}: {name} is given more than once")
    return found


def _as_arguments(option: Option, flag: str, value: object, *, path: Path) -> list[str]:
    """Return a key, given as one of the option's flags, and its value as arguments."""
    if value is None:
        return []
    if not option.is_switch:
        values = value if isinstance(value, list) else [value]
        return [flag, *map(str, values)]
    name = flag.removeprefix("--")
    require(isinstance(value, bool), f"{path}: {name} must be true or false, not {value!r}")
    if value:
        return [flag]
    return [f"--no-{name}"] if option.has_opposite else []


def _all_options(settings: type) -> dict[str, Option]:
    """Return the options of a settings class and of the classes in it, by each of their flags."""
    found: dict[str, Option] = {}
    options = options_of(settings)
    for field in fields(settings):
        if isinstance(field.default_factory, type) and is_dataclass(field.default_factory):
            found |= _all_options(field.default_factory)
        else:
            found |= dict.fromkeys(options[field.name].flags, options[field.name])
    return found
