"""Write the result tables and figures of the documentation from results/.

    python -m benchmarks.tables

writes the pages of docs/results/, figures into docs/images/, and the text between the markers
`<!-- result NAME -->` and `<!-- end -->` of README.md and docs/. Pages with unchanged results do not change.
results/README.md names the programs that write the inputs. Tables of finished studies are text of their
pages, which name the folder of experiments/ with the numbers.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.frontier_tables import (
    draw_frontier,
    frontier_conditions,
    frontier_losses,
    frontier_seconds,
)
from benchmarks.gpu_tables import nccl_page
from benchmarks.markdown import NOTICE, table
from benchmarks.plan_constants import constants_text, host_constants
from benchmarks.planned_jobs import jobs_page
from benchmarks.speed_tables import (
    cluster_results,
    cluster_section,
    draw_step_times,
    kernels_page,
    profile_section,
)
from sdp4bit_lab.common.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- result ([\w-]+) -->\n?).*?(<!-- end -->)", re.DOTALL)
FRONTIER = {
    "frontier-losses": frontier_losses,
    "frontier-seconds": frontier_seconds,
    "frontier-conditions": frontier_conditions,
}
_LIGHT = (
    "text.color",
    "axes.labelcolor",
    "axes.edgecolor",
    "xtick.color",
    "ytick.color",
    "legend.labelcolor",
)
DARK = {"savefig.transparent": True, **dict.fromkeys(_LIGHT, "#c9d1d9")}
"""Style of figures for dark pages, on which only text and lines differ."""


# -- sections of pages -----------------------------------------------------------------------------------


def peak_table(result: dict[str, Any]) -> str:
    """Return the measured memory of a result beside the planned one, in MB."""
    rows = []
    for row in result["rows"]:
        planned = row["planned"]
        counts = (
            *(row["between_steps"], planned["shards"] + planned["replica"]),
            *(row["measured"], sum(planned.values())),
        )
        rows.append([row["strategy"], *(f"{count / 1e6:.1f}" for count in counts)])
    return table(["MB", "between steps", "shards and replica, planned", "peak", "peak, planned"], rows)


def predictions(result: dict[str, Any]) -> str:
    """Return the predicted shares of a copy, for comparison with the first measurements."""
    rows = [
        [f"{cell} %" if 3 <= i <= 5 else str(cell) for i, cell in enumerate(row)] for row in result["rows"]
    ]
    return (
        f"## Prediction for GPUs\n\n**A calculation of {result['date']}, not a measurement.** "
        f"{result['note']}\n\n{table(result['columns'], rows)}"
    )


def gpu_section(reports: dict[str, dict[str, str]]) -> str:
    """Return the machines with GPUs that have sent a report, with the result of each part."""
    if not reports:
        return "No GPU has been measured.\n"
    names = list(dict.fromkeys(part for parts in reports.values() for part in parts))
    rows = [[name, *(parts.get(each, "–") for each in names)] for name, parts in reports.items()]
    return f"## Reports of machines with GPUs\n\n{table(['machine', *names], rows)}"


def kernels_section(title: str, result: dict[str, Any]) -> str:
    """Return a measurement of the kernels on a GPU, besides their times."""
    rows = [["–" if cell is None else str(cell) for cell in row] for row in result["rows"]]
    return f"## {title}\n\n{result['note']}.\n\n{table(result['columns'], rows)}"


# -- everything ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Results:
    """Content of results/, and the documents generated from it."""

    root: Path = ROOT

    def _read(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.root / "results" / name).read_text(encoding="utf-8"))
        return content

    @cached_property
    def kernels(self) -> list[dict[str, Any]]:
        """Times of the operators on all devices."""
        folder = self.root / "results"
        paths = [*sorted((folder / "kernels").glob("*")), *sorted((folder / "gpu").glob("*/kernels.json"))]
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    @cached_property
    def gpu_reports(self) -> dict[str, dict[str, str]]:
        """Result of each part of `benchmarks.gpu_report`, by the names of the machines."""
        paths = sorted((self.root / "results" / "gpu").glob("*/report.json"))
        found = {path.parent.name: json.loads(path.read_text(encoding="utf-8"))["parts"] for path in paths}
        return {name: {part: each["result"] for part, each in of.items()} for name, of in found.items()}

    @cached_property
    def gpu_kernels(self) -> dict[str, dict[str, Any]]:
        """Measurements of the kernels on GPUs, besides their times, by titles."""
        found = {}
        titles = {
            "tuning": "Launch settings",
            "ncu": "Profile of the kernels",
            "limits": "Limits of the kernels",
        }
        for name, title in titles.items():
            for path in sorted((self.root / "results" / "gpu").glob(f"*/{name}.json")):
                found[f"{title}, {path.parent.name}"] = json.loads(path.read_text(encoding="utf-8"))
        return found

    @cached_property
    def clusters(self) -> list[dict[str, Any]]:
        """Results of the emulated cluster, one per layout, smallest first."""
        return cluster_results(self.root / "results" / "cluster")

    @cached_property
    def frontier(self) -> dict[str, Any]:
        """Losses and seconds of methods that people choose between."""
        return self._read("frontier.json")

    @cached_property
    def nccl(self) -> dict[str, dict[str, Any]]:
        """Step times over NCCL by layout, of the first machine that has them."""
        found: dict[str, dict[str, Any]] = {}
        for path in sorted((self.root / "results" / "gpu").glob("*/nccl-2*.json")):
            layout = path.stem.removeprefix("nccl-")
            found.setdefault(layout, json.loads(path.read_text(encoding="utf-8")))
        return found

    def pages(self) -> dict[str, str]:
        """Return the generated pages and the planner's constants by path."""
        pages = {
            "docs/results/kernels.md": (
                f"{NOTICE}# Times of all operators\n\n{kernels_page(self.kernels)}\n"
                f"{predictions(self._read('gpu/predictions.json'))}\n{gpu_section(self.gpu_reports)}"
                + "".join(f"\n{kernels_section(*each)}" for each in self.gpu_kernels.items())
            ),
            "docs/results/nccl.md": (
                f"{NOTICE}# Step times over NCCL\n\n{nccl_page(self.root / 'results' / 'gpu')}"
            ),
            "docs/results/planned.md": jobs_page(self.root),
            "sdp4bit_lab/plan/measured.json": constants_text(self.root),
        }
        return {path: f"{text.rstrip()}\n" for path, text in pages.items()}

    def fragment(self, name: str) -> str:
        """Return the text for a marker; ValueError if no result has this name."""
        kind, _, detail = name.partition("-")
        if name == "peaks":
            return peak_table(self._read("memory.json"))
        if kind == "ncclslower":
            return self._gain_over_nccl(int(detail), layout="2x1", over="sdp4bit", of="fsdp2-bf16")
        if kind == "nccl":
            return self._gain_over_nccl(int(detail), layout="2x1", over="fsdp2-bf16", of="sdp4bit")
        if kind == "ncclhsdp":
            return self._gain_over_nccl(int(detail), layout="2x2", over="hsdp-bf16", of="hsdp-sdp4bit")
        if name in ("launches", "launches_with_biases"):
            result = self._read("launches.json")
            return f"{sum(result[name].values()) / result['groups']:.0f}"
        if name == "steps":
            profiles = [self._read(f"profile/{each}.json") for each in ("fair", "sdp4bit")]
            return "\n".join([*map(cluster_section, self.clusters), profile_section(profiles)])
        if name in FRONTIER:
            return FRONTIER[name](self.frontier)
        if kind == "host":
            return self._host_time(detail)
        if kind == "hostconst":
            return f"{1e3 * host_constants(self.root)[f'{detail}_seconds']:.1f}"
        raise ValueError(
            f"<!-- result {name} --> names no result. Those without a detail are launches, "
            "launches_with_biases, steps, peaks, frontier-losses, frontier-seconds and frontier-conditions. "
            "Others have one: nccl-GBIT, ncclslower-GBIT, ncclhsdp-GBIT, hostconst-{plain,added}, "
            "host-{plain,before,now,merged,plain-merged}"
        )

    def _host_time(self, which: str) -> str:
        """Return numbers of the layout that was measured last.

        Milliseconds per block and step are those of plain FSDP2, or added by the last commit, or by the first
        one. Percents are those that merged blocks save, of the library ("merged") or of plain FSDP2.
        """
        rows: Any = self._read("host_time.json")
        before, *_, now = (row for row in rows if row["layout"] == rows[-1]["layout"])
        if which in ("merged", "plain-merged"):
            name = "sdp4bit" if which == "merged" else "plain FSDP2"
            return f"{100 * (1 - now['medians'][f'{name}, merged'] / now['medians'][name]):.0f}"
        plain = now["medians"]["plain FSDP2"]
        value = {"plain": plain, "before": before["added"], "now": now["added"]}[which]
        return f"{value / 1000:.1f}"

    def _gain_over_nccl(self, gbit: int, *, layout: str, over: str, of: str) -> str:
        """Return how many times faster a strategy is, from the ratio of either one over the other."""
        for reference, strategy, power in ((over, of, 1), (of, over, -1)):
            wanted = {"rate": f"{gbit}gbit", "reference": reference, "strategy": strategy}
            for ratio in self.nccl[layout]["ratios"]:
                if wanted.items() <= ratio.items():
                    return f"{ratio['ratio'] ** power:.1f}"
        raise ValueError(f"no ratio of {of} over {over} at {gbit} Gbit/s")

    def documents(self) -> Iterator[tuple[Path, str]]:
        """Yield path and content of every generated page and of every page with a marker."""
        generated = self.pages()
        yield from ((self.root / path, text) for path, text in generated.items())
        pages = [self.root / "README.md", *sorted((self.root / "docs").rglob("*.md"))]
        for path in pages:
            if str(path.relative_to(self.root)) in generated:
                continue
            text = path.read_text(encoding="utf-8")
            filled = MARKED.sub(lambda found: f"{found[1]}{self.fragment(found[2])}{found[3]}", text)
            if filled != text or MARKED.search(text):
                yield path, filled

    def figures(self) -> dict[Path, tuple[Callable[..., None], dict[str, Any]]]:
        """Return the drawing function and the result of every figure; each has a variant for dark pages."""
        images = self.root / "docs" / "images"
        return {
            images / "loss-over-seconds.png": (draw_frontier, self.frontier),
            images / "step-time.png": (
                draw_step_times,
                {"cpu": self.clusters[0], "gpu": self.nccl["2x1"]},
            ),
        }


def dark_variant(path: Path) -> Path:
    """Return the file of a figure for dark pages."""
    return path.with_name(f"{path.stem}-dark{path.suffix}")


def digest_of(result: dict[str, Any]) -> str:
    """Return a digest of a result, which its figure stores to reveal that it is outdated."""
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def is_current(path: Path, result: dict[str, Any]) -> bool:
    """Return whether a figure was drawn from this result."""
    return path.exists() and digest_of(result).encode() in path.read_bytes()


def main(root: Path = ROOT) -> int:
    """Write the pages and figures that have changed; return the exit code."""
    results = Results(root=root)
    for path, text in results.documents():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text)
            print(path.relative_to(root))
    for light, (draw, result) in results.figures().items():
        for path, style in ((light, {}), (dark_variant(light), DARK)):
            if not is_current(path, result):
                from matplotlib import rc_context  # takes a second

                with rc_context(style):
                    draw(result, path, digest=digest_of(result))
                print(path.relative_to(root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
