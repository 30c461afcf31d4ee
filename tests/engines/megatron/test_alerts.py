"""Alerts on Megatron-Core: the same on all ranks of a bucket, for all buckets but those of experts.

Layer: real Megatron-Core in 4 processes over gloo, through `fake_cuda`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sdp4bit import Alert, AlertConfig, GradientConfig, SDP4BitConfig, TelemetryConfig
from tests.engines.megatron.runs import MOE, MegatronRun
from tests.ranks import run_ranks

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")

PRELOAD = ["tests.engines.megatron.imports"]

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

    for parameter in comm.group.parameters:
        parameter.register_hook(add)


def check_buckets() -> list[Alert]:
    losses = []
    for config in (CONFIG, replace(CONFIG, alerts=None)):
        run = MegatronRun(config, ddp={"bucket_size": 10_000}, overlap=True)
        add_outliers(run.comm.groups[-1])
        losses.append(run.train(4).finish())
        if config is CONFIG:
            alerts: list[Alert] = run.comm.alerts()
            last = run.comm.groups[-1].group.name
            names = {comm.group.name for comm in run.comm.groups}
    assert losses[0] == losses[1]
    assert [(a.step, a.group) for a in alerts if a.measure == "gradient_error"] == [(2, last)]
    assert {a.group for a in alerts if a.measure == "weight_error"} == names
    return alerts


def check_experts() -> list[str]:
    run = MegatronRun(CONFIG, topology=1, transformer=MOE)
    run.train(3).finish()
    watched = {comm.group.name for comm in run.comm.groups if not comm.group.is_expert}
    assert {alert.group for alert in run.comm.alerts()} == watched
    return sorted(watched)


def check() -> tuple[list[Alert], list[str]]:
    return check_buckets(), check_experts()


def test_outliers_in_a_bucket_alert_all_its_ranks_and_change_nothing() -> None:
    first, *others = run_ranks(check, 4)
    assert all(other == first for other in others)
