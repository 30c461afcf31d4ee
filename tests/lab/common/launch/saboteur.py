"""Run `python -m sdp4bit_lab` with faults: one rank kills or stops itself at a chosen moment.

The soak test starts this module instead of the package. The environment variable SOAK_FOLDER names a folder
with

    plan.json       list of faults; the first without a mark is next
    fired-000       mark of fault 0, written by the affected process (or by the soak test)
    rank-0          current activity of rank 0, in one line of fixed length: process, step, phase
    resumed.jsonl   one line per load, by rank 0: the newest step, and the loaded one
    started.jsonl   one line per start, by rank 0: time and number of its first logged step

A fault is {"signal", "rank", "phase", "call"}: at this call of the phase since the start, the rank sends
itself the signal. The soak test itself sends faults whose phase is "random".
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = "SOAK_FOLDER"
LINE = 96
PHASES = (
    *("load", "forward", "backward", "exchange", "optimizer", "validation"),
    *("checkpoint copy", "checkpoint write", "checkpoint publish", "log"),
)


def mark_of(folder: Path, number: int) -> Path:
    return folder / f"fired-{number:03d}"


def next_fault(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """Return number and content of the next fault, or None."""
    for number, fault in enumerate(json.loads((folder / "plan.json").read_text())):
        if not mark_of(folder, number).exists():
            return number, fault
    return None


class Saboteur:
    """Track this rank's activity, and kill or stop it at its fault."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._counts = dict.fromkeys(PHASES, 0)
        self._stacks = threading.local()
        self.step = 0
        found = next_fault(folder)
        self._number, self._fault = found if found else (-1, {})
        path = folder / f"rank-{rank}"
        path.write_bytes(b" " * LINE)
        with path.open("r+b") as file:
            self._line = mmap.mmap(file.fileno(), LINE)
        self._show("start")

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Count calls of the function as calls of the phase, and trigger faults in them."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._in(phase):
                return function(*args, **kwargs)

        setattr(owner, name, watched)

    @contextmanager
    def _in(self, phase: str) -> Iterator[None]:
        # The checkpoint thread has its own phases.
        stack: list[str] = self._stacks.__dict__.setdefault("phases", [])
        stack.append(phase)
        self._show(phase)
        self._counts[phase] += 1
        self._strike(phase)
        try:
            yield
        finally:
            stack.pop()
            self._show(stack[-1] if stack else "between")

    def _strike(self, phase: str) -> None:
        fault = self._fault
        if fault.get("phase") != phase or fault["rank"] != self._rank:
            return
        if self._counts[phase] < fault["call"]:
            return
        self._fault = {}
        words = {"time": time.time(), "step": self.step, "phase": phase}
        mark_of(self._folder, self._number).write_text(json.dumps(words))
        os.kill(os.getpid(), signal.Signals[fault["signal"]])

    def _show(self, phase: str) -> None:
        text = f"{os.getpid()} {self.step} {phase}".ljust(LINE - 1) + "\n"
        self._line[:] = text.encode()


def instrument(saboteur: Saboteur, *, folder: Path, rank: int) -> None:
    """Wrap the functions of all phases."""
    import torch

    from sdp4bit.collectives.transport import PendingTransfer
    from sdp4bit_lab.pretrain.checkpoint import Checkpointer
    from sdp4bit_lab.pretrain.checkpoint_files import CheckpointWriter, find_checkpoints
    from sdp4bit_lab.pretrain.loop import TrainingLoop
    from sdp4bit_lab.pretrain.metrics import MetricsWriter
    from sdp4bit_lab.pretrain.model.gpt import GPT

    saboteur.watch(GPT, "forward", "forward")
    saboteur.watch(torch.Tensor, "backward", "backward")
    saboteur.watch(PendingTransfer, "wait", "exchange")
    saboteur.watch(torch.optim.AdamW, "step", "optimizer")
    saboteur.watch(TrainingLoop, "validate", "validation")
    saboteur.watch(Checkpointer, "save", "checkpoint copy")
    saboteur.watch(CheckpointWriter, "write_data", "checkpoint write")
    saboteur.watch(CheckpointWriter, "finish", "checkpoint publish")
    saboteur.watch(MetricsWriter, "log_step", "log")
    saboteur.watch(Checkpointer, "load", "load")
    one_step, load, log = TrainingLoop._step, Checkpointer.load, MetricsWriter.log_step
    logged: list[int] = []

    def counted(loop: TrainingLoop, stop_code: Callable[[int], int]) -> Any:
        saboteur.step = loop.progress.step + 1
        return one_step(loop, stop_code)

    def noted(checkpointer: Checkpointer, source: Path) -> Any:
        named = int(find_checkpoints(source)[0].name.removeprefix("step-"))
        progress = load(checkpointer, source)
        if rank == 0:
            with (folder / "resumed.jsonl").open("a") as file:
                file.write(json.dumps({"latest": named, "loaded": progress.step}) + "\n")
        return progress

    def first_noted(writer: MetricsWriter, metrics: Any) -> None:
        log(writer, metrics)
        if not logged:
            with (folder / "started.jsonl").open("a") as file:
                file.write(json.dumps({"time": time.time(), "step": metrics.step}) + "\n")
        logged.append(metrics.step)

    MetricsWriter.log_step = first_noted  # type: ignore[method-assign]
    TrainingLoop._step = counted  # type: ignore[method-assign]
    Checkpointer.load = noted  # type: ignore[method-assign]


def main(run: Callable[[], int]) -> int:
    folder, rank = Path(os.environ[FOLDER]), int(os.environ["RANK"])
    instrument(Saboteur(folder, rank=rank), folder=folder, rank=rank)
    return run()


if __name__ == "__main__":
    from sdp4bit_lab.cli import main as run_command

    sys.exit(main(run_command))
