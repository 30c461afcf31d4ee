"""The handle of simulated ranks tells and does what the handles of all engines do. Layer: no process.

That it trains as processes do, bit for bit, is held by tests/lab/pretrain/test_simulated_ranks.py.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from sdp4bit import AlertConfig, AuditConfig, GradientConfig, SDP4BitConfig, TelemetryConfig, WeightConfig
from sdp4bit_lab.simulated.collectives import SimulatedReduceScatter, SimulatedReplica, simulated_layout
from sdp4bit_lab.simulated.communication import SimulatedCommHandle
from sdp4bit_lab.simulated.rows import RowLayout
from tests.rounding_keys import check_unique, drawn_keys
from tests.tables import explained, flat

WATCHED = replace(
    SDP4BitConfig.preset("sdp4bit"),
    telemetry=TelemetryConfig(interval=1),
    audit=AuditConfig(interval=1),
    alerts=AlertConfig(gradient_error=0.05, weight_error=None),
)


def attach(config: SDP4BitConfig, *, ranks_per_node: int = 2) -> tuple[SimulatedCommHandle, nn.Module]:
    torch.manual_seed(0)
    main = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    names = [name for name, _ in main.named_parameters()]
    groups = [("(root)", names[:2]), ("1", names[2:])]
    layout = simulated_layout(4, ranks_per_node=ranks_per_node)
    compute = copy.deepcopy(main).bfloat16()
    return SimulatedCommHandle(main, compute, groups=groups, layout=layout, config=config, reshard=True), main


def train(handle: SimulatedCommHandle, main: nn.Module, *, steps: int) -> None:
    for step in range(steps):
        handle.before_forward()
        handle.after_forward()
        handle.before_backward()
        for rank in range(4):
            torch.manual_seed(10 * step + rank)
            gradients = {name: torch.randn_like(p) for name, p in main.named_parameters()}
            handle.add_gradients(gradients, rank=rank)
        handle.reduce_gradients()
        with torch.no_grad():
            for parameter in main.parameters():
                parameter -= 1e-3 * parameter.grad
        handle.mark_step()
    handle.before_forward()


def test_alerts_name_the_groups_above_a_threshold() -> None:
    handle, main = attach(WATCHED)
    heard: list[object] = []
    handle.on_alert(heard.append)
    train(handle, main, steps=2)
    assert heard == handle.alerts() and {alert.group for alert in handle.alerts()} == {"(root)", "1"}


@pytest.mark.parametrize("asked_for", [False, True])
def test_on_one_node_nothing_is_quantized_unless_asked_for(asked_for: bool) -> None:
    asking = SDP4BitConfig(
        weights=WeightConfig(replica="full"), gradients=GradientConfig(inside_one_node=True)
    )
    handle, main = attach(asking if asked_for else SDP4BitConfig(), ranks_per_node=4)
    train(handle, main, steps=1)
    table = flat(handle.explain(full=True))
    assert table.count('(WeightConfig(replica="full") quantizes)') == 2 * (not asked_for)
    assert table.count("(GradientConfig(inside_one_node=True) quantizes)") == 2 * (not asked_for)
    bits = [(group["weight_bits"], group["gradient_bits"]) for group in handle.group_stats()]
    assert bits == [(4, 8) if asked_for else (None, None)] * 2
    assert (handle.stats()["compression_ratio"] > 1) == asked_for


def test_what_it_tells_is_what_every_handle_tells() -> None:
    handle, main = attach(replace(WATCHED, alerts=None))
    train(handle, main, steps=2)
    stats, now = handle.stats(), handle.measure()
    assert stats["steps"] == stats["sampled_step"] == 2 and stats["last_step"]["inter_bytes"] > 0
    assert stats["weight_drift"] > 0 and now["weight_drift"] > 0 and 0.05 < stats["gradient_error"] < 0.4
    root = explained(handle.explain(full=True))["(root)"]
    assert "int4/2048 difference, node replica" in root and "inter int4/128, Hadamard" in root
    assert handle.audit() and handle.alerts() == []
    handle.resync()
    handle.before_forward()
    assert handle.stats()["full_refreshes"] == 2
    handle.remove()
    assert handle.stats()["steps"] == 2


@pytest.mark.parametrize(
    ("target", "name", "call"),
    [
        (SimulatedReduceScatter, "add", 6),
        (SimulatedReplica, "quantize", 3),
        (SimulatedReplica, "apply", 2),
        (RowLayout, "read_rows", 2),
    ],
)
def test_an_exception_leaves_what_was(target: Any, name: str, call: int) -> None:
    """Gradients are added again from the first rank on, and weights are refreshed by the next forward."""
    (expected, plain), (handle, main) = attach(SDP4BitConfig()), attach(SDP4BitConfig())
    for each, module in ((expected, plain), (handle, main)):
        train(each, module, steps=1)
    real, calls = getattr(target, name), iter(range(1, 100))

    def fail(*args: Any, **given: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return real(*args, **given)

    with mock.patch.object(target, name, fail), pytest.raises(KeyboardInterrupt):
        train(handle, main, steps=1)
    train(expected, plain, steps=1)
    if name == "add":
        train(handle, main, steps=1)
    handle.before_forward()
    assert all(map(torch.equal, main.parameters(), plain.parameters()))
    assert all(torch.equal(handle._held[each], expected._held[each]) for each in expected._held)


def test_no_key_is_drawn_twice_by_simulated_ranks() -> None:
    handle, main = attach(SDP4BitConfig())
    with drawn_keys() as keys:
        train(handle, main, steps=2)
        other, main = attach(SDP4BitConfig())
        other.load_state_dict(handle.state_dict())
        train(other, main, steps=2)
    check_unique(keys, at_least=30)
