"""One training run, readable from top to bottom: build, loop, validate, log, checkpoint."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import cast

import torch
from rich.console import Console
from torch.distributed.fsdp import FSDPModule

from sdp4bit.pretrain.checkpoint import Checkpointer, Progress
from sdp4bit.pretrain.config import PretrainConfig, SettingError
from sdp4bit.pretrain.data import Batches, prepare_dataset
from sdp4bit.pretrain.metrics import MetricsWriter, StepMetrics, ValidationMetrics, write_atomically
from sdp4bit.pretrain.model import GPT
from sdp4bit.pretrain.optimizer import build_optimizer, learning_rate_at, set_learning_rate
from sdp4bit.pretrain.parallelize import Communication, build_model
from sdp4bit.pretrain.ranks import Ranks, agree, sum_over_ranks

FINAL_STEPS = 20


class TrainingDivergedError(RuntimeError):
    """The loss is no longer a finite number."""


@dataclass(kw_only=True)
class TrainingResult:
    """What a run measured; the same on every rank."""

    strategy: str
    seed: int
    steps: list[StepMetrics] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    """Step and validation loss."""
    test_loss: float | None = None
    """Loss after the last step on data of its own; None without any."""

    @property
    def train_loss(self) -> float:
        """Mean training loss of the last 20 steps."""
        return statistics.fmean(step.loss for step in self.steps[-FINAL_STEPS:])

    @property
    def validation_loss(self) -> float:
        """The last validation loss."""
        return self.validation[-1][1]

    @property
    def intra_bytes_per_step(self) -> int:
        """Bytes that all ranks sent inside nodes in a step; the median, as the first step differs."""
        return round(statistics.median(step.intra_bytes for step in self.steps))

    @property
    def inter_bytes_per_step(self) -> int:
        """Bytes that all ranks sent between nodes in a step; the median, as the first step differs."""
        return round(statistics.median(step.inter_bytes for step in self.steps))

    @property
    def seconds(self) -> float:
        """Duration of all steps, without start-up, validation and checkpoints."""
        return sum(step.step_seconds for step in self.steps)

    def summary(self) -> dict[str, float]:
        """Return the outcome in the names of summary.json."""
        return {
            "train_loss": self.train_loss,
            "val_loss": self.validation_loss,
            "intra_bytes_per_step": self.intra_bytes_per_step,
            "inter_bytes_per_step": self.inter_bytes_per_step,
            "seconds": self.seconds,
        }


def pretrain(config: PretrainConfig, *, ranks: Ranks, console: Console | None = None) -> TrainingResult:
    """Return the measurements of a training run; called on every rank.

    Raises:
        SettingError: on all ranks, before the first step.
        TrainingDivergedError: on all ranks, if the loss stops being finite.
    """
    dataset = prepare_dataset(config.data, ranks=ranks)
    batches = Batches(
        dataset,
        sequence_length=config.sequence_length,
        micro_batch_size=config.micro_batch_size,
        accumulation=config.training.accumulation,
        eval_batches=config.training.eval_batches,
        seed=config.seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
        device=ranks.device,
    )
    torch.manual_seed(config.seed + ranks.rank)
    model, communication = build_model(config, ranks=ranks)
    optimizer = build_optimizer(model, config=config.optimizer, learning_rate=config.learning_rate)
    checkpointer = Checkpointer(
        model=model,
        optimizer=optimizer,
        communication=communication,
        shape=config.model_shape,
        strategy=config.strategy,
        dataset_key=dataset.key,
        ranks=ranks,
    )
    progress = Progress()
    if config.checkpoint.load is not None:
        progress = checkpointer.load(config.checkpoint.load)
    if progress.step >= config.training.steps:
        raise SettingError(
            f"the loaded checkpoint has done {progress.step} steps: set --steps to more than that"
        )
    loop = TrainingLoop(
        config=config,
        model=model,
        communication=communication,
        optimizer=optimizer,
        batches=batches,
        progress=progress,
        ranks=ranks,
    )
    result = TrainingResult(strategy=config.strategy, seed=config.seed)
    writer = agree(lambda: _open_writer(config, progress, console) if ranks.is_first else None)
    try:
        if writer is not None:
            writer.say(describe_run(config, model=model, batches=batches, ranks=ranks))
        for metrics in loop.steps():
            result.steps.append(metrics)
            if writer is not None:
                writer.log_step(metrics)
            if not math.isfinite(metrics.loss):
                raise TrainingDivergedError(
                    f"the loss is {metrics.loss} at step {metrics.step}: lower --learning-rate"
                )
            is_last = metrics.step == config.training.steps
            if is_last or metrics.step % config.training.eval_interval == 0:
                validation = loop.validate()
                result.validation.append((validation.step, validation.loss))
                if writer is not None:
                    writer.log_validation(validation)
            if is_last and batches.has_test:
                test = loop.validate(test=True)
                result.test_loss = test.loss
                if writer is not None:
                    writer.log_validation(test, event="test")
            save = config.checkpoint.save
            if save is not None and (is_last or metrics.step % config.checkpoint.save_interval == 0):
                checkpointer.save(save, progress=loop.progress)
    finally:
        if writer is not None:
            writer.close()
    communication.remove()
    return result


@dataclass(kw_only=True)
class TrainingLoop:
    """The arithmetic of a run: optimizer steps and validations, nothing else."""

    config: PretrainConfig
    model: GPT
    communication: Communication
    optimizer: torch.optim.Optimizer
    batches: Batches
    progress: Progress
    ranks: Ranks

    def __post_init__(self) -> None:
        # Held from here on: while weights are gathered, model.parameters() yields other tensors.
        self._parameters = list(self.model.parameters())
        self._sharded = cast(FSDPModule, self.model)
        self._sent_before = self.communication.stats()["total"]

    def steps(self) -> Iterator[StepMetrics]:
        """Yield the measurements of each remaining optimizer step, after it."""
        while self.progress.step < self.config.training.steps:
            yield self._step()

    def _step(self) -> StepMetrics:
        config, accumulation = self.config, self.config.training.accumulation
        start = time.perf_counter()
        learning_rate = learning_rate_at(
            self.progress.step,
            config=config.optimizer,
            peak=config.learning_rate,
            steps=config.training.steps,
        )
        set_learning_rate(self.optimizer, learning_rate)

        self.model.train()
        loss_sum = torch.zeros((), device=self.ranks.device)
        for micro, (tokens, targets) in enumerate(self.batches.training(self.progress.samples)):
            # Gradients of earlier micro batches stay on this rank and are reduced with the last one's.
            self._sharded.set_requires_gradient_sync(micro == accumulation - 1)
            loss = self.model(tokens, targets) / accumulation
            loss.backward()
            loss_sum += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, config.optimizer.clip_grad or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress = Progress(
            step=self.progress.step + 1,
            samples=self.progress.samples + self.batches.global_batch_size,
        )

        stats = self.communication.stats()
        sent = self._sent_since(stats["total"])
        loss_of_ranks, intra_bytes, inter_bytes = sum_over_ranks(
            [loss_sum.item(), sent["intra_bytes"], sent["inter_bytes"]], device=self.ranks.device
        )
        seconds = time.perf_counter() - start
        return StepMetrics(
            step=self.progress.step,
            loss=loss_of_ranks / self.ranks.world_size,
            lr=learning_rate,
            grad_norm=norm.full_tensor().item(),  # type: ignore[attr-defined]
            tokens_per_second=self.batches.global_batch_size * config.sequence_length / seconds,
            step_seconds=seconds,
            intra_bytes=round(intra_bytes),
            inter_bytes=round(inter_bytes),
            compression_ratio=stats["compression_ratio"],
            weight_drift=stats["weight_drift"],
            gradient_error=stats["gradient_error"],
        )

    @torch.no_grad()
    def validate(self, *, test: bool = False) -> ValidationMetrics:
        """Return the mean loss over the validation or test batches of all ranks, and what it took to send."""
        self.model.eval()
        batches = self.batches.test() if test else self.batches.validation()
        losses = [self.model(tokens, targets).item() for tokens, targets in batches]
        # The root keeps its gathered weights after a forward that no backward follows.
        self._sharded.reshard()
        sent = self._sent_since(self.communication.stats()["total"])
        total, count, intra_bytes, inter_bytes = sum_over_ranks(
            [sum(losses), len(losses), sent["intra_bytes"], sent["inter_bytes"]], device=self.ranks.device
        )
        return ValidationMetrics(
            step=self.progress.step,
            loss=total / count,
            intra_bytes=round(intra_bytes),
            inter_bytes=round(inter_bytes),
        )

    def _sent_since(self, total: dict[str, int]) -> dict[str, int]:
        """Return what this rank has sent since the last call."""
        before, self._sent_before = self._sent_before, total
        return {level: total[level] - before[level] for level in total}


def describe_run(config: PretrainConfig, *, model: GPT, batches: Batches, ranks: Ranks) -> str:
    """Return one line that says what is about to be trained."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weights, arithmetic = config.training.precision, str(model.arithmetic).removeprefix("torch.")
    return (
        f"{parameters / 1e6:,.1f} million parameters on {ranks.world_size} ranks ({ranks.device.type}), "
        f"{batches.global_batch_size} sequences of {config.sequence_length} tokens a step, "
        f"{weights} weights, {arithmetic} arithmetic"
    )


def _open_writer(config: PretrainConfig, progress: Progress, console: Console | None) -> MetricsWriter:
    out = config.logging.out
    try:
        settings = json.dumps(asdict(config), indent=2, default=str)
        write_atomically(out / "config.json", settings + "\n")
        return MetricsWriter(
            config.logging,
            description=config.strategy,
            steps=config.training.steps,
            first_step=progress.step,
            console=console,
        )
    except OSError as error:
        raise SettingError(f"cannot write into --out {out}: {error}") from error
