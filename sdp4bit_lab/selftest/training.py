"""Check that a small GPT trains as with plain FSDP2: without quantizers, with them, and with HSDP."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sdp4bit import (
    AuditConfig,
    GradientConfig,
    SDP4BitConfig,
    TelemetryConfig,
    WeightConfig,
    quantize_communication,
)
from sdp4bit.traffic import format_bytes
from sdp4bit_lab.common.ranks import gather_over_ranks
from sdp4bit_lab.selftest.check import ONE_RANK, CheckSkippedError, Context
from sdp4bit_lab.selftest.model import batches, loss_of, sharded_toy, topology_of

TOLERANCE = 0.003
"""Relative difference of a loss from plain FSDP2's. Rounding to 4 bits changes it by 0.0014 in 20 steps."""
GRADIENT_TOLERANCE = 0.3
"""Norm of the first gradient's error relative to the gradient. A 4-bit quantizer has an error of 0.12 on
normal values."""
NORM_TOLERANCE = math.sqrt(1 + GRADIENT_TOLERANCE**2) - 1
"""Relative difference of the gradient's norm, because HSDP's shards differ from FSDP2's. Assumes an error
orthogonal to the gradient."""
LEARNING_RATE = 1e-3
_WARM_UP = 3
"""First steps, which allocate buffers and may synchronize."""
_QUANTIZED = SDP4BitConfig(
    gradients=GradientConfig(min_numel=0, inside_one_node=True),
    telemetry=TelemetryConfig(interval=1),
    audit=AuditConfig(interval=1),
)
_LOSSLESS = SDP4BitConfig(weights=WeightConfig(bits=None), gradients=None)
_IDENTITY = replace(
    _LOSSLESS, gradients=GradientConfig(intra_bits=None, inter_bits=None, hadamard=False, min_numel=0)
)
"""Send gradients through the full path without quantizers."""


@dataclass(frozen=True, kw_only=True)
class _Trained:
    losses: list[float]
    gradient: Tensor
    """This rank's shard of the first step's gradient, in fp32."""
    step_seconds: float
    """Median after the warm-up."""
    stats: dict[str, Any]
    peak_bytes: int | None
    """Peak allocated memory; None on a CPU."""


def check_training(context: Context) -> dict[str, Any]:
    """Return losses, times and bytes after checking losses and gradients."""
    if context.ranks.world_size == 1:
        raise CheckSkippedError(ONE_RANK)
    context.say(f"      {context.config.steps} steps each with plain FSDP2, without quantizers, with sdp4bit")
    plain, lossless = _train(context, None), _train(context, _LOSSLESS)
    _require_losses(context, plain.losses, lossless.losses, how="sdp4bit without a quantizer", tolerance=0.0)
    size = context.ranks.world_size
    # Two addends give the same sum in either order. More are rounded in another order than FSDP2's.
    exact = 0.0 if size == 2 else size * torch.finfo(torch.float32).eps
    _require_gradient(context, plain, _train(context, _IDENTITY, steps=1), tolerance=exact)
    quantized = _train(context, _QUANTIZED)
    _require_gradient(context, plain, quantized, tolerance=GRADIENT_TOLERANCE)
    _require_losses(context, plain.losses, quantized.losses, how="sdp4bit")
    if context.is_cuda:
        # Without the audit and the measures, for which the host waits.
        _train(context, replace(_QUANTIZED, audit=None, telemetry=None), forbids_waiting=True)
    losses = {"plain": plain.losses, "sdp4bit": quantized.losses}
    topology = topology_of(context)
    per_node = topology if isinstance(topology, int) else context.ranks.local_world_size
    replicas = context.ranks.world_size // per_node
    if replicas > 1:
        hybrid = _train(context, _QUANTIZED, replicas=replicas)
        losses["HSDP, sdp4bit"] = hybrid.losses
        # Every replica has the whole gradient, so the sum over all ranks counts it once per replica.
        norm, hybrid_norm = _norm(plain.gradient), _norm(hybrid.gradient) / math.sqrt(replicas)
        context.require(
            abs(hybrid_norm - norm) <= NORM_TOLERANCE * norm,
            f"the norm of the first gradient is {hybrid_norm:.4f} with HSDP and sdp4bit and {norm:.4f} with "
            f"plain FSDP2: they differ by more than {100 * NORM_TOLERANCE:.1g} %",
            case="step 1",
        )
        _require_losses(context, plain.losses, hybrid.losses, how="HSDP and sdp4bit")
    total, ratio = quantized.stats["total"], quantized.stats["compression_ratio"]
    last = ", ".join(f"{name} {values[-1]:.4f}" for name, values in losses.items())
    context.say(f"      last losses: {last}")
    context.say(
        f"      {format_bytes(total['inter_bytes'])} inter-node, {ratio:.2f}x fewer than plain FSDP2; "
        "replicas identical after every step"
    )
    return {
        "losses": losses,
        "step_seconds": {"plain": plain.step_seconds, "sdp4bit": quantized.step_seconds},
        "bytes": total,
        "compression_ratio": ratio,
        "peak_bytes": {"plain": plain.peak_bytes, "sdp4bit": quantized.peak_bytes},
        "audits": context.config.steps,
    }


def check_removal(context: Context) -> dict[str, Any]:
    """Return the losses of runs that lose sdp4bit halfway, after comparing them with plain FSDP2's."""
    if context.ranks.world_size == 1:
        raise CheckSkippedError(ONE_RANK)
    half = (context.config.steps + 1) // 2
    plain = _train(context, None)
    # Plain FSDP2 continues from the weights that the library leaves, so every loss is the same.
    lossless = _train(context, _LOSSLESS, removed_at=half)
    _require_losses(context, plain.losses, lossless.losses, how="sdp4bit removed halfway", tolerance=0.0)
    quantized = _train(context, _QUANTIZED, removed_at=half)
    _require_losses(context, plain.losses, quantized.losses, how="4 bits, removed halfway")
    return {"removed_after": half, "losses": {"plain": plain.losses, "removed": quantized.losses}}


def _require_losses(
    context: Context,
    plain: Sequence[float],
    quantized: Sequence[float],
    *,
    how: str,
    tolerance: float = TOLERANCE,
) -> None:
    for step, (expected, loss) in enumerate(zip(plain, quantized, strict=True), start=1):
        context.require(
            abs(loss - expected) <= tolerance * expected,
            f"the loss of step {step} is {loss:.7g} with {how} and {expected:.7g} with plain FSDP2: "
            f"{100 * (loss / expected - 1):+.2g} %, more than {100 * tolerance:.1g} %",
            case=f"step {step}",
        )


def _require_gradient(context: Context, plain: _Trained, other: _Trained, *, tolerance: float) -> None:
    error, norm = _norm(other.gradient - plain.gradient), _norm(plain.gradient)
    context.require(
        error <= tolerance * norm,
        f"the first gradient differs from plain FSDP2's by {error / norm:.2g} of its norm, more than "
        f"{tolerance:.2g}",
        case="step 1",
    )


def _norm(shard: Tensor) -> float:
    """Return the norm of a sharded vector; a collective."""
    return math.sqrt(sum(gather_over_ranks(shard.double().square().sum().item(), what="norms")))


def _train(
    context: Context,
    config: SDP4BitConfig | None,
    *,
    steps: int | None = None,
    forbids_waiting: bool = False,
    replicas: int = 1,
    removed_at: int | None = None,
) -> _Trained:
    """Train under FSDP2, or HSDP if replicas > 1; quantized if `config` is given.

    Args:
        removed_at: step, counted from 0, before which sdp4bit is removed; default: the end.
    """
    model = sharded_toy(context, replicas=replicas)
    hooks = _hooks_of(model)
    handle = None
    if config is not None:
        handle = quantize_communication(model, topology=topology_of(context), config=config)
    if context.is_cuda:
        torch.cuda.reset_peak_memory_stats(context.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    losses, seconds, gradient = [], [], torch.empty(0)
    stats: dict[str, Any] = {}
    for step, batch in enumerate(
        batches(context, rank=context.ranks.rank, count=steps or context.config.steps)
    ):
        if handle is not None and step == removed_at:
            stats = dict(handle.stats())
            handle.remove()
            handle = None
            left = _hooks_of(model) - hooks
            context.require(not left, f"{left} hooks are left after remove()", case=f"before step {step + 1}")
        context.synchronize()
        start = time.perf_counter()
        with _no_waiting(context, forbids_waiting and step >= _WARM_UP):
            loss = loss_of(model, batch)
            loss.backward()
            if step == 0:
                shards = [cast(DTensor, parameter.grad).to_local() for parameter in model.parameters()]
                gradient = torch.cat([shard.flatten().float() for shard in shards])
            optimizer.step()
            optimizer.zero_grad()
        context.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.detach())
    if handle is not None:
        stats = dict(handle.stats())
        handle.remove()
    return _Trained(
        losses=[loss.item() for loss in losses],
        gradient=gradient,
        step_seconds=statistics.median(seconds[_WARM_UP:] or seconds),
        stats=stats,
        peak_bytes=torch.cuda.max_memory_allocated(context.device) if context.is_cuda else None,
    )


def _hooks_of(model: nn.Module) -> int:
    """Return the number of hooks of all modules before their forwards and after loads."""
    modules = model.modules()
    return sum(len(each._forward_pre_hooks) + len(each._load_state_dict_post_hooks) for each in modules)


@contextmanager
def _no_waiting(context: Context, is_forbidden: bool) -> Iterator[None]:
    """Make CUDA raise inside the block when the host waits for the device."""
    if not is_forbidden:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
