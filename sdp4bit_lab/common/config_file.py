"""Read options from a YAML or TOML file, as if they came first on the command line.

Values are handed over as they are written, so that a file and a command line have the same types. YAML's own
types would read `no` as False and `1e-3` as text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdp4bit_lab.common.options import url_problem
from sdp4bit_lab.common.settings import SettingError, require

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPTION = "--config-file"


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One option of a file."""

    name: str
    value: str | list[str] | None
    """Text as it is written; None if there is none."""
    is_plain: bool
    """Whether the text is not quoted."""
    where: str
    """File, and line if the parser reports it."""


def expand_config_file(
    arguments: Sequence[str], *, names: Mapping[str, str], switches: Mapping[str, str]
) -> list[str]:
    """Replace --config-file FILE by the options in the file.

    Options on the command line come later and win. Keys are option names, with - or _, in any section;
    section names have no meaning. A key without a value is not an option that is given.

    Args:
        names: flags of the command, each with a name that all flags of the same option share.
        switches: flags of switches, each with the flag of the opposite meaning, or "" if there is none.

    Raises:
        SettingError: the file cannot be read or parsed, or repeats an option.
    """
    rest: list[str] = []
    loaded: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, path = argument.partition("=")
        if name.replace("_", "-") == OPTION:
            path = path if equals else next(remaining, "")
            require(bool(path), f"{OPTION} needs a file")
            require(not (problem := url_problem(path)), problem)
            loaded += _options(_read(Path(path)), names=names, switches=switches)
        else:
            rest.append(argument)
    return loaded + rest


def _options(
    entries: Sequence[_Entry], *, names: Mapping[str, str], switches: Mapping[str, str]
) -> Iterator[str]:
    seen: dict[str, str] = {}
    for entry in entries:
        flag, value = f"--{entry.name.replace('_', '-')}", entry.value
        name = names.get(flag, flag)
        before = f" (as {seen[name][2:]})" if seen.get(name, flag) != flag else ""
        require(name not in seen, f"{entry.where}: {entry.name} is given more than once{before}")
        seen[name] = flag
        if value is None:
            # An unknown option is reported even without a value.
            yield from () if flag in names else (flag,)
        elif flag in switches:
            is_on = {"true": True, "false": False}.get(str(value).lower()) if entry.is_plain else None
            require(is_on is not None, f"{entry.where}: {entry.name} must be true or false, not {value}")
            yield from filter(None, [flag if is_on else switches[flag]])
        elif isinstance(value, list):
            options = [each for each in value if each.startswith("--")]
            require(not options, f"{entry.where}: {entry.name} contains the option {', '.join(options)}")
            yield from (flag, *value)
        else:
            yield f"{flag}={value}"


def _read(path: Path) -> list[_Entry]:
    require(
        path.suffix in (".toml", ".yaml", ".yml"),
        f"{OPTION} {path}: the name must end in .yaml, .yml or .toml",
    )
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".toml":
            # Floats keep their text. Integers do not, but Python writes each of them in one way.
            return list(_toml_entries(tomllib.loads(text, parse_float=str), where=str(path)))
        import yaml

        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return [] if root is None else list(_yaml_entries(root, path=path, sections=set()))
    except SettingError:
        raise
    except Exception as error:  # every parser has its own error types
        raise SettingError(f"{OPTION} {path} cannot be read: {' '.join(str(error).split())}") from error


def _toml_entries(section: Mapping[str, Any], *, where: str) -> Iterator[_Entry]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _toml_entries(value, where=where)
            continue
        parts = value if isinstance(value, list) else [value]
        _require_flat(not any(isinstance(each, dict | list) for each in parts), name=name, where=where)
        texts = [str(each).lower() if isinstance(each, bool) else str(each) for each in parts]
        yield _Entry(
            name=name,
            value=texts if isinstance(value, list) else texts[0],
            is_plain=not isinstance(value, str | list),
            where=where,
        )


def _yaml_entries(section: Any, *, path: Path, sections: set[int]) -> Iterator[_Entry]:
    """Yield the entries of a parsed mapping, whose leaves still have their text and their line."""
    require(section.id == "mapping", f"{path} must contain a mapping of options, not a {section.id}")
    # With aliases, a section can be part of itself, or occur exponentially often.
    require(id(section) not in sections, f"{path}: a section is repeated by an alias")
    sections.add(id(section))
    for key, node in section.value:
        where = f"{path}, line {key.start_mark.line + 1}"
        require(key.id == "scalar", f"{where}: a name is expected, not a {key.id}")
        if node.id == "mapping":
            yield from _yaml_entries(node, path=path, sections=sections)
        elif node.id == "sequence":
            _require_flat(all(each.id == "scalar" for each in node.value), name=key.value, where=where)
            values = [each.value for each in node.value]
            yield _Entry(name=key.value, value=values, is_plain=False, where=where)
        else:
            is_absent = node.tag == "tag:yaml.org,2002:null"
            value = None if is_absent else node.value
            yield _Entry(name=key.value, value=value, is_plain=node.style is None, where=where)


def _require_flat(condition: bool, *, name: str, where: str) -> None:
    require(condition, f"{where}: {name}: a list must contain values, not lists or mappings")
