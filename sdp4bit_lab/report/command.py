"""`sdp4bit report`: write one HTML page about training runs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

from sdp4bit_lab.common.settings import positional, require, require_folder


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Training runs to show on one page."""

    runs: Annotated[tuple[Path, ...], positional("RUNS")]
    """--out folders of pretrain, compare or demo. The strategy of the first run is the baseline."""
    out: Path | None = None
    """HTML file to write. Default: report.html in the folder of the first run."""

    def __post_init__(self) -> None:
        require(bool(self.runs), "give at least one RUN, the --out folder of pretrain, compare or demo")
        for path in self.runs:  # before the imports, which take seconds
            require_folder(path, remedy="Give an --out folder of pretrain, compare or demo")
        require(not self.file.is_dir(), f"--out {self.file} is a folder: give a file name")

    @property
    def file(self) -> Path:
        """HTML file to write."""
        return self.out or self.runs[0] / "report.html"


def write_report(config: ReportConfig) -> Path:
    """Write the page and return its path; runs may still be training."""
    from sdp4bit_lab.common.files import write_atomically
    from sdp4bit_lab.common.progress import phase
    from sdp4bit_lab.report.page import render_page
    from sdp4bit_lab.report.runs import find_runs

    runs = find_runs(config.runs)
    phase(f"writing {config.file}")
    page = render_page(runs, now=datetime.now().astimezone())
    write_atomically(config.file, page)
    return config.file
