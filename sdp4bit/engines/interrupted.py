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


def agree_on_interrupted(groups: Sequence[Group], *, host: ProcessGroup | None) -> None:
    """Require full precision where a refresh was interrupted on any rank; collective over the ranks.

    Ranks may hold different rows of such groups.

    Args:
        host: the job's process group for tensors on the CPU; None if all groups take them.
    """
    with_replica = [(group, group.weights.replica) for group in groups if group.weights.replica is not None]
    for layout in dict.fromkeys(group.layout for group, _ in with_replica):
        here = [(group, replica) for group, replica in with_replica if group.layout == layout]
        flags = torch.tensor([replica.is_torn for _, replica in here], dtype=torch.int32)
        over = host or here[0][0].view.process_group
        assert over is not None
        what = "agreement on interrupted refreshes"
        all_reduce_on_host(flags, over, ranks=layout.ranks, op=dist.ReduceOp.MAX, what=what)
        for (group, _), is_torn in zip(here, flags.tolist(), strict=True):
            if is_torn:
                group.weights.require_full_refresh(REASON)
