"""Alerts and the ladder of bits on FSDP2: after each measured step, decided alike on all ranks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sdp4bit.collectives.exchange_error import naming
from sdp4bit.config import AlertConfig, GradientConfig, WeightConfig
from sdp4bit.integrations.alerts import AlertLog
from sdp4bit.integrations.fsdp_comm_state import CommState
from sdp4bit.integrations.fsdp_group_comm import GroupComm
from sdp4bit.integrations.fsdp_measures import group_squares
from sdp4bit.integrations.ladder import GroupLadder, Half, gradient_rungs, weight_rungs
from sdp4bit.integrations.measures import COLUMNS, measures_of


class _LadderComm:
    """A parameter group, the settings of its rungs, and where it stands."""

    def __init__(self, comm: GroupComm, config: AlertConfig) -> None:
        self.comm = comm
        self._gradients: dict[str, GradientConfig] = {}
        self._weights: dict[str, WeightConfig] = {}
        if comm.reduce_scatter is not None:
            self._gradients = gradient_rungs(comm.reduce_scatter.config, comm.layout)
        if comm.replica is not None:
            self._weights = weight_rungs(comm.replica.config)
        rungs: dict[Half, list[str]] = {
            "gradients": list(self._gradients),
            "weights": list(self._weights),
        }
        self.ladder = GroupLadder(comm.group.name, rungs, config=config)

    def apply(self) -> None:
        """The group communicates as its rungs say; `explain()` tells why."""
        self._set_rungs(self.ladder.rung("gradients"), self.ladder.rung("weights"))
        reasons = {"gradients": self.ladder.reason("gradients"), "weights": self.ladder.reason("weights")}
        self.comm.moved = {half: reason for half, reason in reasons.items() if reason}

    @contextmanager
    def one_rung_lower(self) -> Iterator[None]:
        """Inside the block, raised halves are one rung lower: to be measured, not to communicate."""
        rungs = self.ladder.rung("gradients"), self.ladder.rung("weights")
        self._set_rungs(*(max(rung - 1, 0) for rung in rungs))
        try:
            yield
        finally:
            self._set_rungs(*rungs)

    def _set_rungs(self, gradients: int, weights: int) -> None:
        comm = self.comm
        if comm.reduce_scatter is not None:
            comm.reduce_scatter.configure(list(self._gradients.values())[gradients])
        if comm.replica is not None:
            comm.replica.configure(list(self._weights.values())[weights])


class Alerts:
    """Watches the measures of all groups of a model and, if so configured, moves groups along the ladder."""

    def __init__(self, state: CommState, config: AlertConfig) -> None:
        self.log = AlertLog()
        self._state = weakref.ref(state)
        self._config = config
        self._groups = [_LadderComm(comm, config) for comm in state.groups]
        layouts = {comm.layout.ranks: comm.group.process_group for comm in state.groups}
        self._shared = [(ranks, [layouts[ranks], *_further(state, ranks)]) for ranks in sorted(layouts)]

    def at_step_border(self, step: int) -> None:
        """All ranks have taken the same decisions from this step's measures, if it was measured.

        Steps: 1. raised groups are measured as if one rung lower;  2. for each set of ranks that groups are
        spread over, the largest values of all ranks, by one all-reduce of a few numbers per group (and one
        more over each further dimension of the mesh: tensor-parallel ranks and HSDP replicas decide
        together);  3. the host waits for them, and decides.
        """
        state = self._state()
        if state is None or not state.sampled.is_due(step):
            return
        with torch.no_grad(), torch.inference_mode(False):
            values = self._agree(self._measure(state))
        for group, row in zip(self._groups, values, strict=True):
            now, below = row[: len(COLUMNS)], row[len(COLUMNS) :]
            alerts = group.ladder.decide(now, below, step=step)
            group.apply()
            log = dist.get_rank() == min(self._deciding_ranks(group))
            for alert in alerts:
                self.log.tell(alert, log=log)

    def _measure(self, state: CommState) -> Tensor:
        """Return this rank's measures of each group as they are, and one rung lower, fp32 [groups, 8]."""
        now = state.sampled_measures()
        assert now is not None
        below = torch.full_like(now, math.nan)
        for index, group in enumerate(self._groups):
            if group.ladder.is_raised:
                with group.one_rung_lower():
                    squares = group_squares(group.comm, sample_numel=state.sampled.sample_numel)
                below[index] = measures_of(squares[None])[0]
        # What does not apply, or is not a number, is below every threshold; no maximum sees a NaN.
        return torch.cat([now, below], dim=1).nan_to_num(nan=-1.0, posinf=math.inf)

    def _agree(self, values: Tensor) -> list[list[float]]:
        for ranks, process_groups in self._shared:
            members = [i for i, group in enumerate(self._groups) if group.comm.layout.ranks == ranks]
            part = values[members]
            for process_group in process_groups:
                with naming("agreement on alerts", group=process_group):
                    dist.all_reduce(part, op=dist.ReduceOp.MAX, group=process_group)
            # As a ring does it: twice around, a part of the values at a time.
            traffic = self._groups[members[0]].comm.gradient_traffic
            traffic.count_ring(round(2 * part.nbytes / len(ranks)))
            values[members] = part
        rows: list[list[float]] = values.tolist()
        return rows

    def _deciding_ranks(self, group: _LadderComm) -> set[int]:
        ranks = group.comm.layout.ranks
        shared = next(groups for own, groups in self._shared if own == ranks)
        return {rank for each in shared for rank in dist.get_process_group_ranks(each)}

    def save(self) -> dict[str, Tensor]:
        """Return where each group stands, by its name; nothing without a ladder."""
        if self._config.action != "ladder":
            return {}
        return {group.ladder.name: group.ladder.state() for group in self._groups}

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Every group stands where it did; groups that were not saved, as configured. Call on all ranks."""
        for group in self._groups:
            group.ladder.load((saved or {}).get(group.ladder.name))
            group.apply()


def _further(state: CommState, ranks: tuple[int, ...]) -> list[ProcessGroup]:
    """Return the process groups along which other ranks hold the same parameters or parts of them."""
    mesh = max((comm.group.mesh for comm in state.groups), key=lambda mesh: mesh.ndim)
    along = [mesh.get_group(dim) for dim in range(mesh.ndim)] if mesh.ndim > 1 else []
    members = [tuple(dist.get_process_group_ranks(group)) for group in along]
    if ranks not in members:
        return []
    return [group for group, own in zip(along, members, strict=True) if own != ranks]
