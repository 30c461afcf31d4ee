"""The planner against every step that was measured. Layer: no process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import plan_constants
from benchmarks.planned_jobs import TOLERANCE, Job, jobs, unlimited, verdicts
from sdp4bit_lab.plan.host import HostTime, host_time, measured
from tests import ROOT

JOBS = jobs(ROOT)
KNOWN_MISSES = {("results/gpu/h100/extra/full-precision-2x1.json", "qwd")}
"""Rows that the planner misses by more. Weights alone took longer than both directions; nobody knows why."""
OLD_HOST = HostTime(plain=3e-3, added=0.65e-3, source="assumed before there was a measurement")


def row(job: Job) -> tuple[str, str]:
    return job.source, job.strategy


def test_nobody_who_follows_the_advice_loses() -> None:
    found = verdicts(JOBS)
    assert {(each.job.transport, each.job.ranks_per_node) for each in found} == {
        ("nccl", 1),
        ("nccl", 2),
        ("gloo", 1),
        ("gloo", 2),
    }
    assert [(each.job.source, each.job.rate, each.advice) for each in found if not each.is_right] == []
    # Both answers occur, so that neither is right by always being given.
    assert {each.advice for each in found} >= {"enable", "do not enable"}


def test_the_constants_that_were_assumed_once_advise_a_loss() -> None:
    wrong = [each for each in verdicts(jobs(ROOT, host=OLD_HOST)) if not each.is_right]
    assert [(each.job.rate, each.advice) for each in wrong] == [("40gbit", "enable")]


@pytest.mark.parametrize("transport", ["nccl", "gloo"])
def test_planned_seconds_are_near_the_measured_ones(transport: str) -> None:
    found = [job for job in JOBS if job.transport == transport and job.sends_as_planned]
    assert len(found) > 25
    far = {row(job): round(job.error, 2) for job in found if abs(job.error) > TOLERANCE}
    assert far.keys() == (KNOWN_MISSES if transport == "nccl" else set()), far


def test_bytes_are_those_of_the_interfaces() -> None:
    other = {(job.source.partition("-")[0], job.strategy) for job in JOBS if not job.sends_as_planned}
    # With several ranks per node, gloo's exchanges and all-reduces cross between nodes more often than rings.
    assert other == {("results/cluster/2x2", name) for name in ("fair", "fair-bf16", "ddp-bf16")}


def test_a_new_result_joins_by_itself(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "results", tmp_path / "results")
    new = json.loads((ROOT / "results/gpu/h100/nccl-2x1.json").read_text(encoding="utf-8"))
    for each in new["rows"]:
        each["rate"] = each["rate"].replace("40gbit", "25gbit")
        if each["strategy"] == "sdp4bit":
            for name in ("fastest", "seconds_per_step"):
                each[name] *= 2
    path = tmp_path / "results/gpu/new/nccl-2x1.json"
    path.parent.mkdir()
    path.write_text(json.dumps(new), encoding="utf-8")
    joined = [job for job in jobs(tmp_path) if job.source == "results/gpu/new/nccl-2x1.json"]
    assert len(joined) == 20 and {job.rate for job in joined} == {"1gbit", "10gbit", "25gbit", "unshaped"}
    assert any(job.error < -TOLERANCE for job in joined if job.strategy == "sdp4bit")


def test_the_packaged_constants_are_those_of_the_results() -> None:
    assert plan_constants.constants(ROOT) == measured()
    default, server = host_time("measured"), host_time("server")
    # 23.8 ms for five groups, and 15.8 ms more with the code of that day.
    assert default.plain == pytest.approx(23.80e-3 / 5, rel=1e-3)
    assert measured()["host"]["added_seconds_then"] == pytest.approx(15.82e-3 / 5, rel=1e-3)
    assert default.added == pytest.approx(15.82e-3 / 5 * measured()["host"]["scale"], rel=1e-3)
    assert (server.plain, server.added) == (default.plain / 2, default.added / 2)
    assert "not measured" in server.source and "not measured" not in default.source


def test_the_host_s_time_follows_the_commits() -> None:
    def at(layout: str, plain: float, added: float) -> dict[str, object]:
        return {"layout": layout, "medians": {"plain FSDP2": plain}, "added": added}

    rows = [at("a", 10.0, 5.0), at("a", 20.0, 5.0), at("b", 8.0, 4.0), at("b", 8.0, 1.0)]
    assert plan_constants.added_since(rows) == pytest.approx((0.25 / 0.5) * (0.125 / 0.5))


def test_sockets_are_measured_by_the_ranks_that_share_them() -> None:
    # 8 MB from each of two ranks in 1.414 ms; three times that from each of four in 9.475 ms.
    assert unlimited(ROOT, ranks=2) == pytest.approx(8388608 / 1.414e-3)
    assert unlimited(ROOT, ranks=4) == pytest.approx(3 * 8388608 / 9.475e-3, rel=1e-3)
