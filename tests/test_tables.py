"""What commands print as tables fits a terminal of 80 columns. Layer: no process.

`plan`, `probe` and `explain()` have tests of their own in their rooms, with what they compute.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("tyro")

from sdp4bit_lab.cli import main
from sdp4bit_lab.compare.demo import print_outcome
from sdp4bit_lab.compare.tables import Report
from sdp4bit_lab.selftest.check import Outcome
from sdp4bit_lab.selftest.command import _report
from sdp4bit_lab.selftest.config import SelftestConfig
from tests.lab.compare.synthetic_runs import finished

LARGE = 999_999_999_999.0


def compared(console: Console) -> None:
    """Strategies with long names, six seeds and losses with many digits."""
    names = ["baseline", "sdp4bit-paper:inter_bits=3,clip=0.6", "tlq-hs"]
    runs = [finished(name, seed, 123.4567 + seed) for name in names for seed in range(6)]
    Report(runs=runs, baseline="baseline", planned=len(runs)).print(console)


def demonstrated(console: Console) -> None:
    result: Any = SimpleNamespace(
        train_loss=1234.5678,
        validation_loss=1234.5678,
        intra_bytes_per_step=LARGE,
        inter_bytes_per_step=LARGE,
        seconds=99999,
    )
    print_outcome([result, result], console=console)


def checked(_: Console) -> None:
    outcomes = [
        Outcome(name="kernels", result="passed", seconds=12345.6),
        Outcome(name="exchanges", result="skipped", seconds=0.0, reason="a reason of many words " * 9),
    ]
    _report(SelftestConfig(), outcomes, {"verdict": "what was checked works, but not all of it " * 4})


def planned(_: Console) -> None:
    arguments = ["pretrain", "--dry-run", "--preset", "13B", "--world-size", "64", "--ranks-per-node", "4"]
    assert main(arguments) == 0


@pytest.mark.parametrize(
    ("show", "least"),
    [(compared, 12), (demonstrated, 8), (checked, 8), (planned, 5)],
    ids=["compare", "demo", "selftest", "pretrain --dry-run"],
)
def test_tables_fit_80_columns(
    show: Callable[[Console], None], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stdout", printed)
    show(Console(file=printed, width=80))
    lines = printed.getvalue().splitlines()
    assert len(lines) >= least and max(map(len, lines)) <= 80, printed.getvalue()
