"""Collectives: every rank calls the same ones in an order that NCCL can carry out; four simulated ranks.

NCCL neither checks nor repairs: other sizes than the peers' are garbage or a hang, and so are two
communicators that are called in opposite orders on two ranks. That tensors are contiguous, of one dtype and
of sizes that fit is checked by the simulated back end at every call.
"""

from __future__ import annotations

import graphlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch.distributed as dist

from tests.engines.simulated_cuda import simulate
from tests.engines.stream_scenarios import ORDERED_SCENARIOS
from tests.engines.stream_simulator import Collective
from tests.ranks import run_ranks

PRELOAD = ["tests.engines.stream_scenarios"]

Log = Sequence[Collective]
"""The collectives of one rank, in order."""


def disorder(logs: Sequence[Log]) -> str:
    """Return what NCCL could not carry out; empty if nothing."""
    by_group: list[dict[object, list[Collective]]] = []
    for log in logs:
        by_group.append(defaultdict(list))
        for call in log:
            by_group[-1][call.group].append(call)
    for rank, groups in enumerate(by_group):
        for (name, ranks), calls in groups.items():
            for peer in ranks:
                theirs = by_group[peer][name, ranks]
                for number, (mine, other) in enumerate(zip(calls, theirs, strict=False)):
                    if mine.alike != other.alike:
                        return f"call {number} of group {name}: rank {rank} {mine}, rank {peer} {other}"
                if len(calls) != len(theirs):
                    return f"group {name}: {len(calls)} calls on rank {rank}, {len(theirs)} on rank {peer}"
    # A collective is one node for all its ranks; it waits for what each of them has called before.
    waits_for: dict[object, set[object]] = defaultdict(set)
    for log in logs:
        counts: dict[object, int] = defaultdict(int)
        before = None
        for call in log:
            node = (call.group, counts[call.group])
            counts[call.group] += 1
            waits_for[node] |= {before} if before else set()
            before = node
    try:
        tuple(graphlib.TopologicalSorter(waits_for).static_order())
    except graphlib.CycleError as error:
        return f"ranks wait for each other in a circle: {error.args[1]}"
    return ""


def logs_of_rank(names: Sequence[str]) -> dict[str, Log]:
    rank, world = dist.get_rank(), dist.get_world_size()
    logs = {}
    for name in names:
        with simulate(rank=rank, world=world, sees_operators=False) as sim:
            ORDERED_SCENARIOS[name]()
        logs[name] = sim.collectives
    return logs


def logs_of_all(*names: str) -> dict[str, list[Log]]:
    ranks = run_ranks(logs_of_rank, 4, names, timeout=480.0)
    return {name: [logs[name] for logs in ranks] for name in names}


@pytest.fixture(scope="module")
def logs() -> dict[str, list[Log]]:
    """The collectives of four ranks in every scenario."""
    return logs_of_all(*ORDERED_SCENARIOS)


@pytest.mark.parametrize("name", ORDERED_SCENARIOS)
def test_all_ranks_call_the_same_collectives_in_one_order(logs: dict[str, list[Log]], name: str) -> None:
    assert len(logs[name][0]) > 50
    assert len({call.group for call in logs[name][0]}) > 4
    assert disorder(logs[name]) == ""


def swap(log: Log, wanted: Callable[[Collective, Collective], bool]) -> list[Collective]:
    """Return the log with two neighbours exchanged, the first ones of which that is wanted."""
    at = next(at for at, pair in enumerate(itertools.pairwise(log)) if wanted(*pair))
    return [*log[:at], log[at + 1], log[at], *log[at + 2 :]]


def test_two_collectives_of_a_group_swapped_on_one_rank_are_found(
    logs: dict[str, list[Log]],
) -> None:
    zero, *others = logs["alerts"]
    swapped = swap(zero, lambda one, two: one.group == two.group and one.alike != two.alike)
    assert "rank 0" in disorder([swapped, *others])


def test_collectives_of_two_groups_swapped_on_one_rank_are_found(logs: dict[str, list[Log]]) -> None:
    zero, *others = logs["alerts"]
    swapped = swap(
        zero,
        lambda one, two: one.group != two.group and len(set(one.group[1]) & set(two.group[1])) > 1,
    )
    assert "circle" in disorder([swapped, *others])


def test_a_collective_that_one_rank_leaves_out_is_found(logs: dict[str, list[Log]]) -> None:
    zero, one, *others = logs["skipped step"]
    assert "calls on rank" in disorder([zero, one[:-1], *others])
