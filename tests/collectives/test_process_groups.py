"""Nodes, process groups and exchanges: who shares a node, which groups a rank creates and what they carry.

Layers: no process; a fake process group; gloo; threads, for libraries that have exchanges of their own.
"""

from __future__ import annotations

import functools
import inspect
import json
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sdp4bit
from benchmarks import attach as attach_benchmark
from sdp4bit.collectives.exchange import all_gather_blocks, start_all_gather_rows, start_all_to_all
from sdp4bit.collectives.process_groups import create_process_groups, unknown_creation
from sdp4bit.collectives.topology import (
    NodeLayout,
    arrange,
    create_topologies,
    destroy_topology,
    host_name,
    mesh_rows,
    node_labels,
)
from tests.ranks import on_ranks, run_ranks, run_threads


def open_names() -> set[str]:
    return set(dist.distributed_c10d._world.pg_names.values())


def grid(nodes: int, per_node: int) -> NodeLayout:
    world = nodes * per_node
    return arrange(range(world), [rank // per_node for rank in range(world)])


# -- a fake process group -----------------------------------------------------------------------------


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def attach(world: int) -> tuple[int, int]:
    """Return how many groups a rank asks for and how many it is in when a model is attached again."""
    measured = attach_benchmark.measure(world, ranks_per_node=8, layers=1, repeats=2)
    return measured["groups_asked_for"], measured["communicators"]


def test_the_groups_that_a_rank_creates_do_not_grow_with_the_world() -> None:
    # Inside a node and between nodes, for weights and for gradients.
    assert attach(16) == attach(64) == attach(1024) == (4, 4)


@pytest.mark.slow
def test_thousands_of_ranks_attach_with_four_groups_each() -> None:
    assert attach(4096) == attach(16384) == (4, 4)


def test_the_benchmark_tells_what_it_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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


def test_the_summary_that_ranks_gather_does_not_grow_with_the_world() -> None:
    """What every rank sends to every other when a model is attached: bytes of one rank's messages."""
    small, large = (
        attach_benchmark.measure(world, ranks_per_node=8, layers=40, repeats=1)["object_bytes_sent"]
        for world in (64, 4096)
    )
    assert small < 600 and 0 <= large - small < 10  # digits of rank numbers


class StandInForNCCLOptions:
    """Takes the place of ProcessGroupNCCL.Options, which a torch without CUDA does not have."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


def test_streams_of_communicators_have_high_priority_by_a_stand_in_for_nccl() -> None:
    """Every group has settings of its own, as torch writes into them, with the timeout that torch wants."""
    asked: list[Any] = []
    real = dist.distributed_c10d._new_process_group_helper

    @functools.wraps(real)
    def helper(*args: Any, backend_options: Any, **kwargs: Any) -> Any:
        asked.append((backend_options, kwargs["timeout"]))
        return real(*args, **kwargs)

    nccl = SimpleNamespace(Options=StandInForNCCLOptions)
    with (
        fake_world(8),
        mock.patch.object(dist.distributed_c10d, "_new_process_group_helper", helper),
        mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
    ):
        create_topologies([grid(2, 4)])
        with mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"):
            create_topologies([grid(2, 4)])
    (plain, _), (other, _), *high = asked
    assert plain is other is None
    assert [options.is_high_priority_stream for options, _ in high] == [True, True]
    assert [options._timeout for options, _ in high] == [timeout for _, timeout in high]
    assert high[0][0] is not high[1][0]


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


def names_of_users_groups(layouts: list[NodeLayout]) -> list[str]:
    """Return the names of plain groups made before and after ours."""
    names = []
    for _ in range(2):
        names.append(dist.new_group().group_name)
        create_topologies(layouts)
    return names


def test_groups_of_users_have_the_names_that_they_would_have_anyway() -> None:
    with_ours = run_ranks(names_of_users_groups, 4, [grid(2, 2)], timeout=60)
    assert with_ours == run_ranks(names_of_users_groups, 4, [], timeout=60)


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


@on_ranks(4, timeout=90)
def test_other_groups_of_the_job_do_not_get_in_the_way() -> None:
    """Groups of all ranks, of some, meshes and further models, before and after, do not get in the way."""
    rank = dist.get_rank()
    if (
        torch.__version__ < (2, 14) and rank < 2
    ):  # from 2.14 on, torch itself hangs at the next group of all ranks
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


@on_ranks(4, timeout=90)
def test_attaching_works_after_groups_that_only_some_ranks_make() -> None:
    """Ranks that are in different numbers of groups, and that torch 2.14 counts differently, attach twice."""
    for _ in range(2):
        pair = dist.new_group([0, 1], use_local_synchronization=True) if dist.get_rank() < 2 else None
        model = fully_shard(nn.Linear(64, 64))
        handle = sdp4bit.quantize_communication(model, topology=2)
        model(torch.ones(1, 64)).sum().backward()
        handle.remove()
        assert pair is None or sums([pair]) == [3]


def attach_and_make_groups() -> list[float]:
    handle = sdp4bit.quantize_communication(fully_shard(nn.Linear(64, 64)), topology=2)
    mine = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2]
    totals = sums([mine])
    handle.remove()
    return totals + sums([dist.new_group()])


def test_groups_are_made_after_attaching_and_after_removing() -> None:
    assert run_ranks(attach_and_make_groups, 4, timeout=60) == [[3, 10], [3, 10], [7, 10], [7, 10]]


def create_within(parts: list[list[NodeLayout]]) -> list[float]:
    """Each half of the job creates groups as often as it likes, here its number + 1 times."""
    part = dist.get_rank() // 4
    halves = [dist.new_group(range(4)), dist.new_group(range(4, 8))]
    names: set[str] = set()
    for _ in range(part + 1):
        before = open_names()
        (topology,) = create_topologies(parts[part], within=halves[part]).values()
        assert open_names() - before and not (open_names() - before) & names
        names |= open_names() - before
        totals = sums([topology.intra, topology.inter])
        destroy_topology(topology)
    (topology,) = create_topologies([grid(4, 2)]).values()
    return totals + sums([topology.intra, topology.inter])


def test_a_part_of_the_ranks_creates_groups_without_the_others() -> None:
    parts = [[NodeLayout(ranks=tuple(range(s, s + 4)), nodes=2, ranks_per_node=2)] for s in (0, 4)]
    for rank, totals in enumerate(run_ranks(create_within, 8, parts, timeout=90)):
        node, local = divmod(rank, 2)
        start = rank // 4 * 4
        assert totals == [4 * node + 3, 2 * (start + local) + 4, 4 * node + 3, 4 * local + 16]


def create_without_splitting() -> tuple[list[Any], list[torch.device | None]]:
    """Pose as a job on bound devices; return the device of each call's default group, and after it."""
    default: Any = dist.group.WORLD
    device = torch.device("cuda:0")
    seen: list[Any] = []
    original = dist.distributed_c10d._new_process_group_helper

    @functools.wraps(original)
    def look(*args: Any, **kwargs: Any) -> Any:
        seen.append((default.bound_device_id, kwargs["device_id"]))
        default.bound_device_id = None  # gloo has nothing to bind
        return original(*args, **{**kwargs, "device_id": None})

    both = dist.new_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_new_process_group_helper", look)
        for within in (both, dist.group.WORLD, None):
            default.bound_device_id = device
            create_process_groups([[[0], [1]]], timeout=None, description="test", within=within)
            seen.append(default.bound_device_id)
            default.bound_device_id = None
    return seen


def test_a_part_of_the_ranks_does_not_split_the_communicator_of_all() -> None:
    device = torch.device("cuda:0")
    for seen in run_ranks(create_without_splitting, 2, timeout=60):
        assert seen == [(None, device), device, (device, device), None, (device, device), None]


def create_when_torch_waits_for_all() -> tuple[int, list[float]]:
    calls = attach_benchmark.Calls()
    with pytest.MonkeyPatch.context() as patch, calls.counted():
        patch.setenv("TORCH_DIST_INIT_BARRIER", "1")
        (topology,) = create_topologies([grid(2, 2)]).values()
    return calls.groups, sums([topology.intra, topology.inter])


def test_a_rank_creates_its_groups_only_when_torch_waits_for_all_ranks_at_plain_ones() -> None:
    for rank, (asked, totals) in enumerate(run_ranks(create_when_torch_waits_for_all, 4, timeout=60)):
        assert (asked, totals) == (2, [4 * (rank // 2) + 3, 2 * (rank % 2) + 4])


def create_on_another_torch() -> tuple[list[str], list[float], str]:
    """Create groups with a torch whose part that takes a name wants one argument more."""
    original = dist.distributed_c10d._new_process_group_helper

    def changed(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    signature = inspect.signature(original)
    added = inspect.Parameter("shape", inspect.Parameter.KEYWORD_ONLY)
    changed.__signature__ = signature.replace(parameters=[*signature.parameters.values(), added])  # type: ignore[attr-defined]
    everyone = dist.new_group()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(dist.distributed_c10d, "_new_process_group_helper", changed)
        (topology,) = create_topologies([grid(2, 2)]).values()
        with pytest.raises(ValueError) as refused:
            create_topologies([grid(2, 2)], within=everyone)
    return (
        [str(warning.message) for warning in caught],
        sums([topology.intra, topology.inter]),
        str(refused.value),
    )


def test_a_torch_that_creates_groups_in_another_way_has_every_rank_create_all() -> None:
    for rank, (said, totals, refused) in enumerate(run_ranks(create_on_another_torch, 4, timeout=60)):
        assert totals == [4 * (rank // 2) + 3, 2 * (rank % 2) + 4]
        assert f"torch {torch.__version__} creates process groups otherwise than torch 2.9 to" in said[0]
        assert "all ranks" in refused and torch.__version__ in refused


def test_this_torch_creates_groups_as_expected() -> None:
    assert unknown_creation() == ""


def sums_of_threads(layout: NodeLayout) -> list[float]:
    (topology,) = create_topologies([layout]).values()
    return sums([topology.intra, topology.inter])


def test_the_world_of_threads_creates_its_groups_alike() -> None:
    for rank, totals in enumerate(run_threads(sums_of_threads, 8, grid(4, 2), timeout=60)):
        node, local = divmod(rank, 2)
        assert totals == [4 * node + 3, 4 * local + 16]


# -- topology -----------------------------------------------------------------------------------------


HOSTS = ["a", "a", "b", "b"]
MESH = ((0, 1), (2, 3))


# -- no process ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["auto", 2, [MESH] * 4, [((0, 1),), ((0, 1),), ((2, 3),), ((2, 3),)]])
def test_every_spec_of_the_same_nodes_gives_the_same_layout(spec: Any) -> None:
    layout = arrange(range(4), node_labels(spec, hosts=HOSTS))
    assert layout == NodeLayout(ranks=(0, 1, 2, 3), nodes=2, ranks_per_node=2)


@pytest.mark.parametrize(("spec", "nodes"), [(1, 4), (4, 1), ("auto", 2)])
def test_the_spec_decides_over_nodes(spec: Any, nodes: int) -> None:
    layout = arrange(range(4), node_labels(spec, hosts=HOSTS))
    assert (layout.nodes, layout.ranks_per_node, layout.size) == (nodes, 4 // nodes, 4)


def test_ranks_per_node_counts_ranks_of_the_whole_job() -> None:
    # Two tensor-parallel ranks beside each other: a node of four ranks has two of each data-parallel group.
    labels = node_labels(4, hosts=["h"] * 8)
    assert arrange([0, 2, 4, 6], labels) == NodeLayout(ranks=(0, 2, 4, 6), nodes=2, ranks_per_node=2)
    assert arrange([1, 3, 5, 7], labels) == NodeLayout(ranks=(1, 3, 5, 7), nodes=2, ranks_per_node=2)


def test_each_data_parallel_group_may_have_its_own_mesh() -> None:
    even, odd = ((0, 2), (4, 6)), ((1, 3), (5, 7))
    labels = node_labels([even, odd] * 4, hosts=["h"] * 8)
    for mesh in (even, odd):
        layout = arrange(mesh[0] + mesh[1], labels)
        assert [layout.intra_ranks(0), layout.intra_ranks(1)] == [list(row) for row in mesh]


def test_a_layout_lists_the_ranks_of_both_levels() -> None:
    layout = NodeLayout(ranks=(1, 3, 5, 7, 9, 11), nodes=3, ranks_per_node=2)
    assert [layout.intra_ranks(node) for node in range(3)] == [[1, 3], [5, 7], [9, 11]]
    assert [layout.inter_ranks(local) for local in range(2)] == [[1, 5, 9], [3, 7, 11]]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (3, r"topology=3 ranks per node does not divide the 4 ranks: use one of \[1, 2, 4\]"),
        (8, r"topology=8 ranks per node does not divide"),
        (0, r"topology=0 ranks per node does not divide"),
        (-2, r"topology=-2 ranks per node does not divide"),
        (True, r"topology=True is unknown"),
        (
            "banana",
            r"topology='banana' is unknown: use \"auto\", ranks per node, or an \(inter, intra\) mesh",
        ),
        ([MESH, MESH, MESH, ((0, 1),)], r"rank 3 is not in the \(inter, intra\) mesh it passes"),
        ([MESH, ((0, 2), (1, 3))] * 2, r"ranks 0 and 1 pass meshes that contradict each other"),
    ],
)
def test_an_impossible_spec_is_an_error_that_names_the_possible(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        node_labels(spec, hosts=HOSTS)


@pytest.mark.parametrize(
    ("ranks", "hosts", "message"),
    [
        ((0, 1, 2, 3), "aaab", r"4 ranks .* spread unequally over the nodes \(a: 3, b: 1\)"),
        ((0, 1, 2, 3, 4, 5), "abbbaa", r"not in ascending, node-major order \(a: 3, b: 3\)"),
        ((0, 1, 2, 3), "abab", r"not in ascending, node-major order \(a: 2, b: 2\)"),
        ((3, 2, 1, 0), "aabb", r"not in ascending, node-major order"),
        ((0, 2, 1, 3), "aaaa", r"not in ascending, node-major order"),
    ],
)
def test_ranks_that_do_not_fill_nodes_in_order_are_an_error_with_the_table(
    ranks: tuple[int, ...], hosts: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        arrange(ranks, list(hosts))
    table = [line.split() for line in str(caught.value).splitlines()[2:]]
    assert table == [[str(i), str(rank), hosts[rank]] for i, rank in enumerate(ranks)]
    assert "topology=1" in str(caught.value)
    if ranks == tuple(sorted(ranks)):  # the way out that the message names
        assert arrange(ranks, node_labels(1, hosts=list(hosts))).ranks_per_node == 1


# -- process groups -----------------------------------------------------------------------------------


def membership(cases: list[list[NodeLayout]]) -> list[list[list[int] | None]]:
    """Create, use and destroy the groups of each case; return who this rank's are: intra, inter."""
    found = []
    for layouts in cases:
        before = len(open_names())
        (topology,) = create_topologies(layouts).values()
        groups = [topology.intra, topology.inter]
        found.append([group and dist.get_process_group_ranks(group) for group in groups])
        assert len(open_names()) - before == sum(group is not None for group in groups)
        layout = topology.layout
        assert layout.ranks[topology.row] == dist.get_rank()
        assert (topology.nodes, topology.ranks_per_node, topology.size) == (
            layout.nodes,
            layout.ranks_per_node,
            len(layout.ranks),
        )
        expected = [sum(ranks) + len(ranks) for ranks in filter(None, found[-1])]
        assert sums([group for group in groups if group is not None]) == expected
        destroy_topology(topology)
        assert len(open_names()) == before
    return found


def test_each_rank_joins_two_groups_or_one_if_a_level_is_single() -> None:
    # Data-parallel groups beside each other, as under tensor parallelism: on two nodes, then on one.
    spread = [NodeLayout(ranks=r, nodes=2, ranks_per_node=1) for r in ((0, 2), (1, 3))]
    packed = [NodeLayout(ranks=r, nodes=1, ranks_per_node=2) for r in ((0, 2), (1, 3))]
    results = run_ranks(membership, 4, [[grid(2, 2)], spread, packed], timeout=30)
    for rank, result in enumerate(results):
        node, local = divmod(rank, 2)
        own = [local, local + 2]
        assert result == [[[2 * node, 2 * node + 1], own], [None, own], [own, None]]


def test_the_groups_of_a_rank_do_not_grow_with_the_nodes() -> None:
    for rank, result in enumerate(run_ranks(membership, 6, [[grid(3, 2)]], timeout=30)):
        node, local = divmod(rank, 2)
        assert result == [[[2 * node, 2 * node + 1], [local, local + 2, local + 4]]]


@on_ranks(4, timeout=30)
def test_a_mesh_is_read_row_by_row() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    assert mesh_rows(mesh) == MESH
    for wrong in (mesh["intra"], init_device_mesh("cpu", (2, 2, 1))):
        with pytest.raises(
            ValueError, match=rf"must be 2-D \(inter, intra\), this one has {wrong.ndim} dims"
        ):
            mesh_rows(wrong)
    assert host_name() == socket.gethostname()


# -- exchanges ----------------------------------------------------------------------------------------


def values(rank: int, *shape: int) -> torch.Tensor:
    """Numbers that tell source, place and destination."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.int32) + 100_000 * (rank + 1)).view(shape)


def exchange_all(lengths: list[int]) -> None:
    """Each exchange equals what its definition says; several are under way at once, waited in any order."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    everyone = range(size)
    pending = []
    for tag, numel in enumerate(lengths):
        received = torch.full((size, numel), -1, dtype=torch.int32)
        pending.append((received, start_all_to_all(received, values(rank, size, numel), group, tag=tag)))
    for received, transfer in reversed(pending):
        transfer.wait()
        expected = torch.stack([values(peer, size, received.shape[1])[rank] for peer in everyone])
        assert torch.equal(received, expected)
        transfer.wait()  # a second wait is harmless

    for numel in lengths:
        rows = torch.full((size, numel), -1, dtype=torch.int32)
        start_all_gather_rows(rows, values(rank, numel), group).wait()
        assert torch.equal(rows, torch.stack([values(peer, numel) for peer in everyone]))

        blocks = torch.full((3, size, numel), -1, dtype=torch.int32)
        all_gather_blocks(blocks, values(rank, 3, numel), group)
        assert torch.equal(blocks, torch.stack([values(peer, 3, numel) for peer in everyone], dim=1))


def exchange_like_torch(lengths: list[int]) -> None:
    """The pairwise exchanges give what torch.distributed's own collectives give."""
    exchange_all(lengths)
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    for numel in lengths:
        sent = torch.randn(size, numel, generator=torch.Generator().manual_seed(rank))
        ours, theirs = torch.empty_like(sent), torch.empty_like(sent)
        start_all_to_all(ours, sent, group).wait()
        dist.all_to_all_single(theirs, sent)
        assert torch.equal(ours, theirs)
        start_all_gather_rows(ours, sent[0], group).wait()
        dist.all_gather(list(theirs.unbind()), sent[0])
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [2, 3])
def test_pairwise_exchanges_equal_the_native_ones(size: int) -> None:
    run_ranks(exchange_like_torch, size, [5, 0, 1000, 1, 70_001], timeout=30)


def test_native_exchanges_mean_the_same() -> None:
    run_threads(exchange_all, 8, [5, 0, 1000], timeout=60)
