"""Files of metrics. Layer: no process."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from sdp4bit_lab.pretrain import metrics
from sdp4bit_lab.pretrain.config.pretrain import LoggingConfig


def test_communication_and_alerts_are_in_all_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scalars: list[tuple[str, float, int]] = []

    class Recorder:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((name, value, step))

        def close(self) -> None:
            pass

    monkeypatch.setattr(metrics, "_tensorboard_writer", lambda *_, **__: Recorder())
    writer = metrics.MetricsWriter(LoggingConfig(out=tmp_path), description="x", steps=9, first_step=0)
    groups = [{"name": "layers.0", "inter_bytes": 5, "compression_ratio": math.inf, "weight_bits": None}]
    writer.log_communication(4, groups)
    writer.log_alert(5, "layers.0", "the drift has doubled", weight_drift=0.5, limit=math.nan)
    writer.close()
    communication, alert = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    # JSON has no infinity and no NaN.
    groups[0]["compression_ratio"] = None
    assert communication == {"event": "communication", "step": 4, "groups": groups}
    described = {"group": "layers.0", "message": "the drift has doubled", "weight_drift": 0.5, "limit": None}
    assert alert == {"event": "alert", "step": 5, **described}
    assert scalars == [("communication/layers.0/inter_bytes", 5, 4), ("alert/layers.0/weight_drift", 0.5, 5)]
