"""Optimizer step of simulated ranks: forwards and backwards in turn, then one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from sdp4bit_lab.pretrain.step.gradients import Gradients
from sdp4bit_lab.pretrain.step.pipeline import Batch
from sdp4bit_lab.pretrain.step.simulated_model import SimulatedModel
from sdp4bit_lab.pretrain.step.training_step import TrainingStep


class SimulatedGradients(Gradients):
    """Reduced gradients of all simulated ranks."""

    def __init__(self, model: SimulatedModel) -> None:
        super().__init__(model)
        self._ranks = model.data_parallel_size

    def _squared_norms(self) -> list[Tensor]:
        """Return one squared norm per simulated rank, of its chunks."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        squares = []
        for rank in range(self._ranks):
            # Views of each rank's chunks, so that squares are added in the order of a real rank.
            chunks = [_chunk(gradient, rank=rank, ranks=self._ranks) for gradient in gradients]
            squares.append(torch.nn.utils.get_total_norm(chunks).to(self._device).double().square())
        return squares


def _chunk(tensor: Tensor, *, rank: int, ranks: int) -> Tensor:
    """Return the rows of a tensor that FSDP2 gives a rank, possibly none."""
    size = -(-tensor.shape[0] // ranks)
    return tensor[min(rank * size, tensor.shape[0]) :][:size]


_FIRST_MICRO_BATCH_IN_FP32 = hasattr(FSDPParam, "unsharded_grad_dtype")
"""Whether FSDP2 (since torch 2.15) lets autograd create gradients that it accumulates in fp32.

Then the uses of a tied weight are summed in fp32, too.
"""


@dataclass(kw_only=True)
class SimulatedTrainingStep(TrainingStep):
    """Turn the micro batches of all simulated ranks, rank by rank, into an optimizer step."""

    model: SimulatedModel

    def __post_init__(self) -> None:
        super().__post_init__()
        self._gradients = SimulatedGradients(self.model)
        self._evaluated = 0
        self.optimizer.register_step_post_hook(lambda *_: self.model.communication.mark_step())

    def _forward_backward(self, batches: Sequence[Batch], weight: Tensor) -> Tensor:
        model, ranks = self.model, self.model.data_parallel_size
        micro_batches = len(batches) // ranks
        total = torch.zeros_like(weight, dtype=torch.float64)
        for rank in range(ranks):
            own = batches[rank * micro_batches : (rank + 1) * micro_batches]
            with model.random.of_rank(rank):
                loss_sum, gradients = self._of_rank(own, weight, is_first=rank == 0)
            total += loss_sum
            model.communication.add_gradients(gradients, rank=rank)
        model.communication.reduce_gradients()
        return total

    def _of_rank(
        self, batches: Sequence[Batch], weight: Tensor, *, is_first: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return one rank's summed loss, and its weighted gradients as FSDP2 would reduce them."""
        model, communication = self.model.compute, self.model.communication
        loss_sum, gradients = torch.zeros_like(weight), dict[str, Tensor]()
        for index, (tokens, targets) in enumerate(batches):
            if _FIRST_MICRO_BATCH_IN_FP32:
                # Not the others: autograd adds their gradients to those in fp32.
                casts = index == 0 and len(batches) > 1
                for parameter in model.parameters():
                    parameter.grad_dtype = torch.float32 if casts else None
            if is_first:
                communication.before_forward()
            loss = model(tokens, targets).sum()
            if is_first:
                communication.after_forward()
                communication.before_backward()
            (loss * weight).backward()
            loss_sum += loss.detach()
            if len(batches) > 1:
                _accumulate(model, gradients)
        if len(batches) == 1:
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            model.zero_grad()
        return loss_sum, gradients

    def _evaluate(self, batches: list[Batch]) -> Tensor:
        """Return the loss of a batch, whose rank is the next in turn."""
        ((tokens, targets),) = batches
        is_first = self._evaluated % self.model.data_parallel_size == 0
        self._evaluated += 1
        if is_first:
            self.model.communication.before_forward()
        loss: Tensor = self.model.compute(tokens, targets)
        if is_first:
            self.model.communication.after_forward()
        return loss.sum()


def _accumulate(model: torch.nn.Module, gradients: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if name in gradients:
            gradients[name] += parameter.grad
        else:
            gradients[name] = parameter.grad.float()
        parameter.grad = None
