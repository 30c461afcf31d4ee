"""Reductions in stages over buckets, for GPUs with one hardware queue: bits, and the order of collectives.

Layer: real Megatron-Core in 4 processes over gloo, through `fake_cuda`, told that it has one queue.
`tests/engines/test_streams.py` simulates the streams.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sdp4bit.collectives import transport
from sdp4bit_megatron import api, handle
from sdp4bit_megatron.patches import GroupPatch
from tests.megatron.runs import STOCHASTIC, MegatronRun
from tests.ranks import on_ranks, run_ranks
from tests.tables import flat

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")

PRELOAD = ["tests.megatron.imports"]
ONE_SLICE = replace(STOCHASTIC, gradients=replace(STOCHASTIC.gradients, pipeline_chunks=None))
LAYERS: dict[str, Any] = {"layers": 3, "ddp": {"bucket_size": 10_000}}

Event = tuple[str, tuple[int, ...], str]
"""An action of a rank: "hook", or the level of an all-to-all with its ranks and the bucket's name."""


def one_queue(has: bool) -> Any:
    return mock.patch.object(handle, "has_one_queue", return_value=has)


def train(staged: bool, **options: Any) -> tuple[MegatronRun, list[Event]]:
    """Train three steps with gradients that overlap, and return the events of the last one."""
    events: list[Event] = []
    start_all_to_all, start_grad_sync = transport.start_all_to_all, GroupPatch.start_grad_sync

    def transfer(received: Any, sent: Any, group: Any, *, what: str, **more: Any) -> Any:
        name, level = re.fullmatch(r"quantized .* of (\S+), all-to-all (.*)", what).groups()
        events.append((level, tuple(dist.get_process_group_ranks(group)), name))
        return start_all_to_all(received, sent, group, what=what, **more)

    def hook(self: GroupPatch, *args: Any, **kwargs: Any) -> None:
        events.append(("hook", (), ""))
        start_grad_sync(self, *args, **kwargs)

    with (
        one_queue(staged),
        mock.patch.object(transport, "start_all_to_all", transfer),
        mock.patch.object(GroupPatch, "start_grad_sync", hook),
    ):
        run = MegatronRun(ONE_SLICE, overlap=True, **{**LAYERS, **options}).train(2)
        events.clear()
        run.train(1)
        last = list(events)
        run.finish()
    assert ("staged over buckets" in flat(run.comm.explain(full=True))) == staged
    return run, last


def bytes_of_messages(run: MegatronRun) -> int:
    transports = [comm.gradients.reduction.transport for comm in run.comm.groups]
    (scratch,) = {each._scratch for each in transports}
    return sum(buffer.numel() for buffer in scratch._buffers.values())


def train_both_ways(options: dict[str, Any]) -> tuple[list[Event], list[Event]]:
    staged, events = train(True, **options)
    at_once, events_at_once = train(False, **options)
    assert staged.losses == at_once.losses
    assert all(map(torch.equal, staged.weights(), at_once.weights()))
    assert staged.comm.state_dict() == at_once.comm.state_dict()
    assert staged.comm.stats()["last_step"] == at_once.comm.stats()["last_step"]
    assert bytes_of_messages(staged) == bytes_of_messages(at_once)
    return events, events_at_once


@pytest.mark.slow
def test_the_second_half_of_a_bucket_goes_with_the_first_half_of_the_next() -> None:
    ranks = run_ranks(train_both_ways, 4, {"topology": 2})
    for rank, (events, at_once) in enumerate(ranks):
        sent = [event for event in events if event[0] != "hook"]
        node, local = divmod(rank, 2)
        assert {members for _, members, _ in sent} == {(2 * node, 2 * node + 1), (local, local + 2)}
        # Bucket by bucket, and within one the node first: as without stages, and so on every rank.
        assert sent == [event for event in at_once if event[0] != "hook"]
        assert [(level, name) for level, _, name in sent] == [
            (level, name) for level, _, name in ranks[0][0] if level != "hook"
        ]
        hooks = " ".join("|" if level == "hook" else f"{level}:{name}" for level, _, name in events)
        first, *between, last = hooks.removeprefix("| ").split(" | ")
        buckets = list(dict.fromkeys(name for _, _, name in sent))
        assert len(buckets) > 3
        assert first == f"inside the node:{buckets[0]}"
        for previous, name, done in zip(buckets, buckets[1:-1], between, strict=False):
            assert done == f"between nodes:{previous} inside the node:{name}"
        assert last == (
            f"between nodes:{buckets[-2]} inside the node:{buckets[-1]} between nodes:{buckets[-1]}"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"topology": 1},
        {"topology": 4},
        {"topology": (1, 2)},
        {"topology": 2, "tp": 2},
        {"topology": 2, "pp": 2, "chunks": 2, "layers": 4},
    ],
)
def test_one_level_and_model_parallel_ranks_are_staged_with_the_same_bits(options: dict[str, Any]) -> None:
    run_ranks(train_both_ways, 4, options)


@on_ranks(2)
def test_one_queue_is_warned_of_without_tensor_parallelism() -> None:
    for has, expected in ((True, 1), (False, 0)):
        run = MegatronRun(None, overlap=True)
        with warnings.catch_warnings(record=True) as caught, one_queue(has):
            warnings.simplefilter("always")
            with mock.patch.object(api, "has_one_queue", return_value=has):
                run.attach(ONE_SLICE, topology=1)
        told = [w for w in caught if "CUDA_DEVICE_MAX_CONNECTIONS=1" in str(w.message)]
        assert len(told) == (expected if dist.get_rank() == 0 else 0)
        run.comm.remove()
