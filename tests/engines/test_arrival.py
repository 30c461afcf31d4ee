"""Calls that only some ranks make, as under `if rank == 0`, name the others, and training continues.

Layer: real processes over gloo. The other ranks run the training's collectives meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sdp4bit
from sdp4bit import DDPCommState, ExchangeError, quantize_communication
from sdp4bit.engines import arrival
from sdp4bit.engines.agreement import AgreedNodes
from tests import toy
from tests.ranks import on_ranks
from tests.toy import QUANTIZED


@contextlib.contextmanager
def timeout_of(seconds: float) -> Iterator[None]:
    with mock.patch.object(arrival, "job_timeout", return_value=timedelta(seconds=seconds)):
        yield


@on_ranks(2)
def test_attaching_on_one_rank_alone_names_the_other_and_spoils_no_collective() -> None:
    model = toy.build()
    data, optimizer = toy.batches(), toy.adamw(model)
    if dist.get_rank() == 0:
        absent = r"^sdp4bit\.quantize_communication: rank 0 has waited \d+ s for rank 1 to call it\. Call it"
        with timeout_of(2.0), pytest.raises(ExchangeError, match=absent):
            quantize_communication(model, topology=1)
    toy.train(model, optimizer, data, 1)  # rank 1 has waited in it
    comm = quantize_communication(model, QUANTIZED, topology=1)
    toy.train(model, optimizer, data, 1)
    assert comm.audit()


COLLECTIVE: dict[str, Callable[[Any], object]] = {
    "audit": lambda comm: comm.audit(),
    "measure": lambda comm: comm.measure(),
    "time_steps": lambda comm: comm.time_steps(lambda: None, repeats=1),
    "load_state_dict": lambda comm: comm.load_state_dict(comm.state_dict()),
    "remove": lambda comm: comm.remove(),
}


def losses_with_a_call_on_rank_0(name: str | None, call: Callable[[Any], object]) -> list[float]:
    """Train two steps, the second after a call that rank 0 alone makes; it fails if it has a name."""
    model = toy.build()
    comm = quantize_communication(model, QUANTIZED, topology=1)
    data, optimizer = toy.batches(), toy.adamw(model)
    losses = toy.train(model, optimizer, data, 1)
    if dist.get_rank() == 0:
        absent = rf"^comm\.{name}: rank 0 has waited \d+ s for rank 1 to call it"
        fails = pytest.raises(ExchangeError, match=absent) if name else contextlib.nullcontext()
        with timeout_of(0.5), fails:
            call(comm)
    losses += toy.train(model, optimizer, data, 1)
    comm.remove()
    return losses


@on_ranks(2)
def test_a_collective_call_on_one_rank_alone_names_the_other_and_changes_nothing() -> None:
    undisturbed = losses_with_a_call_on_rank_0(None, lambda comm: None)
    for name, call in COLLECTIVE.items():
        assert losses_with_a_call_on_rank_0(name, call) == undisturbed, name


@on_ranks(2)
def test_local_calls_need_no_other_rank_and_change_nothing() -> None:
    undisturbed = losses_with_a_call_on_rank_0(None, lambda comm: None)
    for name in ("state_dict", "stats", "group_stats", "explain", "alerts", "log_values"):
        losses = losses_with_a_call_on_rank_0(None, lambda comm, name=name: getattr(comm, name)())
        assert losses == undisturbed, name


@on_ranks(3)
def test_ranks_that_give_up_one_after_the_other_name_the_absent_one() -> None:
    rank, errors = dist.get_rank(), list[str]()
    if rank < 2:
        with timeout_of(0.5 + rank), pytest.raises(ExchangeError) as error:
            arrival.wait_for_ranks(range(3), call="comm.audit")
        errors.append(str(error.value))
    every: list[list[str]] = [errors] * 3
    dist.all_gather_object(every, errors)
    assert [len(each) for each in every] == [1, 1, 0]
    assert all(" s for rank 2 to call it. " in each for (each,) in every[:2]), every
    with timeout_of(20.0):
        for _ in range(2):  # once more after the failure, and a meeting that nobody has missed
            arrival.wait_for_ranks(range(3), call="comm.audit")


@on_ranks(2)
def test_ddp_waits_too() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(40, 40))
    state = DDPCommState(topology=1)
    model.register_comm_hook(state, sdp4bit.ddp_comm_hook)
    model(torch.ones(2, 40)).sum().backward()
    if dist.get_rank() == 0:
        for name, call in COLLECTIVE.items():
            absent = rf"^comm\.{name}: .* for rank 1 to call it"
            with timeout_of(0.2), pytest.raises(ExchangeError, match=absent):
                call(state)
    model(torch.ones(2, 40)).sum().backward()
    state.remove()


@on_ranks(2)
def test_a_rank_that_handles_an_error_removes_the_handle_without_waiting() -> None:
    comm = quantize_communication(toy.build(), topology=1)
    begin = time.monotonic()
    if dist.get_rank() == 0:
        try:
            raise KeyError("a defect of the training")
        except KeyError:
            comm.remove()
        assert not comm.is_attached and time.monotonic() - begin < 20


@on_ranks(3)
def test_ranks_outside_of_a_models_group_are_not_waited_for() -> None:
    """Rank 2 holds a state, as all ranks must, but no part of the model."""
    group = dist.new_group([0, 1])
    state = DDPCommState(group, topology=1)
    if dist.get_rank() < 2:
        model = DistributedDataParallel(torch.nn.Linear(40, 40), process_group=group)
        model.register_comm_hook(state, sdp4bit.ddp_comm_hook)
        model(torch.ones(2, 40)).sum().backward()
        assert state.audit()
        state.remove()


@on_ranks(4)
def test_a_rank_meets_one_after_the_other_in_models_of_different_layouts() -> None:
    """Pairs of two models share their first rank and their number, but not the meetings before."""
    rank = dist.get_rank()
    columns, rows = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    with timeout_of(20.0):
        for ranks in (columns, rows, columns):
            arrival.wait_for_ranks(ranks, call="comm.remove")


@pytest.mark.unit
def test_ranks_are_connected_through_groups_that_share_some() -> None:
    nodes: Any = None
    shards = dict.fromkeys(((0, 1), (2, 3), (4, 5), (6,)), nodes)
    layouts = AgreedNodes(shards=shards, replicate=dict.fromkeys(((0, 2), (1, 3)), nodes))
    found = []
    for rank in range(7):
        with mock.patch.object(dist, "get_rank", return_value=rank):
            found.append(layouts.connected())
    assert found == [[0, 1, 2, 3]] * 4 + [[4, 5]] * 2 + [[6]]
