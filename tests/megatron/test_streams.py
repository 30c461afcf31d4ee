"""Simulated training steps of Megatron-Core on GPUs; see `tests/engines/test_streams.py`.

Layer: one process, whose operators are those of a simulated GPU, and which `fake_cuda` has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from sdp4bit.collectives.streams import advance
from sdp4bit_megatron.patches import GroupPatch
from sdp4bit_megatron.staged import StagedCollectives
from tests.engines import fake_cuda
from tests.engines.stream_scenarios import MEGATRON_SCENARIOS
from tests.engines.stream_simulator import Simulator, Stream
from tests.engines.test_streams import Outcome, check, marked, names_in, run_scenario
from tests.ranks import run_ranks

PRELOAD = ["tests.engines.stream_scenarios"]

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(1000)]  # fixtures, which wait for ranks up to 900 s

QUICK = ("overlap", "resync and audit")
"""Scenarios that the quick tests have."""


def run_megatron(names: Sequence[str]) -> Outcome:
    """Return the results of these scenarios of Megatron-Core, and the faults found with mutations."""
    fake_cuda.install()
    results = {name: run_scenario(name, MEGATRON_SCENARIOS) for name in names}
    with mock.patch.object(GroupPatch, "finish_pending"):
        unfinished = run_scenario("resync and audit", MEGATRON_SCENARIOS)[0]
    with mock.patch.object(StagedCollectives, "_do_steps", _newest_first):
        newest_first = run_scenario("one queue", MEGATRON_SCENARIOS)[0]
    mutated = {"transfers that are under way": unfinished, "stages, newest first": newest_first}
    return results, mutated


def _newest_first(self: StagedCollectives) -> None:
    """Messages of a bucket are filled before those of the one before it have arrived."""
    self._under_way = advance(self._under_way[::-1])[::-1]


@pytest.fixture(scope="module")
def megatron(request: pytest.FixtureRequest) -> list[Outcome]:
    """Run the scenarios that are asked for, in a process that `fake_cuda` has changed."""
    pytest.importorskip("megatron.core")
    return run_ranks(run_megatron, 1, names_in(request), timeout=480.0)


@marked(MEGATRON_SCENARIOS, QUICK)
def test_nothing_races_and_the_host_does_not_wait_on_megatron(megatron: list[Outcome], name: str) -> None:
    check(megatron, name)


def test_there_is_a_fault_if_megatron_sends_what_is_still_under_way(megatron: list[Outcome]) -> None:
    faults = megatron[0][1]
    assert len(faults) == 2 and all(faults.values()), faults


def kernels_behind_own_transfers(name: str) -> tuple[int, set[int]]:
    """Return how many kernels are issued behind a transfer that the same hook of a gradient has started.

    With one hardware queue, nothing that is issued later starts before such a kernel does. And the priorities
    of the streams that these kernels are on.
    """
    found: list[str] = []
    priorities: set[int] = set()
    transfers: list[tuple[Stream, int]] | None = None
    start, launch = GroupPatch.start_grad_sync, Simulator.launch

    def hook(self: GroupPatch, *args: Any, **kwargs: Any) -> None:
        nonlocal transfers
        transfers = []
        start(self, *args, **kwargs)
        transfers = None

    def note(self: Simulator, what: str, *, on: Stream | None = None, **tensors: Any) -> None:
        launch(self, what, on=on, **tensors)
        stream = on or self.stream
        if transfers is None:
            return
        if what == "all_to_all":
            transfers.append((stream, stream.clock[stream]))
        elif what.startswith(("hadamard", "dequantize")):
            priorities.add(stream.priority)
            found.extend(what for other, time in transfers if stream.is_after(other, time))

    with (
        mock.patch.object(GroupPatch, "start_grad_sync", hook),
        mock.patch.object(Simulator, "launch", note),
    ):
        faults, _, _, failure = run_scenario(name, MEGATRON_SCENARIOS)
    assert not failure and not faults, (failure, faults)
    return len(found), priorities


def run_megatron_hooks() -> dict[str, tuple[int, set[int]]]:
    fake_cuda.install()
    return {name: kernels_behind_own_transfers(name) for name in ("overlap", "one queue")}


@pytest.mark.slow
def test_with_one_queue_no_kernel_is_issued_behind_a_transfer_that_has_just_begun() -> None:
    pytest.importorskip("megatron.core")
    (found,) = run_ranks(run_megatron_hooks, 1, timeout=240.0)
    (behind, high), (behind_with_one_queue, high_with_one_queue) = found["overlap"], found["one queue"]
    assert behind > 0 and behind_with_one_queue == 0
    assert high == high_with_one_queue == {-1}
