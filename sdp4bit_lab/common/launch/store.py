"""A store for the addresses of this start's processes alone, whatever the launcher's store still holds.

torchrun keeps one store over its restarts. Back ends write their addresses there under the same names every
time, and a rank that is early reads those of processes that have ended. TORCHELASTIC_RESTART_COUNT does not
tell starts apart: each node counts for itself.
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
    """Return a part of the store that only the processes of this start use, and a name of the whole job.

    1. Every rank but 0 registers with a number of its own, drawn at random.
    2. Rank 0 answers each hello with it and the name of the start: an answer to a process that has ended, or
       of one, has another number.
    3. The ranks confirm the name.

    Raises:
        ExchangeError: a rank is missing after the timeout.
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
    """Return the name of the start, which all ranks have confirmed."""
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
    """Return the name of the start."""
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
            f"start of the ranks: rank {rank} has waited for {ranks_in_words(missing)} until the timeout. "
            "See their errors, or give them a longer timeout"
        )
    time.sleep(_INTERVAL)
