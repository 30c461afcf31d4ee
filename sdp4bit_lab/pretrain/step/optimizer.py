"""AdamW with Megatron's weight-decay groups, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sdp4bit_lab.pretrain.config.pretrain import LOWEST_SHARE, OptimizerConfig


def build_optimizer(
    parameters: Iterable[nn.Parameter], *, config: OptimizerConfig, learning_rate: float
) -> torch.optim.AdamW:
    """Return AdamW with weight decay for matrices and embeddings, but not for biases and norms."""
    # A fused update cannot mix parameters of several meshes, as in tensor parallelism.
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": config.weight_decay if decays else 0.0}
            for (decays, _), members in sorted(groups.items(), key=lambda item: not item[0][0])
        ],
        lr=learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate_at(
    step: int, *, config: OptimizerConfig, peak: float, warmup_steps: int, steps: int
) -> float:
    """Return the learning rate of a step, counted from 0.

    Linear warm-up to the peak, cosine or linear decay to the minimum at the last decay step, then constant.
    """
    decay_steps = config.decay_steps or steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if config.decay_style == "constant":
        return peak
    lowest = peak * LOWEST_SHARE if config.min_lr is None else config.min_lr
    progress = min(1.0, (step + 1 - warmup_steps) / max(1, decay_steps - warmup_steps))
    left = 1 - progress if config.decay_style == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return lowest + (peak - lowest) * left


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of the optimizer's next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
