"""Addresses in messages: pages of the documentation, and commands that install packages.

Both constants are empty in a checkout, whose user has the pages. `.ci/addresses.py` fills them in before a
release is built.
"""

from __future__ import annotations

from pathlib import Path

from sdp4bit.config import VERSION

REPOSITORY = ""
"""https address of the repository of a release."""

DOCUMENTATION = ""
"""https address of the documentation of a release, with a slash at the end."""


def page(name: str) -> str:
    """Return the address of a page of the documentation, or its file in the checkout.

    The file is relative to the working directory if that contains it.

    Args:
        name: "ddp" for docs/ddp.md, "telemetry#why-your-ratio-differs" for a section.
    """
    file, sign, section = name.partition("#")
    if DOCUMENTATION:
        return f"{DOCUMENTATION}{file}.html{sign}{section}"
    path, here = Path(__file__).parents[1] / "docs" / f"{file}.md", Path.cwd()
    if not path.is_file():
        return f"docs/{file}.md{sign}{section} in the source of sdp4bit {VERSION}"
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}{sign}{section}"


def install(extra: str) -> str:
    """Return the command that installs the packages of an extra. No package index has sdp4bit."""
    if REPOSITORY:
        return f'pip install "sdp4bit[{extra}] @ git+{REPOSITORY}@v{VERSION}"'
    return f'pip install ".[{extra}]" in the checkout'
