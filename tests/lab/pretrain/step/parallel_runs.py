"""Parts of training runs in any layout, for the tests of tensor and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig, PretrainConfig
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.pretrain.step.optimizer import build_optimizer
from sdp4bit_lab.pretrain.step.parallelize import build_model, lay_out
from sdp4bit_lab.pretrain.step.training_step import StepOutcome, TrainingStep
from tests.lab.pretrain.tiny_runs import small, this_rank

Batch = tuple[Tensor, Tensor]

GLOBAL_MICRO_BATCH = 4
"""Sequences of one micro batch, over all data ranks."""
LENGTH = 32


def laid_out(
    text: Path,
    *,
    data: int,
    layers: int = 4,
    dropout: float = 0.0,
    strategy: str = "baseline",
    **changes: Any,
) -> PretrainConfig:
    """Return a run of 3 steps with the same samples on any number of data ranks.

    Args:
        changes: fields of ParallelConfig or of TrainingConfig.
    """
    of_parallel = {name: changes.pop(name) for name in list(changes) if hasattr(ParallelConfig(), name)}
    config = small(
        text,
        Path(mkdtemp(dir=text.parent)) / "run",  # a run refuses the folder of another
        strategy=strategy,
        model=ModelConfig(layers=layers, hidden=64, heads=4, dropout=dropout),
        parallel=ParallelConfig(**of_parallel),
    )
    settings = {"steps": 3, "param_dtype": "fp32", "accumulation": 2, "eval_interval": 3, "eval_batches": 3}
    training = replace(
        config.training, micro_batch_size=GLOBAL_MICRO_BATCH // data, **{**settings, **changes}
    )
    return replace(config, training=training)


class Job:
    """A model in its layout with its optimizer, on this rank, without data of its own."""

    def __init__(self, config: PretrainConfig) -> None:
        self.config = config
        self.layout = lay_out(config, ranks=this_rank())
        torch.manual_seed(config.seed + self.layout.random_stream)
        self.model = build_model(config, layout=self.layout)
        self.comm = self.model.communication
        self.optimizer = build_optimizer(
            self.model.parameters(), config=config.optimizer, learning_rate=config.learning_rate
        )
        self.step = TrainingStep(model=self.model, optimizer=self.optimizer, config=config)

    def train(self, batches: Sequence[Batch]) -> tuple[float, StepOutcome]:
        """Return the mean loss and the outcome of a step over global micro batches."""
        outcome = self.step.run(self.mine(batches))
        return outcome.loss_sum / outcome.tokens, outcome

    def mine(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield this data rank's part of global micro batches."""
        size, rank = self.layout.data.size(), self.layout.data.get_local_rank()
        for tokens, targets in batches:
            yield tokens.chunk(size)[rank], targets.chunk(size)[rank]

    def parameters(self) -> dict[str, Tensor]:
        """Return this rank's parameters, as whole tensors, by their names; called on all ranks."""
        named = [item for chunk in self.model.chunks for item in chunk.named_parameters()]
        return {name: whole(parameter) for name, parameter in named}


def whole(parameter: Tensor) -> Tensor:
    return parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def whole_model(config: PretrainConfig) -> GPT:
    """Return the model on this rank alone, with the initial weights of the run."""
    model = GPT(config.model_shape)
    model.reset_parameters(seed=config.seed)
    return model


def random_batches(config: PretrainConfig, *, masked: bool = False) -> list[Batch]:
    """Return the micro batches of one step, the same everywhere; masks leave few targets, unevenly."""
    generator = torch.Generator().manual_seed(11)
    result = []
    for _ in range(config.training.accumulation or 1):
        tokens = torch.randint(0, 512, (GLOBAL_MICRO_BATCH, LENGTH + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        if masked:
            share = torch.tensor([[0.0], [0.9], [0.5], [0.02]])
            kept = torch.rand(targets.shape, generator=generator) < share
            targets[~kept] = -100
        result.append((tokens[:, :-1].contiguous(), targets))
    return result


def reference_step(config: PretrainConfig, batches: Sequence[Batch]) -> tuple[float, float]:
    """Return loss and gradient norm of the mean over all unmasked tokens, by plain PyTorch in one piece."""
    model = whole_model(config)
    tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return loss.item(), norm.item()


LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2 x DP2": {"data": 2, "tensor_model_parallel_size": 2},
    "PP2 x DP2": {"data": 2, "pipeline_model_parallel_size": 2},
    "PP2 x DP2, interleaved": {
        "data": 2,
        "pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": 1,
    },
    "TP2 x PP2": {"data": 1, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
}
"""Four ranks, as options of `laid_out`."""

ROUNDING = 2 * GLOBAL_MICRO_BATCH * LENGTH * 2.0**-24
"""Relative error of summing the losses of the 256 tokens of a step in fp32, in the worst order: 1.5e-5.

The terms are positive, so the error is at most n * 2^-24 of the sum. AgreedNodes differ by the order of sums:
this one, and those of logits and gradients, which are not longer.
"""
