"""A unit test cannot start a process. Layer: no process."""

from __future__ import annotations

import sys

import pytest

from tests.ranks import STARTED


@pytest.mark.parametrize("event", [STARTED, "subprocess.Popen", "os.fork", "os.posix_spawn"])
def test_a_unit_test_that_starts_a_process_fails(event: str) -> None:
    with pytest.raises(AssertionError, match=r"starts a process .*: mark it with gloo"):
        sys.audit(event, None)
