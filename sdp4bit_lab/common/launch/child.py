"""Run a rank in a process that a launcher has started; imports torch only when that has been printed."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from datetime import timedelta

from sdp4bit_lab.common.files import shorten_warnings
from sdp4bit_lab.common.launch.link import Link
from sdp4bit_lab.common.progress import end_progress, start_progress
from sdp4bit_lab.common.settings import EXIT_FAILED


def run_child(
    program: str,
    *,
    config: object,
    timeout: timedelta,
    environment: dict[str, str],
    began: float,
    link: Link | None = None,
) -> None:
    """Run a program as the rank that the environment describes; see `local.run_on_ranks`.

    Args:
        began: see `start_progress`.
        link: see `local.run_on_ranks`.
    """
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.update(environment)
    if link is not None:
        link.enter(2 * int(environment["RANK"]) // int(environment["WORLD_SIZE"]))
    shorten_warnings()
    start_progress("importing torch", began=began)
    from sdp4bit_lab.common.launch.rank import run_rank

    code = run_rank(program, config=config, timeout=timeout)
    end_progress()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without cleanup, which takes seconds per rank, and so that the launcher stops the others before they
    # report the same error.
    os._exit(code)


def end_with_parent() -> None:
    """Exit when the parent process has exited; run it in its own thread."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(EXIT_FAILED)
