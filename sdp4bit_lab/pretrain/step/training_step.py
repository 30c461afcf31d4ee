"""What one optimizer step, and a validation, computes, in any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.model.tensor_parallel import IGNORED_TARGET
from sdp4bit_lab.pretrain.step.gradients import Gradients
from sdp4bit_lab.pretrain.step.optimizer import LossScale
from sdp4bit_lab.pretrain.step.parallelize import ShardedModel
from sdp4bit_lab.pretrain.step.pipeline import Batch, Pipeline
from sdp4bit_lab.pretrain.timers import Timers


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What an optimizer step has found out."""

    loss_sum: float
    """Sum of the losses of all tokens of the global batch; the same on all ranks."""
    tokens: float
    """Tokens of the global batch whose loss counts; the same on all ranks."""
    grad_norm: float
    """Norm of the gradient before clipping; the same on all ranks."""
    loss_scale: float | None
    """What the loss was multiplied by, with fp16."""
    skipped: bool
    """Whether the gradient was not finite and the weights have been left as they were, with fp16."""
    sums: list[float]
    """Of the further numbers, over all ranks."""
    maxima: list[float]
    """The largest of each of them."""


@dataclass(kw_only=True)
class TrainingStep:
    """Turns micro batches into an optimizer step: forward, backward, reduction, clipping, update."""

    model: ShardedModel
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale | None
    config: PretrainConfig
    timers: Timers

    def __post_init__(self) -> None:
        self._accumulation = self.config.micro_batches(self.model.data_parallel_size)
        self._gradients = Gradients(self.model)
        self._pipeline: Pipeline | None = None
        if self.model.layout.pipeline.size() > 1:
            self._pipeline = Pipeline(
                self.model,
                micro_batches=self._accumulation,
                micro_batch_size=self.config.micro_batch_size,
                sequence_length=self.config.sequence_length,
                stages=len(self.config.parallel.stages(self.config.model_shape.layers)),
            )

    def run(self, batches: Iterable[Batch], *, numbers: Callable[[], Sequence[float]] = tuple) -> StepOutcome:
        """Return what the step has found; the weights are updated, unless an fp16 gradient is not finite.

        The gradient is that of the mean over all tokens of the global batch whose target is not -100. Two
        collectives beside the model's own, and one wait of the host: it reads everything at once.

        Args:
            numbers: returns further numbers of this rank after the backward pass, to be put together.
        """
        layout, batches = self.model.layout, list(batches)
        tokens = self._count(batches)
        data = layout.data.get_group()
        with comm_error_context("sum of the number of tokens", group=data):
            dist.all_reduce(tokens, group=data)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        # FSDP2 averages over the data ranks; the weight makes a sum of it. In fp64, as scale may be large.
        weight = (self.model.data_parallel_size * scale / tokens.clamp(min=1)).float()

        self.model.train()
        with self.timers("forward-backward", level=1):
            loss_sum = self._forward_backward(batches, weight)
        with self.timers("clip-grad-norm", level=2):
            self._gradients.add_tied()
            further = torch.tensor([0.0, *numbers()], dtype=torch.float64, pin_memory=loss_sum.is_cuda)
            mine = further.to(loss_sum.device, non_blocking=True)
            if layout.reports_loss:
                mine[0] = loss_sum
            norm, rows = self._gradients.gather(mine)
            norm = norm / scale
            found = torch.cat([torch.stack([norm, tokens]), rows.sum(dim=0), rows.amax(dim=0)])
        # With fp16 the norm decides whether there is an update; otherwise the host reads behind it.
        read = None if self.loss_scale is None else found.tolist()
        skipped = read is not None and not math.isfinite(read[0])
        with self.timers("optimizer", level=1):
            if not skipped:
                self._gradients.clip(norm, largest=self.config.optimizer.clip_grad, divisor=scale)
                self.optimizer.step()
            self.optimizer.zero_grad()
        if self.loss_scale is not None:
            self.loss_scale.update(overflow=skipped)
        grad_norm, count, *both = found.tolist() if read is None else read
        sums, maxima = both[: mine.numel()], both[mine.numel() :]
        return StepOutcome(
            loss_sum=sums[0],
            tokens=max(1.0, count),
            grad_norm=grad_norm,
            loss_scale=None if self.loss_scale is None else scale,
            skipped=skipped,
            sums=sums[1:],
            maxima=maxima[1:],
        )

    def _forward_backward(self, batches: Sequence[Batch], weight: Tensor) -> Tensor:
        """Return the sum of this rank's losses; the weighted gradients are reduced."""
        if self._pipeline is not None:
            return self._pipeline.train(batches, weight=weight)
        (model,) = self.model.chunks
        loss_sum = torch.zeros_like(weight)
        for micro, (tokens, targets) in enumerate(batches):
            # Gradients of earlier micro batches stay on this rank and are reduced with the last one's.
            cast(FSDPModule, model).set_requires_gradient_sync(micro == len(batches) - 1)
            loss = model(tokens, targets).sum()
            (loss * weight).backward()
            loss_sum += loss.detach()
        return loss_sum

    @torch.no_grad()
    def validate(self, batches: Iterable[Batch]) -> tuple[float, float]:
        """Return the sum of the losses and their number; both 0 where another rank reports them."""
        self.model.train(False)
        loss_sum = tokens = torch.zeros((), dtype=torch.float64, device=self.model.layout.ranks.device)
        remaining = iter(batches)
        while group := list(islice(remaining, self._accumulation if self._pipeline else 1)):
            tokens = tokens + self._count(group)
            loss_sum = loss_sum + self._evaluate(group)
        self.model.reshard()
        if not self.model.layout.reports_loss:
            return 0.0, 0.0
        return loss_sum.item(), tokens.item()

    def _evaluate(self, batches: list[Batch]) -> Tensor:
        if self._pipeline is None:
            ((tokens, targets),) = batches
            loss: Tensor = self.model.chunks[0](tokens, targets)
            return loss.sum()
        # The schedule takes its number of micro batches; what is missing at the end has no loss.
        tokens, targets = batches[-1]
        nothing = (tokens, torch.full_like(targets, IGNORED_TARGET))
        return self._pipeline.evaluate(batches + [nothing] * (self._accumulation - len(batches)))

    def _count(self, batches: Sequence[Batch]) -> Tensor:
        """Return the number of targets that have a loss, fp64."""
        counts = [(targets != IGNORED_TARGET).sum() for _, targets in batches]
        return torch.stack(counts).sum().double()
