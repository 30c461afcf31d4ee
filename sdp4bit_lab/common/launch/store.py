"""Separate the store of this start from keys that earlier starts left in the launcher's store.

torchrun keeps one store across restarts. Back ends write their addresses under the same names each time, so
an early rank could read the addresses of processes that have exited. TORCHELASTIC_RESTART_COUNT cannot
distinguish starts because every node counts for itself. docs/upstream.md has a program that shows this.
"""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, Store

from sdp4bit.collectives.errors import ExchangeError, ranks_in_words

_INTERVAL = 0.01
_PREFIX = "sdp4bit"


def join_store(rendezvous: Store, *, rank: int, world_size: int, timeout: timedelta) -> tuple[Store, str]:
    """Return a prefix store for the processes of this start, and the name of the job.

    1. Every rank but 0 registers a random number.
    2. Rank 0 answers with that number and the name of the start. Stale answers have another number.
    3. The ranks confirm the name.

    Raises:
        ExchangeError: a rank did not register before the timeout.
    """
    store = PrefixStore(_PREFIX, rendezvous)
    job = store.compare_set("job", "", uuid4().hex).decode()
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        start = _serve_handshake(store, world_size=world_size, deadline=deadline)
    else:
        start = _join_handshake(store, rank=rank, deadline=deadline)
    return PrefixStore(f"{_PREFIX}/{start}", rendezvous), job


def _serve_handshake(store: Store, *, world_size: int, deadline: float) -> str:
    """Return the name of the start after all ranks have confirmed it."""
    start = uuid4().hex
    missing = set(range(1, world_size))
    answered: dict[int, str] = {}
    while missing:
        for rank in sorted(missing):
            hello = _read(store, f"hello {rank}")
            if hello and answered.get(rank) != hello:
                store.set(f"answer {rank}", f"{hello} {start}")
                answered[rank] = hello
            if _read(store, f"confirmed {rank}") == start:
                missing.remove(rank)
        if missing:
            _pause(deadline, missing=sorted(missing), rank=0)
    return start


def _join_handshake(store: Store, *, rank: int, deadline: float) -> str:
    hello = uuid4().hex
    store.set(f"hello {rank}", hello)
    while True:
        answer = _read(store, f"answer {rank}")
        if answer and answer.split()[0] == hello:
            start = answer.split()[1]
            store.set(f"confirmed {rank}", start)
            return start
        _pause(deadline, missing=[0], rank=rank)


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _pause(deadline: float, *, missing: list[int], rank: int) -> None:
    if time.monotonic() > deadline:
        raise ExchangeError(
            f"start of the ranks: rank {rank} waited for {ranks_in_words(missing)} until the timeout. "
            "Check their errors, or raise the timeout"
        )
    time.sleep(_INTERVAL)
