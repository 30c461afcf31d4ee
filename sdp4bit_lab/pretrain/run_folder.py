"""Choose the folder of a run, so that a run never overwrites the metrics of an earlier one."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

from sdp4bit_lab.common.command_line import continuing_command
from sdp4bit_lab.common.files import read_json_object
from sdp4bit_lab.common.ranks import Ranks, broadcast_from_rank0
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint import Start
from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig
from sdp4bit_lab.pretrain.config.pretrain import DEFAULT_OUT, PretrainConfig

METRICS, SETTINGS, EVENTS = "metrics.jsonl", "config.json", "tensorboard"
_KEY = "run folder"
"""Key with the folder of a job, which a restart by torchrun continues."""


def with_folder(config: PretrainConfig, *, start: Start, ranks: Ranks) -> PretrainConfig:
    """Return the settings with the run's folder, identical on all ranks.

    Raises:
        SettingError: on all ranks: --out has the metrics of another run.
    """

    def choose() -> Path:
        store = ranks.job_store
        if store is not None and store.check([_KEY]):
            return Path(store.get(_KEY).decode())
        folder = _choose(config, start)
        if store is not None:
            store.set(_KEY, str(folder))
        return folder

    folder = broadcast_from_rank0(choose)
    return replace(config, logging=replace(config.logging, out=folder))


def _choose(config: PretrainConfig, start: Start) -> Path:
    checkpoints, given = _continued(config.checkpoint, start), config.logging.out
    if given is not None:
        path = given / METRICS
        if (
            start.folder is None
            and path.is_file()
            and path.stat().st_size
            and not checkpoints & _saves(given)
        ):
            saves, save = next(iter(_saves(given)), None), config.checkpoint.save
            remedy = "it saved no checkpoints" if saves is None else f"to continue it, give --load {saves}"
            if saves is not None and save is not None and saves == save.resolve():
                remedy = f"to continue it: {continuing_command('--auto-resume')}"
            raise SettingError(
                f"--out {given} has the metrics of an earlier run ({remedy}). For a new run, give a new "
                "folder or delete this one"
            )
        return given
    names = (DEFAULT_OUT if n == 1 else DEFAULT_OUT.with_name(f"{DEFAULT_OUT.name}-{n}") for n in count(1))
    continued: Path | None = None
    for folder in names:
        if not any((folder / name).exists() for name in (METRICS, SETTINGS, EVENTS)):
            return continued or folder
        if checkpoints & _saves(folder):
            continued = folder
    raise AssertionError("the names are endless")


def _continued(config: CheckpointConfig, start: Start) -> set[Path]:
    """Return the folders of checkpoints that the run continues, even if they have no checkpoint yet."""
    save, loaded = (path and path.resolve() for path in (config.save, start.folder))
    own = save if config.resumes_own else None
    if loaded is not None and loaded.name.startswith("step-"):
        loaded = loaded.parent
    return {folder for folder in (own, loaded) if folder is not None}


def _saves(folder: Path) -> set[Path]:
    """Return the folder of checkpoints of the run with this folder, if it is recorded."""
    try:
        return {Path(read_json_object(folder / SETTINGS)["checkpoint"]["save"]).resolve()}
    except (OSError, SettingError, KeyError, TypeError):
        return set()
