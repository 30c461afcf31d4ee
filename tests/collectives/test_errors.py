"""Ranks that hang or end inside an exchange: the others say which exchange, and whom they have waited for.

Layer: 4 processes over gloo, as 2 nodes of 2 ranks. Which of the exchanges of a step it is depends on timing;
that it is named does not.
"""

from __future__ import annotations

import os
import re
import signal
import time
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
from tests.pretrain.checkpoint.saved_runs import one_rank
from tests.ranks import run_ranks

WAITS = 4


def train_until_rank_3_is_gone(preset: str, *, hangs: bool) -> None:
    set_timeout(timedelta(seconds=WAITS), dist.group.WORLD)
    assert job_timeout() == timedelta(seconds=WAITS)
    model = toy.build()
    sdp4bit.quantize_communication(model, topology=2, config=sdp4bit.SDP4BitConfig.preset(preset))
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
    """Return what each rank has reported."""
    parts = re.split(r"^rank (\d): ", failure, flags=re.M)
    return {int(rank): text for rank, text in zip(parts[1::2], parts[2::2], strict=True)}


NAMES = {
    "sdp4bit": r"(quantized|full-precision|replica) (weight all-gather|gradient reduce-scatter) of [^\s,]+"
    r"(, (all-to-all )?(inside the node|between nodes))?",
    "baseline": r"full-precision (weight all-gather|gradient reduce-scatter) of \S+",
}


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
        rf"sdp4bit\S*ExchangeError: {NAMES[preset]}: rank (\d) has waited [\d.]+ s for ranks? [\d, ]+ \(.*"
        r"--distributed-timeout-minutes"
    )
    for rank in (0, 1, 2):
        found = message.search(reports[rank])
        assert found, reports[rank]
    if hangs:
        assert f"Timed out waiting {WAITS * 1000}ms" in "".join(reports.values())


def _train(preset: str, hangs: bool) -> None:
    train_until_rank_3_is_gone(preset, hangs=hangs)


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
        assert isinstance(error.value.__cause__, RuntimeError)
        start = time.monotonic()
        named = exchange_error(RuntimeError(""), what="x", group=None, start=start, peers=[0, 0])
        assert "for rank 0 (RuntimeError)" in str(named)
    assert is_communication_failure(RuntimeError("Timed out waiting 5ms for recv operation to complete"))
    assert not is_communication_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
