"""The gallery of examples: its commands are those of programs that exist, and the quick ones train.

Layer: no process for what the gallery says; two processes of torchrun for each example that runs.
"""

from __future__ import annotations

import os
import py_compile
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytest.importorskip("tyro")

from sdp4bit_lab.cli import COMMANDS

GALLERY = ROOT / "examples" / "README.md"
PROGRAMS = sorted(
    path
    for path in (ROOT / "examples").iterdir()
    if path.suffix in (".py", ".sh", ".sbatch") and path.stem != "__init__"
)


def commands() -> list[list[str]]:
    """Return the words of the gallery's commands, variables that are set for them left out."""
    starts = ("torchrun ", "sdp4bit ", "sbatch ", "examples/", "DATA=", "NNODES=")
    lines = [line[4:] for line in GALLERY.read_text().splitlines() if line.startswith("    ")]
    found = [shlex.split(line) for line in lines if line.startswith(starts)]
    return [[word for word in words if not re.match(r"[A-Z_]+=", word)] for words in found]


def test_the_gallery_names_every_example() -> None:
    text = GALLERY.read_text()
    assert len(PROGRAMS) >= 5 and len(commands()) >= 9
    assert [path.name for path in PROGRAMS if f"]({path.name})" not in text] == []
    assert all((GALLERY.parent / name).exists() for name in re.findall(r"\]\(([^)]+)\)", text))


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_the_gallery_can_be_given(words: list[str], tmp_path: Path) -> None:
    if words[0] == "sdp4bit":
        COMMANDS[words[1]].parse(words[2:])
        return
    words = [word.replace(".", "/") + ".py" if word.startswith("examples.") else word for word in words]
    programs = [ROOT / word for word in words if word.startswith("examples/")]
    assert programs
    for program in programs:
        assert program.is_file()
        if program.suffix == ".py":
            py_compile.compile(str(program), cfile=str(tmp_path / "compiled"), doraise=True)
        else:
            subprocess.run(["bash", "-n", program], check=True, timeout=30)
            assert program.suffix == ".sbatch" or os.access(program, os.X_OK)


def run(name: str, *options: str) -> list[str]:
    """Return the lines that an example prints with two ranks."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(ROOT / "examples" / name), *options],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def losses(lines: list[str]) -> list[float]:
    return [float(line.split()[-1]) for line in lines if re.fullmatch(r"step \d+: loss [\d.]+", line)]


def test_the_tutorial_s_program_is_the_one_that_its_page_ends_with() -> None:
    page, program = (ROOT / "docs" / "tutorial.md").read_text(), ""
    for language, text in re.findall(r"^```(python|diff)[^\n]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            program = text
            continue
        lines = text.splitlines()
        before, after = ("\n".join(line[1:] for line in lines if line[:1] != sign) for sign in "+-")
        assert program.count(before) == 1, text
        program = program.replace(before, after)
    assert (ROOT / "examples" / "tutorial.py").read_text() == program


@pytest.mark.parametrize("name", ["trainer_hf", "trainer_accelerate", "trainer_lightning"])
def test_a_missing_package_of_a_trainer_is_named(name: str) -> None:
    hidden = "accelerate" if name != "trainer_lightning" else "lightning"
    code = f"import sys; sys.modules['{hidden}'] = None; import examples.{name}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and f"pip install {hidden}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_fsdp2_example_trains() -> None:
    lines = run("fsdp2_minimal.py")
    assert re.fullmatch(r"[\d.]+x fewer inter-node bytes than plain FSDP2", lines[-1])
    assert len(losses(lines)) == 12
    assert any("gradients  full precision: all ranks on one node" in line for line in lines)


@pytest.mark.slow
def test_the_megatron_example_trains_on_a_cpu_with_and_without_sdp4bit() -> None:
    pytest.importorskip("megatron.core")
    quantized, unquantized = (
        run("megatron_minimal.py", *plain, "--steps", "6") for plain in ((), ("--plain",))
    )
    ours, plain = losses(quantized), losses(unquantized)
    assert len(ours) == 6 and ours[-1] < ours[0] - 0.2
    assert ours[0] == plain[0] and ours[1:] != plain[1:]  # nothing is quantized before the first step
    assert ours[-1] == pytest.approx(plain[-1], abs=0.05)
    assert any("gradients  inter int4/128, Hadamard" in line for line in quantized)
    assert not any("int4" in line for line in unquantized)
