"""All-to-all and all-gather of rows, full duplex on gloo, native elsewhere.

gloo answers a receive through the same socket that carries the payload, so its own all-to-all between two
ranks runs half duplex. Posting every receive before the first send lets both directions flow at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ProcessGroup

from sdp4bit.collectives.errors import comm_error_context, exchange_error, is_communication_failure
from sdp4bit.collectives.pipeline import SLICES_UNDER_WAY
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import Topology
from sdp4bit.collectives.work import DeferredWork
from sdp4bit.traffic import Level

# torch 2.13 renames these two; the old names warn there and are the only ones before.
_all_gather_native: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_native: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)
_GATHER_SEVERAL = (
    "all_gather_single_coalesced"
    if hasattr(ProcessGroup, "all_gather_single_coalesced")
    else "allgather_into_tensor_coalesced"
)


class PendingExchange:
    """Transfers that have been started; the buffers stay in use until wait() returns."""

    def __init__(
        self,
        works: list[Any],
        *,
        what: str = "exchange",
        group: ProcessGroup | None = None,
        peers: Sequence[int] | None = None,
    ) -> None:
        """Take over transfers.

        Args:
            what: is exchanged, for errors.
            group: among whom.
            peers: the rank of the group that each transfer comes from or goes to.
        """
        self._works = works
        self._what = what
        self._group = group
        self._peers = peers

    def wait(self) -> None:
        """Wait for all transfers; on CUDA, the current stream does.

        Raises:
            ExchangeError: a rank has ended, or has not answered within the timeout of the process group.
        """
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
                        error, what=self._what, group=self._group, start=start, peers=peers
                    ) from error


def _is_pairwise(group: ProcessGroup) -> bool:
    return dist.get_backend(group) == dist.Backend.GLOO


def start_all_to_all(
    received: Tensor,
    sent: Tensor,
    group: ProcessGroup,
    *,
    overlaps: bool = False,
    tag: int = 0,
    what: str = "all-to-all",
) -> PendingExchange:
    """Start to send row i of `sent` to rank i of the group and to receive row i of `received` from it.

    Args:
        received, sent: [group size, row], contiguous rows, same dtype.
        overlaps: on CUDA, whether the current stream is given other work before it waits. If not, the
            transfer is its next work: a stream of the communicator's would have to be waited for at once.
        tag: tells exchanges apart that are under way in the same group at once.
        what: is exchanged, for errors.
    """
    if not _is_pairwise(group):
        with comm_error_context(what, group=group):
            work = dist.all_to_all_single(received, sent, group=group, async_op=overlaps)
        return PendingExchange([work], what=what, group=group)
    rank, size = group.rank(), group.size()
    peers = [(rank + i) % size for i in range(1, size)]
    with comm_error_context(what, group=group):
        works = [dist.irecv(received[p], group=group, group_src=p, tag=tag) for p in peers]
        works += [dist.isend(sent[p], group=group, group_dst=p, tag=tag) for p in peers]
    received[rank].copy_(sent[rank])
    return PendingExchange(works, what=what, group=group, peers=peers * 2)


def start_all_gather_rows(
    received: Tensor, sent: Tensor, group: ProcessGroup, *, what: str = "all-gather"
) -> PendingExchange:
    """Start to receive row i of `received` from rank i of the group, which passes it as `sent`.

    Gathers that are under way in a group at once are told apart by their order, the same on all ranks.

    Args:
        received: [group size, ...], contiguous; every received[i] of the shape of sent.
        sent: contiguous.
        what: is gathered, for errors.
    """
    if not _is_pairwise(group):
        with comm_error_context(what, group=group):
            _all_gather_native(received.view(-1), sent.view(-1), group=group)
        return PendingExchange([])
    rank, size = group.rank(), group.size()
    peers = [(rank + i) % size for i in range(1, size)]
    with comm_error_context(what, group=group):
        works = [dist.irecv(received[p], group=group, group_src=p) for p in peers]
        works += [dist.isend(sent, group=group, group_dst=p) for p in peers]
    received[rank].copy_(sent)
    return PendingExchange(works, what=what, group=group, peers=peers * 2)


def all_gather_blocks(
    received: Tensor, sent: Tensor, group: ProcessGroup, *, what: str = "all-gather"
) -> None:
    """Receive sent[k] of rank i of the group as received[k, i], where it is to stay: nothing is copied.

    Args:
        received: [blocks, group size, n], contiguous.
        sent: [blocks, n], contiguous.
        what: is gathered, for errors.
    """
    if not _is_pairwise(group):
        # received[k] is one piece of memory, what one gather fills. One call and one launch for all of them;
        # torch's context manager for this would cost the host some microseconds per block.
        options = AllgatherOptions()
        options.asyncOp = False
        with comm_error_context(what, group=group):
            gather = getattr(group, _GATHER_SEVERAL)
            work = gather(received.flatten(1).unbind(), sent.unbind(), options)
        PendingExchange([work], what=what, group=group).wait()
        return
    rank, size = group.rank(), group.size()
    peers = [(rank + i) % size for i in range(1, size)]
    blocks = range(sent.shape[0])
    with comm_error_context(what, group=group):
        works = [dist.irecv(received[k, p], group=group, group_src=p, tag=k) for p in peers for k in blocks]
        works += [dist.isend(sent[k], group=group, group_dst=p, tag=k) for p in peers for k in blocks]
    received[:, rank].copy_(sent)
    of_works = [p for p in peers for _ in blocks] * 2
    PendingExchange(works, what=what, group=group, peers=of_works).wait()


def all_gather_dense(
    received: Tensor,
    sent: Tensor,
    group: ProcessGroup,
    *,
    gather: Callable[..., Any] = _all_gather_native,
    async_op: bool = False,
    what: str = "all-gather",
) -> Any:
    """Gather every rank's `sent` [n] to `received` [size * n], by the communication library's own way.

    Args:
        gather: takes the first three and async_op; returns a work handle, or None if synchronous.

    Returns:
        A work handle, or None if the call is synchronous.
    """
    with comm_error_context(what, group=group):
        work = gather(received, sent, group=group, async_op=async_op)
    if work is not None:
        return DeferredWork(PendingExchange([work], what=what, group=group).wait)
    return None


def reduce_scatter_dense(
    received: Tensor,
    sent: Tensor,
    group: ProcessGroup,
    op: Any,
    *,
    reduce: Callable[..., Any] = _reduce_scatter_native,
    what: str = "reduce-scatter",
) -> None:
    """Reduce `sent` [size * n] to this rank's row `received` [n], by the communication library's own way.

    Args:
        reduce: takes the first four; synchronous.
    """
    with comm_error_context(what, group=group):
        reduce(received, sent, op=op, group=group)


Use = Literal["send", "receive"]


class GroupExchange:
    """The all-to-alls of one rank, among the ranks of its node and among those with its local rank.

    Simulated ranks overwrite both methods.
    """

    def __init__(self, topology: Topology, scratch: Scratch) -> None:
        self._topology = topology
        self._scratch = scratch

    def messages(
        self, level: Level, use: Use, index: int, *, slot: int | None, nbytes: int, device: torch.device
    ) -> Tensor:
        """Return uint8 [ranks of the level, nbytes], to be filled and sent, or to be received into.

        Slices take turns, and reductions that follow each other on a stream share the memory.

        Args:
            index: of the slice, among those whose messages are under way at once.
            slot: of the reduction, among those that are under way at once on this rank; None for those that
                share the memory.
        """
        topology = self._topology
        count = topology.ranks_per_node if level == "intra" else topology.nodes
        turn = index % SLICES_UNDER_WAY
        return self._scratch.messages(f"{level} {use} {slot} {turn}", count, nbytes, device=device)

    def start(
        self, received: Tensor, sent: Tensor, *, level: Level, tag: int, overlaps: bool, what: str
    ) -> PendingExchange:
        """Start to send row i of `sent` to rank i of the level and to receive row i of `received` from it.

        Args:
            tag: the same on all ranks; no two exchanges that are under way at once have the same.
            overlaps: whether other work is issued before it is waited for.
            what: is exchanged, for errors.
        """
        group = self._topology.intra if level == "intra" else self._topology.inter
        assert group is not None
        return start_all_to_all(received, sent, group, overlaps=overlaps, tag=tag, what=what)
