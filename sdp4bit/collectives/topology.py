"""Which ranks of a data-parallel group share a node, and the process groups of both levels."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from sdp4bit.collectives.errors import job_timeout
from sdp4bit.collectives.process_groups import create_process_groups

TopologySpec = str | int | DeviceMesh
"""What users give: "auto" (by host name), ranks per node, or an (inter, intra) mesh."""

MeshRows = tuple[tuple[int, ...], ...]
"""An (inter, intra) mesh as global ranks, one row per node."""


@dataclass(frozen=True, kw_only=True)
class NodeLayout:
    """A data-parallel group as nodes x ranks_per_node: group rank = node * ranks_per_node + local rank."""

    ranks: tuple[int, ...]
    """Global ranks in group order."""
    nodes: int
    ranks_per_node: int

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.nodes * self.ranks_per_node

    def intra_ranks(self, node: int) -> list[int]:
        """Return the global ranks of one node."""
        start = node * self.ranks_per_node
        return list(self.ranks[start : start + self.ranks_per_node])

    def inter_ranks(self, local_rank: int) -> list[int]:
        """Return the global ranks with this local rank, one per node."""
        return list(self.ranks[local_rank :: self.ranks_per_node])


def mesh_rows(mesh: DeviceMesh) -> MeshRows:
    """Return the global ranks of an (inter, intra) mesh; ValueError if it is not 2-D."""
    if mesh.ndim != 2:
        raise ValueError(f"topology: the mesh must be 2-D (inter, intra), this one has {mesh.ndim} dims")
    return tuple(tuple(int(rank) for rank in row) for row in mesh.mesh.tolist())


def node_labels(spec: str | int | Sequence[MeshRows | None], *, hosts: Sequence[str]) -> list[Hashable]:
    """Return which node each global rank is on, as labels that are equal within a node.

    Args:
        spec: "auto" takes the host names; an int k puts ranks 0..k-1 on the first node and so on (ranks of
            the whole job, also under tensor or pipeline parallelism); meshes, the one that each global rank
            passes for its own data-parallel group, or None, take their rows as nodes.
        hosts: host name of each global rank.

    Raises:
        ValueError: an unknown spec, ranks that do not fill the nodes, or meshes that contradict each other.
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
    return list(_own_rows(spec))


def _own_rows(meshes: Sequence[MeshRows | None]) -> list[tuple[int, ...]]:
    """Return the row that each global rank has in its own mesh; none has a row of itself."""
    rows = []
    for rank, mesh in enumerate(meshes):
        row = (rank,) if mesh is None else next((row for row in mesh if rank in row), None)
        if row is None:
            raise ValueError(f"topology: rank {rank} is not in the (inter, intra) mesh it passes, {mesh}")
        rows.append(row)
    first_with: dict[tuple[int, ...], int] = {}
    for rank, row in enumerate(rows):
        first_with.setdefault(row, rank)
    for row, rank in first_with.items():
        for peer in row:
            if rows[peer] != row:
                raise ValueError(
                    f"topology: ranks {rank} and {peer} pass meshes that contradict each other: one has the "
                    f"row {row}, the other {rows[peer]}"
                )
    return rows


def arrange(ranks: Sequence[int], labels: Sequence[Hashable]) -> NodeLayout:
    """Return the layout of a group from the node label of every global rank.

    Raises:
        ValueError: nodes of unequal size, or ranks that are not in node-major order; with the whole table.
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
            "Start the same number of ranks on every node and number them node by node, or pass "
            f"topology=1 for the one-level exchange.\n  group  global rank  node\n{table}"
        )
    return NodeLayout(ranks=tuple(ranks), nodes=len(order), ranks_per_node=counts[0])


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This rank's place in a node layout and the two process groups it exchanges with."""

    layout: NodeLayout
    node: int
    local_rank: int
    intra: ProcessGroup | None
    """Ranks of this node in order; None if it has one."""
    inter: ProcessGroup | None
    """Ranks with this local rank in node order; None if there is one node."""

    @property
    def nodes(self) -> int:
        """Nodes of the group."""
        return self.layout.nodes

    @property
    def ranks_per_node(self) -> int:
        """Ranks of the group on each node."""
        return self.layout.ranks_per_node

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.layout.size

    @property
    def row(self) -> int:
        """This rank's number in the group."""
        return self.node * self.ranks_per_node + self.local_rank


def create_topologies(
    layouts: Sequence[NodeLayout],
    *,
    purpose: str = "communication",
    within: ProcessGroup | None = None,
) -> dict[tuple[int, ...], Topology]:
    """Return this rank's place in each layout it belongs to, by the layout's ranks, with new process groups.

    Collective over `within`: each of its ranks passes the same layouts in the same order. A rank creates the
    groups that it is a member of, two per layout, whatever the size of the job. They wait for a rank as long
    as the default group does.

    Args:
        purpose: of the groups, for the communication library's own messages.
        within: the ranks of all the layouts, which then call this alone; the whole job when not given.

    Raises:
        ValueError: a part of the job's ranks cannot create process groups here; the same on every rank.
    """
    me = dist.get_rank()
    batches = _disjoint_batches(layouts)
    intra = [[ranks for layout in batch for ranks in _intra_groups(layout)] for batch in batches]
    inter = [[ranks for layout in batch for ranks in _inter_groups(layout)] for batch in batches]
    rounds = [groups for level in zip(intra, inter, strict=True) for groups in level]
    created = iter(
        create_process_groups(
            [groups for groups in rounds if groups],
            timeout=job_timeout(),
            description=f"sdp4bit {purpose}",
            within=within,
        )
    )
    own = [next(created) if groups else None for groups in rounds]
    topologies = {}
    for number, batch in enumerate(batches):
        for layout in batch:
            if me in layout.ranks:
                node, local_rank = divmod(layout.ranks.index(me), layout.ranks_per_node)
                topologies[layout.ranks] = Topology(
                    layout=layout,
                    node=node,
                    local_rank=local_rank,
                    intra=own[2 * number],
                    inter=own[2 * number + 1],
                )
    return topologies


def create_host_groups(
    layouts: Sequence[NodeLayout], *, purpose: str, within: ProcessGroup | None = None
) -> dict[tuple[int, ...], ProcessGroup]:
    """Return new process groups for tensors on the host, one over all ranks of each layout this rank is in.

    Collective over `within`, as :func:`create_topologies`.
    """
    rounds = [[layout.ranks for layout in batch] for batch in _disjoint_batches(layouts)]
    created = create_process_groups(
        rounds, timeout=job_timeout(), description=f"sdp4bit {purpose}", within=within, backend="gloo"
    )
    me = dist.get_rank()
    own = [next((ranks for ranks in groups if me in ranks), ()) for groups in rounds]
    return {ranks: group for ranks, group in zip(own, created, strict=True) if group is not None}


def _disjoint_batches(layouts: Sequence[NodeLayout]) -> list[list[NodeLayout]]:
    """Return the layouts in lists in which no rank occurs twice, each in the first list that has room."""
    batches: list[tuple[set[int], list[NodeLayout]]] = []
    for layout in layouts:
        taken, batch = next((b for b in batches if b[0].isdisjoint(layout.ranks)), (set(), []))
        if not batch:
            batches.append((taken, batch))
        taken.update(layout.ranks)
        batch.append(layout)
    return [batch for _, batch in batches]


def _intra_groups(layout: NodeLayout) -> list[list[int]]:
    return [layout.intra_ranks(node) for node in range(layout.nodes)] if layout.ranks_per_node > 1 else []


def _inter_groups(layout: NodeLayout) -> list[list[int]]:
    return [layout.inter_ranks(local) for local in range(layout.ranks_per_node)] if layout.nodes > 1 else []


def destroy_topology(topology: Topology) -> None:
    """Release the process groups of the topology, which must not be used again."""
    for group in (topology.intra, topology.inter):
        if group is not None:
            with suppress(ValueError):  # destroy_process_group() has released it with all others
                dist.destroy_process_group(group)


def host_name() -> str:
    """Return the name that tells this node from the others."""
    return socket.gethostname()
