"""What a user gets from `pip install sdp4bit` and `import sdp4bit`. Layer: fresh processes."""

import ast
import importlib.metadata
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import sdp4bit
from tests import ROOT

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

IMPORT_AND_REPORT = """
import json, sys
import sdp4bit, torch
for name in sdp4bit.__all__: getattr(sdp4bit, name)
print(json.dumps({"modules": list(sys.modules), "cuda": torch.cuda.is_initialized()}))
"""

HELP_OF_EVERYTHING = """
import sys
from sdp4bit_lab.cli import COMMANDS, main
for arguments in [], *([name] for name in COMMANDS):
    try:
        main([*arguments, "--help"])
    except SystemExit as error:
        assert error.code == 0
assert "torch" not in sys.modules
"""

BLOCK_OPTIONAL = f"""
import sys
for name in {OPTIONAL}:
    sys.modules[name] = None
"""


def python(code: str, *, cwd: Path = ROOT) -> str:
    """Standard output of `code`, run by a fresh interpreter in `cwd`."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def after_import() -> dict[str, Any]:
    """State of a fresh process after `import sdp4bit` and the use of every name."""
    return json.loads(python(IMPORT_AND_REPORT))


def test_import_loads_no_optional_package(after_import: dict[str, Any]) -> None:
    assert "sdp4bit" in after_import["modules"]
    assert [name for name in OPTIONAL if name in after_import["modules"]] == []


def test_import_does_not_initialise_cuda(after_import: dict[str, Any]) -> None:
    assert after_import["cuda"] is False


def test_import_works_without_optional_packages() -> None:
    python(BLOCK_OPTIONAL + "import sdp4bit\nfor name in sdp4bit.__all__: getattr(sdp4bit, name)")


def test_no_help_imports_torch() -> None:
    pytest.importorskip("tyro")
    python(HELP_OF_EVERYTHING)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command is given: use one of pretrain, compare, demo"),
        (["pretrian"], "'pretrian' is not a command: did you mean pretrain?"),
    ],
)
def test_without_a_known_command_the_known_ones_are_named(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "sdp4bit_lab", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'quantise'"):
        sdp4bit.quantise  # noqa: B018
    assert set(sdp4bit.__all__) <= set(dir(sdp4bit))


def test_all_is_a_literal_list_in_order() -> None:
    tree = ast.parse((ROOT / "sdp4bit/__init__.py").read_text())
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert len(values) == 1
    names = ast.literal_eval(values[0])
    assert names == sdp4bit.__all__
    # The order of ruff's RUF022: constants, classes, functions, each by name.
    assert names == sorted(set(names), key=lambda n: (not n.isupper(), not n[0].isupper(), n))


def test_every_public_name_resolves() -> None:
    assert [name for name in sdp4bit.__all__ if not hasattr(sdp4bit, name)] == []


def test_installed_version_is_the_one_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    assert importlib.metadata.version("sdp4bit") == sdp4bit.__version__


@pytest.mark.slow
def test_wheel_ships_types_and_licence_and_the_two_packages(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "LICENSE", "README.md", "sdp4bit", "sdp4bit_lab", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    wheel = python("import setuptools.build_meta as b; print(b.build_wheel('.'))", cwd=tmp_path).split()[-1]
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        files = archive.namelist()
    assert "sdp4bit/py.typed" in files
    assert any(name.endswith("licenses/LICENSE") for name in files)
    assert {name.split("/")[0].split("-")[0] for name in files} == {"sdp4bit", "sdp4bit_lab"}
    packages = (ROOT / "sdp4bit", ROOT / "sdp4bit_lab")
    modules = {str(path.relative_to(ROOT)) for folder in packages for path in folder.rglob("*.py")}
    assets = {str(path.relative_to(ROOT)) for path in (ROOT / "sdp4bit_lab/report/assets").iterdir()}
    assert assets and modules | assets <= set(files)


def test_no_source_file_is_longer_than_600_lines() -> None:
    folders = ("sdp4bit", "sdp4bit_lab", "tests", "benchmarks", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert len(lengths) > 100
    assert {path: lines for path, lines in lengths.items() if lines > 600} == {}
