"""Tests of this folder are skipped where a package that it needs is missing."""

import pytest

pytest.importorskip("rich")
pytest.importorskip("tokenizers")
pytest.importorskip("rich")
