"""Hooks of MkDocs: pages made of other files, the version, and links to the repository."""

from __future__ import annotations

import ast
import json
import os
import posixpath
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INCLUDE = re.compile(r"^<!-- include (\S+) -->$", re.MULTILINE)
"""A line of a page that represents a file of the repository."""
LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r'<picture>\n<source .*>\n<img src="([^"]+)" alt="([^"]+)">\n</picture>')
"""An image with a variant for dark pages, in the form that GitHub shows."""
IMAGE = re.compile(r"!\[([^\]]+)\]\(([^)#\s]+)\.png\)")
FOR_GITHUB = re.compile(r"<!-- github only -->\n.*?<!-- site -->\n", re.DOTALL)
"""Lines for readers of the files, such as how to build this site."""
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
CELL = re.compile(r"(<td[^>]*>)([^<]*(?:&nbsp;|\u00a0)[^<]*)</td>")
"""A cell whose spaces do not break."""
BUTTONS = (("Tutorial", "tutorial"), ("Install", "install"), ("Plan your cluster", "planning"))
"""Links at the top of the home page."""
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files outside docs/ that are pages of the site."""


def on_config(config: Any, **_: Any) -> Any:
    """Show version and repository in the header.

    The repository is the one that this checkout was cloned from, if it is public. If mike builds the site,
    the header has a list of versions.
    """
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}
    source = (ROOT / "sdp4bit" / "config.py").read_text(encoding="utf-8")
    version = re.search(r'^VERSION = "(.*)"$', source, re.MULTILINE)
    assert version is not None, "sdp4bit/config.py has no VERSION"
    config.site_name = f"{config.site_name} {version[1]}"
    config.copyright = f"{config.site_name}, Apache-2.0"
    config.repo_url = config.repo_url or _clone_url() or None
    if config.repo_url and not config.repo_name:
        config.repo_name = config.repo_url.partition("://")[2].partition("/")[2]
    return config


def _homes() -> dict[str, str]:
    """Return the pages of docs/ that another page includes, and the pages that include them."""
    return {
        found.removeprefix("docs/"): path.name
        for path in DOCS.glob("*.md")
        for found in INCLUDE.findall(path.read_text(encoding="utf-8"))
        if found.startswith("docs/")
    }


def on_files(files: Any, **_: Any) -> Any:
    """Leave out the pages that are parts of another one."""
    for name in _homes():
        files.remove(files.get_file_from_path(name))
    return files


def _clone_url() -> str:
    """Return the https address of the remote `origin`; an empty string for none or a local one."""
    command = ["git", "config", "--get", "remote.origin.url"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    url = re.sub(r"^(?:ssh://)?git@([\w.-]+)[:/]", r"https://\1/", found).removesuffix(".git")
    return url if re.fullmatch(r"https://[^@\s]+", url) else ""


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Fill in the files that a page includes, and point links at the site or the repository.

    Without a repository a link to a file outside docs/ becomes text, unless its target is a page of the site.
    """
    url = config.repo_url or ""
    up = "../" * page.file.src_uri.count("/")
    is_a_part = INCLUDE.fullmatch(markdown.strip()) is None
    homes = _homes()
    here = posixpath.dirname(f"docs/{page.file.src_uri}")

    def moved(text: str, folder: str) -> str:
        def link(found: re.Match[str]) -> str:
            path = posixpath.normpath(posixpath.join(folder, found[3]))
            stays = folder == here and path.startswith("docs/") and path.removeprefix("docs/") not in homes
            return (
                found[0] if stays or ":" in found[3] else _link_to(path, found, up=up, url=url, homes=homes)
            )

        return LINK.sub(link, text)

    def included(found: re.Match[str]) -> str:
        text = (ROOT / found[1]).read_text(encoding="utf-8")
        if found[1].endswith(".ipynb"):
            return "\n\n".join(_cells(text))
        text = PICTURE.sub(r"![\2](\1)", text)
        text = re.sub(r"^(?=#+ )", "#", text, flags=re.MULTILINE) if is_a_part else text
        return moved(text, posixpath.dirname(found[1]))

    def of_both_schemes(found: re.Match[str]) -> str:
        dark = f"{found[2]}-dark.png"
        if not (ROOT / here / dark).exists():
            return found[0]
        return f"![{found[1]}]({found[2]}.png#only-light)\n![{found[1]}]({dark}#only-dark)"

    text = INCLUDE.sub(included, moved(FOR_GITHUB.sub("", markdown), here))
    text = IMAGE.sub(of_both_schemes, text)
    if page.file.src_uri == "index.md":
        title, tagline, rest = text.split("\n\n", 2)
        buttons = [f"[{name}]({target}.md){{ .md-button }}" for name, target in BUTTONS]
        buttons[0] = buttons[0].replace(".md-button", ".md-button .md-button--primary")
        text = "\n\n".join([title, tagline, "\n".join(buttons), rest])
    return text


def _breaking_cell(found: re.Match[str]) -> str:
    text = found[2].replace("&nbsp;", " ").replace("\u00a0", " ")
    return f'{found[1]}<span class="number">{text}</span></td>'


def _cells(notebook: str) -> Iterator[str]:
    """Yield the cells of a notebook and their outputs as Markdown."""
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                yield f"```text\n{''.join(output['text'])}```"
            else:
                png = output["data"]["image/png"]
                yield f'<img alt="drawn by the code above" src="data:image/png;base64,{png}">'


def _link_to(path: str, found: re.Match[str], *, up: str, url: str, homes: dict[str, str]) -> str:
    """Return a link to a file of the repository, for a page that is `up` from docs/."""
    is_image, text, _, anchor = found.groups(default="")
    inside = path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path)
    if inside is None:
        return f"[{text}]({url}/blob/HEAD/{path}{anchor or _line_of(text, path)})" if url else text
    if inside in homes:
        title = (DOCS / inside).read_text(encoding="utf-8").partition("\n# ")[2].partition("\n")[0]
        inside, anchor = homes[inside], anchor or f"#{title.lower().replace(' ', '-')}"
    return f"{is_image}[{text}]({up}{inside}{anchor})"


def _line_of(text: str, path: str) -> str:
    """Return the anchor of the function that a link to a source file names; an empty string for none."""
    if not path.endswith(".py"):
        return ""
    node: ast.AST | None = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for name in text.strip("`").split("."):
        below = ast.walk(node) if node is not None else ()
        node = next((each for each in below if getattr(each, "name", "") == name), None)
    return f"#L{node.lineno}" if isinstance(node, ast.ClassDef | ast.FunctionDef) else ""


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """Keep options on one line. In the reference, link the pages that docstrings name, and drop roles."""
    if boost := config.extra["boosts"].get(page.file.src_uri):
        page.meta["search"] = {"boost": boost}
    html = re.sub(
        r"<code>[^<]*</code>",
        lambda found: OPTION.sub(r'<span class="option">\g<0></span>', found[0]),
        html,
    )
    # Ranges and intervals break on a phone only.
    html = CELL.sub(_breaking_cell, html)
    if not page.file.src_uri.startswith("reference/"):
        return html
    html = re.sub(r":(?:class|func|meth):(?=<code>)", "", html)
    return re.sub(r"docs/(\w+)\.md", r'<a href="../\1.html">\1</a>', html)
