"""Every test is in one tier, and a change needs the tiers that import the changed files. Layer: files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT, tiers

TIERS = tiers.of_makefile("TIER")


@pytest.fixture(scope="module")
def imports() -> tiers.Imports:
    return tiers.Imports()


def test_every_file_of_tests_is_in_one_tier() -> None:
    found = {path: list[str]() for path in (ROOT / "tests").rglob("test_*.py")}
    for name, words in TIERS.items():
        for path in tiers.files_of(words):
            found[path].append(name)
    assert {str(path.relative_to(ROOT)): names for path, names in found.items() if len(names) != 1} == {}


def test_every_tier_has_a_command_and_runs_in_the_workflow() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (others,) = re.findall(r"^OTHERS := (.*)$", makefile, re.MULTILINE)
    targets = dict(re.findall(r"^test-(\w+):(.*?) ## ", makefile, re.MULTILINE))
    for name in others.split():
        assert f"test-{name}: TIERS := {name}\n" in makefile and targets[name] == " test-tiers"
    environments = {*TIERS} - {"library", *others.split()}
    assert environments == {*tiers.NEEDS_ENVIRONMENT}
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    # Without a list of tests it runs all that do not need those environments, on each torch and Python.
    assert re.search(r"run: make test-torch VERSION=\S+ \S+ \S+ PYTHON=\S+ \S+ \S+\n", workflow)
    assert all(f"make test-{name}\n" in workflow for name in environments)


def test_the_runs_of_programs_are_fast_tests_of_the_lab() -> None:
    makefile = (ROOT / "Makefile").read_text()
    words = " ".join(re.findall(r"^PROGRAMS [:+]= (.*)$", makefile, re.MULTILINE)).split()
    assert tiers.files_of(words) <= tiers.files_of(TIERS["lab"])
    for word in words:
        path, _, name = word.partition("::")
        text = (ROOT / "tests" / path).read_text()
        assert not name or f"def {name.rpartition('::')[2]}(" in text, word
        before = text.partition(f"def {name.rpartition('::')[2]}(")[0].rpartition("\n\n")[2]
        assert "slow" not in before, word


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("docs/install.md", ""),
        ("docs/lora.md", "library lab"),  # whose table a test of the planner reads
        ("results/memory.json", "benchmarks"),
        ("benchmarks/send_limit.c", "benchmarks"),
        ("examples/muon.py", "library"),
        ("examples/paper/run.sh", "lab"),
        ("sdp4bit/quantization/random.py", "library kernels lab benchmarks megatron"),
        ("sdp4bit/kernels/cpu/tiles.py", "library kernels lab benchmarks megatron"),  # by name, in ops.py
        ("sdp4bit/engines/fsdp2/hooks.py", "library lab benchmarks megatron"),
        ("sdp4bit/trainers/hf.py", "library ecosystem lab"),  # by examples/cluster
        ("sdp4bit_megatron/patches.py", "library megatron"),
        ("sdp4bit_deepspeed/api.py", "deepspeed"),
        ("sdp4bit_lab/pretrain/trainer.py", "library lab benchmarks"),  # by name, in cli.py
        ("sdp4bit_lab/plan/measured.json", "library lab benchmarks"),
        ("sdp4bit_lab/report/assets/page.css", "library lab"),
        ("tests/toy.py", "library lab megatron"),
        ("tests/lab/compare/test_jobs.py", "lab"),
        *((name, "every tier") for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run")),
        ("sdp4bit/deleted.py", "every tier"),
        ("a_file_of_a_new_kind", "every tier"),
    ],
)
def test_a_change_needs_the_tiers_that_use_it(imports: tiers.Imports, file: str, names: str) -> None:
    found = tiers.needed(TIERS, [file], imports)
    everywhere = [name for name in TIERS if name not in tiers.NEEDS_ENVIRONMENT]
    assert {*found} - {"library"} == {*(everywhere if names == "every tier" else names.split())} - {"library"}


@pytest.mark.gloo
@pytest.mark.parametrize(
    "name",
    [
        "engines/ddp/test_hook.py",
        pytest.param("kernels/test_cpu.py", marks=pytest.mark.slow),
        pytest.param("lab/compare/test_folders.py", marks=pytest.mark.slow),
    ],
)
def test_what_a_file_of_tests_imports_is_found_without_importing_it(
    imports: tiers.Imports, name: str
) -> None:
    module = tiers.module_of(Path("tests") / name)
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    loaded = {each for each in done.stdout.split() if each.partition(".")[0] in tiers.ROOTS}
    found = imports.of({ROOT / "tests" / name})
    assert module in loaded and len(loaded) > 20
    assert {each for each in loaded if not found & {each, f"{each}.__init__"}} == set()


@pytest.mark.gloo
def test_files_that_differ_from_a_commit_are_known_only_if_it_is_an_ancestor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
        command = ["git", "-C", str(folder), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    for variable in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(variable)  # a hook of git that runs the tests sets them
    folder = tmp_path / "first"
    folder.mkdir()
    git("init", "--quiet")
    (folder / "old").write_text("text\n" * 9)
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    base = git("rev-parse", "HEAD")
    git("mv", "old", "new name")
    git("commit", "--quiet", "--message", "two")
    monkeypatch.setattr(tiers, "ROOT", folder)
    assert tiers.changes_since(base) == ["new name", "old"]
    assert tiers.changes_since("HEAD") == []
    assert tiers.changes_since("") is tiers.changes_since("0" * 40) is None
    git("switch", "--quiet", "--orphan", "another")
    git("commit", "--quiet", "--allow-empty", "--message", "three")
    assert tiers.changes_since(base) is None
    git("clone", "--quiet", "--depth", "1", f"file://{folder}", str(tmp_path / "shallow"))
    folder = tmp_path / "shallow"
    monkeypatch.setattr(tiers, "ROOT", folder)
    assert tiers.changes_since("HEAD^1") is None


def test_without_a_commit_that_is_known_all_that_is_installed_is_needed(imports: tiers.Imports) -> None:
    assert {*TIERS} - {*tiers.needed(TIERS, None, imports)} == {*tiers.NEEDS_ENVIRONMENT}
    parts = tiers.of_makefile("SLOW")
    assert [*tiers.needed(parts, None, imports)] == [*parts]
