"""Alerts and the fallback on FSDP2: outliers move a group up on all ranks alike, and it comes back down.

Layer: real processes over gloo, 2 nodes x 2 ranks.
"""

from __future__ import annotations

import io
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp4bit import Alert, AlertConfig, GradientConfig, SDP4BitConfig, TelemetryConfig
from tests.ranks import on_ranks, run_ranks
from tests.tables import explained, flat
from tests.toy import QUANTIZED, Run, build, loss_of

PLAIN = replace(
    QUANTIZED,
    # Outliers are what the Hadamard transform is for: without it they spoil their neighbours.
    gradients=GradientConfig(
        min_numel=1000, hadamard=False, inter_rounding="stochastic"
    ),  # the two blocks only
    telemetry=TelemetryConfig(interval=2),
)
FALLBACK = AlertConfig(
    action="fallback", gradient_error=0.38, weight_error=None, calm_ratio=0.9, calm_samples=2
)
GROUP = "blocks.0"
FIRST, LAST, STEPS = 3, 6, 12
"""Steps with outliers, and all steps."""


def configured(alerts: AlertConfig | None) -> SDP4BitConfig:
    return replace(PLAIN, alerts=alerts)


class Disturbed(Run):
    """Outliers in one group's gradients that cancel between the nodes: the exact sum is what it was."""

    amplitude = 0.0

    def backward(self) -> None:
        extra: list[torch.Tensor] = []

        def disturb(linear: torch.nn.Linear, *_: Any) -> None:
            sign = 1.0 if dist.get_rank() < 2 else -1.0
            extra.append(linear.weight.flatten()[::131].float().sum() * sign * self.amplitude)

        block = self.model.blocks[0]
        linears = [block.qkv, block.proj, block.fc1, block.fc2] if self.amplitude else []
        hooks = [linear.register_forward_hook(disturb) for linear in linears]
        loss = loss_of(self.model, next(self.data))
        (loss + sum(extra)).backward()
        for hook in hooks:
            hook.remove()
        self.losses.append(loss.item())


def disturbed(alerts: AlertConfig | None, *, amplitude: float) -> Disturbed:
    """A longer run: outliers up to its tenth step, all of them in 18."""
    run = Disturbed(build(), configured(alerts))
    train_disturbed(run, range(1, 19), amplitude, last=10)
    return run


def train_disturbed(run: Disturbed, steps: range, amplitude: float, *, last: int = LAST) -> None:
    for step in steps:
        run.amplitude = amplitude if FIRST <= step <= last else 0.0
        run.train(1)


AMPLITUDE = 0.08


def error_of(run: Run) -> float:
    error = run.comm._state.sampled.by_group()[GROUP]["gradient_error"]
    assert error is not None
    return error


def check_fallback() -> dict[str, Any]:
    """The fallback acts alike on all ranks; the run is saved while it is raised, and resumed."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sdp4bit").addHandler(handler)
    heard: list[Alert] = []

    run = Disturbed(build(), configured(FALLBACK))
    listening = run.comm.on_alert(heard.append)
    errors = []
    train_disturbed(run, range(1, 5), AMPLITUDE)
    run.evaluate()  # the boundary of step 4: the first sample with outliers
    errors.append(error_of(run))
    line = explained(run.comm.explain())[GROUP]
    assert "inter int8/128, since step 4 (alert: gradient error " in line
    assert flat(run.comm.explain()).count("since step") == 1
    train_disturbed(run, range(5, LAST + 1), AMPLITUDE)
    run.evaluate()
    errors.append(error_of(run))
    sent = {c.group.name: c.gradient_traffic.last_step.inter_bytes for c in run.comm._state.groups}
    assert sent["blocks.0"] > 1.7 * sent["blocks.1"]  # the two blocks are of the same size

    saved = io.BytesIO()
    states = {"model": run.model, "optimizer": run.optimizer, "comm": run.comm}
    torch.save({name: part.state_dict() for name, part in states.items()}, saved)
    train_disturbed(run, range(LAST + 1, STEPS + 1), AMPLITUDE)
    losses = run.finish()
    listening.remove()
    logging.getLogger("sdp4bit").removeHandler(handler)
    alerts = run.comm.alerts()
    assert heard == alerts
    assert "since step" not in flat(run.comm.explain())
    assert (dist.get_rank() == 0) == bool(records)

    resumed = Disturbed(build(), configured(FALLBACK))
    for _ in range(LAST):
        next(resumed.data)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    resumed.model.load_state_dict(loaded["model"])
    resumed.optimizer.load_state_dict(loaded["optimizer"])
    resumed.comm.load_state_dict(loaded["comm"])
    assert "since step 4" in explained(resumed.comm.explain())[GROUP]
    train_disturbed(resumed, range(LAST + 1, STEPS + 1), AMPLITUDE)
    assert resumed.finish() == losses[LAST:]
    assert resumed.comm.alerts() == alerts[1:]
    return {"alerts": alerts, "errors": errors, "losses": losses, "records": records}


def check_without() -> dict[str, Any]:
    clean = disturbed(FALLBACK, amplitude=0.0)
    assert clean.finish() and clean.comm.alerts() == []
    quiet = disturbed(None, amplitude=AMPLITUDE)
    warned = disturbed(replace(FALLBACK, action="warn"), amplitude=AMPLITUDE)
    losses = quiet.finish()
    assert warned.finish() == losses  # nothing changes but the warning
    assert "since step" not in flat(warned.comm.explain()) and "fallback" not in warned.comm.state_dict()
    return {
        # All but the size of the weights at the end.
        "clean": clean.finish()[:-1],
        "quantized": losses[:-1],
        "fallback": disturbed(FALLBACK, amplitude=AMPLITUDE).finish()[:-1],
        "alerts": warned.comm.alerts(),
    }


def test_outliers_move_one_group_up_on_all_ranks_and_it_comes_back() -> None:
    results = run_ranks(check_fallback, 4)
    first = results[0]
    assert all(result["alerts"] == first["alerts"] for result in results)
    up, down = first["alerts"]
    assert (up.step, up.group, up.measure) == (4, GROUP, "gradient_error")
    assert up.value > up.threshold == 0.38
    assert up.change == "gradients int8/int4 -> int8"
    assert (down.step, down.group, down.change) == (10, GROUP, "calm, gradients int8 -> int8/int4")
    assert down.value <= 0.9 * 0.38
    assert [record.split(":")[0] for record in first["records"][:2]] == [
        "step 4, blocks.0",
        "step 10, blocks.0",
    ]
    before, after = first["errors"]
    assert after < 0.1 < 0.25 < before


@pytest.mark.slow
def test_the_fallback_brings_the_loss_back_and_a_warning_changes_nothing() -> None:
    others = run_ranks(check_without, 4)
    assert all(result["alerts"] == others[0]["alerts"] for result in others)
    (warning,) = others[0]["alerts"]
    assert (warning.step, warning.group, warning.change) == (4, GROUP, "")
    # The outliers cancel in the exact sum: without quantization the loss would be the clean one.
    with_fallback = without = 0.0
    for result in others:
        for ours, quantized, clean in zip(
            result["fallback"][6:], result["quantized"][6:], result["clean"][6:], strict=True
        ):
            with_fallback += abs(ours - clean)
            without += abs(quantized - clean)
    assert with_fallback < 0.8 * without, (with_fallback, without)


@on_ranks(2)
def test_a_callback_without_alerts_is_refused() -> None:
    run = Run(build(), QUANTIZED, topology=1)
    with pytest.raises(ValueError, match="there will be no alerts"):
        run.comm.on_alert(print)
    assert run.comm.alerts() == []
