"""Audits and alerts of the training program: its options, and alerts in the metrics.

Layer: one run in 2 processes over gloo; the rest in no process.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sdp4bit import AlertConfig, AuditConfig
from sdp4bit.cli import COMMANDS, main
from sdp4bit.pretrain.config.communication import ReliabilityConfig
from sdp4bit.pretrain.config.pretrain import PretrainConfig
from tests.pretrain.tiny_runs import read_log, small, train_here
from tests.ranks import run_ranks


def parsed(*arguments: str) -> PretrainConfig:
    config = COMMANDS["pretrain"].parse(arguments)
    assert isinstance(config, PretrainConfig)
    return config


def test_options_become_the_library_s_settings() -> None:
    nothing = parsed().quantization
    assert nothing.audit == AuditConfig() and nothing.alerts is None
    assert parsed("--audit-interval", "0").quantization.audit is None
    given = parsed(
        *("--audit-interval", "7", "--audit-on-mismatch", "resync", "--alerts", "ladder"),
        *("--alert-gradient-error", "0.5", "--alert-calm-samples", "3"),
    ).quantization
    assert given.audit == AuditConfig(interval=7, on_mismatch="resync")
    assert given.alerts == AlertConfig(action="ladder", gradient_error=0.5, calm_samples=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--audit-interval", "-1"], "audit.interval=-1 must be an integer of at least 1"),
        (["--audit-interval", "0", "--audit-on-mismatch", "resync"], "--audit-on-mismatch has no effect"),
        (["--alert-weight-drift", "0.1"], "--alert-weight-drift has no effect without --alerts warn"),
        (["--alerts", "warn", "--alert-calm-samples", "2"], "has no effect without --alerts ladder"),
        (["--alerts", "warn", "--alert-weight-error", "0"], "alerts.weight_error=0.0 must be a positive"),
        (["--alerts", "warn", "--telemetry-interval", "0"], "alerts look at what telemetry measures"),
        (["--alerts", "warn", "--strategy", "baseline"], "alerts have nothing to watch"),
    ],
)
def test_contradictions_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_alerts_are_in_the_metrics(text: Path, tmp_path: Path) -> None:
    config = small(text, tmp_path / "out")
    config = replace(
        config,
        training=replace(config.training, steps=4),
        logging=replace(config.logging, telemetry_interval=2),
        reliability=ReliabilityConfig(audit_interval=2, alerts="ladder", alert_gradient_error=0.004),
    )
    run_ranks(train_here, 2, config)
    alerts = [line for line in read_log(tmp_path / "out") if line["event"] == "alert"]
    moved = [line for line in alerts if "gradients int8 -> full precision" in line["message"]]
    assert moved and moved[0]["step"] == 2  # one node of 2 ranks: there is no hop of 4 bits
    for line in moved:
        assert line["message"].startswith("gradient error ") and line["value"] > line["threshold"]
