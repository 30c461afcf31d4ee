"""The documentation: links between files of the repository, and the site that `make docs` builds.

Layer: files; one process builds the site."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pytest

import sdp4bit
import sdp4bit.collectives
import sdp4bit_megatron
from tests import ADAPTERS, ROOT
from tests.ranks import guard

pytestmark = pytest.mark.lab

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FIRST_HITS = {
    "DDP": "ddp",
    "OOM": "troubleshooting",
    "disable": "install",
    "error": "troubleshooting",
    "how to install": "install",
    "run the tests": "install",
    "uninstall": "install",
}
"""Pages that a search finds first."""
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
    files = [path for name in ("sdp4bit", *ADAPTERS) for path in (ROOT / name).rglob("*.py")]
    texts = [text for path in files for text in _constants(path)]
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


def script(name: str) -> ModuleType:
    """Return a program of the site as a module."""
    spec = spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """Return the hooks of the site."""
    return script("hooks")


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


def test_a_link_to_a_function_leads_to_its_line(hooks: ModuleType) -> None:
    path = "sdp4bit/collectives/weights.py"
    lines = (ROOT / path).read_text().splitlines()
    page = SimpleNamespace(file=SimpleNamespace(src_uri="walk.md"))
    config = SimpleNamespace(repo_url="https://example.com/one/two")
    for name, line in (("Weights.refresh", "    def refresh("), ("Due", "class Due(")):
        link = hooks.on_page_markdown(f"[`{name}`](../{path})", page, config)
        number = link.rpartition(f"{path}#L")[2].removesuffix(")")
        assert lines[int(number) - 1].startswith(line)
    for name in ("Due.refresh", "weights.py"):
        assert hooks.on_page_markdown(f"[`{name}`](../{path})", page, config).endswith(f"{path})")


def test_a_page_contains_the_tables_that_it_includes(hooks: ModuleType) -> None:
    def shown(name: str, text: str) -> str:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name))
        filled: str = hooks.on_page_markdown(text, page, SimpleNamespace(repo_url=None))
        return filled

    text = shown("one-gpu.md", "# GPU\n\n[a](results/nccl.md#x)\n\n<!-- include docs/results/nccl.md -->")
    assert "\n## Step times over NCCL\n" in text and "\n### h100: 2 nodes x 2 ranks\n" in text
    assert "[a](one-gpu.md#x)" in text and "[How this is measured](one-gpu.md)" in text
    assert shown("reference/a.md", "[b](../results/nccl.md)") == "[b](../one-gpu.md#step-times-over-nccl)"
    assert (
        shown("reference/a.md", "[c](../method.md#x) f[d](method.md)")
        == "[c](../method.md#x) f[d](method.md)"
    )
    assert shown("lora.md", "[e](../examples/lora_trl.py)") == "e"
    home = shown("index.md", "<!-- include README.md -->")
    assert home.startswith("# sdp4bit\n") and "\n[Tutorial](tutorial.md){ .md-button " in home
    assert shown("a.md", "# A\n<!-- github only -->\n`make docs`\n<!-- site -->\nB\n") == "# A\nB\n"
    notebook = shown("notebook.md", "<!-- include docs/method.ipynb -->")
    assert "\n## Two levels\n" in notebook and notebook.count("data:image/png;base64,") == 5


def test_only_a_versioned_site_has_a_list_of_versions(
    hooks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its list is a file that mike writes beside the versions."""
    for version, expected in ((None, {}), ("0.2.0", {"version": {"provider": "mike"}})):
        if version is not None:
            monkeypatch.setenv("MIKE_DOCS_VERSION", version)
        config = SimpleNamespace(
            site_name="name", repo_url="https://example.com/a/b", repo_name="b", extra={}
        )
        hooks.on_config(config)
        assert config.extra == expected


def test_signatures_in_pages_are_those_of_the_code() -> None:
    found = {}
    for page, function in (
        ("fsdp2", sdp4bit.quantize_communication),
        ("ddp", sdp4bit.DDPCommState),
        ("megatron", sdp4bit_megatron.quantize_communication),
    ):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        (found[page],) = re.findall(rf"^`{function.__name__}(\(.*\))`", text, re.MULTILINE)
        signature = inspect.signature(function)
        parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        plain = signature.replace(parameters=parameters, return_annotation=signature.empty)
        assert found[page] == str(plain).replace("'", '"'), page


def test_the_picture_of_a_step_is_the_one_that_its_program_draws() -> None:
    assert (ROOT / "docs/images/architecture.svg").read_text() == script("architecture").picture()


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows() -> None:
    notebook = json.loads((ROOT / "docs/method.ipynb").read_text(encoding="utf-8"))

    def outputs(cells: list[dict[str, Any]]) -> list[str]:
        # The last digits depend on the kind of CPU.
        return [
            re.sub(r"\d+\.\d+", "#", "".join(output.get("text", ["figure"])))
            for cell in cells
            for output in cell.get("outputs", ())
        ]

    assert outputs(script("notebook").executed(notebook)["cells"]) == outputs(notebook["cells"])


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
        timeout=guard(240),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: Page(path) for path in folder.rglob("*.html")}


@pytest.mark.gloo
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


@pytest.mark.gloo
@pytest.mark.slow
def test_lists_and_tables_are_drawn_and_every_public_name_is_in_the_reference(site: dict[Path, Page]) -> None:
    """Markdown shows where lists are nested by two spaces or follow a paragraph at once."""
    for page in site.values():
        text = re.sub(r"<pre.*?</pre>", "", page.path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"\|\s*:?---|^(?:<p>)?(?:[*-]|\d+\.) ", text, re.MULTILINE), page.path.name
    ids = {each for page in site.values() if page.path.parent.name == "reference" for each in page.ids}
    undocumented = {"__version__", "PRESETS"}
    names = {f"sdp4bit.{name}" for name in sdp4bit.__all__ if name not in undocumented}
    names |= {f"sdp4bit_megatron.{name}" for name in sdp4bit_megatron.__all__}
    names |= {f"sdp4bit.collectives.{name}" for name in sdp4bit.collectives.__all__}
    assert names <= ids, names - ids


def dom(page: Path, query: str, profile: Path) -> str:
    """Return a page of the site after its scripts have run, in a browser that loads it from the disk."""
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=15000")
    command = [str(BROWSER), *options, f"--user-data-dir={profile}", f"{page.as_uri()}{query}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or Chrome")
def test_a_search_finds_the_right_page_first(site: dict[Path, Page], tmp_path: Path) -> None:
    home = min((path for path in site if path.name == "index.html"), key=lambda path: len(path.parts))
    found = {}
    for words in FIRST_HITS:
        text = dom(home, f"?q={quote(words)}", tmp_path)
        links = re.findall(r'<a href="[^"]*/([\w-]+)\.html[^"]*" class="md-search-result__link"', text)
        found[words] = links[0] if links else None
    assert found == FIRST_HITS


@pytest.mark.gloo
@pytest.mark.slow
def test_options_are_not_broken_and_no_page_is_for_readers_of_the_files(site: dict[Path, Page]) -> None:
    for page in site.values():
        text = page.path.read_text(encoding="utf-8")
        assert "<code>--" not in text, page.path.name
        assert "fills in the docstrings" not in text and "github only" not in text, page.path.name
