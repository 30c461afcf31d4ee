"""Nodes, process groups and exchanges: members of a node, groups that a rank creates, their messages.

Layers: no process; a fake process group; gloo; threads, for libraries that have exchanges of their own.
"""

from __future__ import annotations

import socket
import subprocess
import sys
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
from sdp4bit.collectives import topology as topologies
from sdp4bit.collectives.topology import (
    Nodes,
    arrange,
    create_topologies,
    destroy_topology,
    host_name,
    mesh_row,
    node_labels,
)
from sdp4bit.collectives.transport import start_all_gather, start_all_to_all
from sdp4bit.engines import agreement
from tests.ranks import fake_world, on_ranks, run_ranks, run_threads


def open_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def grid(nodes: int, per_node: int) -> Nodes:
    world = nodes * per_node
    return arrange(range(world), [rank // per_node for rank in range(world)])


# -- a fake process group -----------------------------------------------------------------------------


def attach(world: int, *, layers: int) -> tuple[int, int, int]:
    """Attach to a model of `layers` FSDP modules and its root, as one rank.

    Returns:
        The process groups asked for, those joined, and the bytes of Python objects that the rank gathers.
    """
    c10d: Any = dist.distributed_c10d
    object_bytes, to_tensor = 0, c10d._object_to_tensor

    def count_bytes(*args: Any, **kwargs: Any) -> Any:
        nonlocal object_bytes
        tensor, size = to_tensor(*args, **kwargs)
        object_bytes += int(size)
        return tensor, size

    with fake_world(world, rank=0):
        mesh = init_device_mesh("cpu", (world,))
        model = nn.Sequential(*(fully_shard(nn.Linear(32, 32), mesh=mesh) for _ in range(layers)))
        fully_shard(model, mesh=mesh)
        before = open_groups()
        with (
            mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group,
            mock.patch.object(c10d, "_object_to_tensor", count_bytes),
        ):
            sdp4bit.quantize_communication(model, topology=8)
        return new_group.call_count, open_groups() - before, object_bytes


def test_a_rank_joins_four_groups_asks_for_those_of_the_job_and_gathers_a_summary_of_one_size() -> None:
    """Groups inside a node and between nodes, for weights and for gradients, whatever the layers."""
    worlds, summaries = (64, 1024), []
    for world, layers in zip(worlds, (1, 8), strict=True):
        asked_for, joined, object_bytes = attach(world, layers=layers)
        assert (asked_for, joined) == (2 * (world // 8 + 8), 4)
        summaries.append(object_bytes)
    small, large = summaries
    assert small < 600 and 0 <= large - small < 10  # digits of rank numbers


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_hybrid", [False, True])
def test_attaching_takes_a_time_that_grows_with_the_number_of_ranks_alone(is_hybrid: bool) -> None:
    """80,000 ranks take 2 seconds; a step for every pair of them would take minutes."""
    nodes, world = 10_000, 80_000

    def gathered(own: Any, subject: str) -> list[Any]:
        everything = []
        for rank in range(world):
            scopes = {
                "shards": range(rank // 8 * 8, rank // 8 * 8 + 8),
                "replicas": range(rank % 8, world, 8),
            }
            digests = {
                (scopes[kind] if is_hybrid and kind in scopes else ranks, kind): digest
                for (ranks, kind), digest in own["digests"].items()
            }
            everything.append({**own, "host": f"node {rank // 8}", "digests": digests})
        return everything

    shape = (nodes, 8) if is_hybrid else (world,)
    with fake_world(world, rank=0), mock.patch.object(agreement, "_gather", gathered):
        model = fully_shard(
            nn.Linear(64, 64), mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])
        )
        assert f"{nodes} x" in sdp4bit.quantize_communication(model).explain(full=True)


@pytest.mark.parametrize("nodes", [2, 1000])
def test_a_bound_device_makes_one_split_for_all_disjoint_groups_by_a_stand_in_for_nccl(nodes: int) -> None:
    asked: list[list[list[int]]] = []
    members: dict[int, object] = {}

    def split_group(
        *, split_ranks: list[list[int]], timeout: Any, pg_options: Any, group_desc: str
    ) -> object:
        assert pg_options.is_high_priority_stream and pg_options is not parent.options
        flat = [rank for ranks in split_ranks for rank in ranks]
        assert sorted(flat) == list(range(8 * nodes))
        asked.append(split_ranks)
        return members.setdefault(len(asked), object())

    parent = SimpleNamespace(options=StandInForNCCLOptions(), supports_splitting=True)
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 0), _get_backend=lambda device: parent)
    with (
        fake_world(8 * nodes, rank=9),
        mock.patch.object(dist, "split_group", split_group),
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
        mock.patch.object(topologies, "_default_group", return_value=world),
    ):
        (created,) = create_topologies([grid(nodes, 8)]).values()
        assert len(asked) == 2
        # Replicas over nodes, in groups that are disjoint for eight layouts.
        over = [Nodes(ranks=tuple(range(i, 8 * nodes, 8)), nodes=nodes, ranks_per_node=1) for i in range(8)]
        (replicas,) = create_topologies(over).values()
    assert len(asked) == 3
    assert (created.intra, created.inter, replicas.inter) == tuple(members.values())
    assert (created.node, created.local_rank) == (1, 1)


class StandInForNCCLOptions:
    """Takes the place of ProcessGroupNCCL.Options, which a torch without CUDA does not have."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


def test_streams_of_communicators_have_high_priority_by_a_stand_in_for_nccl() -> None:
    """Every group has settings of its own, as torch writes into them, with the timeout that torch wants."""
    asked: list[Any] = []
    real = dist.new_group

    def new_group(*args: Any, pg_options: Any, timeout: Any, **kwargs: Any) -> Any:
        asked.append((pg_options, timeout))
        return real(*args, timeout=timeout, **kwargs)

    nccl = SimpleNamespace(Options=StandInForNCCLOptions)
    with (
        fake_world(8, rank=0),
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
    ):
        create_topologies([grid(2, 4)])
        assert len(asked) == 6 and not any(options for options, _ in asked)
        with (
            mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"),
            mock.patch("sdp4bit.collectives.topology.job_timeout", return_value=timedelta(minutes=3)),
        ):
            create_topologies([grid(2, 4)])
    high = asked[6:]
    assert [options.is_high_priority_stream for options, _ in high] == [True] * 6
    assert [options._timeout for options, _ in high] == [timeout for _, timeout in high]
    assert len({id(options) for options, _ in high}) == 6


# -- gloo ---------------------------------------------------------------------------------------------


def sums(groups: list[Any]) -> list[float]:
    found = []
    for group in groups:
        total = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(total, group=group)
        found.append(total.item())
    return found


# -- topology -----------------------------------------------------------------------------------------


HOSTS = ["a", "a", "b", "b"]
ROWS = [(0, 1), (0, 1), (2, 3), (2, 3)]


@pytest.mark.parametrize("spec", ["auto", 2, ROWS])
def test_every_spec_of_the_same_nodes_gives_the_same_layout(spec: Any) -> None:
    layout = arrange(range(4), node_labels(spec, hosts=HOSTS))
    assert layout == Nodes(ranks=(0, 1, 2, 3), nodes=2, ranks_per_node=2)


def test_each_data_parallel_group_may_have_its_own_mesh() -> None:
    even, odd = ((0, 2), (4, 6)), ((1, 3), (5, 7))
    rows = [row for rank in range(8) for row in (*even, *odd) if rank in row]
    labels = node_labels(rows, hosts=["h"] * 8)
    for mesh in (even, odd):
        layout = arrange(mesh[0] + mesh[1], labels)
        assert layout.members("intra") == [list(row) for row in mesh]


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
            r"topology='banana' is unknown: use \"auto\", ranks per node, \(ranks per node, nodes per "
            r"block\), or an \(inter, intra\) mesh",
        ),
        ([*ROWS[:3], None], r"rank 2 passes a mesh with the row \(2, 3\), but rank 3 passes one"),
        (
            [(0, 1), (1, 3), (0, 2), (1, 3)],
            r"rank 0 passes a mesh with the row \(0, 1\), but rank 1 passes one",
        ),
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


def membership(cases: list[list[Nodes]]) -> list[list[list[int] | None]]:
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
        expected = [sum(ranks) + len(ranks) for ranks in filter(None, found[-1])]
        assert sums([group for group in groups if group is not None]) == expected
        destroy_topology(topology)
        assert open_groups() == before
    return found


@pytest.mark.gloo
def test_each_rank_joins_two_groups_or_one_if_a_level_is_single() -> None:
    # Data-parallel groups beside each other, as under tensor parallelism: on two nodes, then on one.
    spread = [Nodes(ranks=r, nodes=2, ranks_per_node=1) for r in ((0, 2), (1, 3))]
    packed = [Nodes(ranks=r, nodes=1, ranks_per_node=2) for r in ((0, 2), (1, 3))]
    results = run_ranks(membership, 4, [[grid(2, 2)], spread, packed], timeout=30)
    for rank, result in enumerate(results):
        node, local = divmod(rank, 2)
        own = [local, local + 2]
        assert result == [[[2 * node, 2 * node + 1], own], [None, own], [own, None]]


@on_ranks(4, timeout=30)
def test_a_mesh_is_read_row_by_row() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    assert [mesh_row(mesh, rank) for rank in range(5)] == [*ROWS, None]
    for wrong in (mesh["intra"], init_device_mesh("cpu", (2, 2, 1))):
        with pytest.raises(
            ValueError, match=rf"must be 2-D \(inter, intra\), but it has {wrong.ndim} dimension"
        ):
            mesh_row(wrong, 0)
    assert host_name() == socket.gethostname()


# -- exchanges ----------------------------------------------------------------------------------------


def values(rank: int, *shape: int) -> torch.Tensor:
    """Numbers that tell source, place and destination."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.int32) + 100_000 * (rank + 1)).view(shape)


def exchange_all(lengths: list[int]) -> None:
    """Each exchange equals its definition; several are in flight at once, waited for in any order."""
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
        start_all_gather(rows[None], values(rank, numel)[None], group).wait()
        assert torch.equal(rows, torch.stack([values(peer, numel) for peer in everyone]))

        blocks = torch.full((3, size, numel), -1, dtype=torch.int32)
        start_all_gather(blocks, values(rank, 3, numel), group).wait()
        assert torch.equal(blocks, torch.stack([values(peer, 3, numel) for peer in everyone], dim=1))


@pytest.mark.gloo
def test_exchanges_equal_their_definition_between_processes_and_threads() -> None:
    """Pairwise over gloo; by the library's own collectives between threads."""
    run_ranks(exchange_all, 3, [5, 0, 1000, 1, 70_001], timeout=30)
    run_threads(exchange_all, 8, [5, 0, 1000], timeout=60)


# -- the end of a process -----------------------------------------------------------------------------

ENDING = """
import sys, threading, time
import torch.distributed as dist
from sdp4bit.collectives.topology import let_gloo_threads_end

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
let_gloo_threads_end()

def free_tensors():
    threading.main_thread().join()
    time.sleep(0.02)
    print("has the lock")

threading.Thread(target=free_tensors, daemon=True).start()
dist.destroy_process_group()
"""
"""A thread of Python in place of gloo's, which needs the interpreter's lock after the last collective."""


@pytest.mark.gloo
def test_gloo_threads_get_the_lock_before_the_interpreter_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDING, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0 and "has the lock" in ended.stdout, ended.stderr
