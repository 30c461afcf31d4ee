"""Ranks that hang or end inside an exchange: the others say which exchange, and whom they have waited for.

Layer: 4 processes over gloo, as 2 nodes of 2 ranks. Which of the exchanges of a step it is depends on timing;
that it is named does not.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sdp4bit
from sdp4bit.collectives.errors import (
    comm_error_context,
    exchange_error,
    is_communication_failure,
    job_timeout,
    set_timeout,
)
from tests import toy
from tests.ranks import one_rank, run_ranks

WAITS = {True: 8, False: 60}
"""Seconds that ranks wait for one that hangs, or whose end they see at once."""

CONFIGS = {
    "sdp4bit": sdp4bit.SDP4BitConfig(),
    "baseline": sdp4bit.SDP4BitConfig(weights=None, gradients=None),
}


def train_until_rank_3_is_gone(preset: str, *, hangs: bool) -> None:
    set_timeout(timedelta(seconds=WAITS[hangs]), dist.group.WORLD)
    assert job_timeout() == timedelta(seconds=WAITS[hangs])
    model = toy.build()
    sdp4bit.quantize_communication(model, topology=2, config=CONFIGS[preset])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, batch in enumerate(islice(toy.batches(), 20)):
        if step == 2 and dist.get_rank() == 3:
            if hangs:
                time.sleep(120)
            # In the middle of a step: its peers have begun to exchange.
            model.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        toy.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("rank 3 was not missed")


def sections(failure: str) -> dict[int, str]:
    """Return the reports of all ranks."""
    parts = re.split(r"^rank (\d): ", failure, flags=re.M)
    return {int(rank): text for rank, text in zip(parts[1::2], parts[2::2], strict=True)}


NAMES = {
    "sdp4bit": r"(agreement on changed weights|(quantized|full-precision|replica) "
    r"(weight all-gather|gradient reduce-scatter) of [^\s,]+)"
    r"(, (all-to-all )?(inside the node|between nodes))?",
    "baseline": r"(agreement on changed weights|"
    r"full-precision (weight all-gather|gradient reduce-scatter) of \S+)",
}


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("preset", "hangs"),
    [
        ("sdp4bit", True),
        ("baseline", False),
        pytest.param("sdp4bit", False, marks=pytest.mark.slow),
        pytest.param("baseline", True, marks=pytest.mark.slow),
    ],
)
def test_the_ranks_that_are_left_name_the_exchange_and_the_rank(preset: str, hangs: bool) -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks(_train, 4, preset, hangs, timeout=60)
    reports = sections(str(failure.value))
    message = re.compile(
        rf"sdp4bit\S*ExchangeError: {NAMES[preset]}: rank (\d) has waited (?P<seconds>[\d.]+) s for "
        r"ranks? [\d, ]+ \(.* or for the rank without an error(?P<advice>.*pass a longer timeout.*)?$",
        flags=re.M,
    )
    for rank in (0, 1, 2):
        found = message.search(reports[rank])
        assert found, reports[rank]
        assert bool(found["advice"]) == (float(found["seconds"]) >= WAITS[hangs] / 2)
    if hangs:
        assert f"Timed out waiting {WAITS[hangs] * 1000}ms" in "".join(reports.values())


def _train(preset: str, hangs: bool) -> None:
    train_until_rank_3_is_gone(preset, hangs=hangs)


ROW = torch.ones(1000)


def messages_of_a_pair(group: dist.ProcessGroup) -> None:
    works = [dist.irecv(ROW.clone(), group=group, group_src=1), dist.isend(ROW, group=group, group_dst=1)]
    for work in works if group.rank() != 1 else []:
        work.wait()


OPERATIONS: dict[str, Callable[[dist.ProcessGroup], object]] = {
    "send and receive": lambda group: group.rank() == 1 or messages_of_a_pair(group),
    "all-reduce": lambda group: dist.all_reduce(ROW.clone(), group=group),
    "future": lambda group: dist.all_reduce(ROW.clone(), group=group, async_op=True).get_future().wait(),
    "sparse all-reduce": lambda group: dist.all_reduce(torch.eye(9).to_sparse(), group=group),
    "all-gather": lambda group: dist.all_gather([ROW.clone() for _ in range(3)], ROW, group=group),
    "objects": lambda group: dist.all_gather_object([None] * 3, "x", group=group),
    "all-to-all": lambda group: dist.all_to_all_single(torch.empty(999), ROW[:999], group=group),
    "broadcast": lambda group: dist.broadcast(ROW.clone(), src=1, group=group),
    "barrier": lambda group: dist.barrier(group=group),
}


def lose_rank_1(hangs: bool) -> None:
    """Every operation, in a group of its own, reports in its own words that rank 1 is lost."""
    groups = {name: dist.new_group(timeout=timedelta(seconds=1)) for name in OPERATIONS}
    store = dist.distributed_c10d._get_default_store()
    store.set(f"connected {dist.get_rank()}", "")
    store.wait([f"connected {rank}" for rank in range(3)])
    if dist.get_rank() == 1:
        time.sleep(60 if hangs else 0)
        os._exit(1)
    unnamed = []
    # A second time, after the first has timed out, the words are others.
    for name, group in (pair for pair in groups.items() for _ in range(2)):
        try:
            with comm_error_context(name, group=group):
                OPERATIONS[name](group)
        except sdp4bit.ExchangeError:
            continue
        except Exception as error:
            unnamed.append(f"{name}: {error!r}")
            continue
        unnamed.append(f"{name}: no error")
    raise AssertionError(f"not named: {unnamed}")


@pytest.mark.gloo
@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_lost_rank_is_known_from_the_words_of_every_operation(hangs: bool) -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks(lose_rank_1, 3, hangs, timeout=60)
    reports = sections(str(failure.value))
    assert "not named: []" in reports[0] and "not named: []" in reports[2], reports


def failing(error: Exception) -> Any:
    with comm_error_context("sum of something"):
        raise error


def test_only_errors_of_the_communication_are_renamed() -> None:
    with one_rank():
        with pytest.raises(ValueError, match="mine"):
            failing(ValueError("mine"))
        with pytest.raises(sdp4bit.ExchangeError, match=r"^already named$"):
            failing(sdp4bit.ExchangeError("already named"))
        with pytest.raises(
            sdp4bit.ExchangeError, match=r"^sum of something: rank 0 has waited 0\.0 s"
        ) as error:
            failing(
                RuntimeError(
                    "[/home/gloo/transport/tcp/pair.cc:7] Connection closed by peer [::1]:5. "
                    "This is typically caused by it"
                )
            )
        assert "(Connection closed by peer [::1]:5)" in str(error.value)
        assert str(error.value).endswith("or for the rank without an error")
        assert isinstance(error.value.__cause__, RuntimeError)
        for mine in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("shapes differ")):
            with pytest.raises(type(mine)) as kept:
                failing(mine)
            assert kept.value is mine
            if sys.version_info >= (3, 11):
                assert mine.__notes__ == ["sdp4bit: in the sum of something"]
        start = time.monotonic()
        named = exchange_error(RuntimeError(""), what="x", group=None, start=start, peers=[0, 0])
        assert "for rank 0 (RuntimeError)" in str(named)
        # The timeout of these process groups is half an hour.
        named = exchange_error(RuntimeError(""), what="x", group=None, start=start - 900)
        assert str(named).endswith("If ranks are only slow, pass a longer timeout to init_process_group")
    assert is_communication_failure(RuntimeError("Timed out waiting 5ms for recv operation to complete"))
    assert not is_communication_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    for text, is_lost in (
        ("NCCL error: ncclRemoteError: A call failed possibly due to a network error", True),
        ("NCCL communicator was aborted on rank 1", True),
        ("ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 'out of memory'", False),
        ("ncclInvalidUsage: This usually reflects invalid usage of NCCL library", False),
    ):
        assert is_communication_failure(dist.DistBackendError(text)) == is_lost
