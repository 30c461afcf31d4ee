"""The examples of the trainers run, and the first blocks of their pages or sections import existing names."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.ranks import guard
from tests.tables import flat

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMANDS = {
    "trl": [*TORCHRUN, "examples/trainer_hf.py"],
    "accelerate": [*TORCHRUN, "examples/trainer_accelerate.py"],
    "lightning": ["examples/trainer_lightning.py"],
    "peft": [*TORCHRUN, "examples/lora_trl.py"],
    "bitsandbytes": [*TORCHRUN, "examples/lora_trl.py", "--four-bit"],
}
PAGES = {
    "trl": "trainers/hf.md",
    "accelerate": "trainers/index.md#Accelerate",
    "lightning": "trainers/index.md#Lightning",
    "olmo_core": "trainers/index.md#OLMo-core",
    "peft": "lora.md",
}


@pytest.mark.parametrize("package", COMMANDS)
def test_example_runs_and_logs_bytes(package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: make test-ecosystem")
    done = subprocess.run(
        [sys.executable, *COMMANDS[package]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=guard(240),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sdp4bit/inter_bytes" in done.stdout + done.stderr
    assert "int4/2048 difference" in done.stdout and "inter int4/128, Hadamard" in done.stdout
    if package in ("peft", "bitsandbytes"):
        assert "9 frozen not sent" in flat(done.stdout) and "full refreshes" not in flat(done.stdout)


def test_deepspeed_example_prints_the_ratio_of_the_readme() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-ecosystem")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [sys.executable, *launch, "examples/deepspeed_minimal.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=guard(240),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *_, last = done.stdout.splitlines()
    assert last == "8.85x fewer inter-node bytes than plain DeepSpeed"
    assert f"`{last.split()[0]} fewer`" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("package", PAGES)
def test_page_or_section_begins_with_a_block_whose_imports_exist(package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: make test-ecosystem")
    name, _, heading = PAGES[package].partition("#")
    page = (ROOT / "docs" / name).read_text()
    if heading:
        page = page.split(f"\n## {heading}\n")[1]
    block = page.split("```python\n")[1].split("```")[0]
    assert page.index("```python") < 200
    tree = ast.parse(block)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom | ast.Import)]
    assert any("sdp4bit.trainers" in ast.unparse(node) for node in imports)
    exec(compile(ast.Module(imports, []), "block", "exec"), {})
