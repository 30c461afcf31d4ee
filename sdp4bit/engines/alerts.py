"""Alerts: measures of a parameter group that cross a threshold, identical on the ranks that share it."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.config import AlertConfig
from sdp4bit.engines.group import GroupState
from sdp4bit.engines.measures import MEASURES, Telemetry

logger = logging.getLogger("sdp4bit")
_KEPT = 1000
_RELEASE_RATIO = 0.8
"""A measure above its threshold is one alert, until it has fallen to this part of the threshold."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A measure of a parameter group that crossed its threshold."""

    step: int
    """Optimizer steps done when it was measured."""
    group: str
    measure: str
    """One of gradient_error, weight_error, weight_drift, nonfinite_groups."""
    value: float
    """The largest of the ranks that share the group."""
    threshold: float

    @property
    def message(self) -> str:
        """The measure, its value and the threshold, without the group's name."""
        return f"{self.measure.replace('_', ' ')} {self.value:.3g} > {self.threshold:g}"


AlertCallback = Callable[[Alert], None]


class Alerts:
    """Compares the measures of parameter groups with their thresholds after every measured step."""

    def __init__(
        self,
        groups: Sequence[GroupState],
        *,
        process_groups: Sequence[ProcessGroup | None],
        telemetry: Telemetry,
        config: AlertConfig,
        where: str = "",
    ) -> None:
        """Begin without alerts.

        Args:
            process_groups: for each group, the ranks that it is sharded over; None for this process alone.
            where: part of the model that the groups are, for the log; empty for all of it.
        """
        self._groups = list(groups)
        self._telemetry = telemetry
        self._where = f"{where}, " if where else ""
        self._thresholds = [_thresholds(config, group) for group in groups]
        # Without a process group this process has the whole group, as with simulated ranks.
        self._logs = [
            process_group is None or dist.get_rank() == min(group.group.ranks)
            for group, process_group in zip(groups, process_groups, strict=True)
        ]
        self._above: set[tuple[int, int]] = set()
        """Group and measure of the alerts that last."""
        # All ranks take the process groups in the same order, so that no two wait for each other.
        self._members: dict[tuple[int, ...], tuple[ProcessGroup, list[int]]] = {}
        ordered = sorted(
            zip(groups, process_groups, range(len(groups)), strict=True), key=lambda e: e[0].group.ranks
        )
        for group, process_group, at in ordered:
            if process_group is not None:
                self._members.setdefault(group.group.ranks, (process_group, []))[1].append(at)
        self._alerts: deque[Alert] = deque(maxlen=_KEPT)
        self._callbacks: OrderedDict[int, AlertCallback] = OrderedDict()

    def listen(self, callback: AlertCallback) -> RemovableHandle:
        """Call the callback with every alert, on all ranks that share the group, until removed."""
        handle = RemovableHandle(self._callbacks)
        self._callbacks[handle.id] = callback
        return handle

    def all(self) -> list[Alert]:
        """Return the last thousand alerts, oldest first."""
        return list(self._alerts)

    def at_step_boundary(self, step: int) -> None:
        """Alert on this step's measures if it was measured; called on all ranks.

        Takes one all-reduce of four numbers per group for each process group.
        """
        if not self._telemetry.is_due(step):
            return
        for at, values in enumerate(self._largest_of_ranks()):
            group, thresholds = self._groups[at], self._thresholds[at]
            for column, (value, limit) in enumerate(zip(values, thresholds, strict=True)):
                if limit is None:
                    continue
                if value > limit and (at, column) not in self._above:
                    self._above.add((at, column))
                    self._tell(
                        Alert(
                            step=step,
                            group=group.group.name,
                            measure=MEASURES[column],
                            value=value,
                            threshold=limit,
                        ),
                        log=self._logs[at],
                    )
                elif 0 <= value <= limit * _RELEASE_RATIO:
                    self._above.discard((at, column))

    def _largest_of_ranks(self) -> list[list[float]]:
        """Return each group's measures, the largest of its ranks; -1 where one does not apply."""
        table = self._telemetry.measures()[[group.index for group in self._groups]]
        # No maximum sees a NaN.
        table = table.nan_to_num(nan=-1.0, posinf=math.inf)
        for process_group, members in self._members.values():
            first = self._groups[members[0]]
            part = table[members].to(first.group.device, torch.float32)
            with comm_error_context("all-reduce of the measures for alerts", group=process_group):
                dist.all_reduce(part, op=dist.ReduceOp.MAX, group=process_group)
            # A ring sends twice around, a part of the values at a time.
            first.gradient_traffic.count_ring(round(2 * part.nbytes / process_group.size()))
            table[members] = part.to(table)
        rows: list[list[float]] = table.tolist()
        return rows

    def _tell(self, alert: Alert, *, log: bool) -> None:
        self._alerts.append(alert)
        if log:
            logger.warning("step %d, %s%s: %s", alert.step, self._where, alert.group, alert.message)
        for callback in tuple(self._callbacks.values()):
            callback(alert)

    def detach(self) -> None:
        """Refer to no group any more; the alerts stay."""
        self._groups, self._members = [], {}


def _thresholds(config: AlertConfig, group: GroupState) -> tuple[float | None, ...]:
    """Return the thresholds of a group; automatic ones follow the fewest bits of the hops that it has."""
    gradients, weights = group.gradient_config, group.weight_config
    hops: list[float | None] = []
    if gradients is not None:
        layouts = group.gradient_layouts
        hops += [gradients.intra_bits] if any(layout.ranks_per_node > 1 for layout in layouts) else []
        hops += [gradients.inter_bits] if any(layout.nodes > 1 for layout in layouts) else []
    return config.for_bits(
        gradients=min((bits for bits in hops if bits), default=None),
        weights=None if weights is None else weights.bits,
    ).thresholds
