"""Errors of collectives that did not complete, with the collective, the ranks and the time waited."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

_SIGNS = (
    "gloo/transport",
    "connectFullMesh failed",
    "Timed out waiting",
    "timeout caused pair closure",  # the next use of a process group after a timeout
    "Connection closed by peer",
    "Connection reset by peer",
)
"""Texts of gloo's errors for a lost rank; gloo raises plain RuntimeErrors."""
_OWN_FAULTS = ("out of memory", "ncclInvalidUsage", "ncclInvalidArgument")
"""Texts of NCCL's errors that this rank itself caused."""


class ExchangeError(RuntimeError):
    """A collective did not complete because a rank has exited or hangs; the original error is the cause.

    The process groups of the job are unusable afterwards: exit this process and restart all ranks.
    `seconds` is the time that this rank waited.
    """

    def __init__(self, message: str, *, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.seconds = seconds


def call_all(calls: Sequence[Callable[[], object]]) -> None:
    """Call each in order, also after one has failed, because other ranks wait for all; raise the error."""
    with ExitStack() as left:
        for call in reversed(calls):
            left.callback(call)


class comm_error_context:
    """Turn a lost connection or a timeout inside the block into an ExchangeError that names the collective.

    Other errors are unchanged, except for a note with the collective (Python 3.11 and newer).
    """

    __slots__ = ("_start", "_torch_group", "_what")

    def __init__(self, what: str, *, group: ProcessGroup | None = None) -> None:
        """Create a context for a collective.

        Args:
            what: description such as "sum of the losses".
            group: process group; None for the default group.
        """
        self._what = what
        self._torch_group = group
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, ExchangeError):
            return
        if is_communication_failure(error):
            raise exchange_error(
                error, what=self._what, group=self._torch_group, start=self._start
            ) from error
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
    """Return the ExchangeError for an error of the communication library.

    Args:
        start: time.monotonic() at the beginning of the wait.
        peers: group ranks that were waited for; None for all others.
    """
    me = dist.get_rank()
    members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    others = [rank for rank in members if rank != me]
    if peers is not None:
        others = sorted({members[peer] for peer in peers})
    seconds = time.monotonic() - start
    message = (
        f"{what}: rank {me} has waited {seconds:.1f} s for {ranks_in_words(others)} "
        f"({_reason(error)}). A rank has exited or hangs: look for the first error of the job, or for the "
        "rank without an error"
    )
    timeout = group_timeout(group)
    # An error long before the timeout is a lost connection.
    if timeout is None or 2 * seconds >= timeout.total_seconds():
        message += ". If ranks are only slow, pass a longer timeout to init_process_group"
    return ExchangeError(message, seconds=seconds)


def is_communication_failure(error: BaseException) -> bool:
    """Return whether an error means a lost rank, that is, a closed connection or a timeout."""
    if isinstance(error, ExchangeError | dist.DistNetworkError | dist.DistStoreError):
        return True
    if isinstance(error, dist.DistBackendError):  # all errors of NCCL
        return not any(sign in str(error) for sign in _OWN_FAULTS)
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 2, 3", with at most eight ranks."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def set_timeout(timeout: timedelta, group: ProcessGroup | None) -> None:
    """Set the timeout of a process group (None: the default one)."""
    c10d: Any = dist.distributed_c10d
    # torch 2.14 deprecates the private name.
    (c10d.set_timeout if hasattr(c10d, "set_timeout") else c10d._set_pg_timeout)(timeout, group)


def job_timeout() -> timedelta | None:
    """Return the timeout of the default process group; None if it is unknown.

    torch.distributed.new_group would use the backend's default instead, which is half an hour for gloo.
    """
    return group_timeout(None)


def group_timeout(group: ProcessGroup | None) -> timedelta | None:
    """Return the timeout of a process group (None: the default one); None if it is unknown."""
    group = dist.group.WORLD if group is None else group
    try:
        options = group._get_backend(group._device_types[0]).options  # type: ignore[union-attr]
        timeout = options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def _reason(error: BaseException) -> str:
    """Return the error's text in one line, without the source location at its beginning."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text.partition(". This is typically")[0]
    return re.sub(r"^\[[^\]]*\.(cc|cpp|h|hpp):\d+\] ", "", text)[:300].rstrip(". ")
