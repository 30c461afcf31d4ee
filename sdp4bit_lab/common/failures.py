"""Turn the errors that a run can meet into one line and an exit code."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from sdp4bit_lab.common.settings import EXIT_FAILED, RunError


def is_failure(error: BaseException) -> bool:
    """Return whether an error is a failure of this process, and not a request to end it.

    Panics of packages written in Rust are not derived from Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def as_run_error(error: BaseException) -> RunError | None:
    """Return the error as one line; None if it is a defect, whose traceback is needed."""
    if isinstance(error, RunError):
        return error
    if isinstance(error, OSError):
        filename = error.filename if isinstance(error.filename, str | bytes) else None
        return RunError(one_line(error) if filename is None else failed(Path(os.fsdecode(filename)), error))
    if is_failure(error) and not isinstance(error, Exception):
        return RunError(f"a package written in Rust has failed: {one_line(error)}")
    return None


def outcome(error: BaseException) -> tuple[str, int] | None:
    """Return the line and the exit code with which an error ends a command; None for a defect."""
    expected = as_run_error(error)
    if expected is not None:
        return str(expected), expected.exit_code
    # Only now, because they import torch: a wrong option is reported at once.
    from sdp4bit import ReplicaMismatchError
    from sdp4bit.collectives.errors import is_communication_failure

    if is_communication_failure(error):
        return f"{error} (--distributed-timeout-minutes)", EXIT_FAILED
    return (str(error), EXIT_FAILED) if isinstance(error, ReplicaMismatchError) else None


def failed(path: Path, error: OSError) -> str:
    """Describe a failed access to a file; on a full disk with the bytes in the file and the bytes free."""
    text = f"{path}: {error.strerror or one_line(error)}"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return text
    written = path.stat().st_size if path.is_file() else 0
    return f"{text}; {written:,} bytes are written, {free_bytes(path):,} are free"


def free_bytes(path: Path) -> int:
    """Return the bytes that are free where a path is, or would be."""
    existing = next((place for place in (path, *path.parents) if place.exists()), Path.cwd())
    return shutil.disk_usage(existing).free


def one_line(error: BaseException) -> str:
    """Return the text of an error without line breaks."""
    return " ".join(str(error).split())
