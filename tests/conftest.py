"""What the tests of the programs share: the packages that they need, and a text to train on."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = ("tyro", "rich", "matplotlib", "tokenizers", "scipy", "jinja2", "yaml")
MISSING = [name for name in PACKAGES if find_spec(name) is None]
NEEDING = (
    *("compare/*", "report/*", "plan/test_[cdp]*.py"),
    *("pretrain/test_*.py", "pretrain/config/*", "pretrain/model/*", "pretrain/step/*"),
)
collect_ignore_glob = [*NEEDING] if MISSING else []


def pytest_report_header() -> str:
    return f"left out, as {', '.join(MISSING)} is missing: tests of the programs" if MISSING else ""


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of a few documents; runs keep its tokens in a folder beside it."""
    from tests.pretrain.tiny_runs import write_text

    return write_text(tmp_path_factory.mktemp("text") / "text.txt")
