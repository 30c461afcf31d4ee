"""What MkDocs calls while it builds the site: pages made of files outside docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INCLUDE = re.compile(r"^<!-- include (\S+) -->$", re.MULTILINE)
"""A line of a page that stands for a file of the repository, up to its line END if it has one."""
END = "<!-- the site's first page ends here -->"
LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files outside docs/ that are pages of the site."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the files that a page includes; what is linked outside docs/ and is no page is named only."""
    up = "../" * page.file.src_uri.count("/")
    outside = f"../{up}"

    def upwards(found: re.Match[str]) -> str:
        is_outside = found[3].startswith(outside)
        return _from_root(found, found[3].removeprefix(outside), up=up) if is_outside else found[0]

    def included(found: re.Match[str]) -> str:
        text, _, _ = (ROOT / found[1]).read_text(encoding="utf-8").partition(END)
        return LINK.sub(lambda link: _from_root(link, link[3], up=up), text)

    return INCLUDE.sub(included, LINK.sub(upwards, markdown))


def _from_root(found: re.Match[str], target: str, *, up: str) -> str:
    """Return a link to a file, named from the root of the repository, for a page that is `up` from docs/."""
    is_image, text, _, anchor = found.groups(default="")
    if ":" in target:
        return found[0]
    inside = target.removeprefix("docs/") if target.startswith("docs/") else PAGES.get(target)
    return f"{is_image}[{text}]({up}{inside}{anchor})" if inside else text


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Link the pages that docstrings name as docs/NAME.md, and drop the roles of names."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    html = re.sub(r":(?:class|func|meth):(?=<code>)", "", html)
    return re.sub(r"docs/(\w+)\.md", r'<a href="../\1.html">\1</a>', html)
