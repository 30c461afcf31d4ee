"""Alerts and the precision fallback over the groups of an attached model, whatever engine trains it.

After each measured step, decided alike on all ranks that share a group or must round like those that do.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.config import AlertConfig, GradientConfig, WeightConfig
from sdp4bit.engines.fallback import (
    TRAFFIC_KINDS,
    Alert,
    GroupFallback,
    TrafficKind,
    gradient_precisions,
    thresholds_for,
    weight_precisions,
)
from sdp4bit.engines.group import AnyGroup
from sdp4bit.engines.measures import MEASURES, SampledMeasures, sum_squares
from sdp4bit.traffic import TrafficCounter

logger = logging.getLogger("sdp4bit")
_KEPT = 1000

AlertCallback = Callable[[Alert], None]
Positions = Mapping[str, Any]
"""Numbers by the name of a group, as tensors or lists: where its traffic stands."""


class AlertLog:
    """The last thousand alerts, and who wants to hear of the next one."""

    def __init__(self, *, where: str = "") -> None:
        """There are none.

        Args:
            where: what part of the model they are of, for the log; empty for all of it.
        """
        self._where = f"{where}, " if where else ""
        self._alerts: deque[Alert] = deque(maxlen=_KEPT)
        self._callbacks: OrderedDict[int, AlertCallback] = OrderedDict()

    def listen(self, callback: AlertCallback) -> RemovableHandle:
        """Call the callback with every alert, alike on all ranks that share it, until removed."""
        handle = RemovableHandle(self._callbacks)
        self._callbacks[handle.id] = callback
        return handle

    def tell(self, alert: Alert, *, log: bool) -> None:
        """Make an alert known.

        Args:
            log: also write a warning to the log, which one rank of those that share the alert does.
        """
        self._alerts.append(alert)
        if log:
            logger.warning("step %d, %s%s: %s", alert.step, self._where, alert.group, alert.message)
        for callback in tuple(self._callbacks.values()):
            callback(alert)

    def all(self) -> list[Alert]:
        """Return the alerts, oldest first."""
        return list(self._alerts)


@dataclass(frozen=True, kw_only=True)
class DecisionRound:
    """One all-reduce over ranks that decide together; all of them list as many groups, in one order."""

    process_group: ProcessGroup
    groups: tuple[int, ...]
    """Places of the groups in the list of all."""
    as_one: bool = False
    """The groups share one row of values; ranks may then list different numbers of them, but some."""
    traffic: TrafficCounter | None = None
    """Where the bytes are counted, if they are data-parallel ones."""


class _WatchedGroup:
    """A parameter group, the settings of its precisions, and where it stands."""

    def __init__(self, group: AnyGroup, config: AlertConfig) -> None:
        self.group = group
        self._gradients: dict[str, GradientConfig] = {}
        self._weights: dict[str, WeightConfig] = {}
        if group.gradient_config is not None:
            self._gradients = gradient_precisions(group.gradient_config, *group.gradient_layouts)
        if group.weight_config is not None:
            self._weights = weight_precisions(group.weight_config)
        precisions: dict[TrafficKind, list[str]] = {
            "gradients": list(self._gradients),
            "weights": list(self._weights),
        }
        config = thresholds_for(
            config,
            gradients=group.gradient_config,
            weights=group.weight_config,
            layouts=group.gradient_layouts,
        )
        self.fallback = GroupFallback(group.group.name, precisions, config=config)

    def apply(self) -> None:
        """Let the group communicate as its precisions say; `explain()` tells why."""
        self._set_precisions(self.fallback.precision("gradients"), self.fallback.precision("weights"))
        reasons = {kind: self.fallback.reason(kind) for kind in TRAFFIC_KINDS}
        self.group.fallback_reasons = {kind: reason for kind, reason in reasons.items() if reason}

    @contextmanager
    def one_precision_lower(self) -> Iterator[None]:
        """Lower raised traffic by one precision inside the block: to be measured, not to communicate."""
        precisions = self.fallback.precision("gradients"), self.fallback.precision("weights")
        self._set_precisions(*(max(precision - 1, 0) for precision in precisions))
        try:
            yield
        finally:
            self._set_precisions(*precisions)

    def _set_precisions(self, gradients: int, weights: int) -> None:
        self.group.configure(
            gradients=list(self._gradients.values())[gradients] if self._gradients else None,
            weights=list(self._weights.values())[weights] if self._weights else None,
        )


class Alerts:
    """Watches the measures of parameter groups and, if so configured, moves groups along the fallback."""

    def __init__(
        self,
        groups: Sequence[AnyGroup],
        *,
        rounds: Sequence[DecisionRound],
        sampled: SampledMeasures,
        config: AlertConfig,
        where: str = "",
    ) -> None:
        """All groups are as configured.

        Args:
            rounds: who decides together, in an order in which all ranks can take them: of two rounds that
                share ranks, every such rank lists the same one first. Every group is in some round.
            where: what part of the model the groups are, for the log; empty for all of it.
        """
        self.log = AlertLog(where=where)
        self._config = config
        self._sampled = sampled
        self._groups = [_WatchedGroup(group, config) for group in groups]
        self._rounds = rounds
        self._logs = [self._is_first(at) for at in range(len(groups))]

    def at_step_boundary(self, step: int) -> None:
        """Decide from this step's measures, if it was measured, alike on all ranks of a group.

        To be called on all ranks when the measures of a step are available and before any of its new weights
        is sent. Steps: 1. raised groups are measured as if one precision lower;  2. round by round, the
        largest values of all ranks, by one all-reduce of a few numbers per group;  3. the host waits for
        them, and decides.
        """
        if not self._sampled.is_due(step):
            return
        with torch.no_grad(), torch.inference_mode(False):
            values = self._agree(self._measure())
        for group, row, log in zip(self._groups, values, self._logs, strict=True):
            now, below = row[: len(MEASURES)], row[len(MEASURES) :]
            alerts = group.fallback.decide(now, below, step=step)
            group.apply()
            for alert in alerts:
                self.log.tell(alert, log=log)

    def _measure(self) -> Tensor:
        """Return this rank's measures of each group as they are, and lowered, fp32 [groups, 8]."""
        measured = self._sampled.on_device()
        assert measured is not None
        now = measured[[group.group.index for group in self._groups]]
        below = torch.full_like(now, math.nan)
        for index, group in enumerate(self._groups):
            if group.fallback.is_raised:
                with group.one_precision_lower():
                    lowered = group.group.deviations(sample_numel=self._sampled.sample_numel)
                below[index] = sum_squares([lowered], device=below.device).measures()[0]
        # What does not apply, or is not a number, is below every threshold; no maximum sees a NaN.
        return torch.cat([now, below], dim=1).nan_to_num(nan=-1.0, posinf=math.inf)

    def _agree(self, values: Tensor) -> list[list[float]]:
        for each in self._rounds:
            members = list(each.groups)
            part = values[members]
            if each.as_one:
                part = part.amax(dim=0, keepdim=True)
            with comm_error_context("agreement on alerts", group=each.process_group):
                dist.all_reduce(part, op=dist.ReduceOp.MAX, group=each.process_group)
            if each.traffic is not None:
                # As a ring does it: twice around, a part of the values at a time.
                each.traffic.count_ring(round(2 * part.nbytes / each.process_group.size()))
            values[members] = part
        rows: list[list[float]] = values.tolist()
        return rows

    def _is_first(self, at: int) -> bool:
        """Whether this is the first of the ranks that decide on a group; so is one that decides alone."""
        return all(
            dist.get_rank() == min(dist.get_process_group_ranks(each.process_group))
            for each in self._rounds
            if at in each.groups
        )

    def positions(self) -> dict[str, Tensor]:
        """Return where each group stands, by its name; nothing without a fallback."""
        if self._config.action != "fallback":
            return {}
        return {group.fallback.name: group.fallback.state() for group in self._groups}

    def save(self) -> Positions:
        """Return what `load` takes; nothing without a fallback."""
        return self.positions()

    def load(self, saved: Positions | None) -> None:
        """Continue where every group stood; those not saved begin as configured. Call it on all ranks."""
        for group in self._groups:
            group.fallback.load((saved or {}).get(group.fallback.name))
            group.apply()

    def detach(self) -> None:
        """Watch nothing any more, and refer to no group; the log stays."""
        self._groups, self._rounds, self._logs = [], [], []


def saved_positions(state: Mapping[str, Any]) -> Positions | None:
    """Return the positions in a handle's state; None if it has none. Their name was "ladder" until 0.1."""
    positions: Positions | None = state.get("fallback", state.get("ladder"))
    return positions
