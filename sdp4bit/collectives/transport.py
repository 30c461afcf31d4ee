"""Transfers between ranks.

gloo acknowledges a receive through the socket that carries the payload, so its own all-to-all between two
ranks is half duplex. Posting every receive before the first send uses both directions at the same time. Other
backends are used as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions
from torch.distributed import ProcessGroup

from sdp4bit.collectives.chunks import CHUNKS_UNDER_WAY
from sdp4bit.collectives.errors import comm_error_context, exchange_error, is_communication_failure
from sdp4bit.collectives.plan import Message
from sdp4bit.collectives.scratch import Messages, Scratch
from sdp4bit.collectives.streams import DeferredWork
from sdp4bit.collectives.topology import Topology
from sdp4bit.traffic import Level

# torch 2.13 renames these two and deprecates the old names.
_all_gather_native: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_native: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)
_EXCHANGE = "all_to_all_single" if hasattr(ProcessGroup, "all_to_all_single") else "alltoall_base"
_GATHER = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"
_GATHER_SEVERAL = (
    "all_gather_single_coalesced"
    if hasattr(ProcessGroup, "all_gather_single_coalesced")
    else "allgather_into_tensor_coalesced"
)


class PendingTransfer:
    """Transfers in flight; their buffers are in use until wait() returns."""

    def __init__(
        self,
        works: list[Any],
        *,
        what: str = "exchange",
        group: ProcessGroup | None = None,
        peers: Sequence[int] | None = None,
    ) -> None:
        """Create a handle.

        Args:
            what: description for errors.
            peers: the group rank at the other end of each transfer.
        """
        self._works = works
        self._what = what
        self._torch_group = group
        self._peers = peers

    def wait(self) -> None:
        """Wait for all transfers; on CUDA only the current stream waits.

        Raises:
            ExchangeError: a rank has exited, or the process group's timeout has passed.
        """
        # The works keep the buffers alive; a second call finds none.
        works, self._works = self._works, []
        start = time.monotonic()
        for index, work in enumerate(works):
            if work is not None:
                try:
                    work.wait()
                except RuntimeError as error:
                    if not is_communication_failure(error):
                        raise
                    peers = None if self._peers is None else [self._peers[index]]
                    raise exchange_error(
                        error, what=self._what, group=self._torch_group, start=start, peers=peers
                    ) from error


_backends: MutableMapping[ProcessGroup, str] = WeakKeyDictionary()


def _is_pairwise(group: ProcessGroup) -> bool:
    if group not in _backends:
        _backends[group] = dist.get_backend(group)
    return _backends[group] == dist.Backend.GLOO


def start_all_to_all(
    received: Tensor,
    sent: Tensor,
    group: ProcessGroup,
    *,
    overlaps: bool = False,
    skips_own: bool = False,
    tag: int = 0,
    what: str = "all-to-all",
) -> PendingTransfer:
    """Start sending row i of `sent` to rank i of the group and receiving row i of `received` from it.

    Args:
        received, sent: [group size, row], contiguous rows, same dtype.
        overlaps: on CUDA, use the communicator's stream because the current stream gets other work before it
            waits. Otherwise the transfer runs on the current stream, which saves the synchronization.
        skips_own: this rank's own row need not be copied.
        tag: identifies exchanges that are in flight in the same group.
        what: description for errors.
    """
    if not _is_pairwise(group):
        # The group's own method. torch's function would check sizes, which the plan has decided, at every
        # call.
        options = AllToAllOptions()
        options.asyncOp = overlaps
        with comm_error_context(what, group=group):
            work = getattr(group, _EXCHANGE)(received, sent, [], [], options)
            if not overlaps and work is not None:
                work.wait()
        return PendingTransfer([work] if overlaps else [], what=what, group=group)
    rank, size = group.rank(), group.size()
    # Every rank begins with its neighbor, so that no rank is the first peer of all others.
    peers = [(rank + i) % size for i in range(1, size)]
    with comm_error_context(what, group=group):
        # All receives before the first send: see the top of the module.
        works = [dist.irecv(received[p], group=group, group_src=p, tag=tag) for p in peers]
        works += [dist.isend(sent[p], group=group, group_dst=p, tag=tag) for p in peers]
    if not skips_own:
        # While the transfers are in flight; none of them uses this row.
        received[rank].copy_(sent[rank])
    return PendingTransfer(works, what=what, group=group, peers=peers * 2)


def start_all_gather(
    received: Tensor, sent: Tensor, group: ProcessGroup, *, what: str = "all-gather"
) -> PendingTransfer:
    """Start receiving sent[k] of rank i of the group as received[k, i], without a copy.

    Concurrent gathers in a group must start in the same order on all ranks.

    Args:
        received: [blocks, group size, n], contiguous.
        sent: [blocks, n], contiguous.
        what: description for errors.
    """
    if not _is_pairwise(group):
        # On the current stream, so there is nothing to wait for.
        with comm_error_context(what, group=group):
            options = AllgatherOptions()
            options.asyncOp = False
            if len(sent) == 1:
                work = getattr(group, _GATHER)(received.view(-1), sent.view(-1), options)
                if work is not None:
                    work.wait()
                return PendingTransfer([])
            # One call and one launch for all received[k], which are contiguous. torch's coalescing context
            # manager would cost the host some microseconds per block.
            gather = getattr(group, _GATHER_SEVERAL)
            work = gather(received.flatten(1).unbind(), sent.unbind(), options)
        return PendingTransfer([work], what=what, group=group)
    rank, size, blocks = group.rank(), group.size(), range(len(sent))
    peers = [(rank + i) % size for i in range(1, size)]
    # The tag is the block, because a peer sends several messages.
    with comm_error_context(what, group=group):
        works = [dist.irecv(received[k, p], group=group, group_src=p, tag=k) for p in peers for k in blocks]
        works += [dist.isend(sent[k], group=group, group_dst=p, tag=k) for p in peers for k in blocks]
    received[:, rank].copy_(sent)
    of_works = [p for p in peers for _ in blocks] * 2
    return PendingTransfer(works, what=what, group=group, peers=of_works)


def all_gather_dense(
    received: Tensor,
    sent: Tensor,
    group: ProcessGroup,
    *,
    gather: Callable[..., Any] = _all_gather_native,
    async_op: bool = False,
    what: str = "all-gather",
) -> Any:
    """Gather every rank's `sent` [n] to `received` [size * n] with the backend's all-gather or `gather`.

    Returns:
        A work handle, or None if the call is synchronous.
    """
    with comm_error_context(what, group=group):
        work = gather(received, sent, group=group, async_op=async_op)
    return None if work is None else DeferredWork(PendingTransfer([work], what=what, group=group).wait)


def reduce_scatter_dense(
    received: Tensor,
    sent: Tensor,
    group: ProcessGroup,
    op: Any,
    *,
    reduce: Callable[..., Any] = _reduce_scatter_native,
    what: str = "reduce-scatter",
) -> None:
    """Reduce `sent` [size * n] to `received` [n] with the backend's reduce-scatter or `reduce`."""
    with comm_error_context(what, group=group):
        reduce(received, sent, op=op, group=group)


Use = Literal["send", "receive"]


class Transport:
    """Moves the messages of one rank between process groups; simulated ranks override both methods."""

    def __init__(self, topology: Topology, scratch: Scratch) -> None:
        self._topology = topology
        self._scratch = scratch

    def messages(
        self, level: Level, use: Use, index: int, message: Message, *, device: torch.device
    ) -> Messages:
        """Return buffers with a message for each rank of the level, from the scratch of the current stream.

        Successive chunks alternate between buffers, and successive reductions on a stream share them. The
        stream waits for the transfer before it uses them again.

        Args:
            index: number of the chunk.
        """
        count, turn = self._topology.layout.levels[level], index % CHUNKS_UNDER_WAY
        return self._scratch.split(f"{level} {use} {turn}", count, message, device=device)

    def start(
        self,
        received: Tensor,
        sent: Tensor,
        *,
        level: Level,
        tag: int,
        overlaps: bool,
        skips_own: bool,
        what: str,
    ) -> PendingTransfer:
        """Start an all-to-all among the ranks of a level; see `start_all_to_all`."""
        group = self._topology.group(level)
        assert group is not None
        return start_all_to_all(
            received, sent, group, overlaps=overlaps, skips_own=skips_own, tag=tag, what=what
        )
