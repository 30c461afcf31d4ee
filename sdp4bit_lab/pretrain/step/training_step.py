"""Compute one optimizer step or validation, for any layout."""

from __future__ import annotations

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
from sdp4bit_lab.pretrain.step.parallelize import ShardedModel
from sdp4bit_lab.pretrain.step.pipeline import Batch, Pipeline


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """Result of an optimizer step; identical on all ranks."""

    loss_sum: float
    """Summed loss over the tokens of the global batch."""
    tokens: float
    """Tokens of the global batch whose loss counts."""
    grad_norm: float
    """Gradient norm before clipping."""
    sums: list[float]
    """Sums of the further numbers over all ranks."""
    maxima: list[float]
    """Maxima of the further numbers over all ranks."""


@dataclass(kw_only=True)
class TrainingStep:
    """Turn micro batches into an optimizer step: forward, backward, reduction, clipping, update."""

    model: ShardedModel
    optimizer: torch.optim.Optimizer
    config: PretrainConfig

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
        """Run one optimizer step.

        The loss is the mean over all tokens of the global batch whose target is not -100. Adds two
        collectives to the model's own, and one host synchronization that reads everything.

        Args:
            numbers: returns further numbers of this rank after backward, to be combined over ranks.
        """
        layout, batches = self.model.layout, list(batches)
        tokens = self._count(batches)
        data = layout.data.get_group()
        with comm_error_context("sum of the number of tokens", group=data):
            dist.all_reduce(tokens, group=data)
        # FSDP2 averages over the data ranks; the weight turns that into a sum.
        weight = (self.model.data_parallel_size / tokens.clamp(min=1)).float()

        self.model.train()
        loss_sum = self._forward_backward(batches, weight)
        self._gradients.add_tied()
        local = torch.tensor([0.0, *numbers()], dtype=torch.float64, pin_memory=loss_sum.is_cuda)
        local = local.to(loss_sum.device, non_blocking=True)
        if layout.reports_loss:
            local[0] = loss_sum
        norm, rows = self._gradients.gather(local)
        results = torch.cat([torch.stack([norm, tokens]), rows.sum(dim=0), rows.amax(dim=0)])
        self._gradients.clip(norm, largest=self.config.optimizer.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # The only host synchronization, after all work has been queued.
        grad_norm, count, *both = results.tolist()
        sums, maxima = both[: local.numel()], both[local.numel() :]
        return StepOutcome(
            loss_sum=sums[0], tokens=max(1.0, count), grad_norm=grad_norm, sums=sums[1:], maxima=maxima[1:]
        )

    def _forward_backward(self, batches: Sequence[Batch], weight: Tensor) -> Tensor:
        """Return this rank's summed loss; reduce the weighted gradients."""
        if self._pipeline is not None:
            return self._pipeline.train(batches, weight=weight)
        (model,) = self.model.chunks
        loss_sum = torch.zeros_like(weight)
        for micro, (tokens, targets) in enumerate(batches):
            # Earlier micro batches accumulate locally and are reduced with the last one.
            cast(FSDPModule, model).set_requires_gradient_sync(micro == len(batches) - 1)
            loss = model(tokens, targets).sum()
            (loss * weight).backward()
            loss_sum += loss.detach()
        return loss_sum

    @torch.no_grad()
    def validate(self, batches: Iterable[Batch]) -> tuple[list[float], list[float]]:
        """Return the summed loss and the number of tokens of each batch; 0 if another rank reports them.

        With a pipeline, the micro batches of a step are one batch.
        """
        self.model.train(False)
        losses, tokens = [], []
        remaining = iter(batches)
        while group := list(islice(remaining, self._accumulation if self._pipeline else 1)):
            tokens.append(self._count(group))
            losses.append(self._evaluate(group).double())
        self.model.reshard()
        if not self.model.layout.reports_loss:
            return [0.0] * len(losses), [0.0] * len(losses)
        return torch.stack(losses).tolist(), torch.stack(tokens).tolist()

    def _evaluate(self, batches: list[Batch]) -> Tensor:
        if self._pipeline is None:
            ((tokens, targets),) = batches
            loss: Tensor = self.model.chunks[0](tokens, targets)
            return loss.sum()
        # The schedule needs a fixed number of micro batches; pad with batches without a loss.
        tokens, targets = batches[-1]
        nothing = (tokens, torch.full_like(targets, IGNORED_TARGET))
        return self._pipeline.evaluate(batches + [nothing] * (self._accumulation - len(batches)))

    def _count(self, batches: Sequence[Batch]) -> Tensor:
        counts = [(targets != IGNORED_TARGET).sum() for _, targets in batches]
        return torch.stack(counts).sum().double()
