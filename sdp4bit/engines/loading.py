"""Check the state of a handle, and load it from a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from sdp4bit.engines.arrival import checked_on_all_ranks
from sdp4bit.observe.stats import ModelState
from sdp4bit.warn import warn_user

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


def check_state(state: object, *, owner: str, version: int, keys: Sequence[str]) -> None:
    """Raise ValueError unless this is a mapping with these keys and this format version."""
    what = f"this is not the state of {owner}"
    if not isinstance(state, Mapping):
        raise ValueError(f"{what}: a {type(state).__name__}")
    missing = [key for key in ("format_version", *keys) if key not in state]
    if missing:
        raise ValueError(f"{what}: it lacks {', '.join(missing)}")
    found = state["format_version"]
    found = int(found) if isinstance(found, Tensor) and found.numel() == 1 else found
    if found != version:
        raise ValueError(
            f"the state of {owner} has format {found}, but this version of sdp4bit reads {version}"
        )


def counters_of(state: ModelState, *, version: int) -> dict[str, Any]:
    """Return the states of all groups, the same on all ranks: counters and the refreshes that are due."""
    return {
        "format_version": version,
        "steps": state.steps,
        "groups": [group.state() for group in state.groups],
    }


def check_counters(state: ModelState, saved: dict[str, Any], *, owner: str, version: int) -> None:
    """Raise ValueError unless these are counters of `counters_of` for this model."""
    check_state(saved, owner=owner, version=version, keys=("steps", "groups"))
    if len(saved["groups"]) != len(state.groups):
        raise ValueError(
            f"the state is of {len(saved['groups'])} parameter groups, but the model has {len(state.groups)}"
        )


def load_counters(state: ModelState, saved: dict[str, Any], *, owner: str, version: int) -> None:
    """Continue from counters of `counters_of`, as numbers or as tensors.

    Raises:
        ValueError: these are no such counters or not of this model; nothing is changed.
    """
    check_counters(state, saved, owner=owner, version=version)
    state.steps = int(saved["steps"])
    for group, own in zip(state.groups, saved["groups"], strict=True):
        group.load({name: int(value) for name, value in own.items()})


def load_checkpoint(
    handle: Stateful, checkpoint_id: str | os.PathLike[str] | None, *, storage_reader: Any, key: str
) -> bool:
    """Load the state of a handle, if the checkpoint has it; see `CommHandle.load`."""
    # Here, because importing it takes a tenth of a second, which few handles need.
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load

    ranks = range(dist.get_world_size())
    # 1. Read the names in the checkpoint. A rank may lack the file, or memory.
    with checked_on_all_ranks(ranks, call="comm.load") as same:
        same.append(f"key={key!r}")
        reader = _reader_of(checkpoint_id) if storage_reader is None else storage_reader
        names = reader.read_metadata().state_dict_metadata
        state = {key: handle.state_dict()}
    # 2. Ranks may read different checkpoints.
    has_state = [False] * len(ranks)
    dist.all_gather_object(has_state, any(name.startswith(f"{key}.") for name in names))
    if not all(has_state):
        warn_user(
            f"the checkpoint {checkpoint_id or ''} has no {key!r}, the state of this handle: replicas "
            "start from the loaded weights in full precision, and the run is not bit-identical to an "
            "uninterrupted one",
            ranks,
        )
        return False
    # 3. Load it. Parts that are not in the checkpoint keep the state of this moment.
    load(state, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    handle.load_state_dict(state[key])
    return True


def _reader_of(checkpoint_id: str | os.PathLike[str] | None) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if checkpoint_id is None:
        raise ValueError("comm.load needs the folder of a checkpoint, or its storage_reader")
    folder = Path(checkpoint_id)
    if not (folder / ".metadata").exists():
        found = "is absent"
        if folder.exists():
            found = "has no file .metadata" if folder.is_dir() else "is a file"
        raise ValueError(
            f"{folder} {found}: comm.load needs the folder that torch.distributed.checkpoint.save wrote, on "
            "all ranks. Pass a state that was saved otherwise to comm.load_state_dict"
        )
    return FileSystemReader(folder)
