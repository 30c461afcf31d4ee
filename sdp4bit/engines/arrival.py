"""Wait until all ranks have made a call, so that its collectives do not meet those of other code."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
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
_made: WeakKeyDictionary[ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""Number of each call in a default group; a group that is created later counts from 0 on all ranks."""


def wait_for_ranks(ranks: Sequence[int], *, call: str) -> None:
    """Return when all these ranks have made this call.

    The ranks meet in the store of the default group, which is independent of the collectives that absent
    ranks run meanwhile. The first of the ranks that wait logs after a minute which ranks are absent.

    Args:
        ranks: ascending global ranks, including this one; the same on all of them.
        call: name of the function for errors.

    Raises:
        ExchangeError: a rank did not make the call before the timeout of the default group. Nothing was
            sent, and the call can be repeated.
    """
    if len(ranks) < 2 or dist.get_backend() == "fake":  # whose store keeps nothing
        return
    c10d: Any = dist.distributed_c10d
    store, me = c10d._get_default_store(), dist.get_rank()
    made = _made.setdefault(dist.group.WORLD, Counter())  # type: ignore[arg-type]
    # All ranks name the meeting, because each counts its own ones, and a rank meets different others.
    name = f"sdp4bit/{call}/{hashlib.sha256(str([*ranks]).encode()).hexdigest()[:16]}"
    key = f"{name}/{made[name]}"
    limit = (job_timeout() or _DEFAULT_TIMEOUT).total_seconds()
    patience = min(_PATIENCE, limit / 2)
    start, pause, has_named = time.monotonic(), 0.001, False
    with comm_error_context(f"wait for all ranks in {call}"):
        store.delete_key(f"{key}/{me}/left")
        store.set(f"{key}/{me}", "")
        # A counter, because the keys of all ranks would make the store answer the square of their number.
        if store.add(f"{key}/count", 1) >= len(ranks):
            store.set(f"{key}/all", "")
        # Not store.wait, which Ctrl-C cannot interrupt.
        while not store.check([f"{key}/all"]):
            seconds = time.monotonic() - start
            if seconds > (limit if has_named else patience):
                here = [rank for rank in ranks if store.check([f"{key}/{rank}"])]
                gone = [rank for rank in ranks if store.check([f"{key}/{rank}/left"])]
                # Ranks that have given up, as this one does now, are named only if no other is absent.
                absent = sorted(set(ranks).difference(here, gone)) or gone
                text = (
                    f"{call}: rank {me} has waited {seconds:.0f} s for {ranks_in_words(absent)} to call it. "
                    "Call it on all ranks, also on those without a model, and not under `if rank == 0`"
                )
                if absent and has_named:
                    if store.add(f"{key}/count", -1) == len(ranks) - 1:
                        store.add(f"{key}/count", 1)
                        continue  # the last rank has come at this moment, and the others proceed
                    store.set(f"{key}/{me}/left", "")
                    store.delete_key(f"{key}/{me}")
                    raise ExchangeError(text, seconds=seconds)
                if absent and me == here[0]:
                    logger.warning("%s", text)
                has_named = True
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        store.delete_key(f"{key}/{me}")
    made[name] += 1
