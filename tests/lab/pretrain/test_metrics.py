"""Files of metrics. Layer: no process, and one with simulated ranks."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from sdp4bit_lab.pretrain import metrics
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import LoggingConfig
from tests.lab.pretrain.tiny_runs import read_log, small, step_metrics, train_here
from tests.ranks import one_rank


def test_communication_and_alerts_are_in_all_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scalars: list[tuple[str, float, int]] = []

    class Recorder:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((name, value, step))

        def close(self) -> None:
            pass

    monkeypatch.setattr(metrics, "_tensorboard_writer", lambda *_, **__: Recorder())
    writer = metrics.MetricsWriter(LoggingConfig(out=tmp_path), prefix="x:", steps=9, first_step=0)
    groups: list[dict[str, object]] = [
        {
            "name": "layers.0",
            "inter_bytes": 5,
            "compression_ratio": math.inf,
            "full_refresh_reason": "resync()",
        }
    ]
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


def test_a_line_has_the_means_since_the_last_one_and_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(metrics, "time", clock)
    console = Console(file=io.StringIO())
    config = LoggingConfig(out=tmp_path, tensorboard=False)
    writer = metrics.MetricsWriter(
        config, prefix="x:", steps=20, first_step=0, steps_after=40, part="run 1 of 3", console=console
    )
    for step in range(1, 12):
        seconds = 2.0 * step
        clock.monotonic = partial(float, seconds)
        writer.log_step(replace(step_metrics(step), step_seconds=2.0))
    writer.close()
    printed = console.file.getvalue().splitlines()
    # 10 + 40 steps of 2 seconds.
    assert printed[-1].endswith(" | run 1 of 3, all: about 2 minutes left") and " left" not in printed[0]
    lines = [line.split(" | ")[:2] for line in printed]
    assert lines == [["x: step 1/20", "loss 1.0000"], ["x: step 10/20", "loss 6.0000"]]


@pytest.mark.parametrize("steps_after", [0, 1])
def test_a_line_tells_the_time_left_unless_nothing_is_left(steps_after: int, tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    config = LoggingConfig(out=tmp_path, tensorboard=False, log_interval=1)
    writer = metrics.MetricsWriter(
        config, prefix="x:", steps=3, first_step=0, steps_after=steps_after, console=console
    )
    for step in (1, 2, 3):
        writer.log_step(step_metrics(step))
    writer.close()
    *_, before, last = console.file.getvalue().splitlines()
    assert before.endswith(" | less than a minute left")
    assert last.endswith(" left") == bool(steps_after)


def test_the_ratio_of_several_steps_is_that_of_their_bytes() -> None:
    full, short = step_metrics(1), step_metrics(2)
    full = replace(full, inter_bytes=9_000, compression_ratio=1.0)
    short = replace(short, inter_bytes=1_000, compression_ratio=9.0)
    assert metrics.compression_ratio([full, short]) == 1.8
    one_node = [replace(step, inter_bytes=0, intra_bytes=step.inter_bytes) for step in (full, short)]
    assert metrics.compression_ratio(one_node) == 1.8


def test_a_ratio_counts_the_step_without_the_validation_before_it(text: Path, tmp_path: Path) -> None:
    config = small(text, tmp_path, parallel=ParallelConfig(ranks_per_node=2, simulated_ranks=4))
    with one_rank():
        (result,) = train_here(config)
    steps = {line["step"]: line for line in read_log(tmp_path) if line["event"] == "train"}
    # The validation after step 4 has sent the weights. Plain FSDP2 would send the same in every step.
    assert steps[5]["inter_bytes"] < steps[4]["inter_bytes"]
    plain = [step["compression_ratio"] * step["inter_bytes"] for step in steps.values()]
    assert plain == pytest.approx([plain[0]] * 8, rel=1e-3)
    assert metrics.compression_ratio(result.steps) == pytest.approx(
        sum(plain) / sum(step["inter_bytes"] for step in steps.values())
    )


def test_a_resume_is_an_event_that_a_repeated_one_replaces(tmp_path: Path) -> None:
    config = LoggingConfig(out=tmp_path, tensorboard=False)
    for first_step in (0, 3, 3, 5, 4):
        metrics.MetricsWriter(config, prefix="x:", steps=9, first_step=first_step).close()
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert events == [{"event": "resume", "step": 3}, {"event": "resume", "step": 4}]
