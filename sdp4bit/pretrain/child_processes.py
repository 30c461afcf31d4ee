"""Processes that are started quickly and do not outlive the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext


def start_from_one_import(modules: Sequence[str]) -> ForkServerContext:
    """Return a context whose processes are copies of one that has imported these modules.

    Importing torch and FSDP2 takes seconds of a core; each process of a "spawn" context would do it again.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    return context


def end_with_parent() -> None:
    """This process ends at once when the one that started it has ended, even if it was killed."""
    threading.Thread(target=_wait_for_parent, name="sdp4bit-parent", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
