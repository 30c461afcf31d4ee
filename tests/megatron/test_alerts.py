"""Alerts on Megatron-Core: the same on all ranks, for all buckets but those of experts.

Layer: real Megatron-Core in 2 processes over gloo, through `fake_cuda`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sdp4bit import Alert, AlertConfig, GradientConfig, SDP4BitConfig, TelemetryConfig
from tests.megatron.runs import MOE, MegatronRun
from tests.ranks import run_ranks

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")

PRELOAD = ["tests.megatron.imports"]

CONFIG = SDP4BitConfig(
    # Without the Hadamard transform outliers spoil their neighbours.
    gradients=GradientConfig(min_numel=0, hadamard=False),
    telemetry=TelemetryConfig(interval=2),
    alerts=AlertConfig(gradient_error=0.36, weight_error=0.02, weight_drift=None),
)
"""4-bit weights are above the threshold in each measured step."""


def add_outliers(comm: Any) -> None:
    """Make every 131st value of a bucket's gradients large on this rank, but not most of the gradient."""

    def add(gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[::131] += 20 * gradient.float().square().mean().sqrt().to(gradient.dtype)
        return spoilt

    for parameter in comm.view.parameters:
        parameter.register_hook(add)


def alerts_of_a_run() -> list[Alert]:
    results = []
    for config in (replace(CONFIG, alerts=None), CONFIG):
        run = MegatronRun(config, topology=1, transformer=MOE, ddp={"bucket_size": 10_000}, overlap=True)
        dense = [comm for comm in run.comm.groups if not comm.view.is_expert]
        add_outliers(dense[-1])
        results.append(run.train(3).finish())
    assert results[0] == results[1]
    assert len(dense) < len(run.comm.groups)
    alerts: list[Alert] = run.comm.alerts()
    by_measure = {
        measure: [(alert.step, alert.group) for alert in alerts if alert.measure == measure]
        for measure in ("gradient_error", "weight_error")
    }
    assert by_measure["gradient_error"] == [(2, dense[-1].view.name)]
    assert {name for _, name in by_measure["weight_error"]} == {comm.view.name for comm in dense}
    return alerts


def test_outliers_in_a_bucket_alert_all_its_ranks_and_change_nothing() -> None:
    first, other = run_ranks(alerts_of_a_run, 2)
    assert first == other
