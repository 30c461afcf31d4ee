"""Replica audit of an FSDP2 model, at step borders and on demand."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from sdp4bit.config import AuditConfig
from sdp4bit.engines.audit import ReplicaCopy, audit_replicas
from sdp4bit.engines.fsdp2.comm_state import CommState
from sdp4bit.engines.fsdp2.group_comm import reduce_over_copies


def audit_state(state: CommState, config: AuditConfig) -> bool:
    """Return whether all copies of all replicas are equal; those that are not will be refreshed.

    Call it on all ranks, outside forward and backward or at a step border.

    Raises:
        ReplicaMismatchError: as the configuration asks for; on all ranks of the group.
    """
    copies = []
    for comm in state.groups:
        if comm.replica is not None:
            comm.replica.settle()
            if comm.replica.rows is not None:
                copies.append(
                    ReplicaCopy(
                        name=comm.group.name,
                        rows=comm.replica.rows,
                        layout=comm.layout,
                        process_group=comm.group.process_group,
                        is_full=comm.replica.is_full,
                        traffic=comm.weight_traffic,
                    )
                )
    names = audit_replicas(copies, config)
    wrong = [comm for comm in state.groups if comm.group.name in names]
    if copies and config.on_mismatch == "resync":
        flags = torch.tensor([int(comm in wrong) for comm in state.groups], device=copies[0].rows.device)
        reduce_over_copies(flags, state.groups, op=dist.ReduceOp.MAX)
        wrong = [comm for comm, flag in zip(state.groups, flags.tolist(), strict=True) if flag]
    for comm in wrong:
        # Parameters that stayed unsharded would hide the refresh; those in use are not taken away.
        if comm.group.is_unsharded and comm.group.is_idle:
            comm.group.module.reshard()
    state.request_resync(only=wrong)
    return not wrong


def audit_at_step_borders(state: CommState, config: AuditConfig) -> Callable[[int], None]:
    """Return what audits every `interval` steps; it does not keep the model alive."""
    reference = weakref.ref(state)

    def at_step_border(step: int) -> None:
        alive = reference()
        if alive is not None and step % config.interval == 0:
            audit_state(alive, config)

    return at_step_border
