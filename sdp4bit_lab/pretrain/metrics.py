"""Write metrics as JSON lines, TensorBoard events and console lines."""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from rich.console import Console

from sdp4bit.traffic import format_bytes
from sdp4bit_lab.common import progress
from sdp4bit_lab.common.failures import failed
from sdp4bit_lab.common.files import time_left, write_atomically
from sdp4bit_lab.common.progress import phase
from sdp4bit_lab.pretrain.config.pretrain import LoggingConfig
from sdp4bit_lab.pretrain.stability import SPIKE_RATIO, SpikeDetector

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step; bytes are summed over all ranks."""

    step: int
    samples: int
    """Sequences trained on so far."""
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    tflops_per_device: float
    """10**12 floating-point operations per second and device, by the paper's count."""
    step_seconds: float
    """Duration without the compilation of CPU kernels."""
    intra_bytes: int
    inter_bytes: int
    compression_ratio: float
    """Inter-node bytes of plain FSDP2 over those sent; on rank 0, like the next two."""
    weight_drift: float | None
    """Last measured |main weights - replica| / |main weights|; None without weight quantization."""
    gradient_error: float | None
    """Last measured relative quantization error; None without gradient quantization."""


def compression_ratio(steps: Sequence[StepMetrics]) -> float:
    """Return the bytes of plain FSDP2 in these steps over those sent, like the ratio of a step."""
    level = "inter_bytes" if any(step.inter_bytes for step in steps) else "intra_bytes"
    sent = [getattr(step, level) for step in steps]
    plain = sum(step.compression_ratio * count for step, count in zip(steps, sent, strict=True))
    return plain / sum(sent) if any(sent) else 1.0


@dataclass(frozen=True, kw_only=True)
class ValidationMetrics:
    """One validation; its bytes include the weight refresh that the next step then needs not send."""

    step: int
    loss: float
    intra_bytes: int
    inter_bytes: int
    batch_losses: tuple[float, ...] = ()
    """Mean loss of each batch, for an interval of the difference between runs."""


class MetricsWriter:
    """Write and print the metrics of a run."""

    def __init__(
        self,
        config: LoggingConfig,
        *,
        prefix: str,
        steps: int,
        first_step: int,
        validation_due: bool = False,
        steps_after: int | None = None,
        part: str | None = None,
        console: Console | None = None,
    ) -> None:
        """Open the outputs; a resumed run drops the events of steps after its start.

        Args:
            prefix: beginning of every line.
            first_step: number of completed steps.
            validation_due: whether the validation after them is still due, and an earlier record of it is
            dropped.
            steps_after: steps of the runs that follow; given, lines end with the time left for all of them.
            part: position of this run among them, such as "run 1 of 2".
        """
        self._config = config
        self._steps = steps
        self._prefix = prefix
        self._console = console or progress.console()
        self._spikes = SpikeDetector()
        self.failure: str | None = None
        """Description of the first failed write, after which nothing more is written."""
        self._log = config.folder / "metrics.jsonl"
        self._lines: TextIO | None = None
        if config.jsonl:
            earlier = _earlier_events(config, first_step=first_step, validation_due=validation_due)
            for event in earlier:
                if event["event"] == "train":
                    norm = event.get("grad_norm")
                    self._spikes.observe(event["step"], math.nan if norm is None else norm)
            write_atomically(self._log, "".join(json.dumps(event) + "\n" for event in earlier))
            self._lines = self._log.open("a", encoding="utf-8")
            if first_step:
                self._write_line("resume", {"step": first_step})
        self._tensorboard = _tensorboard_writer(config, first_step=first_step)
        self._since_line: list[StepMetrics] = []
        self._steps_after = steps_after
        self._part = part
        self._first: tuple[int, float] | None = None
        """First step and the time of its end."""

    def close(self) -> None:
        if self._lines is not None:
            self._attempt(self._lines.close, path=self._log)
        if self._tensorboard is not None:
            self._attempt(self._tensorboard.close, path=events_folder(self._config))

    def _attempt(self, write: Callable[[], object], *, path: Path) -> None:
        """Write, and note a failure for the ranks to agree on: this one alone must not leave the run."""
        try:
            write()
        except OSError as error:
            self.failure = self.failure or failed(path, error)

    def log_step(self, metrics: StepMetrics) -> None:
        """Write a step to all outputs; print the means since the last line at every log interval."""
        self._write("train", metrics)
        self._since_line.append(metrics)
        self._first = self._first or (metrics.step, time.monotonic())
        spike = self._spikes.observe(metrics.step, metrics.grad_norm)
        if spike is not None:
            message = f"{spike}: training is unstable, lower --lr or raise --lr-warmup-iters"
            self.log_alert(spike.step, None, message, value=spike.norm, threshold=SPIKE_RATIO * spike.median)
        if metrics.step % self._config.log_interval == 0 or metrics.step in (1, self._steps):
            self.say(self._line(metrics))
            self._since_line.clear()

    def log_communication(self, step: int, groups: Sequence[Mapping[str, object]]) -> None:
        """Write rank 0's measures of all parameter groups to the files."""
        finite = [_finite(group) for group in groups]
        self._write_line("communication", {"step": step, "groups": finite})
        for group in finite:
            numbers = {f"{group['name']}/{key}": value for key, value in group.items() if key != "name"}
            self._write_scalars("communication", numbers, step=step)

    def log_alert(self, step: int, group: str | None, message: str, **numbers: float | None) -> None:
        """Write an alert to all outputs.

        Args:
            group: parameter group; None for the whole run.
            numbers: value and threshold.
        """
        finite, where = _finite(numbers), "run" if group is None else group
        self._write_line("alert", {"step": step, "group": group, "message": message, **finite})
        self._write_scalars("alert", {f"{where}/{name}": v for name, v in finite.items()}, step=step)
        self.say(f"step {step}/{self._steps}  alert  {where}: {message}")

    def log_validation(
        self, metrics: ValidationMetrics, *, event: Literal["validation", "test"] = "validation"
    ) -> None:
        """Write a validation, or the test after the last step, to all outputs."""
        self._write(event, metrics)
        self.say(f"step {metrics.step}/{self._steps}  {event} loss {metrics.loss:.4f}")

    def say(self, message: str) -> None:
        """Print a line after the prefix of the run."""
        self._console.print(f"{self._prefix} {message}", highlight=False, markup=False, soft_wrap=True)

    def show_progress(self, step: int) -> None:
        """Show the steps done and the time left, of all runs if the lines have it, so that both agree."""
        if self._part is None or self._steps_after is None:
            phase("training", total=self._steps, done=step)
        else:
            phase(f"training from {self._part} on", total=self._steps + self._steps_after, done=step)

    def _line(self, last: StepMetrics) -> str:
        """Format the means of the steps since the last line."""
        steps = self._since_line
        left = self._time_left(last.step)
        seconds = statistics.fmean(step.step_seconds for step in steps)
        operations = statistics.fmean(step.tflops_per_device * step.step_seconds for step in steps)
        inter = format_bytes(statistics.fmean(step.inter_bytes for step in steps))
        parts = {
            f"step {last.step}/{self._steps}": True,
            f"loss {statistics.fmean(step.loss for step in steps):.4f}": True,
            f"grad norm {last.grad_norm:.3f}": True,
            f"{1000 * seconds:,.0f} ms": True,
            f"{operations / seconds:.3g} TFLOP/s per device": self._config.log_throughput,
            f"{inter} inter-node ({compression_ratio(steps):.2f}x)": True,
            left: bool(left),
        }
        return " | ".join(part for part, is_shown in parts.items() if is_shown)

    def _time_left(self, step: int) -> str:
        """Describe the time of the steps left, estimated from the steps after the first; "" if not wanted."""
        first, began = self._first or (step, 0.0)
        if self._steps_after is None or step == first:
            return ""
        seconds, steps = (time.monotonic() - began) / (step - first), self._steps - step + self._steps_after
        all_runs = f"{self._part}, all: " if self._part else ""
        return f"{all_runs}{time_left(seconds * steps)}" if steps else ""

    def _write(self, event: str, metrics: StepMetrics | ValidationMetrics) -> None:
        values = _finite(asdict(metrics))
        self._write_line(event, values)
        numbers = {name: value for name, value in values.items() if name != "step"}
        self._write_scalars(event, numbers, step=metrics.step)

    def _write_line(self, event: str, values: Mapping[str, object]) -> None:
        if self._lines is not None and not self.failure:
            self._attempt(
                partial(print, json.dumps({"event": event, **values}), file=self._lines, flush=True),
                path=self._log,
            )

    def _write_scalars(self, event: str, values: Mapping[str, object], *, step: int) -> None:
        if self._tensorboard is not None and not self.failure:
            for name, value in values.items():
                if isinstance(value, int | float):  # reasons of refreshes are text
                    add = partial(self._tensorboard.add_scalar, f"{event}/{name}", value, step)
                    self._attempt(add, path=events_folder(self._config))


def _finite(values: Mapping[str, object]) -> dict[str, object]:
    """Replace NaN and infinite numbers by None, because JSON lacks them."""

    def finite(value: object) -> object:
        if isinstance(value, tuple):
            return [finite(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: finite(value) for name, value in values.items()}


def _earlier_events(config: LoggingConfig, *, first_step: int, validation_due: bool) -> list[dict[str, Any]]:
    """Read the events of completed steps from metrics.jsonl; none for a new run."""
    path = config.folder / "metrics.jsonl"
    if not first_step or not path.is_file():
        return []
    again = ("validation", "resume") if validation_due else ("resume",)
    events = []
    for line in path.read_bytes().splitlines():
        try:
            event = json.loads(line)
            is_repeated = event["event"] in again and event["step"] == first_step
            is_kept = event["step"] <= first_step and not is_repeated
        except (ValueError, RecursionError, KeyError, TypeError):
            # The run was killed while it wrote this line.
            continue
        if is_kept:
            events.append(event)
    return events


def _tensorboard_writer(config: LoggingConfig, *, first_step: int) -> SummaryWriter | None:
    if not config.tensorboard:
        return None
    from torch.utils.tensorboard import SummaryWriter

    # Its thread keeps an error for the next call, which `MetricsWriter` reports.
    threading.excepthook = partial(_report_error_of_thread, threading.excepthook)
    return SummaryWriter(str(events_folder(config)), purge_step=first_step + 1)


def events_folder(config: LoggingConfig) -> Path:
    """Return the folder of TensorBoard's events."""
    return config.tensorboard_dir or config.folder / "tensorboard"


def _report_error_of_thread(report: Callable[[Any], object], arguments: threading.ExceptHookArgs) -> None:
    if type(arguments.thread).__name__ != "_AsyncWriterThread":
        report(arguments)
