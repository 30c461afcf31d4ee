"""Which ranks share a node, the process groups of both levels, and exchanges within them.

Layers: no process; gloo; threads, for the exchanges of communication libraries that have their own.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sdp4bit.collectives.exchange import all_gather_blocks, all_gather_rows, start_all_to_all
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


def open_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def membership(cases: list[list[NodeLayout]]) -> list[list[list[int] | None]]:
    """Create, use and destroy the groups of each case; return who this rank's are: intra, inter."""
    found = []
    for layouts in cases:
        before = open_groups()
        (topology,) = create_topologies(layouts).values()
        groups = [topology.intra, topology.inter]
        found.append([group and dist.get_process_group_ranks(group) for group in groups])
        assert open_groups() - before == sum(group is not None for group in groups)
        layout = topology.layout
        assert layout.ranks[topology.row] == dist.get_rank()
        assert (topology.nodes, topology.ranks_per_node, topology.size) == (
            layout.nodes,
            layout.ranks_per_node,
            len(layout.ranks),
        )
        for group in filter(None, groups):
            total = torch.tensor([dist.get_rank()])
            dist.all_reduce(total, group=group)
            assert total.item() == sum(dist.get_process_group_ranks(group))
        destroy_topology(topology)
        assert open_groups() == before
    return found


def test_each_rank_joins_two_groups_or_one_if_a_level_is_single() -> None:
    grid = NodeLayout(ranks=(0, 1, 2, 3), nodes=2, ranks_per_node=2)
    # Data-parallel groups beside each other, as under tensor parallelism: on two nodes, then on one.
    spread = [NodeLayout(ranks=r, nodes=2, ranks_per_node=1) for r in ((0, 2), (1, 3))]
    packed = [NodeLayout(ranks=r, nodes=1, ranks_per_node=2) for r in ((0, 2), (1, 3))]
    results = run_ranks(membership, 4, [[grid], spread, packed], timeout=30)
    for rank, result in enumerate(results):
        node, local = divmod(rank, 2)
        own = [local, local + 2]
        assert result == [[[2 * node, 2 * node + 1], own], [None, own], [own, None]]


def test_the_groups_of_a_rank_do_not_grow_with_the_nodes() -> None:
    layout = NodeLayout(ranks=tuple(range(6)), nodes=3, ranks_per_node=2)
    for rank, result in enumerate(run_ranks(membership, 6, [[layout]], timeout=30)):
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
        contiguous = torch.full((size, numel), -1, dtype=torch.int32)
        strided = torch.full((size, 3, numel), -1, dtype=torch.int32)
        expected = torch.stack([values(peer, numel) for peer in everyone])
        all_gather_rows(contiguous, values(rank, numel), group)
        all_gather_rows(strided[:, 1], values(rank, numel), group)
        assert torch.equal(contiguous, expected) and torch.equal(strided[:, 1], expected)
        assert (strided[:, ::2] == -1).all()

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
        all_gather_rows(ours, sent[0], group)
        dist.all_gather(list(theirs.unbind()), sent[0])
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [2, 3])
def test_pairwise_exchanges_equal_the_native_ones(size: int) -> None:
    run_ranks(exchange_like_torch, size, [5, 0, 1000, 1, 70_001], timeout=30)


def test_native_exchanges_mean_the_same() -> None:
    run_threads(exchange_all, 8, [5, 0, 1000], timeout=60)
