"""Folders as training runs write them, made up without training, for the tests of the report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

GROUPS = ("embedding", "layers.0", "layers.1", "layers.2", "norm")


def train_event(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "event": "train",
        "step": step,
        "samples": 8 * step,
        "loss": 4 + 4 * math.exp(-step / 50),
        "lr": 1e-3,
        "grad_norm": 1.5,
        "tokens_per_second": 2000.0,
        "tflops_per_device": 0.01,
        "step_seconds": 0.25,
        "intra_bytes": 2_000_000,
        "inter_bytes": 250_000,
        "compression_ratio": 8.0,
        "weight_drift": 0.01,
        "gradient_error": 0.15,
        **changes,
    }


def validation_event(step: int, loss: float) -> dict[str, Any]:
    return {"event": "validation", "step": step, "loss": loss, "intra_bytes": 10, "inter_bytes": 5}


def communication_event(step: int, names: Iterable[str] = GROUPS, **changes: Any) -> dict[str, Any]:
    return {
        "event": "communication",
        "step": step,
        "groups": [
            {
                "name": name,
                "intra_bytes": 1000,
                "inter_bytes": 200,
                "compression_ratio": 8.0,
                "gradient_error": 0.1 + 0.02 * index,
                "weight_error": 0.05,
                "weight_drift": 0.01 * (index + 1),
                "nonfinite_groups": 0,
                "weight_bits": 4,
                "gradient_bits": 4,
                **changes,
            }
            for index, name in enumerate(names)
        ],
    }


def alert_event(step: int, message: str, *, group: str | None = None, **numbers: float) -> dict[str, Any]:
    return {"event": "alert", "step": step, "group": group, "message": message, **numbers}


def settings(strategy: str = "sdp4bit", *, seed: int = 1, steps: int = 100) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "seed": seed,
        "model": {"model_card": "tiny", "layers": 2, "hidden": None, "heads": None},
        "training": {"steps": steps, "eval_interval": 50, "sequence_length": None, "precision": None},
        "optimizer": {"learning_rate": None},
        "parallel": {"nproc_per_node": 4, "ranks_per_node": 2},
    }


def write_run(
    folder: Path, events: Iterable[dict[str, Any]], *, config: dict[str, Any] | None = None, end: str = "\n"
) -> Path:
    """Write these events into a run's folder; `end` stands behind the last one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(event) for event in events) + end)
    (folder / "config.json").write_text(json.dumps(settings() if config is None else config))
    return folder


def long_events(steps: int, *, seed: int, layers: int = 24, every: int = 20) -> list[dict[str, Any]]:
    """Return a noisy run of many steps with every kind of event; some losses are null."""
    rng = np.random.default_rng(seed)
    names = ["embedding", *(f"layers.{index}" for index in range(layers)), "norm"]
    decimal = ("lr", "grad_norm", "gradient_error", "weight_drift", "step_seconds")
    events = []
    for step in range(1, steps + 1):
        loss = 3 + 5 * math.exp(-step / steps * 6) + 0.05 * rng.standard_normal()
        event = train_event(step, inter_bytes=250_000 if step > 1 else 900_000)
        event |= {name: event[name] * (0.5 + rng.random()) for name in decimal}
        events.append({**event, "loss": None if step % 4001 == 4000 else loss})
        if step % every == 0:
            events.append(communication_event(step, names))
            for group in events[-1]["groups"]:
                errors = ("gradient_error", "weight_error", "weight_drift")
                group |= {name: group[name] * (0.5 + rng.random()) for name in errors}
                group["nonfinite_groups"] = int(rng.random() > 0.998)
        if step % max(1, steps // 20) == 0:
            events.append(validation_event(step, loss + 0.05))
        if step % max(1, steps // 5) == 0:
            message = "gradient error above the limit"
            events.append(alert_event(step, message, group=names[step % len(names)], error=0.15, limit=0.13))
    return events
