"""Processes that are started quickly and do not outlive the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Collection, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext


def start_from_one_import(modules: Sequence[str]) -> ForkServerContext:
    """Return a context whose processes are copies of one that has imported these modules.

    Importing torch and FSDP2 takes seconds of a core; each process of a "spawn" context would do it again.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    return context


def start_server_without(signals: Collection[signal.Signals]) -> None:
    """Start the process that the others are copies of, so that these signals do nothing to it.

    A signal to a whole process group reaches it too, and its end would look like that of all its copies.
    In these the signals stay blocked, and wait for them, until they unblock them.
    """
    # First, as its start unblocks two signals.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """End this process at once when the one that started it has ended, even if that was killed."""
    threading.Thread(target=_wait_for_parent, name="sdp4bit-parent", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
