"""Checkpoint state of an attached model, for torch.distributed.checkpoint.

A bit-exact resume needs each shard's replica, which differs from the main weights by the rounding error. It
also needs the parameters changed since the last refresh, and the counters from which rounding bits are
derived. A fingerprint of each rank's main shard shows whether a row is loaded by the rank that saved it and
with the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sdp4bit.collectives.weights import Due
from sdp4bit.engines.fsdp2.events import FSDPModelState
from sdp4bit.engines.fsdp2.group import FSDPGroup
from sdp4bit.engines.handle import StateDict
from sdp4bit.engines.loading import check_state

FORMAT_VERSION = 3
_OWNER = "sdp4bit communication"
_PARTS = ("counters", "replica", "fingerprints")
_FINGERPRINT_SLOTS = 1024


def save_state(state: FSDPModelState) -> StateDict:
    """Return the state, keyed by parameter.

    Names and shapes depend only on the model, so `torch.distributed.checkpoint.load` works for any layout.
    """
    counters: dict[str, torch.Tensor] = {}
    replica: dict[str, DTensor] = {}
    fingerprints: dict[str, DTensor] = {}
    for group, keys in zip(state.groups, _keys(state), strict=True):
        edits, weights = group.edits, group.weights
        row, marks, due = weights.loaded_row, edits.loaded_fingerprints, edits.due_params()
        if row is None or marks is None:
            marks = edits.fingerprints()
            if weights.is_from_checkpoint:
                # This rank's row was not usable. A wrong fingerprint prevents all ranks from using theirs.
                marks = marks + 1
            if weights.replica is None or weights.replica.rows is None or weights.is_full:
                # A full-precision refresh is due. A resumed run starts with one if nothing is pending.
                row, due = group.view.gathered_shard(), frozenset()
            else:
                row = weights.replica.own_shard
                # After an unused load or edit, and with NaN or infinity, this run continues in full
                # precision. A wrong fingerprint makes the resumed run do the same.
                edited = edits.find_edits(waits=True)
                is_nonfinite = group.values_of(row).isfinite().all().logical_not()
                is_unusable = is_nonfinite if edited is None else edited | is_nonfinite
                marks = marks + is_unusable.to(marks.dtype) + int(edits.seen.was_loaded)
        # No two ranks of the mesh with the most dimensions hold the same shards.
        mesh = max((s.sharded.device_mesh for s in group.view.params), key=lambda mesh: mesh.ndim)
        for index, (key, param) in enumerate(zip(keys, group.view.params, strict=True)):
            # As every engine saves a group, with the level of this parameter.
            saved = group.state() | {"due": Due.TRAINED if index in due else Due.NOTHING}
            counters[key] = torch.tensor([*saved.values()])
            fingerprints[key] = _spread(marks[index], mesh)
            if row is not None:
                replica[key] = param.to_dtensor(row)
    return {
        "format_version": torch.tensor(FORMAT_VERSION),
        "steps": torch.tensor(state.steps + int(state.step_pending)),
        "counters": counters,
        "replica": replica,
        "fingerprints": fingerprints,
    }


def _keys(state: FSDPModelState) -> list[list[str]]:
    """Return the keys of each group's parameters: their names in the model, independent of local roots."""
    # Without the prefix of their root, names are unique across pipeline stages but not across copies of a
    # model.
    keys = [[s.name.removeprefix(group.view.root) for s in group.view.params] for group in state.groups]
    every = [key for names in keys for key in names]
    if len(set(every)) == len(every):
        return keys
    return [[param.name for param in group.view.params] for group in state.groups]


def _spread(fingerprint: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor of fixed shape with this rank's value in this rank's part."""
    # If a mesh has more ranks than slots, the last ranks have no part and nothing to compare.
    value = fingerprint.flatten()[0] if fingerprint.numel() else fingerprint.new_zeros(())
    return distribute_tensor(
        value.repeat(_FINGERPRINT_SLOTS), mesh, [Shard(0)] * mesh.ndim, src_data_rank=None
    )


def check_saved(saved: StateDict) -> None:
    """Raise ValueError unless this is a communication state of a known format."""
    check_state(saved, owner=_OWNER, version=FORMAT_VERSION, keys=("steps", *_PARTS))
    wrong = [key for key in _PARTS if not isinstance(saved[key], Mapping)]
    if wrong:
        raise ValueError(f"this is not the state of {_OWNER}: {', '.join(wrong)} should be dictionaries")


def load_state(state: FSDPModelState, saved: StateDict) -> None:
    """Load a state that was checked; all ranks must. At the next forward they agree whether rows are usable.

    If a row was saved by another rank, with other weights or on other nodes, all ranks warn and refresh their
    replicas in full precision.
    """
    state.steps = int(saved["steps"])
    state.forget_events()
    state.reshard(state.groups)
    for group, keys in zip(state.groups, _keys(state), strict=True):
        names = [*group.state()]
        nothing = torch.zeros(len(names))
        counters = saved["counters"]
        states = [dict(zip(names, map(int, counters.get(key, nothing)), strict=True)) for key in keys]
        group.load(states[0])
        if group.weights.replica is None:
            continue  # Weights in full precision have no row, and no refresh that would use it.
        due = frozenset(index for index, state in enumerate(states) if state["due"])
        marks = [_local(saved["fingerprints"].get(key)) for key in keys]
        known = [mark.to(group.view.device) for mark in marks if mark is not None]
        fingerprints = torch.stack(known) if len(known) == len(marks) else None
        group.edits.load(_row(group, keys, saved["replica"]), fingerprints=fingerprints, due=due)


def _row(group: FSDPGroup, keys: Sequence[str], replica: Mapping[str, object]) -> torch.Tensor | None:
    """Return the saved row of a group; None if a part is missing or has another size."""
    row = torch.zeros(group.view.shard_numel, dtype=group.view.row_dtype, device=group.view.device)
    for key, param in zip(keys, group.view.params, strict=True):
        local = _local(replica.get(key))
        view = param.local_view(row)
        if local is None or local.numel() != view.numel():
            return None
        view.copy_(local.view(view.shape))
    return row


def _local(value: object) -> torch.Tensor | None:
    if isinstance(value, DTensor):
        return value.to_local().detach()
    return value if isinstance(value, torch.Tensor) else None
