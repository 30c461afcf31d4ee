"""Reductions of small tensors on the host in log2(ranks) hops, over one connection per hop."""

from __future__ import annotations

import os
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sdp4bit.collectives.errors import (
    comm_error_context,
    exchange_error,
    group_timeout,
    is_communication_failure,
    job_timeout,
)
from sdp4bit.collectives.topology import let_gloo_threads_end

_COMBINE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.SUM: torch.add,
}
_BACKEND = "sdp4bit_gloo"  # gloo that connects two ranks when they first exchange something
_HOST_BACKENDS = {"cpu:gloo", f"cpu:{_BACKEND}"}
_TAG = 0x5D4B  # the group may be FSDP2's, whose messages between two ranks belong to the user


def create_host_group(*, purpose: str) -> ProcessGroup | None:
    """Create a process group of all ranks for tensors on the CPU; None if the default group takes them.

    Collective over the job. A gloo group would connect every rank to all others at once, two file
    descriptors each, and would end at the limit of 1,024 files. This one connects the ranks that exchange
    something.

    Args:
        purpose: description of the group for the backend's messages.
    """
    if "cpu:" in dist.get_backend_config():
        return None
    if not hasattr(dist.Backend, _BACKEND.upper()):
        # torch.distributed.new_group ignores the options of a gloo group. For "cuda" too, because torch
        # looks for a backend of the device that the default group is bound to.
        dist.Backend.register_backend(_BACKEND, _connected_on_use, devices=["cpu", "cuda"])
    # Of all ranks, because new_group for some ranks would make the others split a bound NCCL communicator.
    group = dist.new_group(backend=_BACKEND, timeout=job_timeout(), group_desc=f"sdp4bit {purpose}")
    assert isinstance(group, ProcessGroup)
    let_gloo_threads_end()
    return group


def _connected_on_use(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # As torch does for groups that it creates itself; it ignores the variable for a device of ours.
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices = [gloo.create_device(interface=name, lazy_init=True) for name in interfaces]
    if not devices and (address := _address_towards_master()):
        devices = [gloo.create_device(hostname=address, lazy_init=True)]
    options._devices = devices or [gloo.create_default_device(lazy_init=True)]
    options._threads = 2 * len(options._devices)
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _address_towards_master() -> str | None:
    """Return this host's address towards MASTER_ADDR if its own name is unknown or of the loopback.

    gloo announces the address of the host's name. Debian's /etc/hosts maps it to 127.0.1.1, and containers
    may not know it; other hosts cannot connect then. NCCL does not use the name, so jobs run until here.
    """
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        if not all(ip_address(entry[4][0]).is_loopback for entry in found):
            return None
    except OSError:
        pass
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            os.environ["MASTER_ADDR"], 1, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: the kernel chooses the route
            return str(probe.getsockname()[0])
    except (KeyError, OSError):
        return None


class Exchange(NamedTuple):
    """The messages between two ranks at a time; ranks are indices in the reduction."""

    peer: int
    sends: bool
    receives: Literal["", "values", "result"]
    origins: range
    """The ranks below the largest power of two whose values the peer has combined."""


@lru_cache(maxsize=64)  # the same in every step
def exchanges_of(me: int, *, size: int) -> tuple[Exchange, ...]:
    """Return the exchanges of a rank in order; see `all_reduce_on_host`."""
    power = 1 << (size.bit_length() - 1)
    if me >= power:
        return (
            Exchange(me - power, True, "", range(0)),
            Exchange(me - power, False, "result", range(power)),
        )
    doubling = []
    for distance in (1 << hop for hop in range(power.bit_length() - 1)):
        peer = me ^ distance
        first = peer // distance * distance
        doubling.append(Exchange(peer, True, "values", range(first, first + distance)))
    extra = me + power
    if extra >= size:
        return tuple(doubling)
    before = Exchange(extra, False, "values", range(extra, extra + 1))
    return (before, *doubling, Exchange(extra, True, "", range(0)))


def all_reduce_on_host(
    values: Tensor, group: ProcessGroup, *, ranks: Sequence[int], op: dist.ReduceOp.RedOpType, what: str
) -> None:
    """Replace values by their reduction over ranks; all end with the same bits.

    Steps, with p the largest power of two up to the number of ranks:
    1. Rank p + i sends its values to rank i, which combines them with its own.
    2. Recursive doubling: at distances 1, 2, 4, ... p/2, two ranks exchange and combine their totals.
       Both compute the same bits, because a + b = b + a.
    3. Rank i sends the result to rank p + i.

    Backends other than gloo use their own all-reduce.

    Args:
        values: a small contiguous tensor on the CPU; changed in place.
        group: a process group that includes the ranks.
        ranks: ascending global ranks. In node-major order the first hops stay inside the node.
        op: MAX or SUM.
        what: description for errors, which name the ranks whose values did not arrive.

    Raises:
        ExchangeError: a rank has exited, or the process group's timeout has passed.
    """
    if not _HOST_BACKENDS & set(dist.get_backend_config(group).split(",")):
        with comm_error_context(what, group=group):
            dist.all_reduce(values, op=op, group=group)
        return
    # A search, because an index in thousands of ranks would take longer than a hop.
    me, size = bisect_left(ranks, dist.get_rank()), len(ranks)
    exchanges = exchanges_of(me, size=size)
    buffers = [torch.empty_like(values) for _ in exchanges]
    sends: list[Any] = []
    total, origins, start = values, range(0), time.monotonic()
    # gloo's messages between two ranks know only the timeout with which the group was created.
    limit = group_timeout(group) or timedelta(0)
    try:
        # All receives before the first send, because gloo asks a receiver that is not ready.
        receives: list[Any] = [
            group.recv([buffer], dist.get_group_rank(group, ranks[each.peer]), _TAG)
            if each.receives
            else None
            for each, buffer in zip(exchanges, buffers, strict=True)
        ]
        for each, buffer, receive in zip(exchanges, buffers, receives, strict=True):
            origins = each.origins
            if each.sends:
                sends.append(group.send([total], dist.get_group_rank(group, ranks[each.peer]), _TAG))
            if receive:
                receive.wait(limit)
                total = buffer if each.receives == "result" else _COMBINE[op](total, buffer)
        for send in sends:
            send.wait(limit)
    except RuntimeError as error:
        if not is_communication_failure(error):
            raise
        power = 1 << (size.bit_length() - 1)
        extras = range(origins.start + power, min(origins.stop + power, size))
        peers = [dist.get_group_rank(group, ranks[each]) for each in (*origins, *extras) if each != me]
        raise exchange_error(error, what=what, group=group, start=start, peers=peers or None) from error
    values.copy_(total)
