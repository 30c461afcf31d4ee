"""`python -m sdp4bit_lab` with state that is wrong but well formed.

The environment variable SIGNALLED names a file with the fault, which a flipped bit removes.
Ranks that the command starts import this file, too.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sdp4bit_lab.cli import main
from sdp4bit_lab.pretrain.loop import TrainingLoop
from sdp4bit_lab.pretrain.step.gradients import Gradients

PLAN = Path(os.environ["SIGNALLED"])
now, clip, train = time.time, Gradients.clip, TrainingLoop._step
step = 0


def clip_and_break(self: Gradients, norm: torch.Tensor, *, largest: float) -> None:
    clip(self, norm, largest=largest)
    if PLAN.read_text() == "nan" and step == 6 and dist.get_rank() == 1:
        self._parameters[0].grad.to_local().fill_(math.nan)


def train_and_flip(self: TrainingLoop, stop_code: Callable[[int], int]) -> Any:
    global step
    step = self.progress.step + 1
    metrics = train(self, stop_code)
    if PLAN.read_text() == "flip" and step == 7 and dist.get_rank() == 1:
        PLAN.write_text("")
        rows = self.model.communication.groups[-1].weights.replica.rows
        rows.view(torch.int16).view(-1)[7] ^= 1
    return metrics


if PLAN.read_text() == "clock":
    time.time = lambda: now() - 3600
Gradients.clip = clip_and_break
TrainingLoop._step = train_and_flip

if __name__ == "__main__":
    sys.exit(main())
