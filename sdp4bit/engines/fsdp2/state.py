"""Checkpoint state of an attached model, for torch.distributed.checkpoint beside the model's own.

A bit-exact resume needs what the devices held of each shard (the replica differs from the main weights by
what quantization left out), which parameters had changed since the last refresh, and how many refreshes and
reductions each group has done, which number the rounding bits. A fingerprint of each rank's main shard tells
whether a row is loaded by the rank that saved it and together with the weights it belongs to.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sdp4bit.engines.fsdp2.communication import FSDPCommunication
from sdp4bit.engines.fsdp2.steps import FSDPModelCommunication
from sdp4bit.engines.handle import StateDict

FORMAT_VERSION = 1
_PARTS = ("layout", "groups", "replica", "fingerprints")
_FINGERPRINT_SLOTS = 1024


def save_state(state: FSDPModelCommunication) -> StateDict:
    """Return the state: replica rows as DTensors sharded like the parameters, counters as int64 tensors."""
    replica: dict[str, DTensor] = {}
    fingerprints: dict[str, DTensor] = {}
    groups: dict[str, torch.Tensor] = {}
    all_reduces: dict[str, torch.Tensor] = {}
    for comm in state.groups:
        due = comm.due_segments()
        pending = [int(index in due) for index in range(len(comm.group.segments))]
        if comm.replica is not None:
            row, fingerprint = comm.loaded_shard, comm.loaded_fingerprint
            if row is None or fingerprint is None:
                fingerprint = comm.group.fingerprint()
                if comm.replica.rows is None or comm.resync_wanted:
                    # A refresh in full precision is due; a resumed run does the same with nothing pending.
                    row = comm.group.main_shard(next(iter(comm.group.param_dtypes)))
                    pending = [0] * len(pending)
                else:
                    row = comm.replica.own_shard
            for segment in comm.group.segments:
                replica[segment.name] = segment.to_dtensor(row)
            fingerprints[comm.group.name] = _spread(fingerprint, comm.group.mesh)
        groups[comm.group.name] = torch.tensor([comm.reductions, comm.refreshes, *pending])
        if comm.all_reduce is not None:
            all_reduces[comm.group.name] = torch.tensor(comm.all_reduces)
    return {
        "format_version": FORMAT_VERSION,
        "steps": state.steps + int(state.step_pending),
        "layout": _layout(state),
        "groups": groups,
        "replica": replica,
        "fingerprints": fingerprints,
        **({"all_reduces": all_reduces} if all_reduces else {}),
    }


def _spread(fingerprint: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor with this rank's value in this rank's part; its shape fits meshes of any size.

    On a mesh of more ranks than slots the last ones have no part, and nothing to compare.
    """
    value = fingerprint.flatten()[0] if fingerprint.numel() else fingerprint.new_zeros(())
    return distribute_tensor(
        value.repeat(_FINGERPRINT_SLOTS), mesh, [Shard(0)] * mesh.ndim, src_data_rank=None
    )


def load_state(state: FSDPModelCommunication, saved: StateDict) -> None:
    """Counters are as saved; replicas are restored at the next forward, when the ranks agree that they fit.

    State of another layout (ranks, nodes, parameter groups) cannot be continued bit for bit: the replicas are
    then refreshed in full precision, with a warning. All ranks must load.

    Raises:
        ValueError: not a communication state, or of an unknown format; nothing is changed.
    """
    _check(saved)
    same_layout = dict(saved["layout"]) == _layout(state)
    if not same_layout:
        warnings.warn(
            "sdp4bit: the communication state was saved by another layout "
            f"({dict(saved['layout'])}, now {_layout(state)}): replicas are refreshed in full precision",
            stacklevel=3,
        )
    state.steps, state.step_pending = int(saved["steps"]), False
    state.reductions_since_step = 0
    state.reshard()
    for comm in state.groups:
        counters = saved["groups"].get(comm.group.name)
        expected = 2 + len(comm.group.segments)
        usable = counters is not None and counters.numel() == expected
        values = [int(v) for v in counters] if usable else [0] * expected
        comm.reductions, comm.refreshes = values[0], values[1]
        comm.all_reduces = int(saved.get("all_reduces", {}).get(comm.group.name, 0))
        comm.changed = {index for index, flag in enumerate(values[2:]) if flag}
        comm.trained = frozenset(comm.changed)
        comm.resync_wanted = True
        comm.load_undecided = comm.replica is not None and same_layout
        comm.loaded_shard = _row(comm, saved["replica"]) if usable and same_layout else None
        fingerprint = _local(saved["fingerprints"].get(comm.group.name))
        comm.loaded_fingerprint = None if fingerprint is None else fingerprint.to(comm.group.device)


def _check(saved: object) -> None:
    """Raise ValueError unless this is a communication state of a known format."""
    what = "this is not the state of sdp4bit communication"
    if not isinstance(saved, Mapping):
        raise ValueError(f"{what}: a {type(saved).__name__}")
    missing = [key for key in ("format_version", "steps", *_PARTS) if key not in saved]
    if missing:
        raise ValueError(f"{what}: it lacks {', '.join(missing)}")
    if saved["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"communication state of format {saved['format_version']}, this version reads {FORMAT_VERSION}"
        )
    wrong = [key for key in _PARTS if not isinstance(saved[key], Mapping)]
    if wrong:
        raise ValueError(f"{what}: {', '.join(wrong)} should be dictionaries")


def _row(comm: FSDPCommunication, replica: Mapping[str, object]) -> torch.Tensor | None:
    """Return the saved row of a group, or None if a part is missing or has another shape."""
    if comm.replica is None:
        return None
    row = torch.zeros(
        comm.group.shard_numel, dtype=next(iter(comm.group.param_dtypes)), device=comm.group.device
    )
    for segment in comm.group.segments:
        local = _local(replica.get(segment.name))
        view = segment.local_view(row)
        if local is None or local.numel() != view.numel():
            return None
        view.copy_(local.view(view.shape))
    return row


def _local(value: object) -> torch.Tensor | None:
    if isinstance(value, DTensor):
        return value.to_local().detach()
    return value if isinstance(value, torch.Tensor) else None


def _layout(state: FSDPModelCommunication) -> dict[str, int]:
    """Return the layout of most ranks; rows of groups on smaller meshes are compared by themselves."""
    layout = max((comm.layout for comm in state.groups), key=lambda layout: layout.size)
    return {
        "ranks": layout.size,
        "nodes": layout.nodes,
        "ranks_per_node": layout.ranks_per_node,
        "groups": len(state.groups),
    }
