"""Alerts: measures that cross a threshold alert once; on FSDP2 all ranks, and training does not change.

Layer: a single process with made-up measures; real processes over gloo, 2 ranks as 2 nodes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp4bit import Alert, AlertConfig, GradientConfig, TelemetryConfig
from sdp4bit.collectives.group import Group
from sdp4bit.collectives.topology import Nodes
from sdp4bit.observe.alerts import Alerts
from sdp4bit.observe.measures import SQUARES, Telemetry
from tests.ranks import on_ranks
from tests.toy import QUANTIZED, Run, build, loss_of

CONFIG = replace(
    QUANTIZED,
    # Without the Hadamard transform outliers spoil their neighbours. Only the two blocks have so many values.
    gradients=GradientConfig(min_numel=1000, hadamard=False, inter_rounding="stochastic"),
    telemetry=TelemetryConfig(interval=1),
)
THRESHOLD = 0.38
ALERTS = AlertConfig(gradient_error=THRESHOLD, weight_error=None)
GROUP = "blocks.0"


# -- made-up measures ----------------------------------------------------------------------------------


def alerts_of(steps: Sequence[dict[int, float]], *, config: AlertConfig) -> list[Alert]:
    """Return the alerts of a group in these steps.

    Args:
        steps: in each step the measures, by the column of their squares.
    """
    view: Any = SimpleNamespace(name="a", ranks=(0,), process_group=None, device=torch.device("cpu"))
    group = Group(view, index=0, layout=Nodes(ranks=(0,), nodes=1, ranks_per_node=1))
    telemetry = Telemetry(TelemetryConfig(interval=1), ["a"])
    alerts = Alerts([group], config=config, telemetry=telemetry)
    for step, values in enumerate(steps, start=1):
        squares = torch.full((1, SQUARES), math.nan, dtype=torch.float64)
        for column, value in values.items():
            # The error's square and the norm's, or a number.
            squares[0, column : column + 2] = torch.tensor([value] if column == 6 else [value**2, 1.0])
        telemetry.publish(squares, step=step)
        alerts.at_step_boundary(step)
    return alerts.all()


ERRORS = AlertConfig(gradient_error=0.5, weight_error=0.25, weight_drift=0.125, nonfinite_groups=2)


@pytest.mark.parametrize(
    ("column", "measure", "limit"),
    [(0, "gradient_error", 0.5), (2, "weight_error", 0.25), (4, "weight_drift", 0.125)],
)
def test_a_measure_alerts_again_only_after_it_has_fallen_to_four_fifths(
    column: int, measure: str, limit: float
) -> None:
    values = [limit * each for each in (1.0, 1.1, 1.2, 0.9, 1.1, 0.81, 1.1, 0.79, 1.0, 1.3)]
    found = alerts_of([{column: value} for value in values], config=ERRORS)
    assert [(alert.step, alert.measure, alert.threshold) for alert in found] == [
        (2, measure, limit),
        (10, measure, limit),
    ]
    assert [alert.value for alert in found] == pytest.approx([1.1 * limit, 1.3 * limit])


def test_an_infinite_measure_alerts_and_nan_neither_alerts_nor_ends_an_alert() -> None:
    values = (math.inf, math.nan, math.inf, 0.0, math.inf)
    found = alerts_of([{0: value} for value in values], config=ERRORS)
    assert [(alert.step, alert.value) for alert in found] == [(1, math.inf), (5, math.inf)]


def test_non_finite_groups_alert_above_their_number() -> None:
    found = alerts_of([{6: value} for value in (2, 3, 3, 0, 4)], config=ERRORS)
    assert [(alert.step, alert.measure, alert.value) for alert in found] == [
        (2, "nonfinite_groups", 3),
        (5, "nonfinite_groups", 4),
    ]
    assert not alerts_of([{6: 5.0}], config=replace(ERRORS, nonfinite_groups=None))


def test_measures_alert_independently_of_each_other() -> None:
    found = alerts_of([{0: 1.0, 2: 1.0}, {0: 1.0, 2: 0.0}, {0: 1.0, 2: 1.0}], config=ERRORS)
    assert [(alert.step, alert.measure) for alert in found] == [
        (1, "gradient_error"),
        (1, "weight_error"),
        (3, "weight_error"),
    ]


# -- in training ---------------------------------------------------------------------------------------


class Disturbed(Run):
    """Outliers in one group's gradients that cancel between the nodes."""

    amplitude = 0.0

    def backward(self) -> None:
        extra: list[torch.Tensor] = []

        def disturb(linear: torch.nn.Linear, *_: Any) -> None:
            sign = 1.0 if dist.get_rank() == 0 else -1.0
            extra.append(linear.weight.flatten()[::131].float().sum() * sign * self.amplitude)

        block = self.model.blocks[0]
        linears = [block.qkv, block.proj, block.fc1, block.fc2] if self.amplitude else []
        hooks = [linear.register_forward_hook(disturb) for linear in linears]
        loss = loss_of(self.model, next(self.data))
        (loss + sum(extra)).backward()
        for hook in hooks:
            hook.remove()
        self.losses.append(loss.item())


def train(run: Disturbed) -> list[float]:
    """Train 5 steps with outliers in the steps 2, 3 and 5."""
    for step in range(1, 6):
        run.amplitude = 0.08 if step in (2, 3, 5) else 0.0
        run.train(1)
    return run.finish()


@on_ranks(2)
def test_a_measure_above_its_threshold_alerts_all_ranks_once_and_changes_nothing() -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sdp4bit").addHandler(handler)
    heard: list[Alert] = []
    run = Disturbed(build(), replace(CONFIG, alerts=ALERTS), topology=1)
    run.comm.on_alert(heard.append)
    assert train(run) == train(Disturbed(build(), CONFIG, topology=1))
    assert heard == run.comm.alerts()
    # It stays high in step 3, is below the threshold in step 4, and high again in step 5.
    assert [(alert.step, alert.group, alert.measure) for alert in heard] == [
        (2, GROUP, "gradient_error"),
        (5, GROUP, "gradient_error"),
    ]
    assert all(alert.value > alert.threshold == THRESHOLD for alert in heard)
    told = [record.partition(":")[0] for record in records if "gradient error" in record]
    assert told == (["step 2, blocks.0", "step 5, blocks.0"] if dist.get_rank() == 0 else [])
    everybody: list[Any] = [None] * 2
    dist.all_gather_object(everybody, heard)
    assert everybody == [heard] * 2


@on_ranks(2)
def test_a_callback_without_alerts_is_refused() -> None:
    run = Run(build(), QUANTIZED, topology=1)
    with pytest.raises(ValueError, match="alerts are off: attach with"):
        run.comm.on_alert(print)
    assert run.comm.alerts() == []
