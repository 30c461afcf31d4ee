"""A disk that really is full while a run saves: the run ends with an error, and goes on once there is room.

Layer: 2 processes over gloo; a small file system in memory, which only root can make.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from sdp4bit.pretrain.checkpoint.config import CheckpointConfig
from sdp4bit.pretrain.checkpoint.files import CheckpointError
from sdp4bit.pretrain.config.pretrain import PretrainConfig
from sdp4bit.pretrain.launch.config import ParallelConfig
from tests.pretrain.checkpoint.test_checkpoint import after_step
from tests.pretrain.tiny_runs import losses, small, train_here, write_text
from tests.ranks import run_ranks


def resize(folder: Path, *, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "sdp4bit-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def train_until_it_is_full(run: PretrainConfig, disk: Path) -> str:
    """The disk has room for half a checkpoint more, from step 3 on."""

    def fill(checkpointer: object) -> None:
        checkpointer.wait()  # type: ignore[attr-defined]
        if dist.get_rank() == 0:
            used = sum(path.stat().st_size for path in disk.rglob("*") if path.is_file())
            resize(disk, size=used * 3 // 2)
        dist.barrier()

    with after_step(3, fill), pytest.raises(CheckpointError) as error:
        train_here(run)
    return str(error.value)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_costs_nothing_that_was_saved(disk: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    run = small(text, tmp_path / "whole", parallel=ParallelConfig(ranks_per_node=1))
    run_ranks(train_here, 2, run)
    saving = replace(
        run,
        logging=replace(run.logging, out=tmp_path / "full"),
        checkpoint=CheckpointConfig(save=disk / "saved", save_interval=2, keep_last=1, auto_resume=True),
    )
    first, second = run_ranks(train_until_it_is_full, 2, saving, disk)
    assert first == second
    assert first.startswith("the checkpoint of step 4 was not saved: rank ")
    assert "No space left on device after " in first and " bytes are free there" in first
    # What was half-written is gone, so that there is room for smaller things again.
    assert sorted(path.name for path in (disk / "saved").iterdir()) == ["latest", "step-00000002"]
    resize(disk, size=64 << 20)
    run_ranks(train_here, 2, saving)
    assert losses(tmp_path / "full") == losses(tmp_path / "whole")
    assert sorted(path.name for path in (disk / "saved").iterdir()) == ["latest", "step-00000008"]
