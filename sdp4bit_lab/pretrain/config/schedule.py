"""The learning rate by step, and the settings that change the numbers of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

DecayStyle = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up to the peak, cosine or linear decay to the minimum at a given step, then constant.

    The fields have the names of the options, so that a checkpoint's record shows them as they were given.
    """

    lr: float
    min_lr: float
    lr_warmup_iters: int
    lr_decay_iters: int
    lr_decay_style: DecayStyle

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.lr_warmup_iters:
            return self.lr * (step + 1) / self.lr_warmup_iters
        if self.lr_decay_style == "constant":
            return self.lr
        decay_steps = self.lr_decay_iters - self.lr_warmup_iters
        progress = min(1.0, (step + 1 - self.lr_warmup_iters) / max(1, decay_steps))
        is_linear = self.lr_decay_style == "linear"
        left = 1 - progress if is_linear else 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_lr + (self.lr - self.min_lr) * left

    @staticmethod
    def of(settings: Mapping[str, Any]) -> Schedule | None:
        """Return the schedule among the settings of a checkpoint's record; None if there is none."""
        names = [field.name for field in fields(Schedule)]
        return Schedule(**{name: settings[name] for name in names}) if set(names) <= set(settings) else None
