"""Options of the commands: how many, their names, and `--help`."""

from __future__ import annotations

import os
import pkgutil
import re
import runpy
import signal
import subprocess
import sys
from dataclasses import fields

import pytest

import sdp4bit
from sdp4bit_lab.cli import COMMANDS, main
from sdp4bit_lab.common.options import docstrings, section_type, sections
from sdp4bit_lab.common.progress import end_progress
from sdp4bit_lab.common.settings import option_flags
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from tests import ROOT
from tests.ranks import guard


def all_options(settings: type) -> dict[str, list[str]]:
    """Map the fields of a settings class and of those in it to their flags; names must be unique."""
    options: dict[str, list[str]] = {}
    for _, part in sections(settings):
        own = {f.name: option_flags(part)[f.name] for f in fields(part) if section_type(f) is None}
        assert all(map(docstrings(part).get, own))
        assert not own.keys() & options.keys()
        options |= own
    return options


def printed(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def test_pretrain_has_at_most_90_options():
    assert len(all_options(PretrainConfig)) <= 90


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_of_a_command_are_unique(name):
    settings = pkgutil.resolve_name(COMMANDS[name].settings)
    flags = [flag for flags in all_options(settings).values() for flag in flags]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.shown])
def test_short_help_has_the_options_that_matter(capsys, name):
    lines = printed(capsys, name, "--help").splitlines()
    assert 20 < len(lines) < 70
    options = all_options(pkgutil.resolve_name(COMMANDS[name].settings))
    flags = [match[1] for line in lines if (match := re.match(r"  (--\S+)", line))]
    assert sorted(flags) == sorted([options[field][0] for field in COMMANDS[name].shown] + ["--help-all"])


def test_short_help_tells_switches_from_values_and_lists_choices(capsys):
    text = " ".join(printed(capsys, "plan", "--help").split())
    assert " --json Print" in text and " --nodes N Number of nodes. " in text
    assert " --engine NAME Training engine: fsdp2, megatron. (default: fsdp2)" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_long_help_has_every_option(capsys, name):
    text = printed(capsys, name, "--help-all")
    for field, flags in all_options(pkgutil.resolve_name(COMMANDS[name].settings)).items():
        assert all(flag in text for flag in flags) or (field == "runs" and "  RUNS " in text)


def test_defaults_are_readable(capsys):
    text = " ".join(printed(capsys, "pretrain", "--help-all").split())
    assert "(default: the preset's)" in text and "(default: 200)" in text and "(default: on)" in text
    assert "None" not in text and "Default:" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["pretrain", "--strateg", "baseline"],
            "sdp4bit pretrain has no option --strateg (did you mean --strategy?): see --help-all",
        ),
        (["pretrain", "--train_iters=x"], "--train-iters x: an integer is expected"),
        (["pretrain", "--lr", "1e-3x"], "--lr 1e-3x: a number is expected"),
        (["pretrain", "--model-card", "7B"], "--model-card 7B: use one of tiny, 125M, "),
        (["pretrain", "--preset"], "--preset needs a value"),
        (
            ["pretrain", "--strategy", "qq"],
            "--strategy qq: use one of sdp4bit, sdp4bit-w3g3.5, ",
        ),
        (["pretrain", "stray"], "Unrecognized options: stray"),
        (["preprocess", "--input", "a"], "missing --output-prefix PATH (see --help)"),
        (["selftest", "stray"], "Unrecognized options: stray"),
        (
            ["pretrain", "--save", "s3://b/p", "--load=gs://b/q"],
            "s3://b/p is a URL: mount or copy it, and give a local path; --load=gs://b/q is a URL: ",
        ),
        (["pretrain", "--config-file", "https://a/b.yaml"], "https://a/b.yaml is a URL: "),
        (["preprocess", "--input", "hf://a", "--output-prefix", "x"], "hf://a is a URL: "),
        (["report", "s3://b/p"], "s3://b/p is a URL: "),
    ],
)
def test_a_wrong_option_is_one_line(capsys, arguments, message):
    end_progress()  # of an earlier test in this process
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sdp4bit: error: {message}")


def test_the_reference_page_has_these_options():
    page = runpy.run_path(str(ROOT / "docs/site/options.py"))["page"]()
    assert (ROOT / "docs/reference/cli.md").read_text() == page, "run python docs/site/options.py"
    names = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)))
    assert len(names) > 100 and max(map(len, names)) < 45, "the first column takes the width of the others"


def test_the_program_lists_its_commands_and_version(capsys):
    assert main(["--help"]) == 0
    assert all(f"  {name} " in capsys.readouterr().out for name in ["pretrain"])
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sdp4bit {sdp4bit.__version__}\n"
    assert main(["pretrian"]) == 2
    assert "'pretrian' is not a command: did you mean pretrain?" in capsys.readouterr().err


@pytest.mark.gloo
@pytest.mark.parametrize("text", ["ö", "\\udcc3"])
def test_a_console_without_the_characters_of_a_path_shows_escapes(text):
    program = f"from sdp4bit_lab.cli import main; main(['--version']); print('{text}')"
    variables = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=guard(60),
        env=variables,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1] == text.encode("ascii", "backslashreplace").decode().replace(
        "\\\\", "\\"
    )


@pytest.mark.gloo
@pytest.mark.parametrize("arguments", ["--help", "plan --help-all"])
def test_a_reader_that_has_enough_ends_a_command_quietly(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "sdp4bit_lab", *arguments.split()]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=guard(60), check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
