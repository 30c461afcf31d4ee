"""Train one run: build, loop, validate, log, checkpoint."""

from __future__ import annotations

import json
import math
import platform
import statistics
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch
from rich.console import Console

import sdp4bit
from sdp4bit.addresses import page
from sdp4bit.traffic import format_bytes
from sdp4bit_lab.common.command_line import continuing_command
from sdp4bit_lab.common.files import write_atomically
from sdp4bit_lab.common.launch.signals import keeping_handlers
from sdp4bit_lab.common.progress import end_progress, phase
from sdp4bit_lab.common.ranks import Ranks, gather_over_ranks, listen_on_rank, run_on_all_ranks
from sdp4bit_lab.common.settings import RunError, SettingError, TrainingDivergedError
from sdp4bit_lab.common.strategies import STRATEGIES
from sdp4bit_lab.pretrain.checkpoint import Checkpointer, Start, choose_start
from sdp4bit_lab.pretrain.checkpoint_files import Progress, RunRecord, find_checkpoints
from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig
from sdp4bit_lab.pretrain.config.pretrain import LoggingConfig, PretrainConfig
from sdp4bit_lab.pretrain.config.same_settings import check_same_settings
from sdp4bit_lab.pretrain.config.training import Precision
from sdp4bit_lab.pretrain.data.batches import Batches, prepare_dataset
from sdp4bit_lab.pretrain.loop import TrainingLoop
from sdp4bit_lab.pretrain.metrics import MetricsWriter, StepMetrics, compression_ratio, events_folder
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.pretrain.run_folder import with_folder
from sdp4bit_lab.pretrain.step.optimizer import build_optimizer
from sdp4bit_lab.pretrain.step.parallelize import build_model, dtype_of, lay_out
from sdp4bit_lab.pretrain.step.simulated_model import build_simulated_model
from sdp4bit_lab.pretrain.stopping import OUTPUT_FAILED, StopRequests

FINAL_STEPS = 20


@dataclass(kw_only=True)
class TrainingResult:
    """Measurements of a run; identical on every rank."""

    strategy: str
    seed: int
    steps: list[StepMetrics] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    """Steps and validation losses."""
    stopped: str | None = None
    """Reason for stopping before the last step; None for a complete run."""
    diverged_at: int | None = None
    """Step at which the loss or its gradient became NaN or infinite; None if it did not."""
    test_loss: float | None = None
    """Loss on the test split after the last step, if there is one."""

    @property
    def train_loss(self) -> float:
        """Mean training loss of the last 20 steps."""
        return statistics.fmean(step.loss for step in self.steps[-FINAL_STEPS:])

    @property
    def validation_loss(self) -> float:
        return self.validation[-1][1]

    @property
    def intra_bytes_per_step(self) -> int:
        """Median intra-node bytes of all ranks in a step."""
        return round(statistics.median(step.intra_bytes for step in self.steps))

    @property
    def inter_bytes_per_step(self) -> int:
        """Median inter-node bytes of all ranks in a step."""
        return round(statistics.median(step.inter_bytes for step in self.steps))

    @property
    def seconds(self) -> float:
        """Duration of all steps, without start-up, compilation, validation and checkpoints."""
        return sum(step.step_seconds for step in self.steps)

    @property
    def step_seconds(self) -> float:
        """Median duration of the steps after the first, which opens connections."""
        return statistics.median(step.step_seconds for step in self.steps[1:] or self.steps)


def pretrain(
    config: PretrainConfig,
    *,
    ranks: Ranks,
    console: Console | None = None,
    label: str | None = None,
    part: str | None = None,
    steps_after: int | None = None,
    keep_diverged: bool = False,
) -> TrainingResult:
    """Train and return the measurements; call on every rank.

    Args:
        label: name of the run in its result and output; default: its strategy.
        part: position among several runs, such as "run 1 of 6"; None for a single run, which also prints the
        next command.
        steps_after: steps of the runs that follow; given, lines end with the time left for all of them.
        keep_diverged: whether to return the measurements if the loss diverges.

    Raises:
        SettingError: on all ranks, before the first step.
        CheckpointError: on all ranks, after the step in which a failed save is noticed.
        RunError: on all ranks, after a step in which rank 0 could not write into --out.
        ReplicaMismatchError: on all ranks, if an audit finds a difference.
        TrainingDivergedError: on all ranks, if the loss diverges, unless keep_diverged.
    """
    if ranks.job_store is not None and ranks.job_store.check(["diverged"]):
        raise TrainingDivergedError(ranks.job_store.get("diverged").decode())
    check_same_settings(config)
    config.check_layout(ranks.world_size)
    start = choose_start(config.checkpoint, job=ranks.job)
    if part is None:  # a comparison has checked its folders
        config = with_folder(config, start=start, ranks=ranks)
    run = build_run(config, ranks=ranks, label=label or config.strategy_name, start=start)
    writer = run_on_all_ranks(lambda: _open_writer(run, console=console, part=part, steps_after=steps_after))
    with keeping_handlers(), closing(writer):
        end_progress()
        if ranks.is_first:
            first = [part or f"writes to {config.logging.folder}"]
            for line in (*first, describe_run(run), *run.loop.batches.notes, *_describe_start(run)):
                writer.say(line)
        if ranks.is_first and config.reliability.alerts != "off":
            run.loop.model.communication.on_alert(partial(_report_alert, writer))
        train(run, writer=writer, keep_diverged=keep_diverged)
        for line in (
            *_describe_end(run, part=part),
            *_describe_result(run),
            *([] if part else _describe_next(run)),
        ):
            writer.say(line)
    run.loop.model.communication.remove()
    end_progress()
    return run.result


@dataclass(frozen=True, kw_only=True)
class Run:
    """Parts of a run at its first step."""

    config: PretrainConfig
    loop: TrainingLoop
    checkpointer: Checkpointer
    start: Start
    first_step: int
    """Number of completed steps."""
    result: TrainingResult


def build_run(config: PretrainConfig, *, ranks: Ranks, label: str, start: Start | None = None) -> Run:
    """Build the parts of a run and load its checkpoint; SettingError on all ranks if no step is left."""
    start = start or Start()
    dataset = prepare_dataset(config.resolved_data, ranks=ranks)
    layout = lay_out(config, ranks=ranks)
    is_simulated = config.parallel.simulated_ranks is not None
    phase("building the order of the samples")
    data_parallel_size = config.parallel.data_parallel_size(ranks.world_size)
    batches = Batches(
        dataset,
        sequence_length=config.sequence_length,
        micro_batch_size=config.micro_batch_size,
        accumulation=config.micro_batches(data_parallel_size),
        eval_batches=config.training.eval_batches,
        seed=config.seed,
        rank=None if is_simulated else layout.data.get_local_rank(),
        world_size=data_parallel_size,
        device=ranks.device,
    )
    phase("building the model")
    torch.manual_seed(config.seed + layout.random_stream)
    model = (build_simulated_model if is_simulated else build_model)(config, layout=layout)
    optimizer = build_optimizer(
        model.parameters(), config=config.optimizer, learning_rate=config.learning_rate
    )
    checkpointer = Checkpointer(
        models=model.chunks,
        optimizer=optimizer,
        communication=model.communication,
        per_rank=model.per_rank,
        config=config.checkpoint,
        record=RunRecord(
            shape=asdict(config.model_shape),
            world_size=ranks.world_size,
            job=ranks.job,
            vocabulary_size=config.resolved_data.vocabulary,
            strategy=config.strategy_name,
            dataset=dataset.key,
            seed=config.seed,
            settings=config.recorded(global_batch_size=batches.global_batch_size),
            layout=model.describe_layout(),
        ),
        ranks=ranks,
    )
    if start.folder is not None:
        phase(f"loading {start.folder}")
    progress = Progress() if start.folder is None else checkpointer.load(start.folder)
    if progress.step >= config.training.steps and not start.continues:
        raise SettingError(
            f"the loaded checkpoint has completed {progress.step} steps: set --train-iters to more"
        )
    loop = TrainingLoop(
        config=config, model=model, optimizer=optimizer, batches=batches, progress=progress, ranks=ranks
    )
    return Run(
        config=config,
        loop=loop,
        checkpointer=checkpointer,
        start=start,
        first_step=progress.step,
        result=TrainingResult(strategy=label, seed=config.seed),
    )


def train(run: Run, *, writer: MetricsWriter, keep_diverged: bool) -> None:
    """Train the remaining steps: log, validate, save and stop after each of them as due."""
    config, loop, result, checkpointer = run.config, run.loop, run.result, run.checkpointer
    stops = StopRequests(config.training, device=loop.ranks.device)
    result.stopped = stops.before_first_step()
    if loop.progress.validation_due and not result.stopped:
        _validate(run, writer)

    def stop_code(step: int) -> int:
        return OUTPUT_FAILED if writer.failure else stops.code(step)

    if loop.progress.step < config.training.steps and not result.stopped:
        phase("training the first step")
    for metrics in () if result.stopped else loop.steps(stop_code=stop_code):
        if not result.steps:
            # Until now a signal has ended the process at once, because there was nothing to save.
            listen_on_rank(loop.ranks)
        result.steps.append(metrics)
        writer.log_step(metrics)
        _report_communication(loop, writer)
        is_last = metrics.step == config.training.steps
        if loop.stop_code == OUTPUT_FAILED:
            break
        result.stopped = None if is_last else stops.reason(loop.stop_code)
        saves = config.checkpoint.is_due(metrics.step, is_last=is_last or bool(result.stopped))
        if problem := _find_divergence(metrics, checkpointer if saves else None):
            if not keep_diverged:
                raise _diverged(problem, step=metrics.step, ranks=loop.ranks)
            result.diverged_at = metrics.step
            break
        evaluates = is_last or metrics.step % config.training.eval_interval == 0
        if evaluates and not result.stopped:
            _validate(run, writer)
        if is_last and loop.batches.has_test:
            phase("computing the loss on the test split")
            test = loop.validate(test=True)
            result.test_loss = test.loss
            writer.log_validation(test, event="test")
        if saves:
            phase(f"saving the checkpoint of step {metrics.step}")
            left_out = evaluates and bool(result.stopped)
            checkpointer.save(progress=replace(loop.progress, validation_due=left_out))
        if result.stopped:
            break
        writer.show_progress(metrics.step)
    phase("closing the files of the run")
    checkpointer.close()
    writer.close()
    for failure in gather_over_ranks(writer.failure, what="outcome of the output"):
        if failure is not None:
            raise RunError(failure)


def _find_divergence(metrics: StepMetrics, checkpointer: Checkpointer | None) -> str | None:
    """Describe a result of this step that is not finite, or a weight that would be saved."""
    if not math.isfinite(metrics.loss + metrics.grad_norm):
        return f"the loss is {metrics.loss} and its gradient norm {metrics.grad_norm}"
    wrong = None if checkpointer is None else checkpointer.first_not_finite()
    return None if wrong is None else f"{wrong} is not finite"


def _diverged(problem: str, *, step: int, ranks: Ranks) -> TrainingDivergedError:
    """Return the error of a divergence. A second one at the same step ends the job, which would repeat it."""
    text = f"{problem} at step {step}: lower --lr. Checkpoints of earlier steps are unchanged"
    if ranks.is_first and ranks.job_store is not None and ranks.job_store.add(f"diverged {step}", 1) > 1:
        ranks.job_store.set("diverged", f"this job has diverged twice: {text}")
    return TrainingDivergedError(text)


def _validate(run: Run, writer: MetricsWriter) -> None:
    phase(f"validating after step {run.loop.progress.step}")
    validation = run.loop.validate()
    run.result.validation.append((validation.step, validation.loss))
    writer.log_validation(validation)
    _report_communication(run.loop, writer)


def _report_communication(loop: TrainingLoop, writer: MetricsWriter) -> None:
    if loop.ranks.is_first and (measured := loop.new_measures()) is not None:
        writer.log_communication(*measured)


def _report_alert(writer: MetricsWriter, alert: sdp4bit.Alert) -> None:
    writer.log_alert(alert.step, alert.group, alert.message, value=alert.value, threshold=alert.threshold)


def describe_run(run: Run) -> str:
    """Describe model, ranks and batch in one line."""
    config, model, batches = run.config, run.loop.model, run.loop.batches
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in GPT(config.model_shape).parameters())
    precisions: tuple[Precision, ...] = ("bf16", "fp32")
    compute_dtype = next(name for name in precisions if dtype_of(name) == model.chunks[0].compute_dtype)
    name = config.strategy_name
    return (
        f"{parameters / 1e6:,.1f} M parameters, {model.describe_ranks()}, "
        f"{batches.global_batch_size} x {config.sequence_length} tokens per step, "
        f"param {config.training.param_dtype}, compute {compute_dtype}"
        + (f", same as strategy {name}" if config.communication.names_parts and name in STRATEGIES else "")
    )


def _describe_start(run: Run) -> list[str]:
    folder = run.config.checkpoint
    if run.start.folder is not None:
        line = f"resumed from step {run.first_step} of {run.start.folder}"
        is_done = run.first_step >= run.config.training.steps
        return [f"{line}: all steps are done" if is_done else line]
    if folder.auto_resume or folder.load is not None:
        return [f"no checkpoint in {folder.save} yet: starting at step 1"]
    if folder.save is not None and find_checkpoints(folder.save):
        command = _continuing_command(folder)
        return [f"starts at step 1, although {folder.save} has a checkpoint; to continue that run: {command}"]
    return []


def _describe_end(run: Run, *, part: str | None) -> list[str]:
    result, folder = run.result, run.config.checkpoint.save
    if result.diverged_at is not None:
        return [f"stopped at step {result.diverged_at}: the loss or its gradient is NaN or infinite"]
    if result.stopped is None:
        return []
    kept = "; not saved because --save was not given" if folder is None else f"; saved in {folder}"
    if not result.steps:
        kept = "; nothing was trained"
    elif part is not None:
        kept = ""  # The commands that train several runs have no --save.
    return [f"stopped after step {run.loop.progress.step} because of {result.stopped}{kept}"]


def _describe_result(run: Run) -> list[str]:
    result = run.result
    if not result.steps:
        return []
    losses = [f"training loss {result.train_loss:.4f}"]
    losses += [f"validation loss {result.validation_loss:.4f}"] if result.validation else []
    losses += [] if result.test_loss is None else [f"test loss {result.test_loss:.4f}"]
    steps, sent = len(result.steps), sum(step.inter_bytes for step in result.steps)
    auto, fewer, choice = run.loop.model.communication.stats()["auto"], "", list[str]()
    if auto is not None:
        fewer = ", without those of plain FSDP2"
        verb = "chose" if auto["is_chosen"] else "has not chosen yet and ends with"
        choice = [f"auto {verb} {auto['candidate']}"]
    elif result.strategy != "baseline":
        fewer = f" ({compression_ratio(result.steps):.2f}x fewer than plain FSDP2)"
    return [
        *choice,
        f"{steps} steps in {result.seconds:.1f} s, median {1000 * result.step_seconds:.1f} ms; "
        + ", ".join(losses),
        f"inter-node: {format_bytes(result.inter_bytes_per_step)} per step, "
        f"{format_bytes(sent)} in total{fewer}",
        f"intra-node: {format_bytes(result.intra_bytes_per_step)} per step",
    ]


def _describe_next(run: Run) -> list[str]:
    result, logging, save = run.result, run.config.logging, run.config.checkpoint.save
    lines = []
    if result.steps and result.strategy != "baseline":
        lines.append(f"about the ratio: {page('telemetry#why-your-ratio-differs')}")
    if result.steps and result.stopped is None:
        saved = "none (--save was not given)" if save is None else f"{save}, step {run.loop.progress.step}"
        lines.append(f"checkpoint: {saved}")
    if result.steps and logging.jsonl:
        lines.append(f"next: sdp4bit report {logging.folder}")
    if result.steps and logging.tensorboard:
        lines.append(f"next: tensorboard --logdir {events_folder(logging)}")
    if result.steps and result.stopped is not None and save is not None:
        lines.append(f"continue: {_continuing_command(run.config.checkpoint)}")
    return lines


def _continuing_command(config: CheckpointConfig) -> str:
    return continuing_command(*([] if config.resumes_own else ["--auto-resume"]))


def write_settings(config: PretrainConfig, *, label: str, ranks: Ranks) -> None:
    """Write config.json, from which other commands identify the run."""
    settings = {
        **asdict(config),
        **config.resolved_sections(),
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
    write_atomically(
        config.logging.folder / "config.json", json.dumps(settings, indent=2, default=str) + "\n"
    )


def _open_writer(
    run: Run, *, console: Console | None, part: str | None, steps_after: int | None
) -> MetricsWriter:
    config, ranks, progress = run.config, run.loop.ranks, run.loop.progress
    logging = config.logging
    if not ranks.is_first:
        logging = LoggingConfig(jsonl=False, tensorboard=False)
        console = Console(quiet=True, force_terminal=False)
    if ranks.is_first:
        write_settings(config, label=run.result.strategy, ranks=ranks)
    return MetricsWriter(
        logging,
        # Unlike "sdp4bit:", which begins the lines of the program.
        prefix=f"[{run.result.strategy} {config.seed}]" if part else f"{run.result.strategy}:",
        steps=config.training.steps,
        steps_after=steps_after,
        part=part,
        first_step=progress.step,
        validation_due=progress.validation_due,
        console=console,
    )
