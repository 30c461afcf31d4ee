"""Alerts on FSDP2: outliers on one rank alert all ranks once, and training does not change.

Layer: real processes over gloo, 2 ranks as 2 nodes.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp4bit import Alert, AlertConfig, GradientConfig, TelemetryConfig
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
