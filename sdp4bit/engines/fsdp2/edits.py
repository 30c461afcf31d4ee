"""Finds edits of the weights that no optimizer step announced, however they were made.

The replica stands for one state of this rank's main shard, whose checksum is kept. When a group is used again
without an optimizer step since, the shard is summed again; one small reduction makes the verdict common to
the ranks of the group, and the host waits for it. After an optimizer step nothing is compared: the difference
that is sent anyway holds every edit.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.collectives.work import HostCopy
from sdp4bit.engines.fsdp2.communication import FSDPCommunication, reduce_over_copies
from sdp4bit.engines.fsdp2.groups import FSDPGroup, ParamSegment, tensor_version

SMALL_EDIT = 1 / 128
"""Edits up to this part of a group's weights (Euclidean norms) are sent as differences: 4 bits then leave an
error of at most a quarter of it or so, which is what rounding weights to bf16 costs. Larger ones, such as
other weights altogether, are sent in full precision."""


class EditDetector:
    """Compares the main shards with what the replicas were refreshed from, at most once per forward."""

    def __init__(self) -> None:
        self._leader: weakref.ref[object] | None = None
        self._seen: set[int] = set()
        self._late: list[HostCopy] = []

    def look(self, comm: FSDPCommunication, groups: Sequence[FSDPCommunication]) -> None:
        """Notice edits since the last refresh before a group is gathered, outside backward.

        Called on all ranks alike. The first group of a forward looks for all groups of its root at once; a
        gather outside of forward looks for its own group only. Afterwards `changed` or `resync_wanted` are
        set in groups that were edited.
        """
        leader = comm.group.forward_leader
        if leader is None:
            self._compare([comm], root=_groups_of_root(comm, groups))
            return
        # FSDP2 does not tell when a forward begins: with the leader's own group, unless that stayed unsharded
        # after the last one, or else with a group that this forward would have gathered before.
        is_known = self._leader is not None and self._leader() is leader
        if comm.group.leads(leader) or not is_known or comm.index in self._seen:
            self._leader = weakref.ref(leader)
            self._seen.clear()
            root = _groups_of_root(comm, groups)
            self._compare(root, root=root)
        self._seen.add(comm.index)

    def take_late(self) -> bool:
        """Return whether this rank has come to know of an edit that was not waited for."""
        looked_at = [(copy, copy.arrived()) for copy in self._late]
        self._late = [copy for copy, flag in looked_at if flag is None]
        return any(bool(flag) for _, flag in looked_at if flag is not None)

    @torch.no_grad()
    @torch.inference_mode(False)
    def _compare(self, comms: Sequence[FSDPCommunication], *, root: Sequence[FSDPCommunication]) -> None:
        trains = any(comm.trained for comm in root)
        asked: dict[tuple[int, ...], list[tuple[FSDPCommunication, Tensor]]] = {}
        for comm in comms:
            replica, kept = comm.replica, comm.refreshed_from
            if replica is None or replica.rows is None or kept is None or comm.resync_wanted:
                continue
            if comm.changed and comm.due_ranges() is None:
                continue
            row = comm.group.main_shard(replica.rows.dtype)
            if comm.changed:
                flag = (comm.frozen_checksum(row) != kept[1]).to(torch.int32)
            else:
                flag = (comm.shard_checksums(row) != kept).any().to(torch.int32)
            if not trains or _may_wait(comm):
                asked.setdefault(comm.group.ranks, []).append((comm, flag))
            else:
                self._late.append(HostCopy(flag))
        for pairs in asked.values():
            edited = _agree([comm for comm, _ in pairs], torch.stack([flag for _, flag in pairs]))
            if edited:
                _choose_refresh(edited)


def _groups_of_root(comm: FSDPCommunication, groups: Sequence[FSDPCommunication]) -> list[FSDPCommunication]:
    context = comm.group.context
    return [each for each in groups if each.group.context is context]


def _may_wait(comm: FSDPCommunication) -> bool:
    """Whether the host may wait for the device here, in a model that trains; the same on all ranks.

    On a GPU a training step must not: neither after an optimizer step, nor between micro-batches whose
    gradients are not reduced yet. Nobody edits weights there, as a rule; after a reduction SAM does.
    """
    if comm.group.device.type == "cpu" or not comm.group.is_training:
        return True
    return comm.is_reduced and not comm.changed


def _agree(comms: Sequence[FSDPCommunication], flags: Tensor) -> list[FSDPCommunication]:
    """Return the groups, all of the same ranks, whose flag is set on any rank; one small reduction."""
    group = comms[0].group.process_group
    with comm_error_context("agreement on edited weights", group=group):
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    # An edit of what tensor parallelism splits may be seen on one of its ranks only.
    reduce_over_copies(flags, comms, op=dist.ReduceOp.MAX)
    return [comm for comm, flag in zip(comms, flags.tolist(), strict=True) if flag]


def _choose_refresh(comms: Sequence[FSDPCommunication]) -> None:
    """The next refresh of edited groups sends a difference if it is small, else full precision."""
    group = comms[0].group.process_group
    squares = torch.stack([_edit_squares(comm) for comm in comms])
    with comm_error_context("agreement on the size of edits", group=group):
        dist.all_reduce(squares, group=group)
    edit, size = squares.unbind(1)
    is_large = torch.where(edit <= SMALL_EDIT**2 * size, 0, 1).to(torch.int32)  # 1 for NaN, too
    reduce_over_copies(is_large, comms, op=dist.ReduceOp.MAX)
    for comm, needs_all in zip(comms, is_large.tolist(), strict=True):
        assert comm.replica is not None
        if needs_all or not comm.replica.sends_differences:
            comm.resync_wanted = True
        else:
            comm.changed = set(range(len(comm.group.segments)))


def _edit_squares(comm: FSDPCommunication) -> Tensor:
    """Return |main - replica|^2 and |main|^2 over this rank's shard, fp64 [2]."""
    assert comm.replica is not None and comm.replica.rows is not None
    row = comm.group.main_shard(comm.replica.rows.dtype).float()
    return torch.stack([(row - comm.replica.own_shard.float()).square().sum(), row.square().sum()]).double()


class StateDictAliases:
    """Finds loads into a model's state dict, whose tensors torch.distributed.checkpoint fills in place.

    After an optimizer step nothing else tells a load from a step. The tensors share memory with the
    parameters but not their version counters.
    """

    def __init__(self) -> None:
        self._handed_out: list[tuple[ParamSegment, weakref.ref[DTensor], tuple[int, int, int]]] = []
        self._kept: list[DTensor] = []
        """Alive until the next look: a state dict may be gone when its tensors' versions are asked for."""

    def watch(self, group: FSDPGroup) -> list[RemovableHandle]:
        """Note state dicts that hold a parameter of the group, until the hooks are removed."""
        return [self._watch(segment) for segment in group.segments]

    def _watch(self, segment: ParamSegment) -> RemovableHandle:
        def after_state_dict(_: nn.Module, state_dict: dict[str, DTensor], prefix: str, *__: object) -> None:
            value = state_dict.get(prefix + segment.own_name)
            if value is not None and hasattr(value, "_local_tensor"):
                self._handed_out.append((segment, weakref.ref(value), tensor_version(value)))
                self._kept.append(value)

        hook: RemovableHandle = segment.owner.register_state_dict_post_hook(after_state_dict)
        return hook

    def take_written(self) -> set[str]:
        """Return the names of the parameters that were written to through state dicts since the last call."""
        written, alive = set(), []
        for segment, reference, before in self._handed_out:
            value = reference()
            if value is not None:
                now = tensor_version(value)
                if now != before:
                    written.add(segment.name)
                alive.append((segment, reference, now))
        self._handed_out = alive
        self._kept.clear()
        return written
