"""Fixtures of the programs' tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of a few documents; runs keep its tokens in a folder beside it."""
    from tests.lab.pretrain.tiny_runs import write_text

    return write_text(tmp_path_factory.mktemp("text") / "text.txt")
