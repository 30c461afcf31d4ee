"""The documentation: links between files of the repository, and the site that `make docs` builds.

Layer: files; one process builds the site."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

import sdp4bit
import sdp4bit.collectives
from tests import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python")
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Attributes whose targets a browser loads by itself."""
INCLUDED = re.compile(r"<!-- include (\S+) -->")
"""A line that the site replaces by a file."""


@cache
def markdown(path: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```$|^    .*?$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = markdown(path)
    if alone := INCLUDED.fullmatch(text.strip()):
        text = markdown(ROOT / alone[1])
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def _constants(path: Path) -> Iterator[str]:
    """Yield the strings of a module; a sentence that is cut by values is several of them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_that_are_explained_are_those_of_the_library() -> None:
    texts = [text for path in (ROOT / "sdp4bit").rglob("*.py") for text in _constants(path)]
    known = [*texts, *vars(sdp4bit), "Missing key in checkpoint state_dict: comm.format_version"]  # torch's
    cells = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(cells) > 10
    for cell in cells:
        for part in re.split(r"3", cell.split("`")[1]):
            assert any(part.strip() in text for text in known), cell


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", markdown(page))):
        parts = urlsplit(target)
        if parts.scheme:
            assert parts.scheme == "https" and parts.netloc, target
            continue
        file = page.parent / unquote(parts.path) if parts.path else page
        assert file.exists(), f"{page.name}: {target}"
        if parts.fragment and file.suffix == ".md" and file.parent.name != "reference":
            assert parts.fragment in anchors(file.resolve()), f"{page.name}: {target}"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """Return the hooks of the site."""
    spec = spec_from_file_location("hooks", ROOT / "docs" / "site" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("remote", "url"),
    [
        ("https://example.com/one/two.git", "https://example.com/one/two"),
        ("git@example.com:one/two.git", "https://example.com/one/two"),
        ("ssh://git@example.com/one/two", "https://example.com/one/two"),
        ("https://name@example.com/one/two", ""),
        ("/srv/two.git", ""),
        ("", ""),
    ],
)
def test_the_site_links_a_public_repository_only(
    remote: str, url: str, hooks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=f"{remote}\n")
    monkeypatch.setattr(hooks.subprocess, "run", lambda *_, **__: done)
    config = SimpleNamespace(site_name="name", repo_url=None, repo_name=None)
    hooks.on_config(config)
    assert (config.repo_url or "") == url
    assert config.repo_name == ("one/two" if url else None)
    assert config.site_name == f"name {sdp4bit.__version__}"


def test_a_page_contains_the_tables_that_it_includes(hooks: ModuleType) -> None:
    def shown(name: str, text: str) -> str:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name))
        filled: str = hooks.on_page_markdown(text, page, SimpleNamespace(repo_url=None))
        return filled

    text = shown("speed.md", "# Speed\n\n[a](results/speed.md#x)\n\n<!-- include docs/results/speed.md -->")
    assert "\n## Seconds per step\n" in text and "\n### Profile of a step\n" in text
    assert "[a](speed.md#x)" in text and "[How this is measured](speed.md)" in text
    assert shown("reference/a.md", "[b](../results/speed.md)") == "[b](../speed.md#seconds-per-step)"
    assert (
        shown("reference/a.md", "[c](../method.md#x) f[d](method.md)")
        == "[c](../method.md#x) f[d](method.md)"
    )
    assert shown("lora.md", "[e](../examples/lora_trl.py)") == "e"
    assert shown("index.md", "<!-- include README.md -->").startswith("# sdp4bit")


@dataclass
class Page(HTMLParser):
    """A page of the site: its links, the files that a browser loads for it, and its anchors."""

    path: Path
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        is_canonical = given.get("rel") in ("canonical", "next", "prev")
        if FETCHED.get(tag) in given and not is_canonical:
            self.fetched.append(given[FETCHED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Return the pages of the site, which has been built without a warning."""
    missing = [name for name in NEEDED if find_spec(name.partition(".")[0]) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: make install")
    folder = tmp_path_factory.mktemp("site").resolve()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: Page(path) for path in folder.rglob("*.html")}


@pytest.mark.slow
def test_links_of_the_site_lead_somewhere_and_it_loads_nothing_from_elsewhere(site: dict[Path, Page]) -> None:
    assert len(site) > 30
    for page in site.values():
        for target in page.fetched:
            assert not urlsplit(target).netloc and not target.startswith("//"), f"{page.path.name}: {target}"
        # Links of the page for missing ones are from the root of a server.
        for link in page.links if page.path.name != "404.html" else ():
            parts = urlsplit(link)
            if parts.scheme:
                assert parts.scheme in ("https", "mailto"), f"{page.path.name}: {link}"
                continue
            file = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            file = file / "index.html" if file.is_dir() else file
            assert file.exists(), f"{page.path.name}: {link}"
            if parts.fragment and file in site:
                assert unquote(parts.fragment) in site[file].ids | {"__top"}, f"{page.path.name}: {link}"
    folder = min(site, key=lambda path: len(path.parts)).parent
    for sheet in folder.rglob("*.css"):
        outside = re.findall(r"(?:@import|url\()\s*['\"]?((?:https?:)?//[^'\")]+)", sheet.read_text())
        assert not outside, f"{sheet.name}: {outside}"


@pytest.mark.slow
def test_lists_and_tables_are_drawn_and_every_public_name_is_in_the_reference(site: dict[Path, Page]) -> None:
    """Markdown shows where lists are nested by two spaces or follow a paragraph at once."""
    for page in site.values():
        text = re.sub(r"<pre.*?</pre>", "", page.path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"\|\s*:?---|^(?:<p>)?(?:[*-]|\d+\.) ", text, re.MULTILINE), page.path.name
    ids = {each for page in site.values() if page.path.parent.name == "reference" for each in page.ids}
    undocumented = {"__version__", "PRESETS", "megatron"}
    names = {f"sdp4bit.{name}" for name in sdp4bit.__all__ if name not in undocumented}
    names |= {f"sdp4bit.megatron.{name}" for name in sdp4bit.megatron.__all__}
    names |= {f"sdp4bit.collectives.{name}" for name in sdp4bit.collectives.__all__}
    assert names <= ids, names - ids
