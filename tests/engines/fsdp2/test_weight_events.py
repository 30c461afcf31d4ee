"""Events that end a replica's state: evaluation after a step, NaN, unknown optimizers, loads.

Layer: gloo, 2 ranks as 2 nodes, against plain FSDP2.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from sdp4bit import GradientConfig, SDP4BitConfig, quantize_communication
from sdp4bit.engines.fsdp2 import observers
from tests.ranks import on_ranks
from tests.toy import LOSSLESS, POLICY, QUANTIZED, Run, assert_replicas_identical, build


def exact_groups(run: Run) -> list[bool]:
    """Return for each group whether the replica equals this rank's main shard as it is gathered."""
    return [
        torch.equal(comm.replica.own_shard, comm.group.main_shard(comm.replica.rows.dtype))
        for comm in run.comm.groups
    ]


def averages_after_a_step(config: SDP4BitConfig | None) -> list[float]:
    """Averages are swapped in between a step and the next forward, evaluated, and swapped out again."""
    run = Run(build(), config, topology=1).train(1)
    params: list[DTensor] = list(run.model.parameters())
    with torch.no_grad():
        stored = [param.detach().clone() for param in params]
        for param in params:
            param.data.mul_(0.5)
        run.model.eval()
        run.losses.append(run.evaluate())
        run.model.reshard()
        if run.comm is not None:
            assert all(exact_groups(run))
        for param, kept in zip(params, stored, strict=True):
            param.data.copy_(kept.data)
        run.model.train()
    return run.train(1).finish()


def momentum_teacher(config: SDP4BitConfig | None) -> list[float]:
    """A teacher in train mode follows by small steps that no optimizer makes."""
    run, teacher = (Run(build(), config, topology=1) for _ in range(2))
    losses = []
    for _ in range(3):
        run.train(1)
        with torch.no_grad():
            for slow, fast in zip(teacher.model.parameters(), run.model.parameters(), strict=True):
                slow.data.mul_(0.5).add_(fast.data, alpha=0.5)
        losses.append(teacher.evaluate())
        teacher.model.reshard()
    return losses


def check_small_updates_in_evaluation_are_differences() -> None:
    """A teacher in eval mode that hardly moves does not travel in full precision."""
    run = Run(build(), QUANTIZED, topology=1)
    run.model.eval()
    run.evaluate()
    for _ in range(3):
        run.model.reshard()
        with torch.no_grad():
            for param in run.model.parameters():
                param.data.mul_(1.001)
        run.comm.mark_step()
        run.evaluate()
    assert run.comm.stats()["full_refreshes"] == 0
    assert not any(exact_groups(run))
    assert [comm.refreshes for comm in run.comm.groups] == [3] * 4


@on_ranks(2)
def test_evaluation_right_after_a_step_uses_the_weights_that_were_put_in() -> None:
    for scenario in (averages_after_a_step, momentum_teacher):
        assert scenario(LOSSLESS) == scenario(None)
    averages_after_a_step(QUANTIZED)
    check_small_updates_in_evaluation_are_differences()


def poisoned(config: SDP4BitConfig | None, *, by_overflow: bool) -> list[float]:
    """A loop steps with weights that are not finite when they are gathered, rewinds, and goes on."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.float16 if by_overflow else torch.bfloat16, reduce_dtype=torch.float32
    )
    run = Run(build(policy=policy), config, topology=1, lr=1e-3).train(1)
    params: list[DTensor] = list(run.model.parameters())
    with torch.no_grad():
        backup = [param.detach().clone() for param in params]
        for param in params[:1] if by_overflow else params:
            if by_overflow:
                param.data.to_local().view(-1)[:1] = 7e4
            else:
                param.data.mul_(float("nan"))
    run.backward()
    for param in params:
        param.grad = torch.zeros_like(param)  # the optimizer's own state stays finite
    run.step()
    with torch.no_grad():
        for param, kept in zip(params, backup, strict=True):
            param.data.copy_(kept.data)
    run.train(2)
    if run.comm is not None:
        assert_replicas_identical(run.comm)
    return run.losses[2:]


@on_ranks(2)
def test_a_replica_recovers_from_values_that_are_not_finite() -> None:
    for by_overflow in (False, True):
        plain = poisoned(None, by_overflow=by_overflow)
        assert all(loss == loss for loss in plain)
        assert poisoned(LOSSLESS, by_overflow=by_overflow) == plain
        losses = poisoned(QUANTIZED, by_overflow=by_overflow)
        assert losses == pytest.approx(plain, rel=0.003), (losses, plain)


class HostOptimizer:
    """Steps copies of the weights and writes them back, as torchao's CPUOffloadOptimizer does."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = list(params)
        self._copies = [param.detach().clone().requires_grad_() for param in self._params]
        self._inner = torch.optim.AdamW(self._copies, lr=2e-3, fused=True)

    def step(self) -> None:
        for own, param in zip(self._copies, self._params, strict=True):
            own.grad = param.grad
        self._inner.step()
        with torch.no_grad():
            for own, param in zip(self._copies, self._params, strict=True):
                param.copy_(own)

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None


def with_host_optimizer(config: SDP4BitConfig | None) -> Run:
    run = Run(build(), config, topology=1)
    run.optimizer = HostOptimizer(run.model.parameters())  # type: ignore[assignment]
    return run.train(3)


@on_ranks(2)
def test_steps_are_counted_whatever_optimizer_makes_them() -> None:
    late = replace(QUANTIZED, gradients=GradientConfig(min_numel=0, start_step=2))
    run = with_host_optimizer(late)
    stats: dict[str, Any] = run.comm.stats()
    assert stats["steps"] == 3 and stats["sampled_step"] is not None
    assert {group["gradient_bits"] for group in run.comm.group_stats()} == {4}
    assert [comm.reductions for comm in run.comm.groups] == [1] * 4
    assert with_host_optimizer(LOSSLESS).finish() == with_host_optimizer(None).finish()


def loaded_on_one_rank(config: SDP4BitConfig | None, moment: str) -> list[float]:
    """After a step, or a forward; or only a block, after an evaluation that left the root unsharded."""
    run = Run(build(), config, topology=1).train(1)
    if moment != "after a step":
        run.evaluate()
    if moment == "after a forward":
        run.model.reshard()
    if dist.get_rank() == 1:
        module = run.model.blocks[0] if moment == "a part" else run.model
        module.load_state_dict({name: value.detach() * 0.9 for name, value in module.state_dict().items()})
    return run.train(1).finish()


@on_ranks(2)
def test_a_load_on_one_rank_alone_is_followed_by_all() -> None:
    for moment in ("after a step", "after a forward", "a part"):
        assert loaded_on_one_rank(LOSSLESS, moment) == loaded_on_one_rank(None, moment)


@on_ranks(2)
def test_a_state_dict_that_is_kept_is_looked_at_once_per_forward() -> None:
    run = Run(build(), LOSSLESS, topology=1).train(1)
    kept = run.model.state_dict()
    for _ in range(20):  # a loop that only saves holds on to nothing
        copy.copy(run.model.state_dict())
    handed_out = run.comm._state.aliases._kept.values()
    assert max(len(each) for each in handed_out) <= 2
    run.train(1)
    versions = mock.Mock(side_effect=observers.tensor_version)
    with mock.patch.object(observers, "tensor_version", versions):
        run.evaluate()
    # Its tensors are asked twice each: whether they were written to, and what they are from now on.
    assert 0 < versions.call_count <= 2 * len(kept)


class Chain(nn.Module):
    """Blocks that take part by turns; the root has no parameters and so no group."""

    def __init__(self, paths: list[list[int]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self._paths = iter(paths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in next(self._paths):
            x = x + torch.tanh(self.blocks[index](x))
        return x


def along(paths: list[list[int]], config: SDP4BitConfig | None) -> list[float]:
    torch.manual_seed(0)
    model = Chain(paths)
    for block in model.blocks:
        fully_shard(block, mp_policy=POLICY)
    fully_shard(model, mp_policy=POLICY)
    if config is not None:
        quantize_communication(model, topology=1, config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in paths:
        loss = (model(torch.randn(4, 32, generator=generator)).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_a_step_reaches_blocks_whatever_path_the_last_forward_took() -> None:
    for paths in ([[0, 1, 2], [1, 2], [0, 1, 2], [0, 1, 2]], [[0, 1, 1, 2]] * 4):
        assert along(paths, LOSSLESS) == along(paths, None)


@on_ranks(2)
def test_a_poisoned_replica_that_was_saved_is_not_resumed() -> None:
    run = Run(build(), QUANTIZED, topology=1)
    backup = {name: value.detach().clone() for name, value in run.model.state_dict().items()}
    with torch.no_grad():
        for param in run.model.parameters():
            param.data.mul_(float("nan"))
    run.evaluate()
    run.model.reshard()
    with torch.no_grad():
        for name, param in run.model.named_parameters():
            param.data.copy_(backup[name].data)
    resumed = Run(build(), QUANTIZED, topology=1)
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.comm.load_state_dict(run.comm.state_dict())
    with pytest.warns(UserWarning, match="was not saved with these weights"):
        assert math.isfinite(resumed.evaluate())
