"""Join the process group and share values and errors among ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from sdp4bit.collectives.errors import ExchangeError, comm_error_context, is_communication_failure
from sdp4bit.collectives.topology import host_name
from sdp4bit_lab.common.failures import as_run_error, is_failure, one_line
from sdp4bit_lab.common.launch.signals import listen
from sdp4bit_lab.common.launch.store import join_store
from sdp4bit_lab.common.settings import RunError

T = TypeVar("T")
_JOB, _LISTENS = "sdp4bit job", "listens"
"""Prefix of the keys that survive restarts, and the key of ranks that record signals."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Identify this process and its device."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    job: str | None = None
    """Job name that survives restarts by torchrun; None without a launcher."""
    job_store: Store | None = None
    """Keys that survive these restarts; None without a launcher."""

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes for all ranks."""
        return self.rank == 0


@contextmanager
def join_ranks(*, timeout: timedelta = default_pg_timeout) -> Iterator[Ranks]:
    """Open the default process group for the block: the launcher's ranks, or one rank.

    Args:
        timeout: timeout of collectives.

    Raises:
        ExchangeError: a rank did not join before the timeout.
    """
    rank, world_size, local_rank, local_world_size = 0, 1, 0, 1
    store: Store = HashStore()
    job: str | None = None
    job_store: Store | None = None
    begin = time.monotonic()
    try:
        if "RANK" in os.environ:
            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
            job_store = PrefixStore(_JOB, store)
            store, job = join_store(store, rank=rank, world_size=world_size, timeout=timeout)
            local_rank, local_world_size = _local_place(store, rank=rank, world_size=world_size)
        if torch.cuda.is_available():
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
            # Ranks share the cores: oversubscribed threads make steps several times slower. torchrun sets
            # OMP_NUM_THREADS itself for several ranks; for one rank, it is the user's choice.
            if local_world_size > 1 or "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except RuntimeError as error:
        if isinstance(error, ExchangeError) or not is_communication_failure(error):
            raise
        seconds = time.monotonic() - begin
        raise ExchangeError(
            f"start of the ranks: rank {rank} has waited {seconds:.1f} s for the other {world_size - 1} "
            f"({one_line(error)[:300]}). Check their errors, or raise the timeout",
            seconds=seconds,
        ) from error
    try:
        yield Ranks(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            device=device,
            job=job,
            job_store=job_store,
        )
    finally:
        dist.destroy_process_group()


def _local_place(store: Store, *, rank: int, world_size: int) -> tuple[int, int]:
    """Return LOCAL_RANK and LOCAL_WORLD_SIZE, or count the ranks of this host if one is not set."""
    if {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= set(os.environ):
        return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    store.set(f"host {rank}", host_name())
    hosts = [store.get(f"host {other}").decode() for other in range(world_size)]
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


def listen_on_rank(ranks: Ranks) -> None:
    """Record signals instead of terminating, and let the launcher know; see `listen`."""
    listen()
    if ranks.is_first and ranks.job_store is not None:
        ranks.job_store.set(_LISTENS, "")


def ranks_listen(store: Store) -> bool:
    """Return whether the ranks of this launcher's store have called `listen_on_rank`."""
    listen: bool = PrefixStore(_JOB, store).check([_LISTENS])
    return listen


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Run `work` on every rank and return its local result, or fail on all ranks.

    Raises:
        RunError: on all ranks, if any rank raised it, or an error that is reported in one line.
        RuntimeError: on all ranks, if any rank raised something else.
    """
    result: T
    failure: tuple[type[Exception], str] | None = None
    cause: BaseException | None = None
    try:
        result = work()
    except BaseException as error:  # the other ranks must not wait for this one
        if not is_failure(error):
            raise
        cause, expected = error, as_run_error(error)
        failure = (RuntimeError, f"{type(error).__name__}: {error}")
        if expected is not None:
            failure = (type(expected), str(expected))
    for rank, other in enumerate(gather_over_ranks(failure, what="agreement on errors")):
        if other is not None:
            kind, message = other
            # Only the message of a subclass is written for all ranks.
            raise kind(f"rank {rank}: {message}" if kind in (RuntimeError, RunError) else message) from cause
    return result


def broadcast_from_rank0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0; return its result or raise its error on all ranks."""
    if not dist.is_initialized():
        return work()
    result = run_on_all_ranks(lambda: work() if dist.get_rank() == 0 else None)
    box: list[T | None] = [result]
    with comm_error_context("broadcast from rank 0"):
        dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def gather_over_ranks(value: T, *, what: str, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks in rank order; only this one without a process group.

    Args:
        what: names the operation in errors.
        group: default: all ranks.
    """
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size(group)
    with comm_error_context(what, group=group):
        dist.all_gather_object(values, value, group=group)
    return values


def sum_over_ranks(values: list[float], *, device: torch.device) -> list[float]:
    """Sum each value over all ranks in fp64."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    with comm_error_context("sum over all ranks"):
        dist.all_reduce(tensor)
    summed: list[float] = tensor.tolist()
    return summed
