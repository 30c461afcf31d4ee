"""What a step on a GPU costs besides arithmetic: calls, launches, events, memory; and what overlaps.

Layer: one process, one rank of a job on simulated GPUs (`tests.engines.simulated_cuda`).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from sdp4bit import GradientConfig, SDP4BitConfig, TelemetryConfig, WeightConfig
from sdp4bit.engines.fsdp2.events import FSDPModelState
from sdp4bit.engines.fsdp2.hooks import ReduceScatterHook
from tests import ROOT
from tests.engines import launches
from tests.engines.simulated_cuda import Kernels, simulate
from tests.engines.stream_scenarios import (
    FULL,
    QUANTIZED,
    FSDPRun,
    more_buffers,
    prefetch,
    weights,
)
from tests.engines.stream_simulator import Event, Simulator, running
from tests.ranks import on_ranks

PRELOAD = ["tests.engines.stream_scenarios", "tests.engines.launches"]
GROUPS = 5
LAUNCHES_PER_GROUP = 18
"""Budget of the default configuration beyond plain FSDP2."""
SLOW = pytest.mark.slow
FULL_PRECISION = weights(bits=None, replica="full")


class Calls(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


# -- measuring ----------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(1)
def test_measuring_takes_few_calls_before_the_first_unshard_and_no_timed_event() -> None:
    """Of each group five operators, their buffers, the samples in any number of stretches, squared norms."""
    in_pieces = replace(
        QUANTIZED,
        weights=WeightConfig(group_size=32),
        gradients=GradientConfig(min_numel=0, intra_group_size=32, inter_group_size=32),
        telemetry=TelemetryConfig(interval=1, sample_numel=256),
    )
    measure, found = FSDPModelState.measure_step, []

    def counted(state: FSDPModelState) -> None:
        with Calls() as calls:
            measure(state)
        found.append(calls.counts.total())

    with (
        simulate(sees_operators=False),
        mock.patch.object(torch.cuda, "Event", wraps=Event) as made,
        mock.patch.object(FSDPModelState, "measure_step", counted),
    ):
        run = FSDPRun(in_pieces).train(3)
        assert len(run.comm.group_stats()) == GROUPS
    assert len(found) == 2 and max(found) <= 46 * GROUPS, found
    # A timed event costs a GPU some of its overlap.
    assert made.called and not any(call.kwargs.get("enable_timing") for call in made.call_args_list)


# -- launches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bias", "name"), [(False, "launches"), (True, "launches_with_biases")])
@on_ranks(1)
def test_launches_of_a_step_are_within_the_budget_and_those_of_the_documentation(
    bias: bool, name: str
) -> None:
    counts, waits = launches.count_launches(bias=bias)
    documented = json.loads((ROOT / "results" / "launches.json").read_text())
    assert counts == documented[name], launches.table_of(counts)
    assert counts.total() <= LAUNCHES_PER_GROUP * launches.GROUPS and waits == 0, launches.table_of(counts)


# -- unshard ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [QUANTIZED, pytest.param(FULL, marks=SLOW)], ids=["node", "full"])
@on_ranks(1)
def test_a_group_is_refreshed_by_two_launches_whatever_the_number_of_ranks(config: SDP4BitConfig) -> None:
    with simulate(sees_operators=False) as sim:
        run = FSDPRun(replace(config, separate_parameters=False)).train(2)
        sent = len(sim.collectives)
        operators: Counter[str] = Counter()
        kernel = Kernels.__getattr__

        def counted(kernels: Kernels, name: str) -> Any:
            operators[name] += 1
            return kernel(kernels, name)

        with mock.patch.object(Kernels, "__getattr__", counted):
            run.train(1)
        collectives = [str(each.alike[0]) for each in sim.collectives[sent:]]
    assert operators["subtract_quantize"] == operators["dequantize_add"] == GROUPS
    assert operators.pop("add_checksum") == GROUPS
    assert operators.total() == 5 * GROUPS
    assert collectives.count("all_to_all") == 2 * GROUPS


@pytest.mark.parametrize(
    "config", [QUANTIZED, pytest.param(FULL_PRECISION, marks=SLOW)], ids=["node", "full"]
)
@on_ranks(1)
def test_gathering_a_group_allocates_less_than_the_group(config: SDP4BitConfig) -> None:
    """FSDP2's tensors hold what is gathered; nothing else is as large."""
    with simulate(world=32) as sim:
        run = FSDPRun(replace(config, telemetry=None), prepare=prefetch, topology=8).train(2)
        group = next(each.view for each in run.comm.groups if each.view.name == "blocks.1")
        held = dict(sim.allocated)
        sim.peak = dict(held)
        run.train(1)
        (stream,) = (each for each in sim.peak if each.name == "all_gather_stream")
        assert sim.peak[stream] - held[stream] < 32 * group.shard_numel * group.row_dtype.itemsize


def under_way(sim: Simulator, before: dict[Any, int]) -> bool:
    """Whether what follows on the compute stream need not wait for something that was launched since."""
    compute = sim.current[0]
    return any(
        before.get(stream) != time and not compute.is_after(stream, time)
        for stream, time in sim.launched.items()
        if stream is not sim.host
    )


def overlaps(config: SDP4BitConfig | None) -> list[tuple[bool, bool]]:
    """Return whether an unshard goes on beside the computation, and whether it does after the wait.

    First with a refresh, then without.
    """
    found = []
    with simulate() as sim:
        run = FSDPRun(config).train(2)
        block = run.models[0].blocks[1]
        for _ in range(2):
            before = dict(sim.launched)
            handle = block.unshard(async_op=True)
            is_beside = under_way(sim, before)
            handle.wait()
            found.append((is_beside, under_way(sim, before)))
            block.reshard()
    return found


@on_ranks(1)
def test_an_asynchronous_unshard_goes_on_beside_the_computation() -> None:
    always, once = [(True, False)] * 2, [(True, False), (False, False)]
    assert overlaps(None) == overlaps(QUANTIZED) == always
    assert overlaps(FULL) == once  # then the replica is there


# -- reductions that the computation may leave behind -------------------------------------------------


def ahead(config: SDP4BitConfig, wanted: bool) -> int:
    """Return how many reductions may be unfinished when the computation comes to the next one."""
    reduce, done, found = ReduceScatterHook.__call__, [], []

    def noted(hook: ReduceScatterHook, *args: Any, **options: Any) -> None:
        compute = running().current[0]
        found.append(sum(not compute.is_after(stream, time) for stream, time in done))
        reduce(hook, *args, **options)
        done.append((running().stream, running().stream.clock[running().stream]))

    with simulate(), mock.patch.object(ReduceScatterHook, "__call__", noted):
        FSDPRun(config, prepare=more_buffers if wanted else None).train(3)
    return max(found)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"), reason="torch before 2.13"
)
@on_ranks(1)
def test_more_input_buffers_let_the_computation_leave_quantized_reductions_behind() -> None:
    assert (ahead(QUANTIZED, wanted=False), ahead(QUANTIZED, wanted=True)) == (0, 2)
