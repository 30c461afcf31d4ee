"""The processes of a run: joining the process group, and agreeing on errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit_lab.common.launch.store import join_store
from sdp4bit_lab.common.settings import SettingError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Which process of the run this is, and the device it computes on."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    job: str | None = None
    """Names the job, the same after torchrun has restarted its processes; None for a process alone."""

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes for all."""
        return self.rank == 0


@contextmanager
def join_ranks(*, timeout: timedelta = default_pg_timeout) -> Iterator[Ranks]:
    """Open the default process group for the block: torchrun's ranks, or one process alone.

    Args:
        timeout: how long a rank waits for the others in an exchange; torch's default when not given.

    Raises:
        ExchangeError: a rank is missing after the timeout.
    """
    alone = "RANK" not in os.environ
    rank, world_size, local_rank, local_world_size = (
        (0, 1, 0, 1)
        if alone
        else (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    )
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        # Ranks on one machine share its cores; more threads than cores cost several times the step. torchrun
        # sets OMP_NUM_THREADS by itself for several ranks; for one rank it is somebody's wish.
        if local_world_size > 1 or "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
    store: Store = HashStore()
    job: str | None = None
    if not alone:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        store, job = join_store(store, rank=rank, world_size=world_size, timeout=timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    try:
        yield Ranks(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            device=device,
            job=job,
        )
    finally:
        dist.destroy_process_group()


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Run `work` on every rank, and return its result here once it has succeeded on all.

    Raises:
        SettingError: on all ranks, if it was raised on any.
        RuntimeError: on all ranks, if anything else was raised on any.
    """
    result: T
    failure: tuple[bool, str] | None = None
    cause: Exception | None = None
    try:
        result = work()
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        cause = error
        is_setting = isinstance(error, SettingError)
        failure = (is_setting, str(error) if is_setting else f"{type(error).__name__}: {error}")
    for rank, other in enumerate(gather_over_ranks(failure, what="agreement on errors")):
        if other is not None:
            is_setting, message = other
            raise (
                SettingError(message) if is_setting else RuntimeError(f"rank {rank}: {message}")
            ) from cause
    return result


def broadcast_from_rank0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 alone, and return its result, or raise its error, on all ranks."""
    result = run_on_all_ranks(lambda: work() if dist.get_rank() == 0 else None)
    box: list[T | None] = [result]
    with comm_error_context("broadcast from rank 0"):
        dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def gather_over_ranks(value: T, *, what: str, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, in their order.

    Args:
        what: is gathered, for the error of a rank that does not answer.
        group: among whom; all when not given.
    """
    values = [value] * dist.get_world_size(group)
    with comm_error_context(what, group=group):
        dist.all_gather_object(values, value, group=group)
    return values


def sum_over_ranks(values: list[float], *, device: torch.device) -> list[float]:
    """Return the sums of each value over all ranks, added in double precision."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    with comm_error_context("sum over all ranks"):
        dist.all_reduce(tensor)
    summed: list[float] = tensor.tolist()
    return summed
