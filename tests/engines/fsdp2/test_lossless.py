"""Lossless weights on FSDP2: equal to plain FSDP2 bit for bit, at every step and through a resume.

Layer: gloo, 4 processes as 2 nodes x 2 ranks, with the numba kernels.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from sdp4bit import AlertConfig, AuditConfig, SDP4BitConfig, TelemetryConfig, WeightConfig
from sdp4bit.quantization.checksum import checksum
from tests import toy
from tests.engines.fsdp2.test_checkpoint import Job, expect_warnings
from tests.ranks import run_ranks

NODE = SDP4BitConfig(
    weights=WeightConfig(mode="lossless"), gradients=None, telemetry=TelemetryConfig(interval=2)
)
WATCHED = replace(
    NODE, alerts=AlertConfig(action="fallback", weight_drift=1e-9), audit=AuditConfig(interval=3)
)
FULL = replace(NODE, weights=WeightConfig(mode="lossless", replica="full"))
LIMIT = 500.0


def schedule(step: int, steps: int) -> float:
    """A rate that rises, falls, and jumps once: sizes of messages change all the time."""
    return 2e-3 * min(step + 1, 5) / 5 * (1 - step / steps) * (4 if step == steps // 2 else 1) + 1e-6


def train(config: SDP4BitConfig | None, steps: int, *, freeze: bool = False) -> tuple[list[Any], Any]:
    """Return losses, what each step computed with, bit for bit, and the final weights; and the handle."""
    model = toy.build()
    if freeze:
        model.embed.weight.requires_grad_(False)
        model.blocks[0].fc1.weight.requires_grad_(False)
    run = toy.Run(model, config, topology=2, clip=1.0)
    computed: list[int] = []
    for block in model.blocks:
        # What every rank computes with: all of a block's parameters, gathered.
        block.register_forward_pre_hook(lambda module, _: computed.append(bits_of(module.parameters())))
    for step in range(steps):
        for group in run.optimizer.param_groups:
            group["lr"] = schedule(step, steps)
        run.train(1)
    losses = run.finish()
    model.reshard()
    shards = [parameter.to_local() for parameter in model.parameters()]
    return [losses, computed, bits_of(shards)], run.comm


def bits_of(tensors: Any) -> int:
    return int(checksum(torch.cat([tensor.detach().flatten().float() for tensor in tensors])))


def train_all(steps: int) -> list[Any]:
    plain, _ = train(None, steps)
    told = []
    for config in (WATCHED, FULL):
        result, comm = train(config, steps)
        assert result == plain, config
        told.append({"stats": comm.stats(), "groups": comm.group_stats(), "table": comm.explain()})
        assert comm.audit()
        comm.remove()
    return told


def assert_told(told: list[dict[str, Any]]) -> None:
    for each in told:
        stats, groups, table = each["stats"], each["groups"], each["table"]
        assert 0.1 < stats["lossless_bits"] < 16
        assert stats["weight_error"] is None  # nothing is quantized
        assert 1e-4 < stats["weight_drift"] < 4e-3  # the rounding of the main weights to bf16
        assert stats["full_refreshes"] == 0
        assert sum(group["late_values"] for group in groups) == stats["late_values"]
        assert all(group["weight_bits"] is None for group in groups)
        assert table.count(" bits/weight") == len(groups) == 4
    node, full = told
    assert "lossless, node replica" in node["table"]
    assert "lossless, full replica" in full["table"]
    assert "alert" not in node["table"]  # there is no higher precision to move to
    if node["stats"]["late_values"]:
        assert "values late in" in node["table"]


@pytest.mark.parametrize("steps", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_weights_and_losses_equal_plain_fsdp2_bit_for_bit(steps: int) -> None:
    results = run_ranks(train_all, 4, steps, timeout=LIMIT, backend="numba")
    for told in results:
        assert_told(told)
    if steps == 200:  # the jump of the rate has come to every group when nobody expected it
        assert results[0][0]["stats"]["late_values"] > 0


def train_partly_frozen(steps: int) -> None:
    assert train(NODE, steps, freeze=True)[0] == train(None, steps, freeze=True)[0]


@pytest.mark.slow
def test_what_is_frozen_is_not_sent_and_the_rest_is_equal() -> None:
    run_ranks(train_partly_frozen, 4, 4, timeout=LIMIT, backend="numba")


# -- resume --------------------------------------------------------------------------------------------


def save_and_go_on(folder: str) -> tuple[list[float], list[int]]:
    job, plain = Job(FULL), Job(None)
    assert job.train(2) == plain.train(2)
    job.save(folder, comm=job.comm)
    losses = job.train(4)
    assert losses == plain.train(4)
    return losses, job.bits()


def resume(folder: str, exact: list[tuple[list[float], list[int]]]) -> None:
    losses, bits = exact[dist.get_rank()]
    with expect_warnings():
        for config, comm in ((FULL, "before"), (FULL, "after"), (NODE, "after")):
            job = Job(config, at=2).load(folder, comm=comm)
            assert job.train(4) == losses, (config, comm)
            assert job.bits() == bits
        # There is nothing that only the communication's state knows.
        assert Job(FULL, at=2).load(folder, comm="not").train(4) == losses


@pytest.mark.slow
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    exact = run_ranks(save_and_go_on, 4, str(tmp_path), timeout=LIMIT, backend="numba")
    run_ranks(resume, 4, str(tmp_path), exact, timeout=LIMIT, backend="numba")


# -- attach --------------------------------------------------------------------------------------------


def attach_in_fp32() -> str:
    model = toy.build(policy=MixedPrecisionPolicy())
    with pytest.raises(ValueError, match="lossless") as caught:
        toy.quantize_communication(model, topology=2, config=NODE)
    return str(caught.value)


def test_weights_of_other_types_are_refused_on_all_ranks() -> None:
    messages = run_ranks(attach_in_fp32, 4)
    assert len(set(messages)) == 1
    assert "is gathered in torch.float32" in messages[0]
    assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in messages[0]
