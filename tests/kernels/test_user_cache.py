"""Compiled kernels are kept for all checkouts of a user. Layer: no process; fresh ones for checkouts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

pytest.importorskip("numba", reason="needs numba")

import llvmlite
import numba

from sdp4bit.kernels.cpu import kernels, user_cache

COMPILE = """
import torch
from sdp4bit.quantization import ops, reference
words = torch.arange(4096, dtype=torch.float32)
results = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
for backend, out in zip(("numba", "reference"), results):
    with ops.use_backend(backend):
        ops.add_checksum(words, out=out)
assert results[0] == results[1] != 0
from sdp4bit.kernels.cpu import compilation
print(compilation.__file__)
"""


def started(checkout: Path, home: Path) -> subprocess.Popen[str]:
    """Start a process that needs one kernel."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE],
        cwd=checkout,
        env=kept | {"XDG_CACHE_HOME": str(home), "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def compiled(process: subprocess.Popen[str], checkout: Path) -> bool:
    """Return whether a process has compiled, and not read the cache."""
    printed, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    assert Path(printed.strip()).is_relative_to(checkout)
    return "compiling CPU kernels" in errors


def test_another_checkout_compiles_only_if_its_sources_differ(tmp_path: Path) -> None:
    first, second, home = tmp_path / "first", tmp_path / "second", tmp_path / "home"
    for checkout in (first, second):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "sdp4bit", checkout / "sdp4bit", ignore=ignored)
    both = [started(checkout, home) for checkout in (first, second)]
    assert sorted(map(compiled, both, (first, second))) == [False, True]
    (folder,) = (home / "sdp4bit" / "kernels").iterdir()
    assert list(folder.glob("*.nbi")) and folder.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.glob("*/sdp4bit/kernels/cpu/__pycache__/*.nb?"))
    with (second / "sdp4bit/kernels/cpu/tiles.py").open("a") as file:
        file.write("# another version\n")
    assert compiled(started(second, home), second)
    assert not compiled(started(first, home), first)
    assert len(list(folder.parent.iterdir())) == 2


def test_without_a_home_that_can_be_written_kernels_are_kept_beside_the_sources(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "sdp4bit", tmp_path / "sdp4bit", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "file").touch()
    for expected in (True, False):
        assert compiled(started(tmp_path, tmp_path / "file"), tmp_path) is expected
    assert list(tmp_path.glob("sdp4bit/kernels/cpu/__pycache__/*.nbi"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    yield tmp_path / "sdp4bit" / "kernels"
    user_cache.user_folder.cache_clear()


def folder_of() -> Path | None:
    """Return the folder as a new process would."""
    user_cache.user_folder.cache_clear()
    return user_cache.user_folder()


def test_the_folders_that_were_used_last_are_kept(home: Path) -> None:
    for number in range(20):
        (home / f"{number}").mkdir(parents=True)
        os.utime(home / f"{number}", (1000 + number, 1000 + number))
    folder = folder_of()
    assert folder is not None and folder.parent == home
    assert {each.name for each in home.iterdir()} == {folder.name, *map(str, range(13, 20))}
    # One that is not new removes none, and has been used.
    os.utime(folder, (1, 1))
    (home / "more").mkdir()
    assert folder_of() == folder and len(list(home.iterdir())) == 9
    assert folder.stat().st_mtime > 2000


def test_each_version_and_processor_has_a_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [folder_of()]
    for owner, name, value in (
        (numba, "__version__", "0"),
        (llvmlite, "__version__", "0"),
        (user_cache.binding, "get_host_cpu_name", lambda: "another"),
        (numba.config, "CPU_NAME", "generic"),
        (user_cache, "_SOURCES", user_cache._SOURCES[1:]),
    ):
        monkeypatch.setattr(owner, name, value)
        folders.append(folder_of())
    assert None not in folders and len({*folders}) == 6


def test_a_folder_of_another_user_is_not_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder_of() is not None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert folder_of() is None


def test_functions_of_others_and_a_place_of_the_user_are_left_to_numba(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_cache.install()
    user_cache.install()
    assert folder_of() == Path(numba.njit(cache=True)(kernels.sum_words).stats.cache_path)
    assert Path(numba.njit(cache=True)(folder_of).stats.cache_path).parent == Path(__file__).parent
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "chosen"))
    assert Path(numba.njit(cache=True)(kernels.sum_words).stats.cache_path).parent == tmp_path / "chosen"
