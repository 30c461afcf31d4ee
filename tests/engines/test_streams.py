"""Simulated training steps on GPUs: no race, no use after free, no wait of the host, collectives in order.

See `stream_simulator` for what that means of streams, and what it leaves open. Of collectives: every rank
calls the same ones in an order that NCCL can carry out. NCCL neither checks nor repairs: other sizes than the
peers' are garbage or a hang, and so are two communicators that are called in opposite orders on two ranks.
That tensors are contiguous, of one dtype and of sizes that fit is checked by the simulated back end.
"""

from __future__ import annotations

import graphlib
import itertools
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sdp4bit.collectives import transport
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.engines.fsdp2.hooks import AllGatherHook
from tests.engines import fake_cuda
from tests.engines.simulated_cuda import simulate
from tests.engines.stream_scenarios import (
    MEGATRON_SCENARIOS,
    ONE_QUEUE,
    ORDERED_SCENARIOS,
    SCENARIOS,
    FSDPRun,
    SimulatedFuture,
)
from tests.engines.stream_simulator import Collective, Simulator, Stream
from tests.ranks import on_ranks, run_ranks, users_of

PRELOAD = ["tests.engines.stream_scenarios"]

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(1000)]  # fixtures, which wait for ranks up to 900 s

EDITS = "fsdp2/events.py"
MAY_WAIT = {
    "load": ("engines/fsdp2/",),  # the ranks agree whether the loaded rows fit
    "load, full replica": ("engines/fsdp2/",),
    "accumulation": (EDITS,),  # each micro-batch is reduced, as with SAM: whether weights were edited since
    "edits": (EDITS,),  # in evaluations: whether weights were edited, and by how much
    "evaluation": (EDITS,),  # the same
    "unshard, measured meanwhile": (EDITS,),  # measure() returns numbers
    "unshard, saved meanwhile": (EDITS,),  # whether weights were edited since the block was asked for
    "audit": ("audit.py",),  # the host compares checksums
    "resync and audit": ("audit.py",),
}
"""Scenarios in which the host has a reason to wait in a step, and the files that do it."""

QUICK = (
    *("plain FSDP2", "pipeline chunks", "unshard, measured meanwhile", "two roots", "HSDP", "DDP", "load"),
)
"""Scenarios of FSDP2 and DDP that the quick tests have; the parts of the others are in them too."""

ORDERED_QUICK = ("two roots", "audit", "mesh per parameter")
"""Those whose collectives the quick tests compare between ranks."""


def marked(scenarios: Iterable[str], quick: Sequence[str]) -> pytest.MarkDecorator:
    """Return the mark of a test of each scenario, slow unless it is a quick one."""
    params = [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in scenarios]
    return pytest.mark.parametrize("name", params)


MOST_TRIED = 8
"""Scenarios in which a call is left out until one needs it: an all-to-all of several slices is rare."""

Result = tuple[list[str], list[str], list[str], str]
"""Faults, waits of the host, calls that order streams, and the traceback of a failure."""

Outcome = tuple[dict[str, Result], dict[str, list[str]]]
"""Results of scenarios, and the faults of mutations."""


def run_scenario(name: str, scenarios: dict[str, Callable[[], object]], left_out: str = "") -> Result:
    failure = ""
    try:
        with simulate(left_out=left_out) as sim:
            scenarios[name]()
    except Exception:
        failure = traceback.format_exc()
    return sim.faults, sim.host_waits, sorted(sim.ordering), failure


def needed(results: dict[str, Result], scenarios: dict[str, Callable[[], object]]) -> dict[str, bool]:
    """Return of each call that orders streams whether one of the first scenarios with it needs it."""
    tried: dict[str, list[bool]] = {}
    for name, (_, _, ordering, _) in results.items():
        for site in ordering:
            found = tried.setdefault(site, [])
            if not any(found) and len(found) < MOST_TRIED and not site.startswith("traffic.py"):
                found.append(bool(run_scenario(name, scenarios, left_out=site)[0]))
    return {site: any(found) for site, found in tried.items() if found}


def half_of(names: Iterable[str]) -> list[str]:
    """Return every second name; before any scenario, which puts other process groups in place of ours."""
    return list(names)[dist.get_rank() :: 2]


def run_fsdp(names: Iterable[str], mutations: Iterable[str] = ()) -> Outcome:
    """Return the results of half of these scenarios, and the faults found with half of these mutations."""
    names, mutations = half_of(names), half_of(mutations)
    results = {name: run_scenario(name, SCENARIOS) for name in names}
    faults = {}
    for name in mutations:
        scenario, mutation = MUTATIONS[name]
        with mutation():
            faults[name] = run_scenario(scenario, SCENARIOS)[0]
    return results, faults


def needed_on_fsdp() -> dict[str, bool]:
    """Return which waits half of the scenarios need."""
    return needed(run_fsdp(SCENARIOS)[0], SCENARIOS)


def _forget(at: int) -> Any:
    """What the output of an all-gather is to keep is kept but for this one."""

    def keep(tensor: torch.Tensor, kept: tuple[Any, ...]) -> None:
        tensor.others = kept[:at] + kept[at + 1 :]  # type: ignore[attr-defined]

    return mock.patch.object(torch.Tensor, "read_by_refresh", property(fset=keep), create=True)


def _unwaited() -> Any:
    """Whoever reads a replica does not wait for the side stream that writes it."""

    def run(replica: WeightReplica, stream: Any, function: Callable[[], None]) -> Any:
        return stream.run(function)

    return mock.patch.object(WeightReplica, "run_beside", run)


def _read_late() -> Any:
    """A side stream reads the main shard, and not a copy that was made before."""
    refresh = AllGatherHook._refresh

    def read_late(hook: AllGatherHook, row: Any, main: Any) -> None:
        refresh(hook, row, row if main is row else hook._group.view.main_shard(torch.float32))

    return mock.patch.object(AllGatherHook, "_refresh", read_late)


def needed_on_megatron() -> dict[str, bool]:
    """Return which waits Megatron-Core's scenarios need."""
    fake_cuda.install()
    return needed({n: run_scenario(n, MEGATRON_SCENARIOS) for n in MEGATRON_SCENARIOS}, MEGATRON_SCENARIOS)


def streams_of_transfers(name: str) -> list[str]:
    """Return on which streams the all-to-alls of gradients are."""
    found: list[str] = []
    launch = Simulator.launch

    def note(self: Simulator, what: str, *, on: Stream | None = None, **tensors: Any) -> None:
        launch(self, what, on=on, **tensors)
        if what == "all_to_all":
            found.append((on or self.stream).name)

    with mock.patch.object(Simulator, "launch", note):
        faults, _, _, failure = run_scenario(name, SCENARIOS)
    assert not failure and not faults, (failure, faults)
    return found


def attached_to_one_queue() -> list[str]:
    """Return the warnings that FSDP2's users get."""
    with simulate(), ONE_QUEUE, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDPRun()
    return [str(warning.message) for warning in caught]


def transfers_of_one_rank() -> tuple[list[str], list[str], list[str]]:
    at_once, overlapping = map(streams_of_transfers, ("node replica", "pipeline chunks"))
    return at_once, overlapping, attached_to_one_queue()


@pytest.mark.slow
def test_a_transfer_that_is_waited_for_at_once_is_on_the_stream_that_waits() -> None:
    """One slice's are on FSDP2's own reduce-scatter stream, those of several on the communicators'."""
    ((at_once, overlapping, told),) = run_ranks(transfers_of_one_rank, 1, timeout=240.0)
    assert at_once and not [name for name in at_once if "communicator" in name]
    assert overlapping and all("communicator" in name for name in overlapping)
    assert sum("CUDA_DEVICE_MAX_CONNECTIONS=1" in text and "Unset it" in text for text in told) == 1


def _shared_buffers() -> Any:
    """Exchanges of all streams share their message buffers."""
    return mock.patch.object(Stream, "cuda_stream", 0)


MUTATIONS: dict[str, tuple[str, Callable[[], Any]]] = {
    "the gathered row is freed": ("full replica", lambda: _forget(0)),
    "the loaded row is freed": ("load", lambda: _forget(1)),
    "the copied main shard is freed": ("unshard", lambda: _forget(2)),
    "a replica is read while it is refreshed": ("unshard, measured meanwhile", _unwaited),
    "the main shard is read late": ("unshard, stepped meanwhile", _read_late),
    "message buffers of two roots": ("two roots", _shared_buffers),
    "message buffers of two unshards": ("unshard", _shared_buffers),
    "message buffers of all-reduces of two roots": ("HSDP, two roots", _shared_buffers),
    "message buffers of two slices": (
        "pipeline chunks",
        lambda: mock.patch.object(transport, "CHUNKS_UNDER_WAY", 1),
    ),
    "gradients are used before they are averaged": (
        "DDP",
        lambda: mock.patch.object(SimulatedFuture, "wait", lambda future: future._value),
    ),
}
"""A kept reference is dropped, memory shared, or something read too early or too late: which scenario must
fail, and how it is done."""

QUICK_MUTATIONS = [
    "the gathered row is freed",
    "a replica is read while it is refreshed",
    "message buffers of two roots",
    "gradients are used before they are averaged",
]
"""One of every kind, which the quick tests have."""


def names_in(request: pytest.FixtureRequest) -> list[str]:
    """Return the scenarios of the tests of this run that use the fixture."""
    users = (test for test in users_of(request) if hasattr(test, "callspec"))
    return list(dict.fromkeys(test.callspec.params["name"] for test in users))


@pytest.fixture(scope="module")
def fsdp(request: pytest.FixtureRequest) -> list[Outcome]:
    """Run the scenarios of FSDP2 that are asked for, each in one of two processes."""
    return run_ranks(run_fsdp, 2, names_in(request), QUICK_MUTATIONS, timeout=900.0)


def check(outcomes: list[Outcome], name: str) -> None:
    faults, waits, _, failure = next(results[name] for results, _ in outcomes if name in results)
    assert not failure, failure
    assert faults == []
    # A measured step waits for its numbers.
    of_library = [wait for wait in waits if "[sdp4bit" in wait and "observe/measures.py" not in wait]
    if name in MAY_WAIT:
        assert of_library
        assert [w for w in of_library if not any(file in w for file in MAY_WAIT[name])] == []
    else:
        assert of_library == []


@marked(SCENARIOS, QUICK)
def test_nothing_races_and_the_host_does_not_wait_on_fsdp2(fsdp: list[Outcome], name: str) -> None:
    check(fsdp, name)


NOT_FOR_ORDER = {
    # NCCL runs a synchronous collective on the current stream; other back ends need the wait.
    "transport.py start_all_to_all Work.wait",
    "transport.py start_all_gather Work.wait",
    "auto.py mark record",  # it measures a time
}
"""Calls that no scenario needs, because they order nothing on a GPU."""


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_there_is_a_fault_without_any_one_of_the_waits() -> None:
    pytest.importorskip("megatron.core")
    found: dict[str, bool] = {}
    for needed_here in (
        *run_ranks(needed_on_fsdp, 2, timeout=1500.0),
        *run_ranks(needed_on_megatron, 1, timeout=900.0),
    ):
        for site, is_needed in needed_here.items():
            found[site] = found.get(site, False) or is_needed
    assert {site for site, is_needed in found.items() if not is_needed} == NOT_FOR_ORDER
    assert {site.partition(" ")[0] for site in found} >= {"streams.py"}


def test_there_is_a_fault_if_memory_is_freed_shared_or_read_too_early_or_late(fsdp: list[Outcome]) -> None:
    check_mutations(fsdp, QUICK_MUTATIONS)


@pytest.mark.slow
def test_there_is_a_fault_with_each_of_the_other_mutations() -> None:
    others = [name for name in MUTATIONS if name not in QUICK_MUTATIONS]
    check_mutations(run_ranks(run_fsdp, 2, [], others, timeout=900.0), others)


def check_mutations(outcomes: list[Outcome], names: Sequence[str]) -> None:
    faults = {name: found for _, mutated in outcomes for name, found in mutated.items()}
    assert set(faults) == set(names) and all(faults.values()), faults
    assert all("use after free" in faults[name][0] for name in names if "freed" in name)


# -- the order of collectives on all ranks ------------------------------------------------------------


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
    ranks = run_ranks(logs_of_rank, 4, names, timeout=900.0)
    return {name: [logs[name] for logs in ranks] for name in names}


@on_ranks(1)
def test_an_edit_in_an_accumulation_is_sent_after_its_step_and_not_waited_for() -> None:
    """The comparison arrives on the host later; large edits then take full precision."""
    with simulate() as sim:
        run = FSDPRun().train(1)
        (model,) = run.models
        model.set_requires_gradient_sync(False)
        run.backward()
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().mul_(2)
        model.set_requires_gradient_sync(True)
        run.backward()
        run.step()
        assert sim.host_waits == [] and all(comm.weights.full_refreshes == 0 for comm in run.comm.groups)
        torch.cuda.synchronize()
        run.forward()
        assert all(comm.weights.full_refreshes == 1 for comm in run.comm.groups)


@pytest.fixture(scope="module")
def logs(request: pytest.FixtureRequest) -> dict[str, list[Log]]:
    """The collectives of four ranks in the scenarios that are asked for, and in one to swap them in."""
    return logs_of_all(*dict.fromkeys(["audit", *names_in(request)]))


@marked(ORDERED_SCENARIOS, ORDERED_QUICK)
def test_all_ranks_call_the_same_collectives_in_one_order(logs: dict[str, list[Log]], name: str) -> None:
    assert len(logs[name][0]) > 50
    # Shards inside a node and replicas between nodes have one level each. Blocks have one rank per node here.
    fewest = 3 if "DP" in name else 4 if "blocks" in name else 5
    assert len({call.group for call in logs[name][0]}) >= fewest
    assert disorder(logs[name]) == ""


def swap(log: Log, wanted: Callable[[Collective, Collective], bool]) -> list[Collective]:
    """Return the log with two neighbours exchanged, the first ones of which that is wanted."""
    at = next(at for at, pair in enumerate(itertools.pairwise(log)) if wanted(*pair))
    return [*log[:at], log[at + 1], log[at], *log[at + 2 :]]


def test_collectives_swapped_or_left_out_on_one_rank_are_found(logs: dict[str, list[Log]]) -> None:
    zero, *others = logs["audit"]
    of_one_group = swap(zero, lambda one, two: one.group == two.group and one.alike != two.alike)
    assert "rank 0" in disorder([of_one_group, *others])
    of_two_groups = swap(
        zero,
        lambda one, two: one.group != two.group and len(set(one.group[1]) & set(two.group[1])) > 1,
    )
    assert "circle" in disorder([of_two_groups, *others])
    assert "calls on rank" in disorder([zero[:-1], *others])
