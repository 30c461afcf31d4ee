"""Folders as training runs write them, made up without training, for the tests of the report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def train_event(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "event": "train",
        "step": step,
        "loss": 4 + 4 * math.exp(-step / 50),
        "grad_norm": 1.5,
        "step_seconds": 0.25,
        "intra_bytes": 2_000_000,
        "inter_bytes": 250_000,
        "compression_ratio": 8.0,
        **changes,
    }


def train_events(steps: int = 20, **changes: Any) -> list[dict[str, Any]]:
    return [train_event(step, **changes) for step in range(1, steps + 1)]


def validation_event(step: int, loss: float | None) -> dict[str, Any]:
    return {"event": "validation", "step": step, "loss": loss, "intra_bytes": 10, "inter_bytes": 5}


def alert_event(step: int, message: str, *, group: str | None = None, **numbers: float) -> dict[str, Any]:
    return {"event": "alert", "step": step, "group": group, "message": message, **numbers}


def communication_event(step: int, **inter_bytes: int) -> dict[str, Any]:
    groups = [{"name": name, "intra_bytes": 0, "inter_bytes": size} for name, size in inter_bytes.items()]
    return {"event": "communication", "step": step, "groups": groups}


def settings(strategy: str = "sdp4bit", *, seed: int = 1, steps: int = 20, **changes: Any) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "seed": seed,
        "training": {"steps": steps, "eval_interval": 50},
        "parallel": {"nproc_per_node": 4, "ranks_per_node": 2},
        **changes,
    }


def write_run(
    folder: Path, events: Iterable[dict[str, Any]], *, config: dict[str, Any] | None = None, end: str = "\n"
) -> Path:
    """Write the files of a run; `end` follows the last event."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(event) for event in events) + end)
    (folder / "config.json").write_text(json.dumps(settings() if config is None else config))
    return folder
