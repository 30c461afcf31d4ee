"""Creates process groups with a number of calls per rank that does not grow with the job.

`torch.distributed.new_group` wants every rank to ask for every group, because it names a group by a counter:
names are keys in the job's store, under which the members find each other. With
`use_local_synchronization=True` outsiders may stay away, but these names come of counts as well, and a count
that only some ranks advance lets ranks disagree (a hang, in torch 2.14 also of plain groups made later), or
gives a name twice (the new group finds the old one's addresses in the store: a hang).

Here the ranks that create the groups first agree on a random number, and a group is named after it and its
place in the list. So names do not repeat, no counter of torch is read or advanced, and the groups that a user
makes, before or after, by whatever ranks, have the names that they would have anyway. The creation itself is
that of `new_group`, by the part of it that takes the name as an argument.
"""

from __future__ import annotations

import inspect
import secrets
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.config import TESTED_TORCH

_ARGUMENTS = {
    *("group_size", "group_rank", "global_ranks_in_group", "group_name", "group_desc"),
    *("backend", "backend_options", "store", "timeout", "device_id"),
}
"""Of `_new_process_group_helper`, the same in all of TESTED_TORCH."""


def create_process_groups(
    rounds: Sequence[Sequence[Sequence[int]]],
    *,
    timeout: timedelta | None,
    description: str,
    within: ProcessGroup | None = None,
    backend: str | None = None,
) -> list[ProcessGroup | None]:
    """Return, for each round, the new process group that this rank is a member of, or None.

    Collective over `within`: each of its ranks passes the same rounds, and other ranks call nothing. Steps:
    1. the ranks agree on a name that the job has not had;  2. a rank creates one group per round, while the
    other ranks create theirs. As all go through the rounds in the same order, groups of different rounds may
    overlap. On NCCL their own streams have high priority, as those on which FSDP2 communicates.

    Args:
        rounds: disjoint groups, as ascending global ranks; at least one per round.
        timeout: how long the groups wait for a rank; None for half an hour.
        description: of the groups, for the communication library's own messages.
        within: the ranks that take part; the default group when not given.
        backend: of the groups; that of `within` when not given.

    Raises:
        ValueError: `within` is a part of the job, and this torch or this back end has all ranks create each
            group; the same on every rank.
    """
    if not rounds:
        return []
    if within is dist.group.WORLD:
        within = None
    obstacle = _obstacle()
    if not obstacle:
        name = f"sdp4bit_{_agreed_number(within):016x}"
        return [
            _create_own(groups, f"{name}_{number}", timeout, description, within, backend)
            for number, groups in enumerate(rounds)
        ]
    if within is not None:
        raise ValueError(
            f"process groups cannot be created by a part of the job's ranks, because {obstacle}: call it on "
            "all ranks, without a process group"
        )
    options: dict[str, Any] = {"timeout": timeout, "group_desc": description, "backend": backend}
    if backend is None:
        options["pg_options"] = _nccl_options(None, timeout)
    return [_create_all(groups, options) for groups in rounds]


def _create_own(
    groups: Sequence[Sequence[int]],
    name: str,
    timeout: timedelta | None,
    description: str,
    within: ProcessGroup | None,
    backend: str | None,
) -> ProcessGroup | None:
    """Create this rank's group of a round."""
    me = dist.get_rank()
    own = next((index for index, ranks in enumerate(groups) if me in ranks), None)
    default: Any = dist.group.WORLD
    c10d: Any = dist.distributed_c10d
    device = default.bound_device_id
    with ExitStack() as stack:
        if within is not None:
            if own is None:
                return None
            # NCCL would split the communicator of all ranks of the job, and wait for those that stay away.
            stack.callback(setattr, default, "bound_device_id", device)
            default.bound_device_id = None
        # Without a group of its own a rank asks as an outsider, as it takes part in that split.
        ranks = list(groups[own or 0])
        timeout = timeout or default_pg_timeout
        group, _ = c10d._new_process_group_helper(
            group_size=len(ranks),
            group_rank=None if own is None else ranks.index(me),
            global_ranks_in_group=ranks,
            backend=backend or dist.get_backend(within),
            backend_options=None if backend else _nccl_options(within, timeout),
            store=c10d._get_default_store(),
            group_name=f"{name}_{own}",
            timeout=timeout,
            device_id=device,
            group_desc=description,
        )
    if own is None:
        return None
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return cast(ProcessGroup, group)


def _nccl_options(within: ProcessGroup | None, timeout: timedelta | None) -> object | None:
    """Return the settings of one process group on NCCL; None where another library communicates on CUDA."""
    if "cuda:nccl" not in dist.get_backend_config(within).split(","):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:  # torch warns of one that differs from the argument
        options._timeout = timeout
    return options


def _create_all(groups: Sequence[Sequence[int]], options: dict[str, Any]) -> ProcessGroup | None:
    """Create each group in turn, on every rank of the job."""
    mine = None
    for ranks in groups:
        group = dist.new_group(list(ranks), **options)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def _agreed_number(group: ProcessGroup | None) -> int:
    """Return a random number, the same on all ranks of the group."""
    on_host = "cpu:" in dist.get_backend_config(group)
    device = torch.device("cpu") if on_host else torch.accelerator.current_accelerator()
    number = torch.tensor([secrets.randbits(63)], device=device)
    with comm_error_context("agreement on names of process groups", group=group):
        dist.broadcast(number, src=dist.get_process_group_ranks(group)[0], group=group)
        return int(number.item())


def _obstacle() -> str:
    """Return why creating a group concerns all ranks of the job, "" if only its members; as on all ranks."""
    if dist.get_backend() == dist.Backend.MPI:
        return "MPI has all ranks take part"
    config = getattr(dist, "config", None)
    if getattr(config, "use_torchcomms", False) or hasattr(dist.group.WORLD, "new_group"):
        return "this job's default process group creates the others by rules of its own"
    if unknown := unknown_creation():
        warnings.warn(
            f"sdp4bit: {unknown}. Every rank creates all process groups in turn: slower in a large job",
            stacklevel=4,
        )
    return unknown


def unknown_creation() -> str:
    """Return that this torch creates process groups in a way that is not known, "" if it is."""
    c10d: Any = dist.distributed_c10d
    helper = getattr(c10d, "_new_process_group_helper", None)
    parameters = inspect.signature(helper).parameters if callable(helper) else {}
    required = {name for name, found in parameters.items() if found.default is found.empty}
    has_ranks = isinstance(getattr(getattr(c10d, "_world", None), "pg_group_ranks", None), dict)
    if required <= _ARGUMENTS <= set(parameters) and has_ranks and hasattr(c10d, "_get_default_store"):
        return ""
    return f"torch {torch.__version__} creates process groups otherwise than {TESTED_TORCH}"
