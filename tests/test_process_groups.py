"""Process groups of a job: how many a rank creates, under which names, and again.

Layers: a fake process group, gloo, threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sdp4bit
from benchmarks import attach as attach_benchmark
from sdp4bit.collectives.process_groups import _apart_from_the_job
from sdp4bit.collectives.topology import NodeLayout, arrange, create_topologies, destroy_topology
from tests.ranks import run_ranks, run_threads
from tests.test_plan_large_worlds import fake_world


@contextmanager
def counted_calls() -> Iterator[list[list[int]]]:
    """The ranks of every group that is asked for meanwhile."""
    asked: list[list[int]] = []
    original = dist.new_group

    def count(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        asked.append(list(ranks))
        return original(ranks, *args, **kwargs)

    dist.new_group = count
    try:
        yield asked
    finally:
        dist.new_group = original


def open_names() -> set[str]:
    return set(dist.distributed_c10d._world.pg_names.values())


def grid(nodes: int, per_node: int) -> NodeLayout:
    world = nodes * per_node
    return arrange(range(world), [rank // per_node for rank in range(world)])


# -- a fake process group -----------------------------------------------------------------------------


def attach(world: int) -> tuple[int, int]:
    """Return how many groups a rank asks for and how many it is in when a model is attached."""
    with fake_world(world, rank=world - 1):
        model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (world,)))
        before = len(open_names())
        with counted_calls() as asked:
            comm = sdp4bit.quantize_communication(model, topology=8)
        members = len(open_names()) - before
        comm.remove()
        assert len(open_names()) == before
    return len(asked), members


def test_the_groups_that_a_rank_creates_do_not_grow_with_the_world() -> None:
    # Inside a node and between nodes, for weights and for gradients.
    assert attach(16) == attach(64) == attach(1024) == (4, 4)


@pytest.mark.slow
def test_thousands_of_ranks_attach_with_four_groups_each() -> None:
    assert attach(4096) == attach(16384) == (4, 4)


def test_the_benchmark_counts_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = [
        "--world",
        "16,64",
        "--layers",
        "2",
        "--repeats",
        "1",
        "--json",
        str(tmp_path / "attach.json"),
    ]
    assert attach_benchmark.main(arguments) == 0
    results = json.loads((tmp_path / "attach.json").read_text())["results"]
    assert [(row["world"], row["groups_asked_for"], row["communicators"]) for row in results] == [
        (16, 4, 4),
        (64, 4, 4),
    ]
    assert "objects received" in capsys.readouterr().out


def test_the_summary_that_ranks_gather_does_not_grow_with_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every rank sends to every other when a model is attached: bytes of one rank's message."""
    sizes = []
    original = dist.distributed_c10d._object_to_tensor

    def measure(*args: Any, **kwargs: Any) -> Any:
        tensor, size = original(*args, **kwargs)
        sizes.append(int(size))
        return tensor, size

    monkeypatch.setattr(dist.distributed_c10d, "_object_to_tensor", measure)
    for world in (64, 4096):
        with fake_world(world, rank=0):
            mesh = init_device_mesh("cpu", (world,))
            model = nn.Sequential(*(fully_shard(nn.Linear(8, 8), mesh=mesh) for _ in range(40)))
            sdp4bit.quantize_communication(fully_shard(model, mesh=mesh), topology=8)
    small_versions, small, large_versions, large = sizes
    assert small_versions == large_versions
    assert small < 600 and large - small < 10  # digits of rank numbers


# -- gloo ---------------------------------------------------------------------------------------------


def sums(groups: list[Any]) -> list[float]:
    found = []
    for group in groups:
        total = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(total, group=group)
        found.append(total.item())
    return found


def names_and_sums(layouts: list[NodeLayout], times: int) -> list[tuple[set[str], list[float]]]:
    """Create, use and destroy the groups several times; return the new names and the groups' sums."""
    found = []
    for _ in range(times):
        before = open_names()
        topologies = create_topologies(layouts)
        names = open_names() - before
        groups = [group for t in topologies.values() for group in (t.intra, t.inter) if group is not None]
        found.append((names, sums(groups)))
        for topology in topologies.values():
            destroy_topology(topology)
    return found


def create_one_by_one(layout: NodeLayout) -> list[tuple[str, list[int]]]:
    """Return name and ranks of the groups this rank is in when every rank asks for every group."""
    every = [layout.intra_ranks(node) for node in range(layout.nodes)]
    every += [layout.inter_ranks(local) for local in range(layout.ranks_per_node)]
    mine = [
        group for ranks in every if (group := dist.new_group(ranks)) is not None and dist.get_rank() in ranks
    ]
    return [(group.group_name, dist.get_process_group_ranks(group)) for group in mine]


def compare_names(layout: NodeLayout) -> None:
    count = dist.distributed_c10d._world.group_count
    (topology,) = create_topologies([layout]).values()
    created = [group for group in (topology.intra, topology.inter) if group is not None]
    ours = [(group.group_name, dist.get_process_group_ranks(group)) for group in created]
    theirs = create_one_by_one(layout)
    shift = dist.distributed_c10d._world.group_count - count
    assert shift == 2 * (layout.nodes + layout.ranks_per_node)
    assert [(str(int(name) + shift // 2), ranks) for name, ranks in ours] == theirs


def test_names_are_those_of_groups_created_one_by_one() -> None:
    run_ranks(compare_names, 6, grid(3, 2), timeout=60)


def test_names_are_never_used_again_and_groups_can_be_created_again() -> None:
    results = run_ranks(names_and_sums, 4, [grid(2, 2)], 3, timeout=60)
    for rank, rounds in enumerate(results):
        names = [name for new, _ in rounds for name in new]
        assert len(names) == len(set(names)) == 6
        node, local = divmod(rank, 2)
        assert all(total == [4 * node + 3, 2 * local + 4] for _, total in rounds)


def test_layouts_that_overlap_or_do_not_concern_a_rank() -> None:
    """Experts over other ranks than the rest, and data-parallel groups beside each other of unequal shape."""
    everyone = grid(2, 2)
    halves = [
        NodeLayout(ranks=(0, 2), nodes=2, ranks_per_node=1),
        NodeLayout(ranks=(1, 3), nodes=1, ranks_per_node=2),
    ]
    some = [NodeLayout(ranks=(1, 2), nodes=2, ranks_per_node=1)]
    results = run_ranks(names_and_sums, 4, [everyone, *halves, *some], 2, timeout=60)
    for rank, rounds in enumerate(results):
        node, local = divmod(rank, 2)
        expected = [4 * node + 3, 2 * local + 4, 2 * local + 4] + ([5] if rank in (1, 2) else [])
        assert all(total == expected for _, total in rounds)


def share_a_job_with_other_groups() -> None:
    """Groups that only some ranks are in, hashed names, meshes and further models do not get in the way."""
    rank = dist.get_rank()
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    dist.new_group([0, 3])
    handles = []
    for number in range(3):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
        models = [fully_shard(nn.Linear(64, 64)) for _ in range(2)]
        handles += [sdp4bit.quantize_communication(model, topology=mesh) for model in models]
        for model in models:
            model(torch.ones(1, 64)).sum().backward()
        handles.pop(number).remove()
        assert sums([mesh["inter"].get_group()]) == [2 * (rank % 2) + 4]
    for handle in handles:
        handle.remove()


def test_other_groups_of_the_job_do_not_get_in_the_way() -> None:
    run_ranks(share_a_job_with_other_groups, 4, timeout=90)


def create_when_torch_waits_for_all() -> tuple[int, list[float]]:
    with pytest.MonkeyPatch.context() as patch, counted_calls() as asked:
        patch.setenv("TORCH_DIST_INIT_BARRIER", "1")
        (topology,) = create_topologies([grid(2, 2)]).values()
    return len(asked), sums([topology.intra, topology.inter])


def test_groups_are_created_one_by_one_if_torch_waits_for_all_ranks_at_each() -> None:
    for rank, (asked, totals) in enumerate(run_ranks(create_when_torch_waits_for_all, 4, timeout=60)):
        assert (asked, totals) == (4, [4 * (rank // 2) + 3, 2 * (rank % 2) + 4])


def create_within(layout: NodeLayout) -> tuple[set[str], list[float]]:
    """Twice, on ranks 1 to 3 of 5; then all ranks create a group together."""
    members = dist.new_group([1, 2, 3])
    before, names, totals = dist.distributed_c10d._world.group_count, set(), []
    for _ in range(2 if dist.get_rank() in layout.ranks else 0):
        known = open_names()
        (topology,) = create_topologies([layout], within=members).values()
        names |= open_names() - known
        totals += sums([topology.inter])
        destroy_topology(topology)
        assert open_names() == known
    assert dist.distributed_c10d._world.group_count == before
    assert sums([dist.new_group(range(5))]) == [15]
    return names, totals


def test_groups_within_some_ranks_are_no_concern_of_the_others() -> None:
    layout = NodeLayout(ranks=(1, 2, 3), nodes=3, ranks_per_node=1)
    first, *inside, last = run_ranks(create_within, 5, layout, timeout=60)
    assert first == last == (set(), [])
    assert inside == [(inside[0][0], [9, 9])] * 3
    assert len(inside[0][0]) == 2 and all(int(name) > 1 << 32 for name in inside[0][0])


def create_next_to_a_device() -> None:
    default, device = dist.group.WORLD, torch.device("cuda", 0)
    assert default is not None
    default.bound_device_id = device  # as init_process_group(device_id=...) leaves it
    with _apart_from_the_job(default) as yielded:
        assert yielded == device
        assert default.bound_device_id is None  # nothing is split from the communicator of the job
    assert default.bound_device_id == device
    default.bound_device_id = None


def test_communicators_within_some_ranks_are_not_split_from_the_one_of_the_job() -> None:
    run_ranks(create_next_to_a_device, 2, timeout=60)


def sums_of_threads(layout: NodeLayout) -> list[float]:
    (topology,) = create_topologies([layout]).values()
    return sums([topology.intra, topology.inter])


def create_within_when_torch_waits_for_all() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DIST_INIT_BARRIER", "1")
        with pytest.raises(ValueError, match="TORCH_DIST_INIT_BARRIER=1 and torchcomms do not allow"):
            create_topologies([grid(2, 1)], within=dist.group.WORLD)


def test_no_groups_within_some_ranks_if_torch_waits_for_all_ranks_at_each() -> None:
    run_ranks(create_within_when_torch_waits_for_all, 2, timeout=60)


def test_the_world_of_threads_creates_its_groups_alike() -> None:
    for rank, totals in enumerate(run_threads(sums_of_threads, 8, grid(4, 2), timeout=60)):
        node, local = divmod(rank, 2)
        assert totals == [4 * node + 3, 4 * local + 16]
