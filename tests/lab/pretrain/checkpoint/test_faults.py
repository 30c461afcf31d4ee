"""Writers that are killed, and disks that are full: checkpoints are complete or absent, and older ones stay.

Layer: one rank in this process; writers that are killed are forked.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sdp4bit.collectives.errors import ExchangeError
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint import folder as checkpoint_folder
from sdp4bit_lab.pretrain.checkpoint.checkpointer import seconds_for_a_save
from sdp4bit_lab.pretrain.checkpoint.files import CheckpointError, HashedFile
from tests.lab.pretrain.checkpoint.saved_runs import load_step, names, one_rank, save_step


@contextmanager
def every_operation(call: Callable[[], None]) -> Iterator[None]:
    """Call the function before each write, synchronization, renaming and deletion inside the block."""

    def before(operation: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            call()
            return operation(*args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", before(os.fsync))
        patch.setattr(HashedFile, "flush", before(HashedFile.flush))
        for name in ("rename", "replace", "mkdir", "iterdir"):
            patch.setattr(Path, name, before(getattr(Path, name)))
        patch.setattr(checkpoint_folder.shutil, "rmtree", before(shutil.rmtree))
        yield


def save_in_a_fork(folder: Path, step: int, *, killed_at: int, keep_last: int | None = None) -> bool:
    """Return whether the writer was killed, at the operation of this number, or else came to its end."""
    child = os.fork()
    if child == 0:
        left = killed_at

        def count_down() -> None:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

        with one_rank(), every_operation(count_down):
            save_step(folder, step, keep_last=keep_last)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
    return status != 0


def test_a_writer_killed_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path):
    """Steps 1 to 3 are there and step 3 is saved again: renaming, replacing and deleting are all in it."""
    original, moment, killed = tmp_path / "original", 0, True
    with one_rank():
        for step in (1, 2, 3):
            save_step(original, step)
    while killed:
        folder = shutil.copytree(original, tmp_path / str(moment))
        killed = save_in_a_fork(folder, 3, killed_at=moment, keep_last=2)
        with one_rank(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert load_step(folder) == 3, moment
            # The next save finds its way, and clears up.
            save_step(folder, 3, keep_last=2)
            assert load_step(folder) == 3
        assert names(folder) == ["latest", "step-00000002", "step-00000003"], moment
        shutil.rmtree(folder)
        moment += 1
    assert moment > 25


def test_a_first_writer_killed_at_any_moment_leaves_none_or_a_complete_checkpoint(tmp_path):
    outcomes, killed = [], True
    while killed:
        folder = tmp_path / str(len(outcomes))
        killed = save_in_a_fork(folder, 1, killed_at=len(outcomes))
        with one_rank():
            try:
                outcomes.append(load_step(folder))
            except SettingError:
                outcomes.append(0)
            save_step(folder, 1)
            assert load_step(folder) == 1
        assert names(folder) == ["latest", "step-00000001"]
    # First nothing, and from the moment on at which it has its name, everything.
    assert outcomes == sorted(outcomes) and outcomes.count(0) > 10 and outcomes.count(1) > 3


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 100, 1000, 4096, 9000])
def test_a_full_disk_is_an_error_with_path_and_bytes_and_leaves_older_checkpoints(size, tmp_path):
    """Too little for the tensors (the larger sizes), for the small files, and for anything at all."""
    with one_rank():
        save_step(tmp_path, 1)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with largest_file(size), pytest.raises(CheckpointError) as error:
            save_step(tmp_path, 2)
        message = str(error.value)
        assert message.startswith("the checkpoint of step 2 was not saved: rank 0: cannot write ")
        assert f"{tmp_path}/.step-00000002.partial/__0_0.distcp: File too large after " in message
        assert "of about 12,004; " in message and message.count("\n") == 0
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        assert load_step(tmp_path) == 1
        save_step(tmp_path, 2)
        assert load_step(tmp_path) == 2


def test_a_disk_that_is_full_for_the_last_files_only_is_the_same(tmp_path):
    def fill(working: Path) -> None:
        with largest_file(100):
            (working / "tokenizer.json").write_bytes(bytes(1000))

    with one_rank():
        save_step(tmp_path, 1)
        with pytest.raises(
            CheckpointError,
            match=r"step 2 was not saved: cannot write into .*partial: .*File too large; .* free",
        ):
            save_step(tmp_path, 2, attach=fill)
        assert names(tmp_path) == ["latest", "step-00000001"]
        assert load_step(tmp_path) == 1


@pytest.mark.parametrize(
    ("error", "timeout", "seconds"),
    [
        (ValueError(), 600.0, 30.0),
        (ValueError(), 20.0, 20.0),
        (ExchangeError("lost a rank at once"), 600.0, 30.0),
        (ExchangeError("hung", seconds=590.0), 600.0, 10.0),
        (ExchangeError("hung", seconds=600.2), 600.0, 0.0),
    ],
)
def test_a_rank_that_fails_ends_within_the_timeout_though_a_save_goes_on(error, timeout, seconds):
    assert seconds_for_a_save(error, timeout=timeout) == seconds
