"""Refreshes that an exception interrupts, for engines whose ranks agree on no other events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sdp4bit.collectives.group import Group
from sdp4bit.collectives.host import all_reduce_on_host

REASON = "an exception has interrupted the refresh before"


def call_all(calls: Sequence[Callable[[], object]]) -> None:
    """Call each in order, also after one has failed, because other ranks wait for all; raise the error."""
    with ExitStack() as left:
        for call in reversed(calls):
            left.callback(call)


def agree_on_interrupted(groups: Sequence[Group], *, host: ProcessGroup | None) -> list[Group]:
    """Return the groups whose last refresh was interrupted on any rank; collective over their ranks.

    Ranks may hold different rows of these groups, which then need full precision.

    Args:
        groups: groups of the same ranks.
        host: the job's process group for tensors on the CPU; None if all groups take them.
    """
    groups = [group for group in groups if group.replica is not None]
    if not groups:
        return []
    torn = torch.tensor([group.replica is not None and group.replica.is_torn for group in groups])
    flags, first = torn.to(torch.int32), groups[0]
    over = host or first.view.process_group
    assert over is not None
    what = "agreement on interrupted refreshes"
    all_reduce_on_host(flags, over, ranks=first.layout.ranks, op=dist.ReduceOp.MAX, what=what)
    return [group for group, is_torn in zip(groups, flags.tolist(), strict=True) if is_torn]
