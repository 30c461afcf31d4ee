"""The quantized collectives of all groups of a model, with their undo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

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
    # 1. Process groups, in the same order on all ranks. Separate ones for weights and gradients, because one
    # communicator would serialize the gather of a group and the reduction of another.
    shards, replicate = list(layouts.shards.values()), list(layouts.replicate.values())
    in_one_hop = [replace(each, blocks=1) for each in shards if config.weights]
    weights = _topologies(in_one_hop, purpose="weights", undo=undo)
    gradients = _topologies(shards if config.gradients else [], purpose="gradients", undo=undo)
    over_replicate = _topologies(replicate if config.gradients else [], purpose="replicate", undo=undo)

    host = _host_group(undo)

    # 2. Message buffers, shared by all groups. Weights and gradients are sent on different streams, so each
    # stream has its own buffers and needs no synchronization to reuse them.
    weight_scratch, gradient_scratch = Scratch(), Scratch()

    # 3. Collectives.
    for group in groups:
        ranks, name = group.view.ranks, group.view.name
        group.weights.host = host or group.view.process_group
        if config.weights is not None and not group.weights.unquantized_reason:
            group.weights.replica = group.weights.make_replica(
                weights[ranks],
                config=config.weights,
                traffic=group.weights.traffic,
                scratch=weight_scratch,
                name=name,
            )
        if config.gradients is None:
            continue
        if not group.gradients.unquantized_reason:
            topology = gradients[ranks]
            group.gradients.reduction = QuantizedReduceScatter(
                topology,
                config=config.gradients,
                seed=config.seed,
                rank=topology.row if group.data_rank is None else group.data_rank,
                bucket=group.index,
                traffic=group.gradients.traffic,
                scratch=gradient_scratch,
                name=name,
            )
        if group.replicate_layout is not None and not group.gradients.unquantized_sum_reason:
            group.gradients.all_reduce = QuantizedAllReduce(
                over_replicate[group.replicate_layout.ranks],
                config=config.gradients,
                seed=config.seed,
                ranks=group.replicate_data_ranks,
                bucket=len(groups) + group.index,
                traffic=group.gradients.all_reduce_traffic,
                scratch=gradient_scratch,
                name=name,
            )
    return host


def _topologies(
    layouts: Sequence[Nodes], *, purpose: str, undo: ExitStack
) -> Mapping[tuple[int, ...], Topology]:
    topologies = create_topologies(layouts, purpose=purpose)
    for topology in topologies.values():
        undo.callback(destroy_topology, topology)
    return topologies


def _host_group(undo: ExitStack) -> ProcessGroup | None:
    group = create_host_group(purpose="decisions")
    if group is not None:
        undo.callback(_destroy, group)
    return group


def _destroy(group: ProcessGroup) -> None:
    with suppress(ValueError):  # already destroyed by dist.destroy_process_group()
        dist.destroy_process_group(group)
