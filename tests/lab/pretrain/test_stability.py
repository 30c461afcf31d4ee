"""Spikes of the gradient norm: which steps are spikes, and the alerts of a run. No process."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from sdp4bit_lab.pretrain.config.pretrain import LoggingConfig
from sdp4bit_lab.pretrain.metrics import MetricsWriter
from sdp4bit_lab.pretrain.stability import SPIKE_RATIO, GradientSpike, gradient_spikes
from tests.lab.pretrain.tiny_runs import step_metrics


def spikes(*norms: float) -> list[GradientSpike]:
    return gradient_spikes(enumerate(norms, start=1))


def test_a_spike_is_more_than_four_times_the_median_of_the_steps_before():
    assert spikes(*[2.0] * 12, SPIKE_RATIO * 2.0) == []
    (spike,) = spikes(*[2.0] * 12, 8.5, 2.0)
    assert (spike.step, spike.norm, spike.median, spike.ratio) == (13, 8.5, 2.0, 4.25)
    assert str(spike) == "gradient norm 8.5 at step 13, 4 times the median before"


def test_the_first_steps_are_no_spikes_whatever_they_are():
    assert spikes(1.0, 100.0, *[1.0] * 7, 100.0) == []
    assert [spike.step for spike in spikes(1.0, 100.0, *[1.0] * 8, 100.0)] == [11]


def test_a_level_that_stays_is_no_spike_after_a_while():
    steps = [spike.step for spike in spikes(*[1.0] * 60, *[10.0] * 60)]
    assert steps == list(range(61, 86))  # then half of the last 50 are 10


def test_a_norm_that_is_no_number_is_left_out():
    assert spikes(*[1.0] * 10, math.inf, math.nan, 5.0)[0].step == 13


def write(out: Path, norms: dict[int, float]) -> str:
    """Write these steps' norms into the folder of a run; return what was printed."""
    console = Console(record=True, width=200, file=(out.parent / "console").open("w"))
    logging = LoggingConfig(out=out, tensorboard=False, log_interval=1000)
    writer = MetricsWriter(logging, prefix="run:", steps=100, first_step=min(norms) - 1, console=console)
    with closing(writer):
        for number, norm in norms.items():
            writer.log_step(step_metrics(number, grad_norm=norm))
    return console.export_text()


def alerts(out: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "alert"]


def test_a_spike_is_an_alert_on_the_console_and_in_the_file(tmp_path):
    printed = write(tmp_path / "run", {n: 30.0 if n == 12 else 1.5 for n in range(1, 20)})
    message = (
        "gradient norm 30 at step 12, 20 times the median before: training is unstable, lower --lr or raise "
        "--lr-warmup-iters"
    )
    assert f"run: step 12/100  alert  run: {message}\n" in printed
    assert alerts(tmp_path / "run") == [
        {"event": "alert", "step": 12, "group": None, "message": message, "value": 30.0, "threshold": 6.0}
    ]


def test_a_resumed_run_knows_the_norms_of_the_steps_before(tmp_path):
    write(tmp_path / "run", dict.fromkeys(range(1, 16), 1.5))
    printed = write(tmp_path / "run", {13: 1.5, 14: 30.0})
    assert printed.count("alert") == 1 and "at step 14, 20 times" in printed
    assert [alert["step"] for alert in alerts(tmp_path / "run")] == [14]
    # What the file says of steps that are trained again goes, alerts included.
    write(tmp_path / "run", {14: 1.5, 15: 1.5})
    assert alerts(tmp_path / "run") == []
