"""Alerts: measures of a parameter group that cross a threshold, identical on all ranks of the group."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.collectives.group import Group
from sdp4bit.config import AlertConfig
from sdp4bit.log import logger
from sdp4bit.observe.measures import MEASURES, Telemetry
from sdp4bit.quantization.formats import Bits, format_of

_KEPT = 1000
_RELEASE_RATIO = 0.8  # a measure alerts again only after it has fallen to this fraction of its threshold


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A measure of a parameter group that crossed its threshold."""

    step: int
    """Optimizer steps completed at the measurement."""
    group: str
    measure: str
    """One of gradient_error, weight_error, weight_drift, nonfinite_groups."""
    value: float
    """Maximum over the ranks that share the group."""
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
        groups: Sequence[Group],
        *,
        config: AlertConfig,
        telemetry: Telemetry,
        where: str = "",
    ) -> None:
        """Create alerts.

        Args:
            where: name of the part of the model with these groups, for the log; empty for all of it.
        """
        self._config = config
        self._where = f"{where}, " if where else ""
        self.watch(groups, telemetry=telemetry)
        self._alerts: deque[Alert] = deque(maxlen=_KEPT)
        self._callbacks: OrderedDict[int, AlertCallback] = OrderedDict()
        self._failed: set[tuple[int, type[Exception]]] = (
            set()
        )  # callbacks and kinds of errors that were logged

    def watch(self, groups: Sequence[Group], *, telemetry: Telemetry) -> None:
        """Compare these groups from now on, all of them below their thresholds; keep the alerts."""
        self._groups = list(groups)
        self._thresholds = [_thresholds_of(group, self._config) for group in groups]
        self._telemetry = telemetry
        self._above: set[tuple[int, int]] = set()  # groups and measures that are above their thresholds
        # All ranks use the process groups in the same order, to prevent a deadlock.
        self._members: dict[tuple[int, ...], tuple[ProcessGroup, list[int]]] = {}
        for at, rows in sorted(enumerate(g.view for g in groups), key=lambda each: each[1].ranks):
            if rows.process_group is not None:
                self._members.setdefault(rows.ranks, (rows.process_group, []))[1].append(at)

    def listen(self, callback: AlertCallback) -> RemovableHandle:
        handle = RemovableHandle(self._callbacks)
        self._callbacks[handle.id] = callback
        return handle

    def all(self) -> list[Alert]:
        return list(self._alerts)

    def at_step_boundary(self, step: int) -> None:
        """Check this step's measures if it was measured; called on all ranks.

        Each process group takes one all-reduce of four numbers per parameter group.
        """
        if not self._telemetry.is_due(step):
            return
        for at, values in enumerate(self._largest_of_ranks()):
            rows = self._groups[at].view
            for column, (value, limit) in enumerate(zip(values, self._thresholds[at], strict=True)):
                if limit is None:
                    continue
                if value > limit and (at, column) not in self._above:
                    self._above.add((at, column))
                    self._report(
                        Alert(
                            step=step,
                            group=rows.name,
                            measure=MEASURES[column],
                            value=value,
                            threshold=limit,
                        ),
                        # A single process, as with simulated ranks, always logs.
                        log=rows.process_group is None or dist.get_rank() == min(rows.ranks),
                    )
                elif 0 <= value <= limit * _RELEASE_RATIO:
                    self._above.discard((at, column))

    def _largest_of_ranks(self) -> list[list[float]]:
        """Return each group's measures, maximized over its ranks; -1 if not applicable."""
        table = self._telemetry.measures()[[group.index for group in self._groups]]
        table = table.nan_to_num(nan=-1.0, posinf=math.inf)  # a maximum must not be NaN
        for process_group, members in self._members.values():
            first = self._groups[members[0]]
            part = table[members].to(first.view.device, torch.float32)
            with comm_error_context("all-reduce of the measures for alerts", group=process_group):
                dist.all_reduce(part, op=dist.ReduceOp.MAX, group=process_group)
            # The bytes of a ring all-reduce.
            first.gradients.traffic.count_ring(round(2 * part.nbytes / process_group.size()))
            table[members] = part.to(table)
        rows: list[list[float]] = table.tolist()
        return rows

    def _report(self, alert: Alert, *, log: bool) -> None:
        self._alerts.append(alert)
        if log:
            logger.warning("step %d, %s%s: %s", alert.step, self._where, alert.group, alert.message)
        for number, callback in tuple(self._callbacks.items()):
            try:
                callback(alert)
            except Exception as error:  # other ranks may see none, and would wait for this one
                if (number, type(error)) not in self._failed:
                    self._failed.add((number, type(error)))
                    logger.exception("a callback of on_alert has failed; training continues: %r", callback)

    def detach(self) -> None:
        """Drop the references to the groups; keep the alerts."""
        self._groups, self._members = [], {}


def _thresholds_of(group: Group, config: AlertConfig) -> tuple[float | None, ...]:
    """Return a threshold per measure, or None; "auto" is resolved for the fewest bits of the hops."""
    hops: list[Bits] = []
    gradients, replica = group.gradients.config, group.weights.replica
    weights = None if replica is None else replica.config
    collectives = (
        (group.gradients.reduction, group.layout),
        (group.gradients.all_reduce, group.replicate_layout),
    )
    layouts = [layout for collective, layout in collectives if collective and layout]
    if gradients is not None:
        hops += [gradients.intra_bits] if any(layout.ranks_per_node > 1 for layout in layouts) else []
        hops += [gradients.inter_bits] if any(layout.nodes > 1 for layout in layouts) else []
    return config.for_bits(
        gradients=min(hops, key=lambda bits: format_of(bits).block_bytes, default=None),
        weights=None if weights is None else weights.bits,
    ).thresholds
