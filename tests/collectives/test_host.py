"""Reductions on the host: the same result on all ranks in log2(ranks) hops, over as many connections.

Layer: the plan of hops for many sizes, and real processes over gloo.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict, deque
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.cluster_network import Network, reason_to_skip
from sdp4bit.collectives.host import all_reduce_on_host, create_host_group, exchanges_of
from tests import ROOT
from tests.ranks import run_ranks

MAX, SUM = dist.ReduceOp.MAX, dist.ReduceOp.SUM


@pytest.mark.parametrize("size", [*range(1, 34), 1000, 8192])
def test_every_rank_is_combined_once_in_a_logarithmic_number_of_hops(size: int) -> None:
    plans = {rank: deque(exchanges_of(rank, size=size)) for rank in range(size)}
    assert max(map(len, plans.values())) <= size.bit_length() + 1
    totals = [1 << rank for rank in range(size)]  # one bit per rank, so a rank that counts twice shows
    sent: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
    waiting = [rank for rank, plan in plans.items() if plan]
    for rank in waiting:
        if plans[rank][0].sends:
            sent[rank, plans[rank][0].peer].append(totals[rank])
    while waiting:
        before = sum(map(len, plans.values()))
        for rank in waiting:
            hop = plans[rank][0]
            if hop.receives and not sent[hop.peer, rank]:
                continue
            if hop.receives:
                received = sent[hop.peer, rank].popleft()
                totals[rank] = received if hop.receives == "result" else totals[rank] + received
            plans[rank].popleft()
            if plans[rank] and plans[rank][0].sends:
                sent[rank, plans[rank][0].peer].append(totals[rank])
        assert sum(map(len, plans.values())) < before, "a rank waits forever"
        waiting = [rank for rank, plan in plans.items() if plan]
    assert set(totals) == {(1 << size) - 1}
    assert not any(sent.values())


def reduced() -> list[list[float]]:
    """Return a sum and a maximum of random numbers of all ranks."""
    ranks = range(dist.get_world_size())
    found = []
    for op in (SUM, MAX):
        whole = torch.tensor([1.0 + dist.get_rank(), -dist.get_rank()], dtype=torch.float64)
        expected = whole.clone()
        all_reduce_on_host(whole, dist.group.WORLD, ranks=ranks, op=op, what="test")
        dist.all_reduce(expected, op=op)
        assert torch.equal(whole, expected)
        values = torch.rand(5) * (1 + dist.get_rank())
        all_reduce_on_host(values, dist.group.WORLD, ranks=ranks, op=op, what="test")
        found.append(values.tolist())
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, 5])
def test_reductions_have_the_same_bits_on_every_rank(size: int) -> None:
    first, *others = run_ranks(reduced, size)
    assert all(each == first for each in others)


def opened() -> int:
    """Return the files that a group of the host opens when it is used."""
    with mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"):
        group = create_host_group(purpose="test")
    assert group is not None and dist.get_backend(group) == "sdp4bit_gloo"
    before = len(os.listdir("/proc/self/fd"))
    ranks, values = range(dist.get_world_size()), torch.full((2,), dist.get_rank())
    for _ in range(3):
        all_reduce_on_host(values, group, ranks=ranks, op=MAX, what="test")
    assert values.tolist() == [len(ranks) - 1] * 2
    return len(os.listdir("/proc/self/fd")) - before


@pytest.mark.gloo
def test_a_host_group_connects_only_the_ranks_that_exchange_something() -> None:
    """Gloo would connect each rank to seven others, with two files each, when the group is made."""
    assert max(run_ranks(opened, 8)) <= 3


ON_A_NODE = """
import os, sys, torch
from datetime import timedelta
from torch.distributed import TCPStore
from sdp4bit.collectives.host import _connected_on_use
rank, limit = int(sys.argv[1]), timedelta(seconds=20)
store = TCPStore(os.environ["MASTER_ADDR"], 29511, 2, rank == 0, limit)
group, values = _connected_on_use(store, rank, 2, limit), torch.ones(1)
group.allreduce([values]).wait()
assert values.item() == 2
del group  # gloo's threads end here; at the interpreter's exit they may still run, which aborts it
"""


@pytest.mark.gloo
@pytest.mark.parametrize(
    "interface", [pytest.param("eth0", marks=pytest.mark.slow, id="named"), pytest.param(None, id="route")]
)
def test_hosts_connect_although_their_own_names_lead_nowhere(interface: str | None) -> None:
    """Two network namespaces whose host names are unknown, like those of containers."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    with Network(2) as network:
        environment = {**os.environ, "MASTER_ADDR": network.address(0), "PYTHONPATH": str(ROOT)}
        environment.pop("GLOO_SOCKET_IFNAME", None)
        if interface is not None:
            environment["GLOO_SOCKET_IFNAME"] = interface
        nameless = 'echo unknown > /proc/sys/kernel/hostname && exec "$@"'
        ranks = [
            network.start(
                rank,
                ["unshare", "--uts", "sh", "-c", nameless, "sh", sys.executable, "-c", ON_A_NODE, str(rank)],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], errors
