"""`sdp4bit probe` sends the bytes that it counts, and the planner reads its file. Layer: gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from sdp4bit.collectives import transport
from sdp4bit.config import GradientConfig
from sdp4bit.traffic import Grid
from sdp4bit_lab.cli import main
from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.machine import PASTE
from sdp4bit_lab.common.settings import RunError
from sdp4bit_lab.plan.config import ProbeConfig
from sdp4bit_lab.plan.host_probe import measure_host
from sdp4bit_lab.plan.probe import WARM_UPS, Link, describe, probe
from sdp4bit_lab.plan.traffic import gradient_exchange
from tests.lab.pretrain.tiny_runs import command_line, this_rank
from tests.ranks import run_ranks


def small(out: Path, *, ranks_per_node: int, **changes: Any) -> ProbeConfig:
    values: dict[str, Any] = {
        **{"megabytes": 0.05, "rounds": 3, "quantized_values": 2**15, "host_rounds": 2},
        **changes,
    }
    return ProbeConfig(out=out, parallel=RanksConfig(ranks_per_node=ranks_per_node), **values)


def run_probe(config: ProbeConfig) -> tuple[dict[str, Any], int]:
    """Return the result and the bytes that this rank handed to sends before the steps that time the host."""
    sent, before, original = 0, 0, dist.isend

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes
        return original(tensor, *args, **kwargs)

    def timing_the_host(*args: Any, **kwargs: Any) -> Any:
        nonlocal before
        before = sent
        return measure_host(*args, **kwargs)

    with (
        patch.object(transport.dist, "isend", counting),
        patch("sdp4bit_lab.plan.probe.measure_host", timing_the_host),
    ):
        return probe(config, ranks=this_rank()), before


@pytest.mark.gloo
def test_timed_exchanges_send_the_counted_bytes(tmp_path: Path) -> None:
    config = small(tmp_path / "probe.json", ranks_per_node=2)
    results = run_ranks(run_probe, 4, config)
    result = results[0][0]
    assert all(other == result for other, _ in results)
    assert json.loads((tmp_path / "probe.json").read_text()) == result
    assert (result["nodes"], result["devices_per_node"], result["measured"]["hosts"]) == (2, 2, 1)
    exchanges = config.rounds + WARM_UPS
    for level in ("intra", "inter"):
        link = Link(**result["measured"][level])
        assert link.sent_bytes == 50000  # one peer, a multiple of 16
        assert 0 < link.fastest <= link.seconds <= link.slowest and link.latency > 0
        ranks = 1 if level == "intra" else 2
        assert result[f"{level}_bandwidth"] == link.bandwidth * ranks
    assert [sent for _, sent in results] == [exchanges * 2 * (50000 + 16)] * 4
    assert 0 < result["host_seconds"] < 1 and 0 <= result["added_host_seconds"] < 1
    assert result["host_computes"] is True
    # The operators are timed on one hop over all ranks.
    grid = Grid(nodes=1, ranks_per_node=4)
    measured = result["measured"]
    reduction = gradient_exchange(config.quantized_values // 4, grid=grid, config=GradientConfig())
    assert measured["quantization_bytes"] == reduction.moved_bytes
    assert result["quantization_bandwidth"] == reduction.moved_bytes / measured["quantization_seconds"]


def probe_and_expect_refusal(config: ProbeConfig) -> str:
    with pytest.raises(RunError) as error:
        run_probe(config)
    return str(error.value)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks_per_node": 3}, "topology=3 ranks per node does not divide the 2 ranks"),
        ({"out": Path("/proc/none/probe.json"), "ranks_per_node": 1}, "rank 0: /proc/none: No such file"),
    ],
)
def test_refusals_are_the_same_on_all_ranks(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    arguments = {"out": tmp_path / "probe.json", **changes}
    config = small(arguments.pop("out"), **arguments)
    refusals = run_ranks(probe_and_expect_refusal, 2, config)
    assert refusals[0] == refusals[1]
    assert message in refusals[0]


def link(seconds: float, *, latency: float = 0.0) -> Link:
    return Link(sent_bytes=1000, seconds=seconds, fastest=seconds, slowest=2 * seconds, latency=latency)


def test_latency_is_not_taken_for_bandwidth() -> None:
    assert link(3.0, latency=1.0).bandwidth == 500
    assert link(1.0, latency=0.9).bandwidth == 2000
    assert link(3.0, latency=1.0).spread == (200, 500)


@pytest.mark.parametrize(("intra_seconds", "added"), [(1e-6, 2e-3), (1e-4, None)])
def test_the_spread_is_shown_and_a_node_that_is_slower_inside_is_pointed_out(
    intra_seconds: float, added: float | None
) -> None:
    measured = {
        "intra": vars(link(intra_seconds)),
        "inter": vars(link(1e-5)),
        **{f"quantization_{end}": 1.0 for end in ("seconds", "fastest", "slowest")},
        **{"quantization_bytes": 1e9, "rounds": 5, "kernels": "x", "hosts": 2},
        **{"software": "CPU; sdp4bit 1, torch 2", "backend": "gloo"},
    }
    ends = {"name": "somewhere", "nodes": 2, "devices_per_node": 4, "quantization_bandwidth": 1e9}
    ends |= {"host_seconds": 4e-3, "added_host_seconds": added}
    printed = describe({**ends, "measured": measured}, out=Path("probe.json"))
    _, _, pasted = printed.partition(PASTE)
    assert "somewhere" not in pasted and "first-hour" in pasted
    assert "\nCPU; sdp4bit 1, torch 2\n2 nodes with 4 ranks each, gloo, 2 host names\n" in pasted
    assert pasted.count("400 MB/s per direction") == 1 and "quantization (x)" in pasted
    text = " ".join(printed.split())
    assert "inter-node, per node: 400 MB/s per direction (200 MB/s to 400 MB/s in 5 rounds)" in text
    warning = "WARNING: a rank is slower inside its node (10 MB/s) than between nodes (100 MB/s)"
    assert (warning in text) == (intra_seconds > 1e-5)
    more = "sdp4bit not measured (one rank)" if added is None else "2.00 ms more with sdp4bit"
    assert f"host: 4.00 ms per parameter group with plain FSDP2, {more}" in text


@pytest.mark.gloo
@pytest.mark.slow
def test_the_command_starts_ranks_and_the_planner_reads_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "probe.json"
    options = ["--megabytes", "0.1", "--rounds", "1", "--quantized-values", "4096", "--out", str(path)]
    options += ["--host-rounds", "1"]
    done = command_line("probe", "--nproc-per-node", "2", "--ranks-per-node", "1", *options, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2 nodes with 1 rank each" in done.stdout
    assert "note: 2 nodes on 1 host, without a network between them" in done.stdout
    assert main(["plan", "--probe", str(path), "--device-tflops", "1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["cluster"]["inter_bandwidth"] == json.loads(path.read_text())["inter_bandwidth"]
    assert plan["cluster"]["intra_bandwidth"] is None
    assert plan["data_parallel"] == {"nodes": 2, "ranks_per_node": 1, "blocks": 1}
