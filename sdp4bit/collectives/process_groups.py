"""Creates the process groups of a job with a number of calls per rank that does not grow with the job.

`torch.distributed.new_group` wants every rank to ask for every group. `use_local_synchronization=True` lets
outsiders stay away, but then the group's name is made of its ranks and of how many groups this rank is in.
Such a name differs between ranks that are in different numbers of groups (a hang), repeats once a group has
been destroyed (the new group finds the old one's addresses in the store: a hang), and can be in use. Here
groups keep the numbered names that plain calls give, unique for the life of the job; outsiders only count.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def create_process_groups(
    rounds: Sequence[Sequence[Sequence[int]]],
    *,
    timeout: timedelta | None,
    description: str,
    within: ProcessGroup | None = None,
) -> list[ProcessGroup | None]:
    """Return, for each round, the new process group that this rank is a member of, or None.

    Collective over the whole job: every rank passes the same rounds. A rank creates one group per round,
    while the other ranks create theirs. As all go through the rounds in the same order, groups of different
    rounds may overlap.

    Args:
        rounds: disjoint groups, as ascending global ranks; at least one per round.
        timeout: how long the groups wait for a rank; None for the default of the back end.
        description: of the groups, for the communication library's own messages.
        within: the ranks that all groups are made of and that call this, if these are not all of the job;
            the others notice nothing.

    Raises:
        ValueError: torch lets only all ranks of the job together create groups; the same on every rank.
    """
    options: dict[str, Any] = {"timeout": timeout, "group_desc": description}
    if within is not None:
        _check_creation_within()
        with _apart_from_the_job(within) as device:
            return [_create_own(groups, options | {"device_id": device}) for groups in rounds]
    create = _create_own if _outsiders_may_stay_away() else _create_all
    return [create(groups, options) for groups in rounds]


def _check_creation_within() -> None:
    """Raise ValueError if torch lets only all ranks of the job together create process groups."""
    if not _outsiders_may_stay_away():
        raise ValueError(
            "process_group= needs process groups that some ranks create without the others, which MPI, "
            "TORCH_DIST_INIT_BARRIER=1 and torchcomms do not allow: leave it out, and call this on all ranks "
            "of the job, with no model on those that have none"
        )


@contextmanager
def _apart_from_the_job(within: ProcessGroup) -> Iterator[torch.device | None]:
    """Inside the block, groups can be created that ranks outside `within` know nothing of.

    Numbered names would no longer be those that the others count on, or would be in use among them: here
    they start from a random number that the first rank draws. With a device of its own, NCCL would split the
    communicator of the whole job, all ranks of which take part in that; the groups get their own instead, on
    the device that is yielded.
    """
    default, state = dist.group.WORLD, _state()
    drawn = [uuid.uuid4().int >> 64]
    dist.broadcast_object_list(drawn, src=dist.get_process_group_ranks(within)[0], group=within)
    count, device = state.group_count, getattr(default, "bound_device_id", None)
    state.group_count = drawn[0]
    if device is not None:
        default.bound_device_id = None  # type: ignore[union-attr]
    try:
        yield device
    finally:
        state.group_count = count
        if device is not None:
            default.bound_device_id = device  # type: ignore[union-attr]


def _create_own(groups: Sequence[Sequence[int]], options: dict[str, Any]) -> ProcessGroup | None:
    """Create this rank's group, under the name that it would have if each were created in turn."""
    me = dist.get_rank()
    own = next((index for index, ranks in enumerate(groups) if me in ranks), None)
    state = _state()
    first = state.group_count
    state.group_count = first + (own or 0)
    try:
        # Without a group of its own a rank asks as an outsider: NCCL splits a communicator with all ranks.
        group = dist.new_group(list(groups[own or 0]), **options)
    finally:
        state.group_count = first + len(groups)
    return group if own is not None else None


def _create_all(groups: Sequence[Sequence[int]], options: dict[str, Any]) -> ProcessGroup | None:
    """Create each group in turn."""
    mine = None
    for ranks in groups:
        group = dist.new_group(list(ranks), **options)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def _outsiders_may_stay_away() -> bool:
    """Whether creating a group concerns its members only; the same on all ranks."""
    if dist.get_backend() == dist.Backend.MPI or int(os.environ.get("TORCH_DIST_INIT_BARRIER", "0")) == 1:
        return False  # torch waits for all ranks of the job at every group
    config = getattr(dist, "config", None)
    if getattr(config, "use_torchcomms", False) or hasattr(dist.group.WORLD, "new_group"):
        return False  # others create the group, by rules of their own
    return isinstance(getattr(_state(), "group_count", None), int)


def _state() -> Any:
    return dist.distributed_c10d._world
