"""Notices the steps of torch optimizers over an attached model."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from sdp4bit.engines.fsdp2.comm_state import CommState


def watch_optimizers(state: CommState) -> RemovableHandle:
    """Note the steps of every torch optimizer; the hook does not keep the model alive.

    `torch.compile(optimizer.step)` calls it as it is, between two graphs: compiled, it would run once,
    while it is traced.
    """
    reference = weakref.ref(state)

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        alive = reference()
        if alive is not None and not _only_creates_state(optimizer, alive):
            alive.mark_changed(p for group in optimizer.param_groups for p in group["params"])

    return register_optimizer_step_post_hook(torch.compiler.disable(after_step))


def _only_creates_state(optimizer: torch.optim.Optimizer, state: CommState) -> bool:
    """Whether a step cannot change weights: no gradients from a reduction, a learning rate of zero.

    torch.distributed.checkpoint takes such steps to create optimizer states; with stateless optimizers, at
    every save.
    """
    rates = [group.get("lr") for group in optimizer.param_groups]
    on_host = [float(r) for r in rates if isinstance(r, float | int | torch.Tensor) and not _on_device(r)]
    return state.reductions_since_step == 0 and on_host == [0.0] * len(rates)


def _on_device(rate: float | torch.Tensor) -> bool:
    return isinstance(rate, torch.Tensor) and rate.device.type != "cpu"
