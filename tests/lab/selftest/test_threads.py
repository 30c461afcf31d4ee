"""Ranks that are threads of one process: collectives, errors instead of hangs, and the self-test.

Layer: threads, in this process and in a command of its own. Their order on CUDA streams is not tested here.
"""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.selftest.threads import run_on_threads
from tests import ROOT

LIMIT = timedelta(seconds=20)


def exchange(ranks: Ranks) -> tuple[list[float], int]:
    """Return what a sum, an all-to-all and messages around a ring give, and the number of groups left."""
    rank, size = ranks.rank, ranks.world_size
    total, received = torch.tensor([float(rank)]), torch.empty(size)
    dist.all_reduce(total)
    dist.all_to_all_single(received, torch.arange(size) + 10.0 * rank)
    own = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    pair = torch.tensor([float(rank)])
    dist.all_reduce(pair, group=own)
    message = torch.empty(1)
    work = dist.irecv(message, src=(rank - 1) % size)
    dist.isend(total + rank, dst=(rank + 1) % size).wait()
    work.wait()
    return [*total.tolist(), *received.tolist(), *pair.tolist(), *message.tolist()], dist.get_world_size(own)


def test_collectives_and_messages_are_those_of_processes() -> None:
    results = run_on_threads(exchange, size=4, device="cpu", timeout=LIMIT)
    for rank, (values, pair) in enumerate(results):
        received = [10.0 * sender + rank for sender in range(4)]
        assert values == [6.0, *received, float(4 * (rank // 2) + 1), 6.0 + (rank - 1) % 4]
        assert pair == 2
    assert not dist.is_initialized()


def leave(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise ValueError("rank 1 has left")
    dist.all_reduce(torch.ones(1))


def differ(ranks: Ranks) -> None:
    if ranks.rank == 0:
        dist.all_reduce(torch.ones(1))
    else:
        dist.broadcast(torch.ones(1), src=0)


def test_a_rank_that_ends_or_calls_another_collective_ends_the_waits_of_all() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 has left"):
        run_on_threads(leave, size=3, device="cpu", timeout=LIMIT)
    with pytest.raises(RuntimeError, match="different collectives"):
        run_on_threads(differ, size=2, device="cpu", timeout=LIMIT)
    assert time.monotonic() - start < LIMIT.total_seconds()


def test_the_self_test_trains_on_threads_and_ends() -> None:
    options = ["--device", "cpu", "--ranks-as-threads", "4", "--ranks-per-node", "2", "--steps", "1"]
    command = [sys.executable, "-m", "sdp4bit_lab", "selftest", *options, "--only", "facts,training"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "4 ranks on 1 host" in done.stdout and "Result: all checks passed" in done.stdout
    refused = subprocess.run(
        [*command, "--nproc-per-node", "2"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert refused.returncode == 2 and "starts all ranks in this process" in refused.stderr
