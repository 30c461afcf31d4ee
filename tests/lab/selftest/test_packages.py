"""The self-test needs torch and NumPy alone; every other command names the packages that it lacks.

Layer: fresh processes, in which the other packages cannot be imported. So can none in their ranks.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sdp4bit.addresses import install
from sdp4bit_lab.cli import COMMANDS
from tests import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXTRA = {
    "yaml" if name == "pyyaml" else name
    for name in (
        re.split("[>=;<]", requirement)[0].strip()
        for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]["lab"]
    )
}
OTHERS = {
    *("datasets", "hypothesis", "megatron", "numba", "pandas", "pyarrow"),
    *("docstring_parser", "markdown_it", "pygments", "transformers", "triton", "tyro", "zstandard"),
}


def run_without(packages: set[str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command; neither it nor the ranks that it starts can import these packages."""
    lines = ["import sys", *(f"sys.modules[{name!r}] = None" for name in sorted(packages))]
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    return subprocess.run(
        [sys.executable, "-m", "sdp4bit_lab", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.gloo
@pytest.mark.slow
def test_the_self_test_runs_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    path = tmp_path / "selftest.json"
    done = run_without(
        EXTRA | OTHERS,
        tmp_path,
        *("selftest", "--device=cpu", "--nproc_per_node", "2", "--ranks-per-node", "2", "--steps", "1"),
        *("--only", "facts,training", "--json", str(path)),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert [check["result"] for check in result["checks"]] == ["passed"] * 2
    assert result["ranks"] == 2 and len(result["checks"][1]["findings"]["losses"]["plain"]) == 1
    versions = result["checks"][0]["findings"]["ranks"][0]
    assert versions["kernels"] == "reference"
    assert "training        passed" in done.stdout and "Result: all checks passed" in done.stdout


@pytest.mark.gloo
def test_help_of_the_self_test_and_of_the_program_needs_nothing_else(tmp_path: Path) -> None:
    for arguments in (["--help"], ["selftest", "--help"]):
        done = run_without(EXTRA | OTHERS, tmp_path, *arguments)
        assert done.returncode == 0 and "selftest" in done.stdout, done.stderr
    usual = run_without(set(), tmp_path, "selftest", "--help")
    assert done.stdout == usual.stdout


@pytest.mark.gloo
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_starts_with_the_packages_that_it_asks_for_and_names_those_it_lacks(
    name: str, tmp_path: Path
) -> None:
    """Help imports the settings, and the modules that the command imports when it runs."""
    done = run_without(EXTRA - set(COMMANDS[name].packages), tmp_path, name, "--help-all")
    assert done.returncode == 0, done.stderr
    if lacking := ", ".join(COMMANDS[name].packages):
        done = run_without(EXTRA, tmp_path, name)
        assert done.returncode == 2
        error = f"sdp4bit: error: `sdp4bit {name}` needs {lacking}: {install('lab')}\n"
        assert done.stderr == error


def test_commands_ask_together_for_what_the_extra_installs() -> None:
    asked = {package for command in COMMANDS.values() for package in command.packages}
    assert asked == (EXTRA if sys.version_info < (3, 11) else EXTRA - {"tomli"})


@pytest.mark.gloo
def test_a_wrong_option_of_the_self_test_is_named(tmp_path: Path) -> None:
    for arguments, message in (
        (["--steps", "many"], "--steps many: an integer is expected"),
        (["--device", "tpu"], "--device tpu: use one of auto, cpu (auto uses GPUs if available)"),
        (["--step", "3"], "has no option --step (did you mean --steps?)"),
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--only", "kernel"], "--only 'kernel': give a comma-separated list of facts, kernels"),
    ):
        done = run_without(EXTRA, tmp_path, "selftest", *arguments)
        assert done.returncode == 2 and message in done.stderr, done.stderr
