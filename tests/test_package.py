"""Results of `pip install sdp4bit` and `import sdp4bit`. Layer: fresh processes."""

import ast
import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sdp4bit
from sdp4bit.config import TESTED_TORCH
from tests import ADAPTERS, PACKAGES, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPTIONAL = [
    "accelerate",
    "lightning",
    "matplotlib",
    "megatron",
    "numba",
    "rich",
    "scipy",
    "tensorboard",
    "tokenizers",
    "torchtitan",
    "transformers",
    "triton",
    "tyro",
]

IMPORT_WITHOUT_OPTIONAL = f"""
import sys, torch
tried = []
class Missing:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL}:
            tried.append(name)
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing)
import sdp4bit
for name in sdp4bit.__all__: getattr(sdp4bit, name)
assert not tried, tried
assert not torch.cuda.is_initialized()
"""


def python(code: str, *, cwd: Path = ROOT) -> str:
    """Standard output of `code`, run by a fresh interpreter in `cwd`."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.gloo
def test_import_tries_no_optional_package_and_leaves_cuda_alone() -> None:
    """Every public name is used, too."""
    python(IMPORT_WITHOUT_OPTIONAL)


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'quantise'"):
        sdp4bit.quantise  # noqa: B018
    assert dir(sdp4bit) == sorted(sdp4bit.__all__)


@pytest.mark.gloo
@pytest.mark.parametrize("format", [None, "%(name)s: %(message)s"])
def test_a_logged_warning_has_the_name_of_the_library_once(format: str | None) -> None:
    """By the library's handler, or by the program's."""
    configured = "" if format is None else f"logging.basicConfig(format={format!r}, level='INFO')\n"
    code = "import logging, sys; sys.stderr = sys.stdout; from sdp4bit.log import logger\n"
    lines = python(f"{code}{configured}logger.info('quiet'); logger.warning('loud')").splitlines()
    assert lines == ["sdp4bit: quiet"] * (format is not None) + ["sdp4bit: loud"]


def test_installed_version_is_the_one_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    assert importlib.metadata.version("sdp4bit") == sdp4bit.__version__


def test_every_change_is_tested_on_the_newest_supported_torch() -> None:
    newest = TESTED_TORCH.rpartition(" ")[2]
    pins = (ROOT / f"constraints-torch-{newest}.txt").read_text().splitlines()
    version = next(line for line in pins if line.startswith("torch=="))[len("torch==") :]
    assert version.startswith(f"{newest}.")
    assert f"make test-torch VERSION={version} " in (ROOT / ".ci/run").read_text()
    assert f'torch: "{version}"' in (ROOT / ".github/workflows/ci.yml").read_text()


@pytest.mark.gloo
@pytest.mark.slow
def test_wheel_ships_types_and_licence_and_all_packages(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "LICENSE", "README.md", *PACKAGES, "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    wheel = python("import setuptools.build_meta as b; print(b.build_wheel('.'))", cwd=tmp_path).split()[-1]
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        files = archive.namelist()
    assert {f"{name}/py.typed" for name in ("sdp4bit", *ADAPTERS)} <= set(files)
    assert any(name.endswith("licenses/LICENSE") for name in files)
    assert {name.split("/")[0].split("-")[0] for name in files} == set(PACKAGES)
    modules = {str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assets = {str(path.relative_to(ROOT)) for path in (ROOT / "sdp4bit_lab/report/assets").iterdir()}
    assert assets and modules | assets <= set(files)


def test_no_source_file_is_longer_than_600_lines() -> None:
    folders = (*PACKAGES, "tests", "benchmarks", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert len(lengths) > 100
    assert {path: lines for path, lines in lengths.items() if lines > 600} == {}


def test_tests_of_the_library_do_not_import_the_lab() -> None:
    """Exceptions are the calls of operators that the self-test compares, and the plans of other models."""
    found = []
    for path in (ROOT / "tests").rglob("*.py"):
        name = str(path.relative_to(ROOT))
        if name.startswith("tests/lab/") or name == "tests/ecosystem/test_llama.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [each for each in names if not each.startswith("sdp4bit_lab.selftest.cases")]
            found += [f"{name}: {each}" for each in names if each.startswith(("sdp4bit_lab", "tests.lab"))]
    assert found == []
