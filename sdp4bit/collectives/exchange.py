"""All-to-all and all-gather of rows, full duplex on gloo, native elsewhere.

gloo answers a receive through the same socket that carries the payload, so its own all-to-all between two
ranks runs half duplex. Posting every receive before the first send lets both directions flow at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 renames these two; the old names warn there and are the only ones before.
_all_gather_native: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_native: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


class PendingExchange:
    """Transfers that have been started; the buffers stay in use until wait() returns."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works
        self._stop: Callable[[], None] | None = None

    def timed_by(self, stop: Callable[[], None]) -> PendingExchange:
        """Return this; `stop` is called when the transfers have been waited for."""
        self._stop = stop
        return self

    def wait(self) -> None:
        """All transfers have completed; on CUDA, the current stream waits for them."""
        works, self._works = self._works, []
        for work in works:
            if work is not None:
                work.wait()
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()


def _is_pairwise(group: ProcessGroup) -> bool:
    return dist.get_backend(group) == dist.Backend.GLOO


def start_all_to_all(received: Tensor, sent: Tensor, group: ProcessGroup, *, tag: int = 0) -> PendingExchange:
    """Row i of `sent` travels to rank i of the group, row i of `received` comes from it.

    Args:
        received, sent: [group size, row], contiguous rows, same dtype.
        tag: tells exchanges apart that are under way in the same group at once.
    """
    if not _is_pairwise(group):
        return PendingExchange([dist.all_to_all_single(received, sent, group=group, async_op=True)])
    rank, size = group.rank(), group.size()
    peers = [(rank + i) % size for i in range(1, size)]
    works = [dist.irecv(received[p], group=group, group_src=p, tag=tag) for p in peers]
    works += [dist.isend(sent[p], group=group, group_dst=p, tag=tag) for p in peers]
    received[rank].copy_(sent[rank])
    return PendingExchange(works)


def all_gather_rows(received: Tensor, sent: Tensor, group: ProcessGroup) -> None:
    """Row i of `received` is what rank i of the group sent; see start_all_gather_rows."""
    start_all_gather_rows(received, sent, group).wait()


def start_all_gather_rows(received: Tensor, sent: Tensor, group: ProcessGroup) -> PendingExchange:
    """Row i of `received` comes from rank i of the group, which passes it as `sent`.

    Gathers that are under way in a group at once are told apart by their order, the same on all ranks.

    Args:
        received: [group size, ...]; every received[i] contiguous and of the shape of sent.
        sent: contiguous.
    """
    if not _is_pairwise(group):
        flat = received if received.is_contiguous() else torch.empty_like(received).contiguous()
        _all_gather_native(flat.view(-1), sent.view(-1), group=group)
        if flat is not received:
            received.copy_(flat)
        return PendingExchange([])
    rank, size = group.rank(), group.size()
    peers = [(rank + i) % size for i in range(1, size)]
    works = [dist.irecv(received[p], group=group, group_src=p) for p in peers]
    works += [dist.isend(sent, group=group, group_dst=p) for p in peers]
    received[rank].copy_(sent)
    return PendingExchange(works)


def all_gather_blocks(received: Tensor, sent: Tensor, group: ProcessGroup) -> None:
    """received[k, i] is sent[k] of rank i of the group.

    Args:
        received: [blocks, group size, n], contiguous.
        sent: [blocks, n], contiguous.
    """
    if not _is_pairwise(group):
        gathered = received.new_empty(group.size(), *sent.shape)
        _all_gather_native(gathered.view(-1), sent.view(-1), group=group)
        received.copy_(gathered.transpose(0, 1))
        return
    rank, size = group.rank(), group.size()
    peers = [(rank + i) % size for i in range(1, size)]
    blocks = range(sent.shape[0])
    works = [dist.irecv(received[k, p], group=group, group_src=p, tag=k) for p in peers for k in blocks]
    works += [dist.isend(sent[k], group=group, group_dst=p, tag=k) for p in peers for k in blocks]
    received[:, rank].copy_(sent)
    PendingExchange(works).wait()


def all_gather_dense(received: Tensor, sent: Tensor, group: ProcessGroup, *, async_op: bool = False) -> Any:
    """`received` [size * n] holds every rank's `sent` [n], by the communication library's own algorithm.

    Returns:
        torch.distributed's work handle, or None if the call is synchronous.
    """
    return _all_gather_native(received, sent, group=group, async_op=async_op)


def reduce_scatter_dense(received: Tensor, sent: Tensor, group: ProcessGroup, op: Any) -> None:
    """`received` [n] holds this rank's row of the reduction of `sent` [size * n], reduced by the library."""
    _reduce_scatter_native(received, sent, op=op, group=group)
