"""AdamW with Megatron's weight-decay groups, and its learning rate."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sdp4bit_lab.pretrain.config.pretrain import OptimizerConfig


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


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of the optimizer's next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
