"""Run a program as one rank, and turn its error into an exit code."""

from __future__ import annotations

import os
import pkgutil
import time
from datetime import timedelta

from sdp4bit.collectives.errors import is_communication_failure
from sdp4bit_lab.common.failures import outcome
from sdp4bit_lab.common.files import note
from sdp4bit_lab.common.launch.signals import ignore, keeping_handlers
from sdp4bit_lab.common.progress import end_progress, phase
from sdp4bit_lab.common.ranks import join_ranks

_WAIT_FOR_ROOT_CAUSE = 3.0


def run_rank(program: str, *, config: object, timeout: timedelta) -> int:
    """Run a program as the rank that the environment describes; return the exit code."""
    rank, run = int(os.environ.get("RANK", "0")), pkgutil.resolve_name(program)
    try:
        if "RANK" in os.environ:
            phase(f"joining {os.environ['WORLD_SIZE']} ranks")
        # A launcher's rank ignores repeated signals until it has exited.
        with keeping_handlers(restores="RANK" not in os.environ), join_ranks(timeout=timeout) as ranks:
            end_progress()
            run(config, ranks=ranks)
            phase("leaving the ranks")
            ignore()
    except BaseException as error:
        end_progress()
        ending = outcome(error)
        if ending is None:
            raise
        line, code = ending
        if is_communication_failure(error):
            report_error(line)
            # Usually a peer's exit is the cause. The launcher reports the first exit it sees, so wait.
            time.sleep(_WAIT_FOR_ROOT_CAUSE)
            return code
        if rank:
            # Rank 0 usually reports the same error, and the launcher then kills this process.
            time.sleep(_WAIT_FOR_ROOT_CAUSE)
        report_error(f"rank {rank}: {line}" if rank else line)
        return code
    return 0


def report_error(message: str) -> None:
    """Report the error of a rank or of the launcher."""
    note(f"error: {message}")
