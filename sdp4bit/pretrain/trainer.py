"""One training run, readable from top to bottom: build, loop, validate, log, checkpoint."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch
from rich.console import Console

import sdp4bit
from sdp4bit.pretrain.checkpoint.checkpointer import Checkpointer
from sdp4bit.pretrain.checkpoint.folder import TOKENIZER, Progress, RunRecord
from sdp4bit.pretrain.checkpoint.load import Start, choose_start
from sdp4bit.pretrain.checkpoint.state import TrainingState
from sdp4bit.pretrain.config.pretrain import PretrainConfig
from sdp4bit.pretrain.config.same_settings import check_same_settings
from sdp4bit.pretrain.data.batches import Batches, prepare_dataset
from sdp4bit.pretrain.launch.ranks import Ranks, agree
from sdp4bit.pretrain.launch.signals import listening
from sdp4bit.pretrain.loop import TrainingDivergedError, TrainingLoop
from sdp4bit.pretrain.metrics import MetricsWriter, StepMetrics, write_atomically
from sdp4bit.pretrain.model.gpt import GPT
from sdp4bit.pretrain.options import SettingError
from sdp4bit.pretrain.step.loss_scale import LossScale
from sdp4bit.pretrain.step.optimizer import build_optimizer
from sdp4bit.pretrain.step.parallelize import ShardedModel, build_model, lay_out
from sdp4bit.pretrain.step.simulated_model import build_virtual_model
from sdp4bit.pretrain.stopping import StopRequests

FINAL_STEPS = 20


@dataclass(kw_only=True)
class TrainingResult:
    """What a run measured; the same on every rank."""

    strategy: str
    seed: int
    steps: list[StepMetrics] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    """Step and validation loss."""
    stopped: str | None = None
    """Why the run ended before its last step; None if it did not."""
    diverged_at: int | None = None
    """Step at which the loss stopped being finite; None if it did not."""
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


def pretrain(
    config: PretrainConfig,
    *,
    ranks: Ranks,
    console: Console | None = None,
    label: str | None = None,
    keep_diverged: bool = False,
) -> TrainingResult:
    """Return the measurements of a training run; called on every rank.

    Args:
        label: what the run is called in its result and its output; its strategy's name when not given.
        keep_diverged: return the measurements up to there if the loss stops being finite.

    Raises:
        SettingError: on all ranks, before the first step.
        CheckpointError: on all ranks, at the end of the step by which a checkpoint has failed to be saved.
        TrainingDivergedError: on all ranks, if the loss stops being finite, unless such runs are kept.
    """
    check_same_settings(config)
    label = label or config.strategy_name
    config.check_layout(ranks.world_size)
    dataset = prepare_dataset(config.resolved_data, ranks=ranks)
    tokenizer = dataset.tokenizer
    layout = lay_out(config, ranks=ranks)
    is_virtual = config.parallel.virtual_ranks is not None
    data_parallel_size = config.parallel.data_parallel_size(ranks.world_size)
    batches = Batches(
        dataset,
        sequence_length=config.sequence_length,
        micro_batch_size=config.micro_batch_size,
        accumulation=config.micro_batches(data_parallel_size),
        eval_batches=config.training.eval_batches,
        seed=config.seed,
        rank=None if is_virtual else layout.data.get_local_rank(),
        world_size=data_parallel_size,
        device=ranks.device,
    )
    torch.manual_seed(config.seed + layout.random_stream)
    model = (build_virtual_model if is_virtual else build_model)(config, layout=layout)
    optimizer = build_optimizer(
        model.parameters(), config=config.optimizer, learning_rate=config.learning_rate
    )
    loss_scale = LossScale(config.training) if config.training.weights == "fp16" else None
    checkpointer = Checkpointer(
        TrainingState(
            models=model.chunks,
            optimizers=[optimizer],
            communication=model.communication,
            ranks=ranks,
            shared={} if loss_scale is None else {"loss_scale": loss_scale},
            per_rank=model.per_rank,
        ),
        config=config.checkpoint,
        identity=RunRecord(
            shape=asdict(config.model_shape),
            world_size=ranks.world_size,
            job=ranks.job,
            vocabulary_size=config.resolved_data.vocabulary,
            strategy=config.strategy_name,
            dataset=dataset.key,
            seed=config.seed,
            layout=model.describe_layout(),
        ),
        ranks=ranks,
        attach=None if tokenizer is None else lambda folder: tokenizer.save(folder / TOKENIZER),
    )
    start = choose_start(config.checkpoint, job=ranks.job)
    progress = Progress() if start.folder is None else checkpointer.load(start.folder)
    if progress.step >= config.training.steps and not start.continues:
        raise SettingError(
            f"the loaded checkpoint has done {progress.step} steps: set --train-iters to more than that"
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
    result = TrainingResult(strategy=label, seed=config.seed)
    writer = agree(lambda: _open_writer(config, progress, ranks, console, label) if ranks.is_first else None)
    stops = StopRequests(config.training, device=ranks.device)
    with ExitStack() as stack:
        stack.enter_context(listening())
        stack.push(lambda kind, error, _: checkpointer.abandon(error) if kind is not None else None)
        if writer is not None:
            stack.callback(writer.close)
            writer.say(describe_run(config, model=model, batches=batches))
            for line in [*config.reference.explain(), *_describe_start(config, start, progress)]:
                writer.say(line)
            if config.reliability.alerts != "off":
                model.communication.on_alert(partial(_report_alert, writer))
        result.stopped = stops.before_first_step()
        if progress.validation_due and not result.stopped:
            _log_validation(loop, result, writer)
        steps = () if result.stopped else _measured_steps(loop, result, keep_diverged=keep_diverged)
        for metrics in steps:
            if writer is not None:
                writer.log_step(metrics)
                _report_communication(loop, writer)
            is_last = metrics.step == config.training.steps
            result.stopped = None if is_last else stops.after_step(metrics.step)
            if metrics.step % config.logging.log_interval == 0:
                timings = loop.timers.summarize()
                if writer is not None:
                    writer.log_timings(timings)
            evaluates = is_last or metrics.step % config.training.eval_interval == 0
            if evaluates and not result.stopped:
                _log_validation(loop, result, writer)
            if is_last and batches.has_test:
                test = loop.validate(test=True)
                result.test_loss = test.loss
                if writer is not None:
                    writer.log_validation(test, event="test")
            checkpointer.poll()
            if config.checkpoint.is_due(metrics.step, is_last=is_last or bool(result.stopped)):
                left_out = evaluates and bool(result.stopped)
                checkpointer.save(progress=replace(loop.progress, validation_due=left_out))
            if result.stopped:
                break
        checkpointer.close()
        if result.diverged_at is not None and writer is not None:
            writer.say(
                f"ended at step {result.diverged_at}, as the loss or its gradient is not finite any more"
            )
        if result.stopped and writer is not None:
            folder, step = config.checkpoint.save, loop.progress.step
            kept = "not saved, as --save was not given" if folder is None else f"saved in {folder}"
            kept = kept if result.steps else "nothing was trained"
            writer.say(f"left after step {step} because of {result.stopped}; {kept}")
    model.communication.remove()
    return result


def _measured_steps(
    loop: TrainingLoop, result: TrainingResult, *, keep_diverged: bool
) -> Iterator[StepMetrics]:
    """Yield the measurements of each step, which the result then has; divergence ends them if it is kept."""
    try:
        for metrics in loop.steps():
            result.steps.append(metrics)
            yield metrics
    except TrainingDivergedError:
        if not keep_diverged:
            raise
        result.diverged_at = result.steps[-1].step


def _report_alert(writer: MetricsWriter, alert: sdp4bit.Alert) -> None:
    writer.log_alert(alert.step, alert.group, alert.message, value=alert.value, threshold=alert.threshold)


def _report_communication(loop: TrainingLoop, writer: MetricsWriter) -> None:
    measured = loop.communication()
    if measured is not None:
        writer.log_communication(measured)


def describe_run(config: PretrainConfig, *, model: ShardedModel, batches: Batches) -> str:
    """Return one line that says what is about to be trained."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in GPT(config.model_shape).parameters())
    training = config.training
    arithmetic = str(model.chunks[0].arithmetic).removeprefix("torch.")
    return (
        f"{parameters / 1e6:,.1f} million parameters on {model.describe_ranks()}, "
        f"{batches.global_batch_size} sequences of {config.sequence_length} tokens a step, "
        f"{training.weights} weights, {arithmetic} arithmetic"
    )


def _log_validation(loop: TrainingLoop, result: TrainingResult, writer: MetricsWriter | None) -> None:
    validation = loop.validate()
    result.validation.append((validation.step, validation.loss))
    if writer is not None:
        writer.log_validation(validation)
        _report_communication(loop, writer)


def _describe_start(config: PretrainConfig, start: Start, progress: Progress) -> list[str]:
    """Return a line about the checkpoint that the run goes on from, or about that there is none yet."""
    if start.folder is not None:
        line = f"goes on after step {progress.step} of {start.folder}"
        is_done = progress.step >= config.training.steps
        return [f"{line}: nothing is left to do" if is_done else line]
    folder = config.checkpoint
    if folder.auto_resume or folder.load is not None:
        return [f"no checkpoint in {folder.save} yet: begins at step 1"]
    return []


def _open_writer(
    config: PretrainConfig, progress: Progress, ranks: Ranks, console: Console | None, label: str
) -> MetricsWriter:
    out = config.logging.out
    try:
        settings = {
            **asdict(config),
            "strategy": config.strategy_name,
            "label": label,
            "quantization": asdict(config.quantization),
            "ranks": ranks.world_size,
            "versions": {
                "sdp4bit": sdp4bit.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        write_atomically(out / "config.json", json.dumps(settings, indent=2, default=str) + "\n")
        return MetricsWriter(
            config.logging,
            description=label,
            steps=config.training.steps,
            first_step=progress.step,
            validation_due=progress.validation_due,
            console=console,
        )
    except OSError as error:
        raise SettingError(f"cannot write into --out {out}: {error}") from error
