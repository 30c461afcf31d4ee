"""The packages that `pip install` chooses today: README's line without pins, then the tutorial.

Layer: a fresh environment of several GB, which is removed again; 2 ranks over gloo.
"""

from __future__ import annotations

import re
import shutil
import sys
import venv
from pathlib import Path

import pytest

from tests import ROOT
from tests.lab.test_user_path import copy_sources, follow_the_tutorial, run

pytestmark = pytest.mark.gloo


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_readmes_line_installs_packages_that_run_the_tutorial(tmp_path: Path) -> None:
    (wanted,) = re.findall(r'^pip install "(\.\[.*?\])"', (ROOT / "README.md").read_text(), re.MULTILINE)
    source, environment, scripts = (tmp_path / name for name in ("source", "environment", "scripts"))
    source.mkdir()
    scripts.mkdir()
    copy_sources(source)
    venv.create(environment, symlinks=True)
    python = environment / "bin/python"
    try:
        pip = (sys.executable, "-m", "pip", "--python", python)
        run(*pip, "install", "--quiet", wanted, cwd=source, timeout=1200)
        print(run(*pip, "list", cwd=source))  # of a failure, which versions
        follow_the_tutorial(python, scripts)
    finally:
        shutil.rmtree(environment)
