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
from torch.distributed import ProcessGroup
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


def batches_of(model: nn.Module, batches: Iterable[Any]) -> list[Any]:
    """Return the batches of a measurement.

    Raises:
        RuntimeError: the model has gradients, which the measurement would mix with its own.
        ValueError: there are no batches.
    """
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise RuntimeError(
            "gradient_noise was called while the model has gradients: call it after optimizer.zero_grad()"
        )
    given = list(batches)
    if not given:
        raise ValueError("gradient_noise needs at least one batch, got none")
    return given


def gradient_noise(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    batches: Sequence[Any],
    *,
    full_precision: Callable[[], AbstractContextManager[None]],
    device: torch.device | None,
    process_group: ProcessGroup | None,
) -> GradientNoise:
    """Compare gradients with and without quantization; see `CommHandle.gradient_noise`.

    Steps:
    1. Compute the gradients of all batches in full precision, and keep this rank's shards on the host.
    2. Compute them quantized, with the same random numbers, and add up squared differences.
    3. Sum over the ranks.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = device or parameters[0].device  # DDP knows none before the first backward
    numbers = _random_state(device)
    buffers = [buffer.clone() for buffer in model.buffers()]
    try:
        # 1. Switched once, because a switch costs a refresh of all weights.
        exact, states = list[list[Tensor]](), list[list[Tensor]]()
        with full_precision():
            for batch in batches:
                states.append(_random_state(device))
                loss(batch).backward()
                exact.append(_taken(parameters))
        # 2. Buffers such as running means are those of the first pass again.
        _restore(model, buffers)
        error, squares = torch.zeros(2, dtype=torch.float64).unbind()
        for batch, state, gradient in zip(batches, states, exact, strict=True):
            _set_random_state(state, device)
            loss(batch).backward()
            error += _squared(torch._foreach_sub(_taken(parameters), gradient))
            squares += _squared(gradient)
        total = exact[0]
        for gradient in exact[1:]:
            torch._foreach_add_(total, gradient)
    finally:
        # A caller that handles an exception continues with these.
        for parameter in parameters:
            parameter.grad = None
        _restore(model, buffers)
        _set_random_state(numbers, device)
    # 3. Replicas count every value equally often, so ratios are those of the model.
    sums = torch.stack([error, squares, _squared(total)]).to(device)
    with comm_error_context("squared norms of gradients"):
        dist.all_reduce(sums, group=process_group)
    return _ratios(sums.tolist(), len(batches))


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
    """Return copies of this rank's shards of the gradients, fp32 on the host, and clear the gradients."""
    found = list[Tensor]()
    for parameter in parameters:
        is_missing = parameter.grad is None  # on ranks that did not use the parameter
        shard = parameter if parameter.grad is None else parameter.grad
        local = (shard.to_local() if isinstance(shard, DTensor) else shard).detach()
        # A copy, because a gradient may be a view of DDP's bucket.
        found.append(torch.zeros(local.shape) if is_missing else local.to("cpu", torch.float32, copy=True))
        parameter.grad = None
    return found


def _squared(values: Sequence[Tensor]) -> Tensor:
    # fp64, because squares of small gradients underflow in fp32.
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in values]
    return torch.stack(norms).square().sum()


@torch.no_grad()
def _restore(model: nn.Module, buffers: Sequence[Tensor]) -> None:
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_random_state(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
