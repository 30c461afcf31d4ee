"""Node layout of data-parallel groups, and the process groups of both levels."""

from __future__ import annotations

import atexit
import copy
import socket
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from sdp4bit.collectives.errors import job_timeout
from sdp4bit.traffic import Grid, TrafficCounter

TopologySpec = str | int | DeviceMesh
"""The user's choice: "auto" (by host name), ranks per node, or an (inter, intra) mesh."""


@dataclass(frozen=True, kw_only=True)
class Nodes(Grid):
    """A data-parallel group as nodes x ranks_per_node: group rank = node * ranks_per_node + local rank."""

    ranks: tuple[int, ...]  # global ranks in group order

    def intra_ranks(self, node: int) -> list[int]:
        """Return the global ranks of one node."""
        start = node * self.ranks_per_node
        return list(self.ranks[start : start + self.ranks_per_node])

    def inter_ranks(self, local_rank: int) -> list[int]:
        """Return the global ranks with this local rank, one per node."""
        return list(self.ranks[local_rank :: self.ranks_per_node])


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
    if isinstance(spec, int) and not isinstance(spec, bool):
        if spec < 1 or world % spec:
            divisors = [d for d in range(1, world + 1) if world % d == 0]
            raise ValueError(
                f"topology={spec} ranks per node does not divide the {world} ranks: use one of {divisors}"
            )
        return [rank // spec for rank in range(world)]
    if spec == "auto":
        return list(hosts)
    if isinstance(spec, str | int):
        raise ValueError(
            f'topology={spec!r} is unknown: use "auto", ranks per node, or an (inter, intra) mesh'
        )
    rows = [(rank,) if row is None else row for rank, row in enumerate(spec)]
    for rank, row in enumerate(rows):
        for peer in row:
            if rows[peer] != row:
                raise ValueError(
                    f"topology: rank {rank} passes a mesh with the row {row}, but rank {peer} passes one "
                    f"with the row {rows[peer]}. Pass the same mesh on both"
                )
    return list(rows)


def arrange(ranks: Sequence[int], labels: Sequence[Hashable]) -> Nodes:
    """Return the layout of a group from the node label of every global rank.

    Raises:
        ValueError: nodes have different sizes, or ranks are not in node-major order; shows a table.
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
    return Nodes(ranks=tuple(ranks), nodes=len(order), ranks_per_node=counts[0])


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This rank's place in a node layout and its two process groups."""

    layout: Nodes
    node: int
    local_rank: int
    intra: ProcessGroup | None  # ranks of this node in order; None for a single rank
    inter: ProcessGroup | None  # ranks with this local rank in node order; None for a single node

    @property
    def nodes(self) -> int:
        return self.layout.nodes

    @property
    def ranks_per_node(self) -> int:
        return self.layout.ranks_per_node

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def row(self) -> int:
        """This rank's index in the group."""
        return self.node * self.ranks_per_node + self.local_rank

    def counter(self) -> TrafficCounter:
        """Return a counter of the bytes that this rank sends."""
        return TrafficCounter(self.layout)


def create_topology(spec: str | int = "auto") -> Topology:
    """Create the topology of all ranks of the job, and its process groups; collective.

    Args:
        spec: "auto" takes ranks with the same host name as a node. An int is the number of ranks per node.

    Raises:
        ValueError: the ranks do not fill the nodes.
    """
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host_name())
    layout = arrange(range(len(hosts)), node_labels(spec, hosts=hosts))
    return create_topologies([layout])[layout.ranks]


def create_topologies(
    layouts: Sequence[Nodes], *, purpose: str = "communication"
) -> dict[tuple[int, ...], Topology]:
    """Create both process groups of every layout; return the topologies that include this rank, by ranks.

    Collective over the job: every rank passes the same layouts in the same order.

    Args:
        purpose: description of the groups for the backend's messages.
    """
    me = dist.get_rank()
    wanted: list[list[int]] = []
    places: list[tuple[range, range]] = []  # of each layout's groups among all of these
    for layout in layouts:
        first = len(wanted)
        if layout.ranks_per_node > 1:
            wanted += [layout.intra_ranks(node) for node in range(layout.nodes)]
        middle = len(wanted)
        if layout.nodes > 1:
            wanted += [layout.inter_ranks(local_rank) for local_rank in range(layout.ranks_per_node)]
        places.append((range(first, middle), range(middle, len(wanted))))
    own = _create_groups(wanted, purpose=purpose)
    topologies = {}
    for layout, of_levels in zip(layouts, places, strict=True):
        if me in layout.ranks:
            node, local_rank = divmod(layout.ranks.index(me), layout.ranks_per_node)
            intra, inter = (next((own[i] for i in numbers if i in own), None) for numbers in of_levels)
            topologies[layout.ranks] = Topology(
                layout=layout, node=node, local_rank=local_rank, intra=intra, inter=inter
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
    for group in (topology.intra, topology.inter):
        if group is not None:
            with suppress(ValueError):  # already destroyed by dist.destroy_process_group()
                dist.destroy_process_group(group)


def host_name() -> str:
    """Return the name that identifies this node."""
    return socket.gethostname()
