"""Addresses in messages: pages of the documentation, and commands that install packages.

Both constants are empty in a checkout, whose user has the pages. `.ci/addresses.py` fills them in before a
release is built.
"""

from __future__ import annotations

from sdp4bit.config import VERSION

REPOSITORY = ""
"""https address of the repository of a release."""

DOCUMENTATION = ""
"""https address of the documentation of a release, with a slash at the end."""


def page(name: str) -> str:
    """Return the address of a page of the documentation, or its file in the repository.

    Args:
        name: "ddp" for docs/ddp.md, "telemetry#why-your-ratio-differs" for a section.
    """
    file, sign, section = name.partition("#")
    address = f"{DOCUMENTATION}{file}.html" if DOCUMENTATION else f"docs/{file}.md"
    return f"{address}{sign}{section}"


def install(extra: str) -> str:
    """Return the command that installs the packages of an extra. No package index has sdp4bit."""
    if REPOSITORY:
        return f'pip install "sdp4bit[{extra}] @ git+{REPOSITORY}@v{VERSION}"'
    return f'pip install ".[{extra}]" in the checkout'
