"""Hooks of MkDocs: pages made of files outside docs/, the version, and links to the repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INCLUDE = re.compile(r"^<!-- include (\S+) -->$", re.MULTILINE)
"""A line of a page that represents a file of the repository."""
URL = "REPOSITORY_URL"
"""Placeholder of README.md for the address of the repository."""
LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files outside docs/ that are pages of the site."""


def on_config(config: Any, **_: Any) -> Any:
    """Show the version on every page, and link the repository that this checkout was cloned from, if any."""
    source = (ROOT / "sdp4bit" / "config.py").read_text(encoding="utf-8")
    version = re.search(r'^VERSION = "(.*)"$', source, re.MULTILINE)
    assert version is not None, "sdp4bit/config.py has no VERSION"
    config.copyright = f"{config.site_name} {version[1]}, Apache-2.0"
    config.repo_url = config.repo_url or _clone_url() or None
    return config


def _clone_url() -> str:
    """Return the https address of the remote `origin`; an empty string for none or a local one."""
    command = ["git", "config", "--get", "remote.origin.url"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    url = re.sub(r"^(?:ssh://)?git@([\w.-]+)[:/]", r"https://\1/", found).removesuffix(".git")
    return url if re.fullmatch(r"https://[^@\s]+", url) else ""


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Fill in the files that a page includes, and point links outside docs/ at the site or the repository.

    Without a repository such a link becomes text, unless its target is a page of the site.
    """
    url = config.repo_url or ""
    up = "../" * page.file.src_uri.count("/")
    outside = f"../{up}"

    def upwards(found: re.Match[str]) -> str:
        is_outside = found[3].startswith(outside)
        return _from_root(found, found[3].removeprefix(outside), up=up, url=url) if is_outside else found[0]

    def included(found: re.Match[str]) -> str:
        text = (ROOT / found[1]).read_text(encoding="utf-8")
        text = text.replace(URL, url or URL)
        return LINK.sub(lambda link: _from_root(link, link[3], up=up, url=url), text)

    return INCLUDE.sub(included, LINK.sub(upwards, markdown))


def _from_root(found: re.Match[str], target: str, *, up: str, url: str) -> str:
    """Return a link to a file, named from the root of the repository, for a page that is `up` from docs/."""
    is_image, text, _, anchor = found.groups(default="")
    if ":" in target:
        return found[0]
    inside = target.removeprefix("docs/") if target.startswith("docs/") else PAGES.get(target)
    if inside is None:
        return f"[{text}]({url}/blob/HEAD/{target}{anchor})" if url else text
    return f"{is_image}[{text}]({up}{inside}{anchor})"


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Link the pages that docstrings name as docs/NAME.md, and drop the roles of names."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    html = re.sub(r":(?:class|func|meth):(?=<code>)", "", html)
    return re.sub(r"docs/(\w+)\.md", r'<a href="../\1.html">\1</a>', html)
