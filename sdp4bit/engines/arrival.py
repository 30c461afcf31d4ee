"""Wait until all ranks have made a call, so that its collectives do not meet those of other code."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from sdp4bit.collectives.errors import ExchangeError, comm_error_context, job_timeout, ranks_in_words
from sdp4bit.log import logger

_PATIENCE = 60.0  # seconds until absent ranks are named
_LONGEST_PAUSE = 0.5  # seconds between two looks into the store
_DEFAULT_TIMEOUT = timedelta(minutes=30)
_KINDS = {kind.__name__: kind for kind in (RuntimeError, TypeError, ValueError)}
"""Errors that all ranks raise as they are; others become ValueErrors that name them."""
_made: WeakKeyDictionary[ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""Number of each call in a default group; a group that is created later counts from 0 on all ranks."""


@contextmanager
def checked_on_all_ranks(ranks: Sequence[int], *, call: str) -> Iterator[list[str]]:
    """Wait for all ranks after a block that may fail on some of them; see `wait_for_ranks`.

    The block appends arguments that must be equal on all ranks to the list that it gets, as text.
    """
    same: list[str] = []
    failure: Exception | None = None
    try:
        yield same
    except Exception as caught:  # raising here would leave the other ranks waiting
        failure = caught
    wait_for_ranks(ranks, call=call, same=", ".join(same), failure=failure)


def wait_for_ranks(
    ranks: Sequence[int], *, call: str, same: str = "", failure: Exception | None = None
) -> None:
    """Return when all these ranks have made this call.

    The ranks meet in the store of the default group, which is independent of the collectives that absent
    ranks run meanwhile. The first of the ranks that wait logs after a minute which ranks are absent.

    Args:
        ranks: ascending global ranks, including this one; the same on all of them.
        call: name of the function for errors.
        same: arguments that must be equal on all ranks, as text.
        failure: an error on this rank; every rank then raises it.

    Raises:
        ExchangeError: a rank did not make the call before the timeout of the default group. Nothing was
            sent, and the call can be repeated.
        ValueError: some rank failed, or the arguments differ; the same on every rank.
        RuntimeError, TypeError: the same, if the first failure is of this kind.
    """
    if len(ranks) < 2 or dist.get_backend() == "fake":  # whose store keeps nothing
        if failure is not None:
            raise failure
        return
    c10d: Any = dist.distributed_c10d
    with comm_error_context(f"wait for all ranks in {call}"):
        meeting = _Meeting(c10d._get_default_store(), ranks, call=call)
        try:
            meeting.arrive(failure, same=same)
            meeting.wait()
        except BaseException as error:  # also Ctrl-C, after which a repeated call must wait again
            have_met = False
            with suppress(RuntimeError):  # the store may have gone
                have_met = meeting.leave()
            if not isinstance(error, ExchangeError):
                raise
            if not have_met:
                raise (failure or error) from None
    meeting.end(failure)


class _Meeting:
    """One call of some ranks, by keys of a store that they share."""

    def __init__(self, store: Any, ranks: Sequence[int], *, call: str) -> None:
        self._store, self._ranks, self._call, self._me = store, ranks, call, dist.get_rank()
        self._made = _made.setdefault(dist.group.WORLD, Counter())  # type: ignore[arg-type]
        # All ranks name the meeting, because each counts its own ones, and a rank meets different others.
        self._name = f"sdp4bit/{call}/{hashlib.sha256(str([*ranks]).encode()).hexdigest()[:16]}"
        self._key = f"{self._name}/{self._made[self._name]}"
        self._count = f"{self._key}/count"
        self._told: dict[str, str] = {}  # by this rank, by key
        self._is_counted = False

    def arrive(self, failure: Exception | None, *, same: str) -> None:
        # 1. The reason to fail first, so that all ranks find it.
        if failure is None and same:
            rank, _, other = self._tell(f"{self._key}/same", f"{self._me} {same}").partition(" ")
            if other != same:
                text = f"{same} differs from {other} on rank {rank}; pass the same on all ranks"
                failure = ValueError(text)
        if failure is not None:
            self._tell(f"{self._key}/failure", f"{self._me}\n{type(failure).__name__}\n{failure}")
        # 2. The arrival.
        self._store.delete_key(f"{self._key}/{self._me}/left")
        self._store.set(f"{self._key}/{self._me}", "")
        # A counter, because the keys of all ranks would make the store answer the square of their number. Set
        # first, because Ctrl-C is raised after a call and before its result is assigned.
        self._is_counted = True
        if self._store.add(self._count, 1) >= len(self._ranks):
            self._store.set(f"{self._key}/all", "")
            # All ranks have left the meeting before, whose keys nobody reads again.
            for part in ("all", "count", "same", "failure"):
                self._store.delete_key(f"{self._name}/{self._made[self._name] - 1}/{part}")

    def _tell(self, key: str, value: str) -> str:
        """Set a key that no rank has set; return its value."""
        told: str = self._store.compare_set(key, "", value).decode()
        if told == value:
            self._told[key] = value
        return told

    def wait(self) -> None:
        """Return when all ranks have arrived; raise an ExchangeError after the timeout."""
        limit = (job_timeout() or _DEFAULT_TIMEOUT).total_seconds()
        patience = min(_PATIENCE, limit / 2)
        start, pause, has_named = time.monotonic(), 0.001, False
        # Not store.wait, which Ctrl-C cannot interrupt.
        while not self._store.check([f"{self._key}/all"]):
            seconds = time.monotonic() - start
            if seconds > (limit if has_named else patience):
                here = [rank for rank in self._ranks if self._store.check([f"{self._key}/{rank}"])]
                gone = [rank for rank in self._ranks if self._store.check([f"{self._key}/{rank}/left"])]
                # Ranks that have given up, as this one does now, are named only if no other is absent.
                absent = sorted(set(self._ranks).difference(here, gone)) or gone
                text = (
                    f"{self._call}: rank {self._me} has waited {seconds:.0f} s for {ranks_in_words(absent)} "
                    "to call it. Call it on all ranks, also on those without a model, and not under "
                    "`if rank == 0`"
                )
                if absent and has_named:
                    raise ExchangeError(text, seconds=seconds)
                if absent and self._me == here[0]:
                    logger.warning("%s", text)
                has_named = True
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def leave(self) -> bool:
        """Take the arrival back; return whether all ranks had met at this moment, and the others proceed."""
        if self._is_counted and self._store.add(self._count, -1) >= len(self._ranks) - 1:
            self._store.add(self._count, 1)
            self._store.set(f"{self._key}/all", "")
            return True
        for key, value in self._told.items():
            self._store.compare_set(key, value, "")
        self._store.set(f"{self._key}/{self._me}/left", "")
        self._store.delete_key(f"{self._key}/{self._me}")
        return False

    def end(self, failure: Exception | None) -> None:
        """Count the meeting, and raise the error of a rank, if any."""
        key = f"{self._key}/failure"
        told = self._store.get(key).decode() if self._store.check([key]) else ""
        self._store.delete_key(f"{self._key}/{self._me}")
        self._made[self._name] += 1
        if told:
            rank, kind, text = told.split("\n", 2)
            text = text if kind in _KINDS else f"{kind}: {text}"
            refusal = _KINDS.get(kind, ValueError)(f"{text} (on rank {rank})")
            raise refusal.with_traceback(failure.__traceback__ if failure else None)
