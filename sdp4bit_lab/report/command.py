"""`sdp4bit report`: write one HTML page about training runs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import tyro

from sdp4bit_lab.common.settings import require


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Training runs to show on one page."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """--out folders of pretrain, compare or demo. The strategy of the first run is the baseline."""
    out: Path = Path("report.html")
    """HTML file to write."""

    def __post_init__(self) -> None:
        require(bool(self.runs), "give at least one RUN, the --out folder of pretrain, compare or demo")
        require(not self.out.is_dir(), f"--out {self.out} is a folder: give a file name")


def write_report(config: ReportConfig) -> Path:
    """Write the page and return its path; runs may still be training."""
    from sdp4bit_lab.common.files import write_atomically
    from sdp4bit_lab.report.page import render_page
    from sdp4bit_lab.report.runs import find_runs

    page = render_page(find_runs(config.runs), now=datetime.now().astimezone())
    write_atomically(config.out, page)
    return config.out
