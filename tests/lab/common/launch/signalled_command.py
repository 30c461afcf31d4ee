"""`python -m sdp4bit` whose rank 1 signals the command's process group, once, in the middle of a phase.

The environment variable SIGNALLED names a file: a line "SIGTERM training" is taken away by the rank that does
it. Ranks that the command starts import this file, too.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from sdp4bit_lab.cli import main
from sdp4bit_lab.pretrain import checkpoint
from sdp4bit_lab.pretrain.data.batches import Batches
from sdp4bit_lab.pretrain.loop import TrainingLoop


def strike(phase: str) -> None:
    plan = Path(os.environ["SIGNALLED"])
    name, _, where = plan.read_text().partition(" ")
    if where == phase and dist.get_rank() == 1:
        plan.write_text("")
        # torchrun's ranks are in groups of their own: a terminal, or `timeout`, signals torchrun's.
        launched = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
        os.killpg(os.getpgid(launched), signal.Signals[name])


def watch(owner: object, name: str, phase: str, *, after: int = 0) -> None:
    """Strike in a call, after so many."""
    function, calls = getattr(owner, name), itertools.count()

    @functools.wraps(function)
    def watched(*args: object, **kwargs: object) -> object:
        if next(calls) >= after:
            strike(phase)
        return function(*args, **kwargs)

    setattr(owner, name, watched)


# The data is prepared, and the model is still to be built.
watch(Batches, "__init__", "start")
# Until the first step has ended, a signal ends the process.
watch(Batches, "training", "training", after=1)
watch(TrainingLoop, "validate", "validation")
# Training waits for it.
watch(checkpoint, "save_state", "saving")

if __name__ == "__main__":
    sys.exit(main())
