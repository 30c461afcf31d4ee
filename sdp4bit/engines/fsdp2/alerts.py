"""Alerts and the ladder of bits on FSDP2: which parameter groups move, and who decides together."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.config import AlertConfig, GradientConfig, WeightConfig
from sdp4bit.engines.alerts import Alerts, DecisionRound
from sdp4bit.engines.fsdp2.comm_state import CommState
from sdp4bit.engines.fsdp2.group_comm import GroupComm
from sdp4bit.engines.fsdp2.measures import group_squares


class _MovableComm:
    """An FSDP2 parameter group as the ladder sees it."""

    def __init__(self, comm: GroupComm) -> None:
        self._comm = comm

    @property
    def name(self) -> str:
        """Name of its module."""
        return self._comm.group.name

    @property
    def row(self) -> int:
        """Its number."""
        return self._comm.index

    @property
    def layout(self) -> NodeLayout:
        """The ranks that it is sharded over."""
        return self._comm.layout

    @property
    def gradients(self) -> GradientConfig | None:
        """The settings of the next reductions."""
        return None if self._comm.reduce_scatter is None else self._comm.reduce_scatter.config

    @property
    def weights(self) -> WeightConfig | None:
        """The settings of the next refreshes."""
        return None if self._comm.replica is None else self._comm.replica.config

    def configure(self, *, gradients: GradientConfig | None, weights: WeightConfig | None) -> None:
        """The next reductions and refreshes are done with these settings."""
        if self._comm.reduce_scatter is not None and gradients is not None:
            self._comm.reduce_scatter.configure(gradients)
        if self._comm.replica is not None and weights is not None:
            self._comm.replica.configure(weights)

    def explain(self, moved: Mapping[str, str]) -> None:
        """The table tells these reasons."""
        self._comm.moved = dict(moved)

    def squares(self, *, sample_numel: int) -> Tensor:
        """Return the squares of a sample."""
        return group_squares(self._comm, sample_numel=sample_numel)


def watch_groups(state: CommState, config: AlertConfig) -> Alerts:
    """Return the alerts of a model's groups, as configured.

    The ranks that a group is sharded over decide together, and then those along each further dimension of the
    mesh: tensor-parallel ranks and HSDP replicas.
    """
    layouts = {comm.layout.ranks: comm.group.process_group for comm in state.groups}
    rounds = []
    for ranks in sorted(layouts):
        members = tuple(comm.index for comm in state.groups if comm.layout.ranks == ranks)
        traffic = state.groups[members[0]].gradient_traffic
        rounds.append(DecisionRound(process_group=layouts[ranks], groups=members, traffic=traffic))
        rounds += [DecisionRound(process_group=each, groups=members) for each in _further(state, ranks)]
    return Alerts(
        [_MovableComm(comm) for comm in state.groups], rounds=rounds, sampled=state.sampled, config=config
    )


def _further(state: CommState, ranks: tuple[int, ...]) -> list[ProcessGroup]:
    """Return the process groups along which other ranks hold the same parameters or parts of them."""
    mesh = max((comm.group.mesh for comm in state.groups), key=lambda mesh: mesh.ndim)
    along = [mesh.get_group(dim) for dim in range(mesh.ndim)] if mesh.ndim > 1 else []
    members = [tuple(dist.get_process_group_ranks(group)) for group in along]
    if ranks not in members:
        return []
    return [group for group, own in zip(along, members, strict=True) if own != ranks]
