"""A unit test cannot start a process, and every test runs somewhere, in a part or with its packages.

Layer: files.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT, tiers
from tests.ranks import STARTED


@pytest.mark.parametrize("event", [STARTED, "subprocess.Popen", "os.fork", "os.posix_spawn"])
def test_a_unit_test_that_starts_a_process_fails(event: str) -> None:
    with pytest.raises(AssertionError, match=r"starts a process .*: mark it with gloo"):
        sys.audit(event, None)


PARTS = tiers.of_makefile("SLOW")


def test_every_slow_test_is_in_one_part() -> None:
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.slow" in path.read_text()]
    found = {path: list[str]() for path in files if path.name != "test_kinds.py"}
    for name, words in PARTS.items():
        for path in tiers.files_of(words) & {*found}:
            found[path].append(name)
    assert {path.name: names for path, names in found.items() if len(names) != 1} == {}


def test_parts_of_the_slow_tests_take_turns_and_all_run_at_night() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    (nightly,) = re.findall(r"^ +part: \[([^]]*)\]$", workflow, re.MULTILINE)
    assert sorted(re.split(r",\s+", nightly)) == sorted(PARTS)
    # Those that a change needs, and the packages of others after a change of the library.
    turns = (ROOT / ".ci/run").read_text()
    assert '<<<"$(needed part)"' in turns and "parts+=(ecosystem deepspeed)" in turns


# -- where the tests run that skip ---------------------------------------------------------------------

COMMANDS = "\n".join((ROOT / name).read_text() for name in (".ci/run", ".github/workflows/ci.yml"))
PLACES = {
    "the pinned torch": "make test",  # on Linux, with the packages of `make install`
    "the newest torch": "make test-torch VERSION=2.15.0",
    "ecosystem": "make test-ecosystem",
    "deepspeed": "make test-deepspeed",
    "root": "timed packages",  # .ci/run as root, with iproute2, chromium and a compiler
    "by hand: a GPU": "",  # benchmarks/gpu_report.py runs them on a machine with one
    "by hand: mpirun, mpiexec and srun": "",  # whose packages no job installs, before a release
    "by hand: verl": "",  # which needs other versions of its packages than the other trainers
    "by hand: a checkout of PyTorch": "",  # make test-pytorch
}
"""Where tests run that skip elsewhere, and the command of `.ci/run` or the workflow."""
SKIPS = {
    "collectives/test_host.py": ["root"],
    "deepspeed/test_deepspeed.py": ["deepspeed"],
    "ecosystem/test_examples.py": ["ecosystem"],
    "ecosystem/test_llama.py": ["ecosystem"],
    "ecosystem/test_recipes.py": ["ecosystem", "by hand: verl"],
    "ecosystem/test_trainers.py": ["ecosystem"],
    "ecosystem/test_wrappers.py": ["ecosystem"],
    "engines/fsdp2/pytorch_fsdp.py": ["by hand: a checkout of PyTorch"],
    "engines/fsdp2/test_adapters.py": ["the pinned torch"],
    "engines/fsdp2/test_interrupted.py": ["the pinned torch"],
    "engines/fsdp2/test_lifecycle.py": ["the pinned torch"],
    "engines/fsdp2/test_meshes.py": ["the pinned torch"],
    "engines/fsdp2/test_mixed_dtypes.py": ["the newest torch"],
    "engines/fsdp2/test_step_cost.py": ["the pinned torch"],
    "engines/fsdp2/test_subclasses.py": ["the pinned torch"],
    "engines/fsdp2/test_users.py": ["the pinned torch"],
    "engines/test_contract.py": ["the pinned torch", "deepspeed"],
    "engines/test_events.py": ["the pinned torch", "deepspeed"],
    "kernels/test_cpu.py": ["the pinned torch"],
    "kernels/test_launch.py": ["the pinned torch"],
    "kernels/test_new_formats.py": ["the pinned torch"],
    "kernels/test_triton.py": ["the pinned torch"],
    "kernels/test_triton_compile.py": ["the pinned torch", "the newest torch"],
    "kernels/test_triton_device.py": ["by hand: a GPU"],
    "lab/benchmarks/test_cluster.py": ["root"],
    "lab/benchmarks/test_gpu_limits.py": ["the pinned torch"],
    "lab/benchmarks/test_gpu_report.py": ["root"],
    "lab/benchmarks/test_send_limit.py": ["root"],
    "lab/common/launch/test_cluster_examples.py": ["root", "by hand: mpirun, mpiexec and srun"],
    "lab/common/launch/test_environment.py": ["by hand: mpirun, mpiexec and srun"],
    "lab/common/launch/test_wrong_state.py": ["root"],
    "lab/compare/test_links.py": ["root"],
    "lab/report/test_page.py": ["root"],
    "lab/test_user_path.py": ["the pinned torch"],
    "quantization/test_ops.py": ["the pinned torch"],
    "test_docs.py": ["root"],
    "test_mutants.py": ["deepspeed"],
}
"""Files whose tests skip for a reason that is no missing package of their environment, and where they run."""
MODULES = {"yaml": "pyyaml", "megatron": "megatron-core", "resource": ""}
"""Packages of modules with another name; "" for the standard library, or with a package of the list."""


@cache
def packages() -> dict[str, set[str]]:
    """Return the packages that `make install` and the environment of trainers are asked to install."""
    project = (ROOT / "pyproject.toml").read_text()
    extras = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    installed = {"torch", "numpy", *re.findall(r'^ +"([\w-]+)', extras, re.MULTILINE)}
    installed |= set(re.findall(r'= \["([\w-]+)', extras))
    makefile = (ROOT / "Makefile").read_text()
    lists = re.findall(r"^(?:TRAINERS|LAUNCHERS|\w+_NEEDS|UNRESOLVED) \+?:?= (.*)$", makefile, re.MULTILINE)
    trainers = {name.strip("'").partition("[")[0] for names in lists for name in names.split()}
    normal = [{name.lower().replace("-", "_") for name in names} for names in (installed, trainers)]
    return {"make install": normal[0], "ecosystem": normal[1] | {"torch", "transformers", "yaml"}}


def skips_of(path: Path) -> Iterator[str]:
    """Yield the package that a file needs for each `importorskip` of a known one, else "a condition"."""
    for node in ast.walk(ast.parse(path.read_text())):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name == "pytest.importorskip" and isinstance(node, ast.Call):
            given = node.args[0]
            yield str(given.value) if isinstance(given, ast.Constant) else "a condition"
        elif name in ("pytest.skip", "pytest.mark.skipif", "pytest.mark.skip"):
            yield "a condition"


def is_installed(module: str, place: str) -> bool:
    name, known = module.partition(".")[0], packages()[place]
    package = MODULES.get(name, name).lower().replace("-", "_")
    return module.startswith(("tests.", "sdp4bit", "torch.")) or not package or package in known


def test_every_test_that_skips_somewhere_runs_elsewhere() -> None:
    """A new reason to skip needs a place where the test runs, or a reason why a person runs it."""
    found = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = str(path.relative_to(ROOT / "tests"))
        place = "ecosystem" if name.startswith("ecosystem/") else "make install"
        if any(each == "a condition" or not is_installed(each, place) for each in skips_of(path)):
            found.add(name)
    assert found - {"test_kinds.py"} == {*SKIPS}
    for name, places in SKIPS.items():
        assert {*places} <= {*PLACES}, name
    for place, command in PLACES.items():
        assert place.startswith("by hand: ") or command in COMMANDS, place
        assert any(place in places for places in SKIPS.values()), place
