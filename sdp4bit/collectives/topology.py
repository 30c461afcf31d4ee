"""Node layout of data-parallel groups, and the process groups of all levels."""

from __future__ import annotations

import atexit
import copy
import socket
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from sdp4bit.collectives.errors import job_timeout
from sdp4bit.traffic import Grid, Level, TrafficCounter

TopologySpec = str | int | tuple[str | int, int] | DeviceMesh
"""The user's choice: "auto" (by host name), ranks per node, one of these with the nodes per block, or an
(inter, intra) mesh."""
_SPECS = '"auto", ranks per node, (ranks per node, nodes per block), or an (inter, intra) mesh'


@dataclass(frozen=True, kw_only=True)
class Nodes(Grid):
    """A data-parallel group as nodes x ranks_per_node: group rank = node * ranks_per_node + local rank.

    Consecutive nodes form blocks.
    """

    ranks: tuple[int, ...]  # global ranks in group order

    @property
    def grid(self) -> Grid:
        """The numbers of nodes and ranks, without the ranks themselves."""
        return Grid(nodes=self.nodes, ranks_per_node=self.ranks_per_node, blocks=self.blocks)

    def members(self, level: Level) -> list[list[int]]:
        """Return the global ranks that exchange messages at a level, in one list per process group."""
        size, apart = self.levels[level], self.apart(level)
        firsts = (rank for rank in range(self.size) if rank // apart % size == 0)
        return [list(self.ranks[first : first + size * apart : apart]) for first in firsts]


def split_spec(spec: object) -> tuple[object, int | None]:
    """Return the spec of the nodes, and the nodes per block or None.

    Raises:
        ValueError: the spec is a tuple of other things.
    """
    if not isinstance(spec, tuple):
        return spec, None
    if len(spec) == 2 and isinstance(spec[0], str | int) and _is_count(spec[1]):
        return spec
    raise unknown_spec(spec)


def unknown_spec(spec: object) -> ValueError:
    """Return the error for a spec of an unknown kind."""
    return ValueError(f"topology={spec!r} is unknown: use {_SPECS}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def mesh_row(mesh: DeviceMesh, rank: int) -> tuple[int, ...] | None:
    """Return the global ranks in a rank's row of an (inter, intra) mesh; None if the rank is not in it.

    Raises:
        ValueError: the mesh is not 2-D, or its dimensions are named in the other order.
    """
    if mesh.ndim != 2:
        found = f"{mesh.ndim} dimension{'s' if mesh.ndim > 1 else ''}"
        raise ValueError(f"topology: the mesh must be 2-D (inter, intra), but it has {found}")
    if mesh.mesh_dim_names == ("intra", "inter"):
        raise ValueError(
            "topology: the mesh is (intra, inter), but must be (inter, intra): a row is the ranks of a node"
        )
    return next((tuple(row) for row in mesh.mesh.tolist() if rank in row), None)


def node_labels(
    spec: str | int | Sequence[tuple[int, ...] | None], *, hosts: Sequence[str]
) -> list[Hashable]:
    """Return a node label for each global rank; ranks of a node have equal labels.

    Args:
        spec: "auto" uses the host names. An int k puts global ranks 0..k-1 on the first node and so on. A
            list has the `mesh_row` of each global rank, or None for a node of its own.
        hosts: host name of each global rank.

    Raises:
        ValueError: the spec is unknown, ranks do not fill the nodes, or meshes of ranks contradict.
    """
    world = len(hosts)
    if isinstance(spec, int) and _is_count(spec):
        if spec < 1 or world % spec:
            raise ValueError(
                f"topology={spec} ranks per node does not divide the {world} ranks: "
                f"use one of {_divisors(world)}"
            )
        return [rank // spec for rank in range(world)]
    if spec == "auto":
        return list(hosts)
    if isinstance(spec, str | int):
        raise unknown_spec(spec)
    rows = [(rank,) if row is None else row for rank, row in enumerate(spec)]
    for rank, row in enumerate(rows):
        for peer in row:
            if rows[peer] != row:
                raise ValueError(
                    f"topology: rank {rank} passes a mesh with the row {row}, but rank {peer} passes one "
                    f"with the row {rows[peer]}. Pass the same mesh on both"
                )
    return list(rows)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def block_numbers(labels: Sequence[Hashable], *, nodes_per_block: int) -> dict[Hashable, int]:
    """Return the number of each node's block, by node label; blocks are consecutive nodes.

    Args:
        labels: node label of each global rank.

    Raises:
        ValueError: nodes do not fill the blocks.
    """
    nodes = list(dict.fromkeys(labels))
    if nodes_per_block < 1 or len(nodes) % nodes_per_block:
        raise ValueError(
            f"topology: {nodes_per_block} nodes per block does not divide the {len(nodes)} nodes: "
            f"use one of {_divisors(len(nodes))}"
        )
    return {label: number // nodes_per_block for number, label in enumerate(nodes)}


def arrange(
    ranks: Sequence[int], labels: Sequence[Hashable], *, block_of: Mapping[Hashable, int] | None = None
) -> Nodes:
    """Return the layout of a group from the node label of every global rank.

    Args:
        block_of: number of the block of each node; None for two levels.

    Raises:
        ValueError: nodes have different sizes, or ranks are not in node-major order; shows a table. Or blocks
            have different numbers of the group's nodes.
    """
    members = [labels[rank] for rank in ranks]
    order = list(dict.fromkeys(members))
    count_of = Counter(members)
    counts = [count_of[label] for label in order]
    node_major = members == [label for label, count in zip(order, counts, strict=True) for _ in range(count)]
    ascending = list(ranks) == sorted(ranks)
    if len(set(counts)) != 1 or not node_major or not ascending:
        what = "not in ascending, node-major order"
        if len(set(counts)) != 1:
            what = "spread unequally over the nodes"
        table = "\n".join(f"  {r:>6}  {rank:>11}  {labels[rank]}" for r, rank in enumerate(ranks))
        raise ValueError(
            f"the {len(members)} ranks of this data-parallel group are {what} "
            f"({', '.join(f'{label}: {count}' for label, count in zip(order, counts, strict=True))}). "
            "Start the same number of ranks on every node and number them node by node, or pass topology=1 "
            f"to use one level.\n  group  global rank  node\n{table}"
        )
    layout = Nodes(ranks=tuple(ranks), nodes=len(order), ranks_per_node=counts[0])
    if block_of is None:
        return layout
    blocks = [block_of[label] for label in order]
    nodes_of = Counter(blocks)
    if len(set(nodes_of.values())) != 1 or blocks != sorted(blocks):
        found = ", ".join(f"block {block}: {count}" for block, count in nodes_of.items())
        raise ValueError(
            f"the {len(order)} nodes of the data-parallel group of ranks {ranks[0]} to {ranks[-1]} are "
            f"spread unequally over the blocks of topology ({found}): pass nodes per block that fit every "
            "group, or none for two levels"
        )
    # Blocks of one node are no level.
    return replace(layout, blocks=len(nodes_of) if len(nodes_of) < len(order) else 1)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This rank's place in a node layout and its process groups, one per level."""

    layout: Nodes
    node: int
    local_rank: int
    intra: ProcessGroup | None  # ranks of this node in order; None for a single rank
    inter: ProcessGroup | None  # ranks with this local rank in node order; None for a single node
    outer: ProcessGroup | None = None
    """With blocks: ranks with this place in their block, in the order of blocks. `inter` is then of one
    block."""

    # Cached, because every message asks for them.

    @cached_property
    def nodes(self) -> int:
        return self.layout.nodes

    @cached_property
    def ranks_per_node(self) -> int:
        return self.layout.ranks_per_node

    @cached_property
    def size(self) -> int:
        return self.layout.size

    @cached_property
    def row(self) -> int:
        """This rank's index in the group."""
        return self.node * self.ranks_per_node + self.local_rank

    def group(self, level: Level) -> ProcessGroup | None:
        """Return the process group of a level; None for a single rank."""
        return {"intra": self.intra, "inter": self.inter, "outer": self.outer}[level]

    def place(self, level: Level) -> int:
        """Return this rank's index among those that it exchanges messages with at a level."""
        return self.row // self.layout.apart(level) % self.layout.levels[level]

    def counter(self) -> TrafficCounter:
        """Return a counter of the bytes that this rank sends."""
        return TrafficCounter(self.layout)


def create_topology(spec: str | int | tuple[str | int, int] = "auto") -> Topology:
    """Create the topology of all ranks of the job, and its process groups; collective.

    Args:
        spec: "auto" takes ranks with the same host name on the same machine as a node. An int is the number
            of ranks per node. A tuple of one of these and the nodes per block has three levels, for gradients
            only.

    Raises:
        ValueError: the ranks do not fill the nodes, or the nodes do not fill the blocks.
    """
    nodes, nodes_per_block = split_spec(spec)
    found = [("", "")] * dist.get_world_size()
    dist.all_gather_object(found, (host_name(), machine_id()))
    hosts = node_names(*zip(*found, strict=True))
    labels = node_labels(cast("str | int", nodes), hosts=hosts)
    block_of = None if nodes_per_block is None else block_numbers(labels, nodes_per_block=nodes_per_block)
    layout = arrange(range(len(hosts)), labels, block_of=block_of)
    return create_topologies([layout])[layout.ranks]


def create_topologies(
    layouts: Sequence[Nodes], *, purpose: str = "communication"
) -> dict[tuple[int, ...], Topology]:
    """Create the process groups of every layout; return the topologies that include this rank, by ranks.

    Collective over the job: every rank passes the same layouts in the same order.

    Args:
        purpose: description of the groups for the backend's messages.
    """
    me = dist.get_rank()
    wanted: list[list[int]] = []
    places: list[dict[Level, range]] = []  # of each layout's groups among all of these
    for layout in layouts:
        numbers: dict[Level, range] = {}
        for level, size in layout.levels.items():
            groups = layout.members(level) if size > 1 else []
            numbers[level] = range(len(wanted), len(wanted) + len(groups))
            wanted += groups
        places.append(numbers)
    own = _create_groups(wanted, purpose=purpose)
    topologies = {}
    for layout, numbers in zip(layouts, places, strict=True):
        if me in layout.ranks:
            node, local_rank = divmod(layout.ranks.index(me), layout.ranks_per_node)
            intra, inter, outer = (
                next((own[i] for i in numbers[level] if i in own), None) for level in layout.levels
            )
            topologies[layout.ranks] = Topology(
                layout=layout, node=node, local_rank=local_rank, intra=intra, inter=inter, outer=outer
            )
    return topologies


def _create_groups(groups: Sequence[Sequence[int]], *, purpose: str) -> dict[int, ProcessGroup]:
    """Create process groups with the default group's timeout; return those of this rank, by number.

    Every rank creates every group in this order.
    """
    me, timeout, description = dist.get_rank(), job_timeout(), f"sdp4bit {purpose}"
    own: dict[int, ProcessGroup] = {}
    parent = _splittable_backend()
    if parent is not None:
        # new_group would split NCCL's communicator of all ranks once for each group, also on ranks that are
        # not in it; this does so once for all disjoint groups, as DeviceMesh does.
        for numbers in _disjoint(groups):
            options = copy.deepcopy(parent.options)
            options.is_high_priority_stream = True  # see _nccl_options
            created = dist.split_group(
                split_ranks=[list(groups[number]) for number in numbers],
                timeout=timeout,
                pg_options=options,
                group_desc=description,
            )
            if created is not None:
                own[next(number for number in numbers if me in groups[number])] = created
        return own
    for number, ranks in enumerate(groups):
        # Every rank creates every group, because torch names a group by the number of groups before it and
        # members meet in the store under that name. With use_local_synchronization=True the name is a hash of
        # a count that may differ between ranks or repeat after remove(), and both hang. A call for other
        # ranks takes about 8 microseconds: 0.03 s for the 4,112 groups of 16,384 ranks, 8 per node.
        group = dist.new_group(
            list(ranks), timeout=timeout, pg_options=_nccl_options(timeout), group_desc=description
        )
        if me in ranks:
            own[number] = group
    for group in own.values():
        if "cpu:gloo" in dist.get_backend_config(group).split(","):
            # Gloo returns when this rank's half of each connection is complete. If a rank released the group
            # now, peers that are still connecting would fail. NCCL connects at the first collective.
            dist.all_reduce(torch.zeros(1), group=group)
            let_gloo_threads_end()
    return own


def _default_group() -> Any:
    return dist.group.WORLD


def _splittable_backend() -> Any:
    """Return the default group's backend if all ranks' communicator exists and can be split, else None."""
    group: Any = _default_group()
    device = getattr(group, "bound_device_id", None)
    # Other backends beside it, such as gloo for CPU tensors, would meet under a name that may repeat.
    if device is None or dist.get_backend_config() != f"{device.type}:nccl":
        return None
    backend = group._get_backend(device)
    return backend if backend.supports_splitting else None


def _disjoint(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the numbers of groups in as few sets as they can be in order, each of disjoint groups."""
    batches: list[list[int]] = []
    taken: set[int] = set()
    for number, ranks in enumerate(groups):
        if not batches or not taken.isdisjoint(ranks):
            batches.append([])
            taken = set()
        batches[-1].append(number)
        taken.update(ranks)
    return batches


def let_gloo_threads_end() -> None:
    """Let gloo's threads free the tensors of the last collectives when the process ends.

    A thread takes the interpreter's lock to free a tensor that Python has released. It aborts the process if
    the interpreter shuts down meanwhile, so it gets the lock before that.
    """
    atexit.unregister(_wait_for_gloo_threads)
    atexit.register(_wait_for_gloo_threads)


def _wait_for_gloo_threads() -> None:
    time.sleep(0.1)


def _nccl_options(timeout: timedelta | None) -> object | None:
    """Return NCCL's settings of a process group; None if CUDA uses another backend."""
    if "cuda:nccl" not in dist.get_backend_config().split(","):
        return None
    # Like FSDP2's reduce stream, so that transfers do not wait for computation.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:  # torch warns if it differs from the argument of new_group
        options._timeout = timeout
    return options


def destroy_topology(topology: Topology) -> None:
    """Destroy the process groups of the topology."""
    for group in (topology.intra, topology.inter, topology.outer):
        if group is not None:
            with suppress(ValueError):  # already destroyed by dist.destroy_process_group()
                dist.destroy_process_group(group)


def host_name() -> str:
    """Return the name of this host."""
    return socket.gethostname()


def machine_id() -> str:
    """Return the identity of the running kernel, which containers of one machine share; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def node_names(hosts: Sequence[str], machines: Sequence[str]) -> list[str]:
    """Return a name of each rank's node: its host name, with the machine if several have this name.

    Args:
        hosts: host name of each global rank.
        machines: `machine_id` of each global rank.
    """
    machines_of: dict[str, set[str]] = {}
    for host, machine in zip(hosts, machines, strict=True):
        machines_of.setdefault(host, set()).add(machine)
    differ = {host for host, found in machines_of.items() if len(found) > 1 and "" not in found}
    return [
        f"{host} (machine {machine[:8]})" if host in differ else host
        for host, machine in zip(hosts, machines, strict=True)
    ]
