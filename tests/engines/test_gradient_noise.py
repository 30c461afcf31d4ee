"""`CommHandle.gradient_noise`, against gradients that the test computes itself.

Layer: real processes over gloo.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import eq
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sdp4bit import AlertConfig, GradientConfig, SDP4BitConfig, TelemetryConfig
from tests.engines.ddp.test_hook import DDPRun
from tests.engines.fsdp2.test_hybrid import HybridRun
from tests.ranks import on_ranks
from tests.toy import Run, batches, build, gradient_of, loss_of

CONFIG = SDP4BitConfig(gradients=GradientConfig(min_numel=0, inside_one_node=True))
EXACT = replace(CONFIG, gradients=replace(CONFIG.gradients, intra_bits=None, inter_bits=None, hadamard=False))


def measured_batches(count: int) -> list[Any]:
    data = batches(seed=7)
    return [next(data) for _ in range(count)]


def gradients(model: nn.Module, given: Sequence[Any]) -> list[Tensor]:
    found = []
    for batch in given:
        model.zero_grad()
        loss_of(model, batch).backward()
        found.append(gradient_of(model).double())
    model.zero_grad()
    return found


def squared(values: Tensor) -> float:
    """|values|^2 of the shards of all ranks."""
    total = values.square().sum()
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize("kind", ["FSDP2", "HSDP", "DDP"])
@on_ranks(4, timeout=300)
def test_noise_is_that_of_the_gradients(kind: str) -> None:
    run: Any = {"FSDP2": lambda: Run(build(), CONFIG), "HSDP": lambda: HybridRun(CONFIG)}.get(
        kind, lambda: DDPRun(CONFIG, topology=2)
    )()
    model, comm = (run.ddp, run.state) if kind == "DDP" else (run.model, run.comm)
    given = measured_batches(3)
    for _ in range(2):  # DDP rebuilds its buckets after the first backward
        loss_of(model, given[0]).backward()
        model.zero_grad()
    with comm.full_precision():
        exact = gradients(model, given)
    received = gradients(model, given)
    found = comm.gradient_noise(model, partial(loss_of, model), iter(given))

    noise = sum(squared(one - other) for one, other in zip(received, exact, strict=True))
    mean = sum(exact) / 3
    variance = sum(squared(each - mean) for each in exact) / 2
    signal = squared(mean) - variance / 3
    assert found.batches == 3
    # Other rounding bits were drawn: a different sample of the same noise.
    assert found.signal_to_noise == pytest.approx(math.sqrt(sum(map(squared, exact)) / noise), rel=0.1)
    assert found.noise_scale == (None if signal <= 0 else pytest.approx(variance / signal, rel=1e-3))
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, found)
    assert all(one == found for one in every)
    assert all(parameter.grad is None for parameter in model.parameters())


class Measured:
    """A loss that draws random numbers and counts its calls in a buffer, as dropout and BatchNorm do."""

    def __init__(self, model: nn.Module) -> None:
        model.register_buffer("calls", torch.zeros(()))
        self._model, self.calls_left = model, 0

    def __call__(self, batch: Any) -> Tensor:
        self.calls_left -= 1
        self._model.calls += 1  # type: ignore[operator]
        loss = loss_of(self._model, batch) * (1 + torch.rand(()))
        if self.calls_left == 0:
            loss.backward()
            raise KeyError("of the loss")
        return loss


@pytest.mark.parametrize("kind", ["FSDP2", "DDP"])
@on_ranks(4, timeout=300)
def test_training_continues_as_without_measurements(kind: str) -> None:
    """Also after an exception in the loss: in its second call in full precision, and quantized."""
    ends = []
    config = replace(CONFIG, telemetry=TelemetryConfig(interval=1), alerts=AlertConfig(nonfinite_groups=0))
    for is_measured in (False, True):
        run: Any = DDPRun(config, topology=2) if kind == "DDP" else Run(build(), config)
        model, comm = (run.ddp, run.state) if kind == "DDP" else (run.model, run.comm)
        loss, stepped = Measured(model), list[int]()
        comm._state.on_step(stepped.append)
        torch.manual_seed(1)
        run.train(2)
        found: list[Any] = []
        for loss.calls_left in (2, 0, 5):
            if is_measured and loss.calls_left:
                with pytest.raises(KeyError, match="of the loss"):
                    comm.gradient_noise(model, loss, measured_batches(3))
            elif is_measured:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", UserWarning)
                    comm.gradient_noise(model, loss, measured_batches(4))
            assert all(parameter.grad is None for parameter in model.parameters())
            run.train(1)
            stats = comm.stats()
            last = stats["last_step"]
            if kind == "FSDP2":  # a step's bytes are those of the forward behind it, which sends rows again
                for name in ("inter_bytes", "intra_bytes", "padding_bytes", "collectives"):
                    del last[name]
            found += [last, stats["steps"], torch.rand(()).item()]
        weights = [each.sum().item() for each in model.state_dict().values()]
        ends.append((run.losses, weights, *found, stepped, model.calls.item(), comm.alerts()))
        comm.remove()
    assert all(map(eq, *ends)), [pair for pair in zip(*ends, strict=True) if pair[0] != pair[1]]


@on_ranks(2, timeout=300)
def test_a_gradient_that_is_a_view_of_ddp_s_bucket() -> None:
    found = []
    for is_view in (False, True):
        run = DDPRun(CONFIG, topology=1, gradient_as_bucket_view=is_view)
        found.append(run.state.gradient_noise(run.ddp, partial(loss_of, run.ddp), measured_batches(2)))
    assert found[0] == found[1] and found[0].signal_to_noise is not None


@on_ranks(4, timeout=300)
def test_more_bits_have_less_noise_and_none_without_a_quantizer() -> None:
    def loss(batch: Any) -> Tensor:
        return loss_of(run.model, batch) * (1 + torch.rand(()))  # as if with dropout

    found = []
    for config in (CONFIG, replace(CONFIG, gradients=replace(CONFIG.gradients, inter_bits=8)), EXACT):
        run = Run(build(), config)
        torch.manual_seed(1)
        found.append(run.comm.gradient_noise(run.model, loss, measured_batches(1)))
    four, eight, exact = (each.signal_to_noise or math.inf for each in found)
    assert 4 * four < eight and exact > 1e4
    assert found[0].noise_scale is None  # one batch
    assert str(found[0]).startswith(f"signal to noise {four:.3g}, noise scale not known batches")


@on_ranks(2, timeout=300)
def test_mistakes_and_values_that_are_not_finite() -> None:
    run = Run(build(), CONFIG, topology=1)

    def measure(given: Any, factor: float = 1.0) -> Any:
        return run.comm.gradient_noise(run.model, lambda batch: factor * loss_of(run.model, batch), given)

    with pytest.raises(ValueError, match="at least one batch"):
        measure([])
    found = measure(measured_batches(2), math.nan if dist.get_rank() else 1.0)
    assert (found.signal_to_noise, found.noise_scale) == (None, None)
    run.backward()
    with pytest.raises(RuntimeError, match=r"after optimizer.zero_grad\(\)"):
        measure(measured_batches(1))
    run.step()
    with run.comm.full_precision(), pytest.raises(RuntimeError, match=r"inside full_precision\(\)"):
        measure(measured_batches(1))
    assert measure(measured_batches(1)).batches == 1
