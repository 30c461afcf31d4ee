"""Twenty steps of a small GPT: plain FSDP2, without quantizers, with them, and with a replica per node."""

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
    CommHandle,
    GradientConfig,
    SDP4BitConfig,
    TelemetryConfig,
    WeightConfig,
    quantize_communication,
)
from sdp4bit.traffic import format_bytes
from sdp4bit_lab.common.ranks import gather_over_ranks
from sdp4bit_lab.plan.memory import memory_per_rank
from sdp4bit_lab.plan.model import gpt_groups
from sdp4bit_lab.plan.traffic import RankGrid, group_traffic
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.pretrain.step.optimizer import build_optimizer
from sdp4bit_lab.pretrain.step.parallelize import lay_out
from sdp4bit_lab.pretrain.step.simulated_model import build_simulated_model
from sdp4bit_lab.pretrain.step.simulated_step import SimulatedTrainingStep
from sdp4bit_lab.selftest.check import CheckFailedError, CheckSkippedError, Context
from sdp4bit_lab.selftest.model import batches, loss_of, sharded_toy, topology_of, toy_config

TOLERANCE = 0.003
"""Of a loss, relative to plain FSDP2's. Rounding to 4 bits changes it by 0.0014 in 20 steps."""
GRADIENT_TOLERANCE = 0.3
"""Of the first gradient, by the norm of the difference. A quantizer of 4 bits has an error of 0.12 on
bell-shaped values (docs/numerics.md)."""
NORM_TOLERANCE = math.sqrt(1 + GRADIENT_TOLERANCE**2) - 1
"""Of the gradient's norm, where ranks hold other parts of it: the error is at right angles to it."""
LEARNING_RATE = 1e-3
_UNWATCHED = 3
"""First steps, in which things are set up and the host may wait."""
_QUANTIZED = SDP4BitConfig(
    gradients=GradientConfig(min_numel=0, inside_one_node=True),
    telemetry=TelemetryConfig(interval=1),
    audit=AuditConfig(interval=1),
)
_LOSSLESS = SDP4BitConfig(weights=WeightConfig(bits=None), gradients=None)
_IDENTITY = replace(
    _LOSSLESS, gradients=GradientConfig(intra_bits=None, inter_bits=None, hadamard=False, min_numel=0)
)
"""Gradients take the whole path, without quantizers."""


@dataclass(frozen=True, kw_only=True)
class _Trained:
    losses: list[float]
    gradient: Tensor
    """This rank's part of the first step's, in fp32."""
    step_seconds: float
    """Median over the steps but the first few."""
    stats: dict[str, Any]
    peak_bytes: int | None
    """Largest memory that was in use; None on a CPU."""


def check_training(context: Context) -> dict[str, Any]:
    """Return losses, times and bytes, once the losses are as they must be."""
    if context.simulated_ranks is not None:
        return _check_simulated(context)
    if context.ranks.world_size == 1:
        raise CheckSkippedError("one rank exchanges nothing: start several, or give --simulated-ranks")
    plain = _train(context, None)
    lossless = _train(context, _LOSSLESS)
    failure = None
    if lossless.losses != plain.losses:
        failure = CheckFailedError(
            "without a quantizer, losses are not those of plain FSDP2 bit for bit: "
            + _first_difference(plain, lossless),
            case="weights in replicas of full precision",
        )
    context.fail_together(failure)
    size = context.ranks.world_size
    identity = _train(context, _IDENTITY, steps=1)
    # Two addends have one sum; more are rounded at every addition.
    exact = 0.0 if size == 2 else size * torch.finfo(torch.float32).eps
    context.fail_together(_wrong_gradient(plain, identity, how="without a quantizer", tolerance=exact))
    quantized = _train(context, _QUANTIZED)
    context.fail_together(_wrong_gradient(plain, quantized, how="with sdp4bit", tolerance=GRADIENT_TOLERANCE))
    context.fail_together(_too_different(plain.losses, quantized.losses))
    if context.is_cuda:
        _train(context, replace(_QUANTIZED, audit=None), forbids_waiting=True)
    losses = {"plain": plain.losses, "sdp4bit": quantized.losses}
    replicas = _grid(context).nodes
    if replicas > 1:
        hybrid = _train(context, _QUANTIZED, replicas=replicas)
        losses["HSDP, sdp4bit"] = hybrid.losses
        norms = _total_norm(plain.gradient), _total_norm(hybrid.gradient) / math.sqrt(replicas)
        context.fail_together(_wrong_norm(*norms))
        context.fail_together(_too_different(plain.losses, losses["HSDP, sdp4bit"], how="HSDP and sdp4bit"))
    alone = _seconds_alone(context)
    total = quantized.stats["total"]
    findings = {
        "losses": losses,
        "step_seconds": {"alone": alone, "plain": plain.step_seconds, "sdp4bit": quantized.step_seconds},
        "bytes": total,
        "compression_ratio": quantized.stats["compression_ratio"],
        "peak_bytes": {"plain": plain.peak_bytes, "sdp4bit": quantized.peak_bytes},
        "planned_bytes": _planned_bytes(context),
        "audits": context.config.steps,
    }
    last = ", ".join(f"{name} {values[-1]:.4f}" for name, values in losses.items())
    context.say(f"      losses after {context.config.steps} steps: {last}")
    context.say(
        f"      {format_bytes(total['inter_bytes'])} inter-node in all, "
        f"{quantized.stats['compression_ratio']:.2f}x fewer; replicas equal on all ranks after every step"
    )
    return findings


def _too_different(
    plain: Sequence[float], quantized: Sequence[float], *, how: str = "sdp4bit"
) -> CheckFailedError | None:
    for step, (expected, found) in enumerate(zip(plain, quantized, strict=True), start=1):
        if not abs(found - expected) <= TOLERANCE * expected:
            return CheckFailedError(
                f"the loss of step {step} is {found:.4f} with {how} and {expected:.4f} with plain FSDP2: "
                f"{100 * (found / expected - 1):+.1f} %, more than {100 * TOLERANCE:.0f} %",
                case=f"step {step}",
            )
    return None


def _wrong_gradient(
    plain: _Trained, found: _Trained, *, how: str, tolerance: float
) -> CheckFailedError | None:
    error, norm = _total_norm(found.gradient - plain.gradient), _total_norm(plain.gradient)
    if error <= tolerance * norm:
        return None
    return CheckFailedError(
        f"the first gradient {how} differs from that of plain FSDP2 by {error / norm:.2g} of its norm, more "
        f"than {tolerance:.2g}",
        case="step 1",
    )


def _wrong_norm(plain: float, hybrid: float) -> CheckFailedError | None:
    if abs(hybrid - plain) <= NORM_TOLERANCE * plain:
        return None
    return CheckFailedError(
        f"the first gradient's norm is {hybrid:.4f} with HSDP and sdp4bit and {plain:.4f} with plain FSDP2: "
        f"more than {100 * NORM_TOLERANCE:.0f} % apart",
        case="step 1",
    )


def _total_norm(part: Tensor) -> float:
    """Return the norm of a vector of which every rank has a part; called by all."""
    return math.sqrt(sum(gather_over_ranks(part.double().square().sum().item(), what="norms")))


def _planned_bytes(context: Context) -> int:
    """Return what the planner reckons with for the quantized run, activations left out."""
    config, grid = toy_config(context), _grid(context)
    groups = gpt_groups(config.model_shape)
    traffic = [group_traffic(group, grid=grid, config=_QUANTIZED) for group in groups]
    return sum(memory_per_rank(traffic, grid=grid, accumulation=1).values())


def _grid(context: Context) -> RankGrid:
    topology = topology_of(context, context.ranks)
    per_node = topology if isinstance(topology, int) else context.ranks.local_world_size
    return RankGrid(nodes=context.ranks.world_size // per_node, ranks_per_node=per_node)


def _first_difference(one: _Trained, other: _Trained) -> str:
    pairs = enumerate(zip(one.losses, other.losses, strict=True), start=1)
    step, (left, right) = next((step, pair) for step, pair in pairs if pair[0] != pair[1])
    return f"step {step} has {right!r} instead of {left!r}"


def _train(
    context: Context,
    config: SDP4BitConfig | None,
    *,
    steps: int | None = None,
    forbids_waiting: bool = False,
    replicas: int = 1,
) -> _Trained:
    ranks = context.ranks
    model = sharded_toy(context, ranks, replicas=replicas)
    handle: CommHandle | None = None
    if config is not None:
        handle = quantize_communication(model, topology=topology_of(context, ranks), config=config)
    if context.is_cuda:
        torch.cuda.reset_peak_memory_stats(context.device)
    losses, seconds = [], []
    data = batches(context, rank=ranks.rank, count=steps or context.config.steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    gradients: list[Tensor] = []

    def keep_first(*_: object) -> None:
        if not gradients:
            gradients.append(_local_gradient(model))

    optimizer.register_step_pre_hook(keep_first)
    for step, batch in enumerate(data):
        context.synchronize()
        start = time.perf_counter()
        with _no_waiting(forbids_waiting and step >= _UNWATCHED):
            losses.append(_step(model, optimizer, batch))
        context.synchronize()
        seconds.append(time.perf_counter() - start)
    stats: dict[str, Any] = {}
    if handle is not None:
        stats = dict(handle.stats())
        handle.remove()
    return _Trained(
        losses=[loss.item() for loss in losses],
        gradient=gradients[0],
        step_seconds=_usual(seconds),
        stats=stats,
        peak_bytes=torch.cuda.max_memory_allocated(context.device) if context.is_cuda else None,
    )


def _local_gradient(model: nn.Module) -> Tensor:
    parts = [cast(DTensor, param.grad).to_local() for param in model.parameters() if param.grad is not None]
    return torch.cat([part.flatten().float() for part in parts])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@contextmanager
def _no_waiting(is_forbidden: bool) -> Iterator[None]:
    """Let CUDA raise inside the block if the host waits for the device."""
    if not is_forbidden:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _seconds_alone(context: Context) -> float:
    """Return the time of a step of the whole model on this rank, without FSDP2 and exchanges."""
    config = toy_config(context)
    model = GPT(config.model_shape, compute_dtype=sharded_toy(context, context.ranks).compute_dtype)
    model.reset_parameters(seed=config.seed)
    model.to(context.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    seconds = []
    for batch in batches(context, rank=context.ranks.rank, count=context.config.steps):
        context.synchronize()
        start = time.perf_counter()
        _step(model, optimizer, batch)
        context.synchronize()
        seconds.append(time.perf_counter() - start)
    return _usual(seconds)


def _usual(seconds: Sequence[float]) -> float:
    return statistics.median(seconds[_UNWATCHED:] or seconds)


def _check_simulated(context: Context) -> dict[str, Any]:
    """Train as many ranks would, one after another, with the kernels of this device and without transfers."""
    plain, quantized = (_train_simulated(context, strategy) for strategy in ("baseline", "sdp4bit"))
    context.fail_together(_too_different(plain, quantized))
    context.say(
        f"      losses of plain FSDP2 and sdp4bit after {context.config.steps} steps of "
        f"{context.simulated_ranks} simulated ranks: {plain[-1]:.4f} and {quantized[-1]:.4f}"
    )
    return {"losses": {"plain": plain, "sdp4bit": quantized}, "simulated_ranks": context.simulated_ranks}


def _train_simulated(context: Context, strategy: Any) -> list[float]:
    size = context.simulated_ranks
    assert size is not None
    per_node = context.config.parallel.ranks_per_node
    config: PretrainConfig = replace(
        toy_config(context),
        strategy=strategy,
        parallel=ParallelConfig(simulated_ranks=size, ranks_per_node=per_node),
    )
    model = build_simulated_model(config, layout=lay_out(config, ranks=context.ranks))
    optimizer = build_optimizer(model.parameters(), config=config.optimizer, learning_rate=LEARNING_RATE)
    step = SimulatedTrainingStep(model=model, optimizer=optimizer, config=config)
    of_ranks = [batches(context, rank=rank, count=context.config.steps) for rank in range(size)]
    losses = []
    for number in range(context.config.steps):
        outcome = step.run([data[number] for data in of_ranks])
        losses.append(outcome.loss_sum / outcome.tokens)
    model.communication.remove()
    return losses
