"""Finished runs without training, for the tests of comparisons."""

from __future__ import annotations

import math
from typing import Any

from sdp4bit_lab.compare.finished_run import FinishedRun

SETTINGS: dict[str, Any] = {"model": {"layers": 2}, "training": {"steps": 20, "exit_interval": None}}


def finished(
    strategy: str,
    seed: int,
    loss: float,
    *,
    first: float = 6.0,
    diverged_at: int | None = None,
    **changes: Any,
) -> FinishedRun:
    """Return a run of 20 steps that ends at this validation loss, or at the step where it diverged."""
    losses = [first + (loss - first) * step / 19 for step in range(20)]
    validation = [(step, losses[step - 1]) for step in (10, 20)]
    if diverged_at is not None:
        losses = [*losses[: diverged_at - 1], math.nan]
        validation = [(step, loss) for step, loss in validation if step < diverged_at]
    content: dict[str, Any] = {
        "settings": SETTINGS,
        "quantization": {"weights": None, "gradients": {"bits": 4}, "seed": seed},
        "environment": {"torch": "2.9", "device": "cpu"},
        **changes,
    }
    return FinishedRun(
        strategy=strategy,
        seed=seed,
        losses=tuple(losses),
        validation=tuple(validation),
        train_loss=losses[-1],
        intra_bytes_per_step=2000,
        inter_bytes_per_step=1000 if strategy == "baseline" else 250,
        seconds=30.0,
        step_seconds=1.5,
        diverged_at=diverged_at,
        **content,
    )
