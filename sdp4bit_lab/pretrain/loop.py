"""Run and measure the steps and validations of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sdp4bit.collectives.errors import ExchangeError, is_communication_failure
from sdp4bit.quantization.ops import compile_seconds
from sdp4bit.traffic import Traffic
from sdp4bit_lab.common.ranks import Ranks, sum_over_ranks
from sdp4bit_lab.pretrain.checkpoint_files import Progress
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.data.batches import Batches
from sdp4bit_lab.pretrain.metrics import StepMetrics, ValidationMetrics
from sdp4bit_lab.pretrain.step.optimizer import set_learning_rate
from sdp4bit_lab.pretrain.step.parallelize import ShardedModel
from sdp4bit_lab.pretrain.step.simulated_model import SimulatedModel
from sdp4bit_lab.pretrain.step.simulated_step import SimulatedTrainingStep
from sdp4bit_lab.pretrain.step.training_step import TrainingStep


@contextmanager
def _naming_the_time(when: str) -> Iterator[None]:
    """Prefix communication errors inside the block with the step."""
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not is_communication_failure(error):
            raise
        # Unnamed collectives, such as those of pipelines, have no duration.
        seconds = error.seconds if isinstance(error, ExchangeError) else time.monotonic() - start
        raise ExchangeError(f"{when}: {error}", seconds=seconds) from error


@dataclass(kw_only=True)
class TrainingLoop:
    """Optimizer steps and validations of one run."""

    config: PretrainConfig
    model: ShardedModel
    optimizer: torch.optim.Optimizer
    batches: Batches
    progress: Progress
    ranks: Ranks

    def __post_init__(self) -> None:
        self._communication = self.model.communication
        simulates = isinstance(self.model, SimulatedModel)
        step: type[TrainingStep] = SimulatedTrainingStep if simulates else TrainingStep
        self._step_of_model = step(model=self.model, optimizer=self.optimizer, config=self.config)
        self._operations_per_device = (
            self.config.model_shape.flops_per_sample(self.config.sequence_length)
            * self.batches.global_batch_size
            / self.ranks.world_size
        )
        self._sent_before = self._communication.stats()["total"]
        self._traffic_before = self._traffic()
        self._reported_step: int | None = None
        self.stop_code = 0
        """Largest stop code of all ranks in the last step."""

    def steps(self, *, stop_code: Callable[[int], int] = lambda _: 0) -> Iterator[StepMetrics]:
        """Yield the measurements of each remaining step.

        Args:
            stop_code: returns this rank's reason to stop after the given step, 0 for none.

        Raises:
            ExchangeError: a rank exited or hangs; names the step.
        """
        while self.progress.step < self.config.training.steps:
            with _naming_the_time(f"step {self.progress.step + 1}"):
                metrics = self._step(stop_code)
            yield metrics

    def _step(self, stop_code: Callable[[int], int]) -> StepMetrics:
        config = self.config
        start, compiled_before = time.perf_counter(), compile_seconds()
        learning_rate = config.schedule.rate(self.progress.step)
        set_learning_rate(self.optimizer, learning_rate)
        batches = list(self.batches.training(self.progress.samples))

        ratio = 1.0

        def numbers() -> list[float]:
            nonlocal ratio
            # After backward, a step sends nothing but these numbers.
            sent, ratio = self._newly_sent()
            compiled = compile_seconds() - compiled_before
            return [sent["intra_bytes"], sent["inter_bytes"], compiled, stop_code(self.progress.step + 1)]

        outcome = self._step_of_model.run(batches, numbers=numbers)
        intra_bytes, inter_bytes, *_ = outcome.sums
        *_, compiled, code = outcome.maxima
        self.stop_code = round(code)
        self.progress = Progress(
            step=self.progress.step + 1, samples=self.progress.samples + self.batches.global_batch_size
        )

        stats = self._communication.stats()
        # The ranks wait for the one that compiles kernels.
        seconds = time.perf_counter() - start - compiled
        return StepMetrics(
            step=self.progress.step,
            samples=self.progress.samples,
            loss=outcome.loss_sum / outcome.tokens,
            lr=learning_rate,
            grad_norm=outcome.grad_norm,
            tokens_per_second=self.batches.global_batch_size * config.sequence_length / seconds,
            tflops_per_device=self._operations_per_device / seconds / 1e12,
            step_seconds=seconds,
            intra_bytes=round(intra_bytes),
            inter_bytes=round(inter_bytes),
            compression_ratio=ratio,
            weight_drift=stats["weight_drift"],
            gradient_error=stats["gradient_error"],
        )

    def new_measures(self) -> tuple[int, Sequence[Mapping[str, object]]] | None:
        """Return the last measured step and its measures by parameter group, once per measurement."""
        step = self._communication.stats()["sampled_step"]
        if step is None or step == self._reported_step:
            return None
        self._reported_step = step
        return step, self._communication.group_stats()

    def validate(self, *, test: bool = False) -> ValidationMetrics:
        """Compute the mean loss over all ranks' validation or test batches, and the bytes sent."""
        batches = self.batches.test() if test else self.batches.validation()
        with _naming_the_time(f"{'test' if test else 'validation'} after step {self.progress.step}"):
            losses, tokens = self._step_of_model.validate(batches)
            sent, _ = self._newly_sent()
            own = [sum(losses), sum(tokens), sent["intra_bytes"], sent["inter_bytes"]]
            total, count, intra_bytes, inter_bytes, *of_batches = sum_over_ranks(
                [*own, *losses, *tokens], device=self.ranks.device
            )
            sums, counts = of_batches[: len(losses)], of_batches[len(losses) :]
        return ValidationMetrics(
            step=self.progress.step,
            loss=total / count,
            intra_bytes=round(intra_bytes),
            inter_bytes=round(inter_bytes),
            batch_losses=tuple(total / max(1, count) for total, count in zip(sums, counts, strict=True)),
        )

    def _newly_sent(self) -> tuple[dict[str, int], float]:
        """Return the bytes since the last call, and their ratio; unlike a step's in `stats()`, those of a
        validation are not part of the next step."""
        before, self._sent_before = self._sent_before, self._communication.stats()["total"]
        sent = {level: total - before[level] for level, total in self._sent_before.items()}
        earlier, self._traffic_before = self._traffic_before, self._traffic()
        return sent, (self._traffic_before - earlier).compression_ratio

    def _traffic(self) -> Traffic:
        groups = self._communication.groups
        return sum((counter.total for group in groups for counter in group.counters), Traffic())
