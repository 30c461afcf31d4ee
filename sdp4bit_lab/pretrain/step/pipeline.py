"""Run micro batches through pipeline stages with torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from sdp4bit_lab.pretrain.step.parallelize import ShardedModel

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, [micro batch, length]."""


class Pipeline:
    """Stages of this rank and their schedule: 1F1B, interleaved if a rank has several stages."""

    def __init__(
        self,
        model: ShardedModel,
        *,
        micro_batches: int,
        micro_batch_size: int,
        sequence_length: int,
        stages: int,
    ) -> None:
        device, group = model.layout.ranks.device, model.layout.pipeline.get_group()
        self._is_first = 0 in model.stages
        self._loss_sum = torch.zeros((), device=device)
        self._weight = torch.zeros((), device=device)

        def stage(number: int) -> PipelineStage:
            chunk = model.chunks[model.stages.index(number)]
            batch = (micro_batch_size, sequence_length)
            tokens = torch.empty(batch, dtype=torch.int64, device="meta")
            stream = torch.empty(*batch, chunk.shape.hidden, dtype=chunk.compute_dtype, device="meta")
            loss = torch.empty(1, device="meta")
            # Shapes are given, because inferring them would take a forward with communication.
            made = PipelineStage(
                chunk,
                number,
                stages,
                device,
                input_args=tokens if chunk.is_first else stream.requires_grad_(),
                output_args=(loss if chunk.is_last else stream).requires_grad_(),
                group=group,
            )
            if device.type == "cpu" and torch.__version__ < "2.13":
                # Older releases open connections with an int64 received as fp32, which gloo rejects and does
                # not need.
                made._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]
            return made

        # The loss is a weighted sum over tokens. torch would divide by the number of micro batches and also
        # scale gradients accumulated before.
        local = [stage(number) for number in model.stages]
        self._schedule: ScheduleInterleaved1F1B | ScheduleGPipe | Schedule1F1B
        if len(local) > 1:
            self._schedule = ScheduleInterleaved1F1B(
                list(local), micro_batches, loss_fn=self._weigh, scale_grads=False
            )
        else:
            # With few micro batches every stage runs all forwards first (GPipe).
            schedule = ScheduleGPipe if micro_batches < stages else Schedule1F1B
            self._schedule = schedule(local[0], micro_batches, loss_fn=self._weigh, scale_grads=False)

    def train(self, batches: Sequence[Batch], *, weight: Tensor) -> Tensor:
        """Return the summed loss on the last stage; reduce the gradients of loss * weight."""
        return self._run(self._schedule.step, batches, weight)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """Return the summed loss on the last stage."""
        return self._run(self._schedule.eval, batches, torch.ones_like(self._weight))

    def _run(self, run: Callable[..., object], batches: Sequence[Batch], weight: Tensor) -> Tensor:
        self._loss_sum, self._weight = torch.zeros_like(self._loss_sum), weight
        tokens = torch.cat([batch for batch, _ in batches])
        targets = torch.cat([batch for _, batch in batches])
        # The last stage computes the loss itself, so that logits are freed after their micro batch.
        run(*([tokens] if self._is_first else []), target=targets, targets=targets)
        return self._loss_sum

    def _weigh(self, loss: Tensor, _: Tensor) -> Tensor:
        self._loss_sum += loss.detach().sum()
        return (loss * self._weight).sum()
