"""Checkpoint state of an attached model, for torch.distributed.checkpoint beside the model's own.

A bit-exact resume needs what the devices held of each shard (the replica differs from the main weights by
what quantization left out), which parameters had changed since the last refresh, and how many refreshes and
reductions each group has done, which number the rounding bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sdp4bit.integrations.fsdp_hooks import CommState, GroupComm

FORMAT_VERSION = 1


def save_state(state: CommState) -> dict[str, Any]:
    """Return the state: replica rows as DTensors sharded like the parameters, counters as int64 tensors."""
    replica: dict[str, DTensor] = {}
    groups: dict[str, torch.Tensor] = {}
    for comm in state.groups:
        pending = [int(index in comm.changed) for index in range(len(comm.group.segments))]
        groups[comm.group.name] = torch.tensor([comm.reductions, comm.refreshes, *pending])
        if comm.replica is None:
            continue
        row = comm.loaded_row
        if row is None and comm.replica.rows is not None and not comm.resync_wanted:
            row = comm.replica.own_row
        if row is None:
            row = comm.group.main_row(next(iter(comm.group.param_dtypes)))
        for segment in comm.group.segments:
            replica[segment.name] = segment.to_dtensor(row)
    return {
        "format_version": FORMAT_VERSION,
        "steps": state.steps + int(state.step_pending),
        "layout": _layout(state),
        "groups": groups,
        "replica": replica,
    }


def load_state(state: CommState, saved: dict[str, Any]) -> None:
    """Counters are as saved; replicas are restored at the next forward, when the ranks agree that they fit.

    State of another layout (ranks, nodes, parameter groups) cannot be continued bit for bit: the replicas are
    then refreshed in full precision, with a warning. All ranks must load.

    Raises:
        ValueError: not a communication state, or of an unknown format; nothing is changed.
    """
    missing = [key for key in ("format_version", "steps", "layout", "groups", "replica") if key not in saved]
    if missing:
        raise ValueError(f"this is not the state of sdp4bit communication: it lacks {', '.join(missing)}")
    if saved["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"communication state of format {saved['format_version']}, this version reads {FORMAT_VERSION}"
        )
    same_layout = dict(saved["layout"]) == _layout(state)
    if not same_layout:
        state.warn_once(
            "sdp4bit: the communication state was saved by another layout "
            f"({dict(saved['layout'])}, now {_layout(state)}): replicas are refreshed in full precision"
        )
    state.steps, state.step_pending = int(saved["steps"]), False
    for comm in state.groups:
        counters = saved["groups"].get(comm.group.name)
        expected = 2 + len(comm.group.segments)
        usable = counters is not None and counters.numel() == expected
        values = [int(v) for v in counters] if usable else [0] * expected
        comm.reductions, comm.refreshes = values[0], values[1]
        comm.changed = {index for index, flag in enumerate(values[2:]) if flag}
        comm.resync_wanted = True
        comm.load_unsettled = comm.replica is not None
        comm.loaded_row = _row(comm, saved["replica"]) if usable and same_layout else None


def _row(comm: GroupComm, replica: dict[str, Any]) -> torch.Tensor | None:
    """Return the saved row of a group, or None if a part is missing or has another shape."""
    if comm.replica is None:
        return None
    row = torch.zeros(
        comm.group.row_numel, dtype=next(iter(comm.group.param_dtypes)), device=comm.group.device
    )
    for segment in comm.group.segments:
        local = _local(replica.get(segment.name))
        view = segment.local_view(row)
        if local is None or local.numel() != view.numel():
            return None
        view.copy_(local.view(view.shape))
    return row


def _local(value: Any) -> torch.Tensor | None:
    if isinstance(value, DTensor):
        return value.to_local().detach()
    return value if isinstance(value, torch.Tensor) else None


def _layout(state: CommState) -> dict[str, int]:
    layout = state.groups[0].layout
    return {
        "ranks": layout.size,
        "nodes": layout.nodes,
        "ranks_per_node": layout.ranks_per_node,
        "groups": len(state.groups),
    }


def weight_drift(state: CommState) -> float | None:
    """Return |main - replica| / |main| over this rank's shards; None before the first refresh."""
    distance = norm = 0.0
    seen = False
    for comm in state.groups:
        if comm.replica is None or comm.replica.rows is None:
            continue
        seen = True
        main = comm.group.main_row(torch.float32)
        distance += float((main - comm.replica.own_row.float()).square().sum())
        norm += float(main.square().sum())
    if not seen:
        return None
    return float((distance / norm) ** 0.5) if norm else 0.0


def gradient_error(state: CommState) -> float | None:
    """Return the relative error of quantizing samples of the last gradients; None before the first."""
    distance = norm = 0.0
    seen = False
    for comm in state.groups:
        if comm.reduce_scatter is None or comm.gradient_sample is None:
            continue
        seen = True
        energy = float(comm.gradient_sample.float().square().sum())
        distance += energy * comm.reduce_scatter.quantization_error(comm.gradient_sample) ** 2
        norm += energy
    if not seen:
        return None
    return float((distance / norm) ** 0.5) if norm else 0.0
