"""`--help` of every command is short, `--help-all` is complete, and both say what comes of nothing."""

from __future__ import annotations

import pkgutil
from dataclasses import MISSING, fields, is_dataclass, replace

import pytest

import sdp4bit
from sdp4bit_lab.cli import COMMANDS, main
from sdp4bit_lab.common.settings import Option, docstrings, options_of
from sdp4bit_lab.pretrain.config.reference_flags import ReferenceConfig


def printed(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def all_options(name: str) -> list[Option]:
    """Return the options of a command, those of the settings classes in its own included."""
    found, classes = [], [pkgutil.resolve_name(COMMANDS[name].settings)]
    for settings in classes:
        factories = {f.name: f.default_factory for f in fields(settings) if f.default_factory is not MISSING}
        nested = {name: type(make()) for name, make in factories.items() if is_dataclass(make())}
        classes += nested.values()
        said = docstrings(settings)
        found += [
            replace(option, help=option.help or said[field])
            for field, option in options_of(settings).items()
            if field not in nested
        ]
    return found


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_of_every_command_fits_on_a_page(capsys, name):
    lines = printed(capsys, *[] if name is None else [name], "--help").splitlines()
    assert 5 < len(lines) < 60
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_the_long_help_names_every_option_and_says_what_it_does(capsys, name):
    text = printed(capsys, name, "--help-all")
    assert max(map(len, text.splitlines())) <= 80
    assert "None" not in text
    flat = " ".join(text.split())
    for option in all_options(name):
        assert option.help and option.help in flat
        assert option.is_positional or all(flag in flat for flag in option.flags)


def test_what_a_value_is_derived_from_nothing_is_shown(capsys):
    text = " ".join(printed(capsys, "pretrain", "--help").split())
    assert "--micro-batch-size INT Sequences per rank in one forward. (default: derived: 4)" in text
    assert "--lr FLOAT Peak learning rate. (default: derived: 0.001)" in text
    long = " ".join(printed(capsys, "pretrain", "--help-all").split())
    assert "2048 when not given. (default: derived: 2048)" in long


def test_flags_without_effect_are_in_the_long_help_only(capsys):
    short, long = printed(capsys, "pretrain", "--help"), printed(capsys, "pretrain", "--help-all")
    flags = [option.flags[0] for option in options_of(ReferenceConfig).values()]
    for flag in (*flags, "--reset-position-ids", "--reset-attention-mask"):
        assert flag in long and flag not in short
    shown = len(COMMANDS["pretrain"].shown)
    assert 20 <= shown <= 30 and f"Show the other {len(all_options('pretrain')) - shown} options" in short


def test_help_wins_over_what_stands_beside_it(capsys):
    assert printed(capsys, "pretrain", "--steps", "many", "-h") == printed(capsys, "pretrain", "--help")


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sdp4bit {sdp4bit.__version__}\n"
