"""The collectives of this rank, for a world of nodes with equally many ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import Section
from sdp4bit.collectives.topology import Nodes, Topology, create_topologies
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.traffic import Grid, TrafficCounter

SEED, BUCKET = 7, 3


def topology_of(nodes: int, per_node: int, *, blocks: int = 1) -> Topology:
    ranks = tuple(range(nodes * per_node))
    layout = Nodes(ranks=ranks, nodes=nodes, ranks_per_node=per_node, blocks=blocks)
    return create_topologies([layout])[ranks]


def reduce_scatter_of(
    nodes: int,
    per_node: int,
    config: GradientConfig,
    *,
    blocks: int = 1,
    bucket: int = BUCKET,
    scratch: Scratch | None = None,
    name: str = "",
) -> tuple[QuantizedReduceScatter, TrafficCounter]:
    """Return a reduction and the counter of its bytes."""
    traffic = TrafficCounter(Grid(nodes=nodes, ranks_per_node=per_node, blocks=blocks))
    reduction = QuantizedReduceScatter(
        topology_of(nodes, per_node, blocks=blocks),
        config=config,
        seed=SEED,
        rank=dist.get_rank(),
        bucket=bucket,
        traffic=traffic,
        scratch=scratch or Scratch(),
        name=name,
    )
    return reduction, traffic


def all_reduce_of(
    nodes: int, per_node: int, config: GradientConfig, *, blocks: int = 1, ranks: range | None = None
) -> tuple[QuantizedAllReduce, TrafficCounter]:
    """Return an all-reduce and the counter of its bytes; `ranks` are the numbers of the ranks."""
    traffic = TrafficCounter(Grid(nodes=nodes, ranks_per_node=per_node, blocks=blocks))
    all_reduce = QuantizedAllReduce(
        topology_of(nodes, per_node, blocks=blocks),
        config=config,
        seed=SEED,
        ranks=ranks or range(nodes * per_node),
        bucket=BUCKET,
        traffic=traffic,
        scratch=Scratch(),
    )
    return all_reduce, traffic


def replica_of(
    nodes: int, per_node: int, config: WeightConfig, *, sections: Sequence[Section] = (), name: str = ""
) -> tuple[WeightReplica, TrafficCounter]:
    """Return a weight replica and the counter of its bytes."""
    traffic = TrafficCounter(Grid(nodes=nodes, ranks_per_node=per_node))
    replica = WeightReplica(
        topology_of(nodes, per_node),
        config=config,
        traffic=traffic,
        scratch=Scratch(),
        sections=sections,
        name=name,
    )
    return replica, traffic
