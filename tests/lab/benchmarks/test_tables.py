"""Result tables and figures: they are those of results/, and they show what the results say. Layer: files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import cluster_report, gpu_tables, speed_tables, tables
from benchmarks.cluster_report import Sample
from benchmarks.cluster_strategies import Cluster
from tests import ROOT

RESULTS = tables.Results()


def test_generated_pages_and_figures_are_those_of_the_results() -> None:
    for path, text in RESULTS.documents():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.relative_to(ROOT)}: run python -m benchmarks.tables"
        )
    for light, (_, result) in RESULTS.figures().items():
        for path in (light, tables.dark_variant(light)):
            assert tables.is_current(path, result), (
                f"{path.name} is not of these results: delete it and run the same"
            )


def test_no_comment_begins_a_line_of_a_paragraph() -> None:
    """Markdown ends a paragraph there."""
    for path, text in RESULTS.documents():
        assert not re.search(r"^ *<!-- result [\w-]+ -->[^\n]", text, re.MULTILINE), path.name


def cluster_runs(folder: Path, *, seconds: dict[str, float]) -> None:
    """Write three runs of a cluster, the second one twice as slow."""
    for number, slowness in enumerate((1.0, 2.0, 1.0)):
        samples = [
            Sample(
                **{"strategy": name, "rate": rate, "round": n, "seconds": slowness * s * factor},
                **{"tx_bytes": 2e6, "reported_bytes": 1.99e6, "loss": 1.0},
            )
            for rate, factor in (("100mbit", 1.0), ("1000mbit", 0.1))
            for name, s in seconds.items()
            for n in range(3)
        ]
        cluster = Cluster(nodes=2, ranks_per_node=1)
        content = cluster_report.summarize(
            samples, cluster=cluster, parameters=10**6, arguments=["--seed", "1"]
        )
        (folder / f"2x1-{number}.json").write_text(json.dumps(content))


@pytest.mark.gloo
def test_runs_of_the_cluster_become_a_table_and_a_figure(tmp_path: Path) -> None:
    cluster_runs(tmp_path, seconds={"fair": 4.0, "fair-bf16": 3.0, "sdp4bit": 1.0})
    (result,) = speed_tables.cluster_results(tmp_path)
    text = speed_tables.cluster_section(result)
    assert "| `sdp4bit` over `fair` | 4.00 (4.00–4.00) | 4.00 (4.00–4.00) |" in text
    assert "| `fair` | 4.000 | 0.400 | 2.00 | 1.99 |" in text
    figure = tmp_path / "figure.png"
    both = {"cpu": result, "gpu": tables.Results().nccl["2x1"]}
    speed_tables.draw_step_times(both, figure, digest=tables.digest_of(both))
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert tables.is_current(figure, both)
    assert not tables.is_current(figure, both | {"cpu": result | {"parameters": 2}})


def test_times_over_nccl_stand_beside_their_predictions() -> None:
    text = gpu_tables.nccl_page(ROOT / "results" / "gpu")
    assert "| `sdp4bit` | 0.695 (0.751) | 0.118 (0.161) | 0.148 (0.111) | 0.133 |" in text
    assert text.count("## h100: 2 nodes x") == 2 and "## h100: collectives, nccl-collectives" in text
    gain = tables.Results().fragment("nccl-40")
    assert gain == "0.6"  # a loss is published, too


def test_times_of_a_gpu_have_a_table_of_their_own() -> None:
    """A fabricated file of a GPU changes no number of the CPU's."""
    measured = json.loads((ROOT / "results/kernels/zen4-1.json").read_text())
    rows = [{**row, "seconds": row["seconds"] / 1000, "share_of_copy": 0.25} for row in measured["rows"]]
    invented = {"machine": {**measured["machine"], "gpu": "Test GPU"}, "rows": rows}
    alone, both = speed_tables.kernels_page([measured]), speed_tables.kernels_page([measured, invented])
    of_cpu, _, of_gpu = both.partition("## Test GPU")
    assert of_cpu.strip() == alone.strip() and "| 25\N{NO-BREAK SPACE}% |" in of_gpu
