"""The way of a user: the wheel that the sdist makes, in an environment with PyTorch and NumPy only, and what
README and the tutorial tell to run there. Layer: fresh processes, 2 ranks over gloo."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import sdp4bit
from sdp4bit.addresses import install
from sdp4bit_lab.cli import COMMANDS
from tests import ROOT

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(1800)]

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
RANKS = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]

README_MODEL = """
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

distributed.init_process_group("gloo")
model = nn.Module()
model.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
model.forward = lambda x: model.layers[1](model.layers[0](x))
"""
README_STEPS = """
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert comm.stats()["total"]["intra_bytes"] and "all ranks on one node" in comm.explain(), comm.stats()
distributed.destroy_process_group()
"""

OPTIONAL_FEATURES = """
from sdp4bit.addresses import install
from sdp4bit.quantization import ops
for name, extra in ("numba", "cpu"), ("triton", "cuda"):
    try:
        with ops.use_backend(name):
            pass
    except ModuleNotFoundError as error:
        assert install(extra) in str(error), error
    else:
        raise AssertionError(f"{name} is there")
"""


def needed_by(*names: str) -> Iterator[importlib.metadata.Distribution]:
    """Yield the installed distributions of these names and of all that they need."""
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        yield distribution
        needed = [Requirement(line) for line in distribution.requires or []]
        waiting += [
            each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})
        ]


def run(*command: str | Path, cwd: Path, exit_code: int = 0, timeout: float = 1200) -> str:
    """Return what a command prints; it must end with this code."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == exit_code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + (done.stderr if exit_code else "")


def copy_sources(folder: Path) -> None:
    """Copy what the package is built from."""
    for name in ("pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for package in ("sdp4bit", "sdp4bit_lab"):
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.nb?")
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel that `make dist` makes of the sdist."""
    # Not importorskip: a folder build/ of this checkout would be found.
    if not any(importlib.metadata.distributions(name="build")):
        pytest.skip("build is not installed: make install")
    source = tmp_path_factory.mktemp("source")
    copy_sources(source)
    (source / "installed").touch()  # this environment instead of .venv
    run("make", "dist", "STAMP=installed", f"BIN={Path(sys.executable).parent}", cwd=source)
    (wheel,), (_,) = source.glob("dist/*.whl"), source.glob("dist/*.tar.gz")
    return wheel


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with the wheel, PyTorch and NumPy."""
    return new_environment(tmp_path_factory.mktemp("environment"), wheel, "torch", "numpy")


def new_environment(environment: Path, wheel: Path, *names: str) -> Path:
    """Return the interpreter of an environment with the wheel and links to these installed packages."""
    venv.create(environment, symlinks=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    for distribution in needed_by(*names):
        for name in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(Path(str(distribution.locate_file(name))).resolve())
    interpreter = environment / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", interpreter)
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=environment)
    return interpreter


def test_the_demo_of_the_wheel_times_steps_on_slow_links(wheel: Path, tmp_path: Path) -> None:
    requires = map(Requirement, importlib.metadata.requires("sdp4bit") or [])
    extras = [each.name for each in requires if each.marker and each.marker.evaluate({"extra": "lab"})]
    python = new_environment(tmp_path / "environment", wheel, "torch", "numpy", "numba", *extras)
    command = (python.parent / "sdp4bit", "demo", "--out", tmp_path / "demo", "--steps", "2")
    assert "1,000" in run(*command, cwd=tmp_path)


def test_the_package_is_the_installed_one_and_its_version_needs_nothing(python: Path, tmp_path: Path) -> None:
    where = run(
        python, "-c", "import sdp4bit; sdp4bit.quantize_communication; print(sdp4bit.__file__)", cwd=tmp_path
    )
    assert Path(where.strip()).is_relative_to(python.parents[1])
    assert run(python.parent / "sdp4bit", "--version", cwd=tmp_path) == f"sdp4bit {sdp4bit.__version__}\n"


def test_every_command_and_back_end_names_the_extra_that_it_needs(python: Path, tmp_path: Path) -> None:
    every_command = (
        "import contextlib, io\n"
        "from sdp4bit_lab.cli import COMMANDS, main\n"
        "for name in (name for name, command in COMMANDS.items() if command.packages):\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as told:\n"
        "        code = main([name])\n"
        "    print(name, code, told.getvalue(), end='')\n"
    )
    lines = run(python, "-c", every_command, cwd=tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == [name for name, each in COMMANDS.items() if each.packages]
    for line in lines:
        assert line.split()[1] == "2" and line.endswith(install("lab")), line
        assert " needs " in line and "numpy" not in line
    assert install("lab") in run(python.parent / "sdp4bit", "plan", cwd=tmp_path, exit_code=2)
    run(python, "-c", OPTIONAL_FEATURES, cwd=tmp_path)


def test_the_lines_of_the_readme_run(python: Path, tmp_path: Path) -> None:
    (diff,) = [
        text for language, _, text in BLOCK.findall((ROOT / "README.md").read_text()) if language == "diff"
    ]
    code = "\n".join(line[2:] for line in diff.splitlines())
    (tmp_path / "train.py").write_text(README_MODEL + code.replace("mp_policy=policy", "") + README_STEPS)
    assert "gradients" in run(python, *RANKS, "train.py", cwd=tmp_path)


def test_the_tutorial_does_what_it_shows(python: Path, tmp_path: Path) -> None:
    follow_the_tutorial(python, tmp_path)


def follow_the_tutorial(python: Path, tmp_path: Path) -> None:
    """Every block is used: files are written, changes made, commands run, and what they print is compared."""
    printed, outputs = "", []
    for language, title, text in BLOCK.findall((ROOT / "docs/tutorial.md").read_text()):
        file = tmp_path / title
        if language == "python":
            file.write_text(text)
        elif language == "diff":
            lines = text.splitlines()
            before, after = ("\n".join(line[1:] for line in lines if line[:1] != sign) for sign in "+-")
            assert file.read_text().count(before) == 1, text
            file.write_text(file.read_text().replace(before, after))
        elif language == "console":
            for command in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
                program, *arguments = command.split()
                if program == "pip":  # the fixture has done it
                    continue
                assert [program, *arguments[:2]] == ["torchrun", *RANKS[2:]]
                printed = run(python, *RANKS[:2], *arguments, cwd=tmp_path)
                outputs.append(printed)
        else:
            assert language == "text"
            assert without_fractions(printed).strip().startswith(without_fractions(text).strip()), printed
    plain, quantized, stopped, resumed = (
        re.findall(r"^step (\d+): loss (\S+)", output, re.MULTILINE) for output in outputs
    )
    assert len(plain) == 6 and stopped + resumed == quantized != plain
    for (_, ours), (_, theirs) in zip(quantized, plain, strict=True):
        assert abs(float(ours) - float(theirs)) < 0.02 * float(theirs) + 0.002


def without_fractions(text: str) -> str:
    """Return the text without what differs between kinds of CPU; bytes and names stay."""
    return re.sub(r"\d+\.\d+", "#", text)
