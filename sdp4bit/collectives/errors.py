"""The error of an exchange that did not complete: what was exchanged, with whom, for how long."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from sdp4bit.traffic import Level

PLACES: dict[Level, str] = {"intra": "inside the node", "inter": "between nodes"}
"""The levels in words."""
_SIGNS = (
    "gloo/transport",
    "connectFullMesh failed",
    "Timed out waiting",
    "timeout caused pair closure",  # the next use of a process group in which an exchange has timed out
    "Connection closed by peer",
    "Connection reset by peer",
)
"""What gloo says, which has no class of errors, when a rank is lost."""
_OWN_FAULTS = ("out of memory", "ncclInvalidUsage", "ncclInvalidArgument")
"""What NCCL's errors say that are this rank's, not another's."""


class ExchangeError(RuntimeError):
    """An exchange did not complete, because a rank has ended or hangs; the error behind it is the cause.

    The process groups of the job cannot be used any more: end this process, and start all ranks again.
    """

    def __init__(self, message: str, *, seconds: float = 0.0) -> None:
        """Make the error.

        Args:
            seconds: for which this rank had waited.
        """
        super().__init__(message)
        self.seconds = seconds


class comm_error_context:
    """Inside the block, a lost connection or a timeout becomes an error that names the exchange.

    Other errors, such as a lack of memory, stay what they are; from Python 3.11 on, a note names the
    exchange.
    """

    __slots__ = ("_group", "_start", "_what")

    def __init__(self, what: str, *, group: ProcessGroup | None = None) -> None:
        """Prepare; the words are put together only for an error.

        Args:
            what: is exchanged, such as "sum of the losses".
            group: among whom; the default group when not given.
        """
        self._what = what
        self._group = group
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, ExchangeError):
            return
        if is_communication_failure(error):
            raise exchange_error(error, what=self._what, group=self._group, start=self._start) from error
        if sys.version_info >= (3, 11):
            error.add_note(f"sdp4bit: in the {self._what}")


def exchange_error(
    error: BaseException,
    *,
    what: str,
    group: ProcessGroup | None,
    start: float,
    peers: Sequence[int] | None = None,
) -> ExchangeError:
    """Return the error to raise instead of the communication library's.

    Args:
        start: when waiting began, by time.monotonic().
        peers: ranks of the group that were waited for; all but this one when not given.
    """
    me = dist.get_rank()
    members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    others = [rank for rank in members if rank != me]
    if peers is not None:
        others = sorted({members[peer] for peer in peers})
    seconds = time.monotonic() - start
    return ExchangeError(
        f"{what}: rank {me} has waited {seconds:.1f} s for {ranks_in_words(others)} "
        f"({_reason(error)}). A rank has ended or hangs: the first error of the job says which, or the rank "
        "that reports none. If ranks are only slow, give init_process_group a longer timeout",
        seconds=seconds,
    )


def is_communication_failure(error: BaseException) -> bool:
    """Return whether an error says that a rank is lost: by a closed connection, or by a timeout."""
    if isinstance(error, ExchangeError | dist.DistNetworkError | dist.DistStoreError):
        return True
    if isinstance(error, dist.DistBackendError):  # of NCCL, whatever the reason
        return not any(sign in str(error) for sign in _OWN_FAULTS)
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 2, 3" with the first eight."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def set_timeout(timeout: timedelta, group: ProcessGroup | None) -> None:
    """Let a process group (None: the default one) wait so long for a rank from now on."""
    c10d: Any = dist.distributed_c10d
    # torch 2.14 has a public name for it, and warns of the other.
    (c10d.set_timeout if hasattr(c10d, "set_timeout") else c10d._set_pg_timeout)(timeout, group)


def job_timeout() -> timedelta | None:
    """Return how long the default process group waits for a rank, None if it does not say so.

    torch.distributed.new_group would take the default of the back end instead, half an hour for gloo.
    """
    group = dist.group.WORLD
    try:
        options = group._get_backend(group._device_types[0]).options  # type: ignore[union-attr]
        timeout = options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def _reason(error: BaseException) -> str:
    """Return the error's text in one line, without the place in the source that it begins with."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text.partition(". This is typically")[0]
    return re.sub(r"^\[[^\]]*\.(cc|cpp|h|hpp):\d+\] ", "", text)[:300].rstrip(". ")
