"""Which folder a run writes to. Layer: no process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp4bit_lab.common.command_line import continuing_command
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint import Start, choose_start
from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig
from sdp4bit_lab.pretrain.config.pretrain import LoggingConfig, PretrainConfig
from sdp4bit_lab.pretrain.run_folder import with_folder
from tests.lab.pretrain.saved_runs import save_step
from tests.ranks import one_rank


def write(folder: Path, *, save: Path | None = None, metrics: str = "{}\n") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(metrics)
    config = {"checkpoint": {"save": None if save is None else str(save)}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def chosen(out: Path | None = None, *, job_store: dist.Store | None = None, **checkpoint: Any) -> Path:
    """Return the folder of a run with these settings."""
    config = PretrainConfig(checkpoint=CheckpointConfig(**checkpoint), logging=LoggingConfig(out=out))
    ranks = Ranks(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        device=torch.device("cpu"),
        job_store=job_store,
    )
    start = choose_start(config.checkpoint, job=None) if dist.is_initialized() else Start()
    return with_folder(config, start=start, ranks=ranks).logging.folder


def test_without_out_a_new_run_takes_the_next_free_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second, third = (Path(f"runs/pretrain{number}") for number in ("", "-2", "-3"))
    assert chosen() == first
    write(first, save=Path("a"))
    assert chosen() == chosen(save=Path("a")) == second
    # A run that died before its first step has left its settings.
    write(second, save=Path("b"), metrics="")
    assert chosen() == third
    with one_rank():
        save_step(Path("a"), 4)
        assert chosen(load=Path("a"), save=Path("a")) == chosen(load=Path("a/step-00000004")) == first
        assert chosen(save=Path("a"), auto_resume=True) == first
        # This one has no checkpoint yet.
        assert (
            chosen(save=Path("b"), auto_resume=True) == chosen(save=Path("b"), load=Path("x/../b")) == second
        )
        assert chosen(save=Path("c"), auto_resume=True) == chosen(save=Path("a")) == third


def test_a_new_run_refuses_a_folder_with_the_metrics_of_another(tmp_path: Path) -> None:
    save, store = tmp_path / "saved", dist.HashStore()
    died = write(tmp_path / "died", metrics="")
    assert chosen(died) == died
    assert chosen(tmp_path / "run", job_store=store) == tmp_path / "run"
    run = write(tmp_path / "run", save=save)
    with pytest.raises(SettingError, match=r"run \(to continue it, give --load \S+saved\)\. For a new"):
        chosen(run)
    with pytest.raises(SettingError, match=r"to continue it: the same command with --auto-resume"):
        chosen(run, save=save)
    with pytest.raises(SettingError, match=r"it saved no checkpoints"):
        chosen(write(tmp_path / "unsaved"), save=save)
    with pytest.raises(SettingError, match="earlier run"):
        chosen(run, save=tmp_path / "other", auto_resume=True)
    # The same command starts again before its first checkpoint, or torchrun restarts its processes.
    assert chosen(run, save=save, auto_resume=True) == chosen(run, job_store=store) == run
    with one_rank():
        save_step(save, 4)
        assert chosen(run, load=save) == run


def test_the_command_that_continues_is_the_one_that_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    options = ["pretrain", "--save", "a folder"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/sdp4bit", *options])
    assert continuing_command("--auto-resume") == "sdp4bit pretrain --save 'a folder' --auto-resume"
    monkeypatch.setattr(sys, "argv", ["/lib/sdp4bit_lab/__main__.py", *options])
    assert continuing_command() == "python -m sdp4bit_lab pretrain --save 'a folder'"
    # The command of a launcher is unknown, and another program's is not ours.
    monkeypatch.setenv("RANK", "0")
    assert continuing_command("--auto-resume") == "the same command with --auto-resume"
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert continuing_command() == "the same command"
