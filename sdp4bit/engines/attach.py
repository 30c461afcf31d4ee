"""The quantized collectives of all groups of a model, with their undo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch.distributed import ProcessGroup

from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.collectives.group import Group
from sdp4bit.collectives.host import create_host_group
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import Nodes, Topology, create_topologies, destroy_topology
from sdp4bit.config import SDP4BitConfig
from sdp4bit.engines.agreement import AgreedNodes


@dataclass(frozen=True, kw_only=True)
class Connections:
    """Process groups and message buffers, which all settings of a model share."""

    weights: Mapping[tuple[int, ...], Topology]
    gradients: Mapping[tuple[int, ...], Topology]
    replicate: Mapping[tuple[int, ...], Topology]
    host: ProcessGroup | None
    """The job's ranks for tensors on the CPU, for decisions; None if the default group takes them."""
    # Weights and gradients are sent on different streams, so each stream has its own buffers and needs no
    # synchronization to reuse them.
    weight_scratch: Scratch = field(default_factory=Scratch)
    gradient_scratch: Scratch = field(default_factory=Scratch)


def build(
    groups: Sequence[Group], *, layouts: AgreedNodes, config: SDP4BitConfig, undo: ExitStack
) -> ProcessGroup | None:
    """Create the collectives of groups without a reason for full precision; collective over the job.

    Args:
        layouts: those that the ranks have agreed on, also for groups of other ranks.
        undo: destroys the process groups.

    Returns:
        A process group of the job for tensors on the CPU, for decisions; None if the job's own take them.
    """
    connections = connect(layouts, [config], undo=undo)
    equip(groups, connections, config=config)
    return connections.host


def connect(layouts: AgreedNodes, configs: Sequence[SDP4BitConfig], *, undo: ExitStack) -> Connections:
    """Create the process groups that any of these settings needs, on all ranks in the same order."""
    # Separate ones for weights and gradients, because one communicator would serialize the gather of a group
    # and the reduction of another.
    shards, replicate = list(layouts.shards.values()), list(layouts.replicate.values())
    gathers, reduces = any(each.weights for each in configs), any(each.gradients for each in configs)
    in_one_hop = [replace(each, blocks=1) for each in shards if gathers]
    return Connections(
        weights=_topologies(in_one_hop, purpose="weights", undo=undo),
        gradients=_topologies(shards if reduces else [], purpose="gradients", undo=undo),
        replicate=_topologies(replicate if reduces else [], purpose="replicate", undo=undo),
        host=host_group(undo),
    )


def equip(groups: Sequence[Group], connections: Connections, *, config: SDP4BitConfig) -> None:
    """Give groups the collectives of these settings, instead of those that they have; sends nothing."""
    for group in groups:
        ranks, name, weights, gradients = group.view.ranks, group.view.name, group.weights, group.gradients
        weights.host = connections.host or group.view.process_group
        weights.replica = gradients.reduction = gradients.all_reduce = None
        if config.weights is not None and not weights.unquantized_reason:
            weights.replica = weights.make_replica(
                connections.weights[ranks],
                config=config.weights,
                traffic=weights.traffic,
                scratch=connections.weight_scratch,
                name=name,
            )
        if config.gradients is None:
            continue
        if not gradients.unquantized_reason:
            topology = connections.gradients[ranks]
            gradients.reduction = QuantizedReduceScatter(
                topology,
                config=config.gradients,
                seed=config.seed,
                rank=topology.row if group.data_rank is None else group.data_rank,
                bucket=group.index,
                traffic=gradients.traffic,
                scratch=connections.gradient_scratch,
                name=name,
            )
        if group.replicate_layout is not None and not gradients.unquantized_sum_reason:
            gradients.all_reduce = QuantizedAllReduce(
                connections.replicate[group.replicate_layout.ranks],
                config=config.gradients,
                seed=config.seed,
                ranks=group.replicate_data_ranks,
                bucket=len(groups) + group.index,
                traffic=gradients.all_reduce_traffic,
                scratch=connections.gradient_scratch,
                name=name,
            )


def _topologies(
    layouts: Sequence[Nodes], *, purpose: str, undo: ExitStack
) -> Mapping[tuple[int, ...], Topology]:
    topologies = create_topologies(layouts, purpose=purpose)
    for topology in topologies.values():
        undo.callback(destroy_topology, topology)
    return topologies


def host_group(undo: ExitStack) -> ProcessGroup | None:
    """Create the job's process group for tensors on the CPU, if the default group takes none."""
    group = create_host_group(purpose="decisions")
    if group is not None:
        undo.callback(_destroy, group)
    return group


def _destroy(group: ProcessGroup) -> None:
    with suppress(ValueError):  # already destroyed by dist.destroy_process_group()
        dist.destroy_process_group(group)
