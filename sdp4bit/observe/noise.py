"""Noise of quantized gradients, over a few batches of a user's model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sdp4bit.collectives.errors import comm_error_context


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """Noise of gradients, the same on all ranks."""

    batches: int
    signal_to_noise: float | None
    """|g| / |Q - g| of the mean gradient g of all ranks and its quantized sum Q; None without an error, or if
    a gradient is not finite."""
    noise_scale: float | None
    """Batches whose mean gradient has as much noise as signal (arXiv 1812.06162); None for one batch, or if
    the noise hides the gradient."""

    def __str__(self) -> str:
        def shown(value: float | None) -> str:
            return "not known" if value is None else f"{value:.3g}"

        return (
            f"signal to noise {shown(self.signal_to_noise)}, noise scale {shown(self.noise_scale)} batches, "
            f"over {self.batches} batches"
        )


def gradient_noise(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    batches: Iterable[Any],
    *,
    full_precision: Callable[[], AbstractContextManager[None]],
    device: torch.device,
) -> GradientNoise:
    """Compare gradients with and without quantization; see `CommHandle.gradient_noise`."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(parameter.grad is not None for parameter in parameters):
        raise RuntimeError(
            "gradient_noise was called while the model has gradients: call it after optimizer.zero_grad()"
        )
    # Squared error, sum of the squared gradients, and square of their sum, over this rank's shards.
    error, squares = torch.zeros(2, dtype=torch.float64, device=device).unbind()
    total, count = list[Tensor](), 0
    for batch in batches:
        # Both passes draw the same numbers, for dropout.
        with torch.random.fork_rng([device] if device.type == "cuda" else []), full_precision():
            loss(batch).backward()
            exact = _taken(parameters)
        loss(batch).backward()
        error += _squared(torch._foreach_sub(_taken(parameters), exact))
        squares += _squared(exact)
        total = list(torch._foreach_add(total, exact)) if total else exact
        count += 1
    if not count:
        raise ValueError("gradient_noise needs at least one batch, got none")
    # Replicas count every value equally often, so ratios are those of the model.
    sums = torch.stack([error, squares, _squared(total)])
    with comm_error_context("squared norms of gradients"):
        dist.all_reduce(sums)
    return _ratios(sums.tolist(), count)


def _ratios(sums: Sequence[float], count: int) -> GradientNoise:
    error, squares, of_sum = sums
    is_known = math.isfinite(sum(sums)) and error > 0
    scale, of_mean = None, of_sum / count**2
    if math.isfinite(squares) and count > 1:
        variance = (squares - count * of_mean) / (count - 1)
        signal = of_mean - variance / count  # without the part of the noise in the mean
        scale = variance / signal if signal > 0 else None
    return GradientNoise(
        batches=count, signal_to_noise=(squares / error) ** 0.5 if is_known else None, noise_scale=scale
    )


def _taken(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return this rank's shards of the gradients in fp32, and clear them; zeros for missing ones."""
    found = list[Tensor]()
    for parameter in parameters:
        is_missing = parameter.grad is None  # on ranks that did not use the parameter
        shard = parameter if parameter.grad is None else parameter.grad
        local = shard.to_local() if isinstance(shard, DTensor) else shard
        found.append(torch.zeros_like(local, dtype=torch.float32) if is_missing else local.detach().float())
        parameter.grad = None
    return found


def _squared(values: Sequence[Tensor]) -> Tensor:
    # fp64, because squares of small gradients underflow in fp32.
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in values]
    return torch.stack(norms).square().sum()
