"""The folder of a run's checkpoints: they appear complete or not at all, and `latest` names the newest.

    latest                          step-00000500
    step-00000250/, step-00000500/  complete checkpoints
        __0_0.distcp, ...           tensors, one file per rank
        .metadata                   which tensor is where (torch.distributed.checkpoint)
        run.json                    what was trained, and how far
        manifest.json               size and SHA-256 of all other files
    .step-00000750.partial/         being written, or left by a run that was killed

A name with a dot in front is never `latest`.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint.files import (
    MANIFEST,
    CheckpointError,
    Digest,
    digest_file,
    free_bytes,
    replace_file,
    write_file,
    write_manifest,
)
from sdp4bit_lab.pretrain.data.indexed_writer import sync_folder

LATEST = "latest"
RUN_STATE = "run.json"
TOKENIZER = "tokenizer.json"
"""The tokenizer of the text, attached to a checkpoint so that it can be exported."""
MODEL, OPTIMIZER = "model", "optimizer"
"""Parts of a checkpoint that any number of ranks can load."""
# While a checkpoint of the same step is replaced, the old one has a name with a dot for a moment.
_COMPLETE = re.compile(r"\.?step-(\d{8,})(?:\.replaced-\d+)?")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    """Optimizer steps done; also the position of the learning-rate schedule."""
    samples: int = 0
    """Training samples read; the position in the data."""
    validation_due: bool = False
    """Whether a validation belongs after this step that was left out, to leave early."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a checkpoint is of."""

    shape: dict[str, Any]
    """Sizes of the model, by the names of ModelShape."""
    vocabulary_size: int
    """Tokens that exist; the embedding has more rows."""
    world_size: int
    """Ranks that saved it."""
    strategy: str | None = None
    dataset: str | None = None
    """Key of the text that was read; None if there was none."""
    seed: int | None = None
    layout: str | None = None
    """How the ranks shared the model and the data."""
    job: str | None = None
    """Names the job that saved it, restarts by torchrun included; None for a process alone."""
    parts: tuple[str, ...] = (MODEL,)
    """What is in it: the model, the optimizer, and what each rank has for itself, such as random state."""
    progress: Progress = field(default_factory=Progress)

    @staticmethod
    def read(folder: Path) -> RunRecord:
        """Return the record of a checkpoint; ValueError if it is none."""
        try:
            values = json.loads((folder / RUN_STATE).read_bytes())
            values["progress"] = Progress(**values["progress"])
            values["parts"] = tuple(values["parts"])
            record = RunRecord(**values)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{RUN_STATE} cannot be read ({error})") from None
        numbers = (record.world_size, record.vocabulary_size, record.progress.step, record.progress.samples)
        if not isinstance(record.shape, dict) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"{RUN_STATE} holds something else than numbers where numbers belong")
        return record


def step_folder(folder: Path, *, step: int) -> Path:
    """Return where the complete checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def partial_folder(folder: Path, *, step: int) -> Path:
    """Return where the checkpoint of a step is written."""
    return folder / f".step-{step:08d}.partial"


def prepare(folder: Path, *, step: int) -> None:
    """Make an empty folder to write into; remove what killed runs left half-written."""
    for leftover in [*folder.glob(".step-*.partial"), *folder.glob(".step-*.removed-*")]:
        shutil.rmtree(leftover, ignore_errors=True)
    partial_folder(folder, step=step).mkdir(parents=True)


def publish(
    folder: Path,
    *,
    record: RunRecord,
    digests: Mapping[str, Digest],
    attach: Callable[[Path], None] | None = None,
    keep_last: int | None = None,
) -> None:
    """Make the partial folder the complete checkpoint that `latest` names.

    1. Write the record, the attached files and the manifest beside the tensors.
    2. Give the folder its name.
    3. Let `latest` name it.
    4. Delete older checkpoints, if there are more than are to be kept.

    Args:
        digests: the files that are there already.
        attach: writes further files into a folder, such as a tokenizer.
    """
    step = record.progress.step
    working, target = partial_folder(folder, step=step), step_folder(folder, step=step)
    digests = dict(digests)
    content = json.dumps(asdict(record), indent=2) + "\n"
    digests[RUN_STATE] = write_file(working / RUN_STATE, content.encode())
    if attach is not None:
        try:
            attach(working)
        except Exception as error:  # not all say where, and a full disk is likely
            raise CheckpointError(f"cannot write into {working}: {error}; {free_bytes(working)}") from error
        for path in working.iterdir():
            if path.name not in digests:
                digests[path.name] = digest_file(path)
    write_manifest(working, digests)
    sync_folder(working)
    if target.exists():
        # A resumed run reaches the step of an older checkpoint again.
        target.rename(folder / f".{target.name}.replaced-{time.time_ns()}")
    working.rename(target)
    sync_folder(folder)
    replace_file(folder / LATEST, target.name + "\n")
    for replaced in folder.glob(".step-*.replaced-*"):
        _delete(replaced)
    if keep_last is not None:
        _keep(folder, newest=step, count=keep_last)


def _keep(folder: Path, *, newest: int, count: int) -> None:
    """Delete all but so many of the checkpoints up to the newest.

    Later steps are of another continuation of the run, which is not ours to delete. A link may lead anywhere,
    so it stays.
    """
    steps = [(step, path) for step, path in _complete(folder) if step <= newest and not path.is_symlink()]
    for _, path in steps[count:]:
        _delete(path)


def _delete(path: Path) -> None:
    """Delete a checkpoint; no moment leaves a half-deleted one under a name that is loaded."""
    removed = path.with_name(f".{path.name.lstrip('.')}.removed-{time.time_ns()}")
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _complete(folder: Path) -> list[tuple[int, Path]]:
    """Return steps and folders that have the name of a complete checkpoint, the newest first."""
    found = [(match, path) for path in folder.iterdir() if (match := _COMPLETE.fullmatch(path.name))]
    return sorted(((int(match[1]), path) for match, path in found), key=lambda item: item[0], reverse=True)


def holds_checkpoints(folder: Path) -> bool:
    """Return whether a checkpoint has been published in the folder, damaged or not."""
    return folder.is_dir() and bool(_complete(folder))


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints to try: the folder itself, or the one `latest` names and then older ones.

    Raises:
        SettingError: there are none.
    """
    if (folder / MANIFEST).is_file() or (_COMPLETE.fullmatch(folder.name) and folder.is_dir()):
        return [folder]
    complete = _complete(folder) if folder.is_dir() else []
    try:
        match = _COMPLETE.fullmatch((folder / LATEST).read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        match = None
    if match is None:
        # Killed before the first `latest` was written, or it is damaged.
        candidates = [path for _, path in complete]
    else:
        newest = folder / match[0]
        # Steps after the one that `latest` names belong to a continuation that was given up.
        older = [path for step, path in complete if step <= int(match[1]) and path != newest]
        candidates = [newest, *older]
    if not candidates:
        raise SettingError(f"--load {folder}: no checkpoint there (neither {LATEST} nor a step- folder)")
    return candidates
