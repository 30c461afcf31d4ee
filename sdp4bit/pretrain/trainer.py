"""One training run, readable from top to bottom: build, loop, validate, log, checkpoint."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import torch
from rich.console import Console

from sdp4bit.pretrain.checkpoint import Checkpointer, RunIdentity
from sdp4bit.pretrain.checkpoint_folder import TOKENIZER, Progress
from sdp4bit.pretrain.checkpoint_state import TrainingState
from sdp4bit.pretrain.config import PretrainConfig, SettingError
from sdp4bit.pretrain.data import Batches, prepare_dataset
from sdp4bit.pretrain.loss_scale import LossScale
from sdp4bit.pretrain.metrics import MetricsWriter, StepMetrics, ValidationMetrics, write_atomically
from sdp4bit.pretrain.model import GPT
from sdp4bit.pretrain.optimizer import build_optimizer, learning_rate_at, set_learning_rate
from sdp4bit.pretrain.parallelize import ShardedModel, build_model, lay_out
from sdp4bit.pretrain.ranks import Ranks, agree, sum_over_ranks
from sdp4bit.pretrain.training_step import TrainingStep

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
        CheckpointError: on all ranks, at the end of the step by which a checkpoint has failed to be saved.
        TrainingDivergedError: on all ranks, if the loss stops being finite.
    """
    dataset = prepare_dataset(config.data, ranks=ranks)
    layout = lay_out(config, ranks=ranks)
    batches = Batches(
        dataset,
        sequence_length=config.sequence_length,
        micro_batch_size=config.micro_batch_size,
        accumulation=config.training.accumulation,
        eval_batches=config.training.eval_batches,
        seed=config.seed,
        ranks=layout.data_ranks,
    )
    torch.manual_seed(config.seed + layout.random_stream)
    model = build_model(config, layout=layout)
    optimizer = build_optimizer(
        model.parameters(), config=config.optimizer, learning_rate=config.learning_rate
    )
    loss_scale = LossScale(config.training) if config.training.precision == "fp16" else None
    checkpointer = Checkpointer(
        TrainingState(
            models=model.chunks,
            optimizers=[optimizer],
            communication=model.communication,
            ranks=ranks,
            shared={} if loss_scale is None else {"loss_scale": loss_scale},
        ),
        config=config.checkpoint,
        identity=RunIdentity(
            shape=config.model_shape,
            vocabulary_size=config.data.vocabulary_size,
            strategy=config.strategy,
            dataset=dataset.key,
            seed=config.seed,
            layout=model.describe_layout(),
        ),
        ranks=ranks,
        attach=lambda folder: dataset.tokenizer.save(folder / TOKENIZER),
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
        optimizer=optimizer,
        loss_scale=loss_scale,
        batches=batches,
        progress=progress,
        ranks=ranks,
    )
    result = TrainingResult(strategy=config.strategy, seed=config.seed)
    writer = agree(lambda: _open_writer(config, progress, console) if ranks.is_first else None)
    try:
        if writer is not None:
            writer.say(describe_run(config, model=model, batches=batches))
        for metrics in loop.steps():
            result.steps.append(metrics)
            if writer is not None:
                writer.log_step(metrics)
            loop.check(metrics)
            is_last = metrics.step == config.training.steps
            if is_last or metrics.step % config.training.eval_interval == 0:
                validation = loop.validate()
                result.validation.append((validation.step, validation.loss))
                if writer is not None:
                    writer.log_validation(validation)
            checkpointer.poll()
            if config.checkpoint.is_due(metrics.step, is_last=is_last):
                checkpointer.save(progress=loop.progress)
        checkpointer.close()
    except BaseException:
        checkpointer.abandon()
        raise
    finally:
        if writer is not None:
            writer.close()
    model.communication.remove()
    return result


@dataclass(kw_only=True)
class TrainingLoop:
    """The arithmetic of a run: optimizer steps and validations, nothing else."""

    config: PretrainConfig
    model: ShardedModel
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale | None
    batches: Batches
    progress: Progress
    ranks: Ranks

    def __post_init__(self) -> None:
        self._communication = self.model.communication
        self._step_of_model = TrainingStep(
            self.model, optimizer=self.optimizer, loss_scale=self.loss_scale, config=self.config
        )
        self._sent_before = self._communication.stats()["total"]

    def steps(self) -> Iterator[StepMetrics]:
        """Yield the measurements of each remaining optimizer step, after it."""
        while self.progress.step < self.config.training.steps:
            yield self._step()

    def _step(self) -> StepMetrics:
        config = self.config
        start = time.perf_counter()
        # The schedule counts steps that changed the weights.
        skipped = 0 if self.loss_scale is None else self.loss_scale.skipped
        learning_rate = learning_rate_at(
            self.progress.step - skipped,
            config=config.optimizer,
            peak=config.learning_rate,
            steps=config.training.steps,
        )
        set_learning_rate(self.optimizer, learning_rate)
        outcome = self._step_of_model.run(self.batches.training(self.progress.samples))
        self.progress = Progress(
            step=self.progress.step + 1,
            samples=self.progress.samples + self.batches.global_batch_size,
        )

        stats = self._communication.stats()
        sent = self._sent_since(stats["total"])
        loss_sum, intra_bytes, inter_bytes = sum_over_ranks(
            [outcome.loss_sum, sent["intra_bytes"], sent["inter_bytes"]], device=self.ranks.device
        )
        seconds = time.perf_counter() - start
        return StepMetrics(
            step=self.progress.step,
            loss=loss_sum / outcome.tokens,
            lr=learning_rate,
            grad_norm=outcome.grad_norm,
            tokens_per_second=self.batches.global_batch_size * config.sequence_length / seconds,
            step_seconds=seconds,
            intra_bytes=round(intra_bytes),
            inter_bytes=round(inter_bytes),
            compression_ratio=stats["compression_ratio"],
            weight_drift=stats["weight_drift"],
            gradient_error=stats["gradient_error"],
            loss_scale=outcome.loss_scale,
            skipped=outcome.skipped,
        )

    def check(self, metrics: StepMetrics) -> None:
        """The run has not diverged in this step; TrainingDivergedError on all ranks otherwise."""
        if metrics.skipped:
            training = self.config.training
            if training.loss_scale is None and metrics.loss_scale == training.min_loss_scale:
                raise TrainingDivergedError(
                    f"the gradient is not finite at step {metrics.step}, at the smallest loss scale "
                    f"{metrics.loss_scale:g}: lower --learning-rate"
                )
        elif not math.isfinite(metrics.loss):
            raise TrainingDivergedError(
                f"the loss is {metrics.loss} at step {metrics.step}: lower --learning-rate"
            )

    def validate(self) -> ValidationMetrics:
        """Return the mean loss over the validation batches of all ranks, and what it took to send."""
        loss_sum, tokens = self._step_of_model.validate(self.batches.validation())
        sent = self._sent_since(self._communication.stats()["total"])
        total, count, intra_bytes, inter_bytes = sum_over_ranks(
            [loss_sum, tokens, sent["intra_bytes"], sent["inter_bytes"]], device=self.ranks.device
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


def describe_run(config: PretrainConfig, *, model: ShardedModel, batches: Batches) -> str:
    """Return one line that says what is about to be trained."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in GPT(config.model_shape).parameters())
    ranks, training = model.layout.ranks, config.training
    arithmetic = str(model.chunks[0].arithmetic).removeprefix("torch.")
    where = ranks.device.type
    if config.parallel.model_parallel_size > 1:
        where += f", {model.describe_layout()}"
    return (
        f"{parameters / 1e6:,.1f} million parameters on {ranks.world_size} ranks ({where}), "
        f"{batches.global_batch_size} sequences of {config.sequence_length} tokens a step, "
        f"{training.precision} weights, {arithmetic} arithmetic"
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
