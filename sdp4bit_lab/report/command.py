"""`sdp4bit report`: one HTML page about one or several training runs, from the files they have written."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import tyro

from sdp4bit_lab.common.settings import SettingError, require


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Training runs to show on one page."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders that runs have written (--out of pretrain), or comparisons of several (--out of compare, demo).
    The others are compared with the first."""
    out: Path = Path("report.html")
    """The HTML page to write."""

    def __post_init__(self) -> None:
        require(bool(self.runs), "give at least one RUN, the --out folder of pretrain, compare or demo")
        require(not self.out.is_dir(), f"--out {self.out} is a folder: give the name of the page in it")


def write_report(config: ReportConfig) -> Path:
    """Return the page, which is written; it shows the runs as they are at this moment.

    Raises:
        SettingError: a folder holds no run, a file in it cannot be understood, or the page cannot be written.
    """
    from sdp4bit_lab.common.files import write_atomically
    from sdp4bit_lab.report.page import render_page
    from sdp4bit_lab.report.runs import find_runs

    page = render_page(find_runs(config.runs), now=datetime.now().astimezone())
    try:
        write_atomically(config.out, page)
    except OSError as error:
        raise SettingError(f"cannot write --out {config.out}: {error}") from error
    return config.out
