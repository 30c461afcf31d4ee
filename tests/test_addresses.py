"""Addresses in messages, in a checkout and in a release. Layer: files; no process."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import sdp4bit
from sdp4bit import addresses
from tests import PACKAGES, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY, DOCUMENTATION = "https://example.com/one/two", "https://one.example.com/two/1.0/"


def calls(name: str) -> Iterator[str]:
    """Yield the texts that the packages pass to a function of `addresses`."""
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                yield from (each.value for each in node.args if isinstance(each, ast.Constant))


def test_every_page_and_section_that_a_message_names_exists() -> None:
    pages = set(calls("page"))
    assert len(pages) > 5
    for page in pages:
        file, _, section = page.partition("#")
        text = (ROOT / "docs" / f"{file}.md").read_text(encoding="utf-8")
        titles = [
            line.lstrip("# ").lower().replace(" ", "-") for line in text.splitlines() if line[:1] == "#"
        ]
        assert not section or section in titles, page


def test_no_message_names_a_page_past_these_functions() -> None:
    """Docstrings and comments do, which the site links."""
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        if path.name == "addresses.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                assert "docs/" not in node.value and "sdp4bit[" not in node.value, f"{path}: {node.value}"


def test_a_checkout_names_its_files_and_a_release_its_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(addresses.__file__).parents[1])
    assert addresses.page("ddp") == "docs/ddp.md"
    assert addresses.page("telemetry#cost") == "docs/telemetry.md#cost"
    monkeypatch.chdir(tmp_path)
    assert addresses.page("ddp#cost") == f"{Path(addresses.__file__).parents[1]}/docs/ddp.md#cost"
    assert addresses.page("nowhere") == f"docs/nowhere.md in the source of sdp4bit {sdp4bit.__version__}"
    assert addresses.install("lab") == 'pip install ".[lab]" in the checkout'
    monkeypatch.setattr(addresses, "REPOSITORY", REPOSITORY)
    monkeypatch.setattr(addresses, "DOCUMENTATION", DOCUMENTATION)
    assert addresses.page("telemetry#cost") == f"{DOCUMENTATION}telemetry.html#cost"
    assert addresses.install("lab") == f'pip install "sdp4bit[lab] @ git+{REPOSITORY}@v{sdp4bit.__version__}"'


def test_a_release_writes_its_addresses_once(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "sdp4bit/addresses.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    write = _module(ROOT / ".ci/addresses.py").write_addresses
    write(tmp_path, repository=REPOSITORY, documentation=DOCUMENTATION)
    filled = _module(tmp_path / "sdp4bit/addresses.py")
    assert (filled.REPOSITORY, filled.DOCUMENTATION) == (REPOSITORY, DOCUMENTATION)
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls.pop("Paper").startswith("https://arxiv.org/")
    assert urls == {
        "Homepage": DOCUMENTATION,
        "Repository": REPOSITORY,
        "Issues": f"{REPOSITORY}/issues",
        "Changelog": f"{DOCUMENTATION}changelog.html",
    }
    with pytest.raises(SystemExit, match="filled in already"):
        write(tmp_path, repository=REPOSITORY, documentation=DOCUMENTATION)
    for wrong in ("http://example.com/one/two", "https://example.com/one/two/", 'https://a/"b'):
        with pytest.raises(SystemExit, match="https"):
            write(ROOT, repository=wrong, documentation=DOCUMENTATION)


def _module(path: Path):  # type: ignore[no-untyped-def]
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
