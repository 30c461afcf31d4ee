"""AdamW with Megatron's decay groups, the learning-rate schedule, and the scale of the loss for fp16."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sdp4bit_lab.pretrain.config.pretrain import LOWEST_SHARE, OptimizerConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig

SCALE_GROWTH = 2.0
SCALE_BACKOFF = 0.5


def build_optimizer(
    parameters: Iterable[nn.Parameter], *, config: OptimizerConfig, learning_rate: float
) -> torch.optim.AdamW:
    """Return AdamW over the parameters: matrices and embeddings decay, biases and norms do not."""
    # One fused update cannot mix parameters of several meshes, as tensor parallelism makes them.
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
    """Return the learning rate of a step (counted from 0) of a run of `steps`.

    Linear over the warm-up, which ends at the peak; then half a cosine, or a line, to the smallest rate at
    the last decay step; constant afterwards.
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
    """Set the rate of the next step of the optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


class LossScale:
    """The factor of the loss for fp16, whose gradients are too small or too large without (Megatron's rules).

    It is doubled after a window of good steps and halved after overflows. A Stateful.

    Every rank has the same: it depends only on the norm of the gradient, which all ranks know alike.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self.value = config.loss_scale or config.initial_loss_scale
        """What the loss is multiplied by."""
        self.skipped = 0
        """Steps that changed no weights, because the gradient was not finite."""
        self._good_steps = 0
        self._overflows_left = config.hysteresis

    def update(self, *, overflow: bool) -> None:
        """Adapt the scale for the next step.

        As in Megatron, overflows count towards the hysteresis until the scale grows: once it is used up, each
        further one halves the scale.
        """
        self.skipped += int(overflow)
        if self._config.loss_scale is not None:
            return
        if overflow:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.value = max(self.value * SCALE_BACKOFF, self._config.min_loss_scale)
            return
        self._good_steps += 1
        if self._good_steps == self._config.loss_scale_window:
            self._good_steps = 0
            self._overflows_left = self._config.hysteresis
            self.value *= SCALE_GROWTH

    def state_dict(self) -> dict[str, float]:
        """Return what a bit-exact resume needs: plain numbers."""
        return {
            "value": self.value,
            "skipped": self.skipped,
            "good_steps": self._good_steps,
            "overflows_left": self._overflows_left,
        }

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Continue from a state; a scale that is given as an option stays what it is."""
        if self._config.loss_scale is None:
            self.value = float(state_dict["value"])
        self.skipped = int(state_dict["skipped"])
        self._good_steps = int(state_dict["good_steps"])
        self._overflows_left = int(state_dict["overflows_left"])
