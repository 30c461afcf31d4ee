"""The report of a machine with GPUs: a part that fails or hangs does not lose the others."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cluster_network, gpu_report
from benchmarks.cluster_network import reason_to_skip
from benchmarks.gpu_report import ROOT, Part, parts, run_part
from benchmarks.tables import Results

REASON = reason_to_skip()


def _report(*arguments: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_report",
        *arguments,
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("command", "seconds", "result", "last"),
    [
        (["this"], 60, "passed", "Namespaces are one honking great idea"),
        (["no_such_module"], 60, "failed", "No module named no_such_module"),
        (["benchmarks.gpu_limits", "none.json", "--device", "cpu"], 60, "skipped", "Compute needs a GPU"),
        (["http.server", "0", "--bind", "127.0.0.1"], 1, "timed out", ""),
        (["pytest", "-q", "tests/kernels/test_triton_device.py"], 900, "skipped", "skipped"),
    ],
)
def test_outcome_of_a_part(command: list[str], seconds: int, result: str, last: str, tmp_path: Path) -> None:
    part = Part(name="part", about="a test", command=command, seconds=seconds)
    outcome = run_part(part, tmp_path)
    if command[0] == "pytest" and torch.cuda.is_available():
        result, last = "passed", "passed"
    assert outcome["result"] == result
    assert outcome["command"].startswith(f"python -m {command[0]}")
    if last:
        assert last in outcome["output"][-1]


@pytest.mark.gloo
@pytest.mark.slow
def test_a_part_writes_beside_the_report(tmp_path: Path) -> None:
    """Launches and host time are measured on the CPU too; without a GPU there are no launches to count."""
    done = _report("try", "--parts", "profile", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "try" / "report.json").read_text())
    assert report["parts"]["profile"]["result"] == "passed"
    profile = json.loads((tmp_path / "try" / "profile.json").read_text())
    # Two blocks are gathered twice and the root once; each is reduced once.
    assert profile["sdp4bit"]["calls"] == pytest.approx((2 + 2 + 1 + 3) / 3)
    assert profile["plain"]["calls"] == 0
    assert profile["sdp4bit"]["host_us"] > 0
    assert profile["sdp4bit"]["launches"] is None


@pytest.mark.gloo
@pytest.mark.slow
def test_all_parts_on_a_cpu(tmp_path: Path) -> None:
    done = _report("try", out=tmp_path)
    report = json.loads((tmp_path / "try" / "report.json").read_text())
    results = {name: part["result"] for name, part in report["parts"].items()}
    assert results.pop("tests") == "passed"  # two of them need no device
    assert results.pop("limits") == "skipped"
    assert set(results.values()) == {"passed"}, done.stdout
    files = {path.stem for path in (tmp_path / "try").glob("*.json")}
    assert files == {"report", *results}


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["../elsewhere"], "is no name"),
        (["try", "--parts", "kernel"], "--parts kernel is unknown: use nccl-collectives, nccl-2x1"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str, tmp_path: Path) -> None:
    done = _report(*arguments, out=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
    assert not any(tmp_path.iterdir())


def test_ten_minutes(tmp_path: Path) -> None:
    """The limits of the parts over NCCL are within the time of one call, with 150 s left for the self-test,
    the last of them. Those of the other parts are 14 minutes; what takes 10 is measured on a GPU."""
    every = parts(tmp_path, tmp_path, device="cuda")
    nccl = [part for part in every if part.name.startswith("nccl-")]
    assert nccl == every[: len(nccl)] and nccl[-1].name == "nccl-selftest"
    assert sum(part.seconds for part in nccl[:-1]) <= 570 - 150
    assert sum(part.seconds for part in every[len(nccl) :]) <= 14 * 60


NCCL = [
    *("nccl-collectives", "nccl-2x1", "nccl-2x2", "nccl-2x2-deferred"),
    *("nccl-deterministic", "nccl-no-mps", "nccl-selftest"),
]
Started = list[tuple[str, float]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Started, Any, Any]]:
    """Report with parts that last 100 s of a clock; return the parts and their limits, the file, the code."""

    def report(*arguments: str) -> tuple[Started, Any, Any]:
        calls: Started = []
        clock = [1000.0]

        def run(part: Part, folder: Path, limit: float) -> dict[str, Any]:
            calls.append((part.name, limit))
            clock[0] += 100
            return {"result": "passed", "seconds": 100.0}

        monkeypatch.setattr(gpu_report, "describe_machine", lambda: {"gpu": "H100"})
        monkeypatch.setattr(gpu_report, "run_part", run)
        monkeypatch.setattr(gpu_report.time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(sys, "argv", ["gpu_report", "try", "--out", str(tmp_path), *arguments])
        with pytest.raises(SystemExit) as exit_:
            gpu_report.main()
        written = json.loads((tmp_path / "try" / "report.json").read_text())
        return calls, written["parts"], exit_.value.code

    return report


@pytest.mark.gloo
def test_a_first_word_selects_several_parts(started: Callable[..., tuple[Started, Any, Any]]) -> None:
    calls, written, code = started("--parts", "nccl")
    assert [name for name, _ in calls] == list(written) == NCCL and not code
    assert {limit for _, limit in calls} == {float("inf")}
    calls, _, _ = started("--parts", "nccl-2x2,kernels")
    assert [name for name, _ in calls] == ["nccl-2x2", "kernels"]


@pytest.mark.gloo
def test_the_total_time_ends_later_parts(started: Callable[..., tuple[Started, Any, Any]]) -> None:
    calls, written, code = started("--parts", "nccl", "--seconds", "304")
    assert calls == list(zip(NCCL, (304.0, 204.0, 104.0), strict=False))
    assert [written[name]["result"] for name in NCCL] == ["passed"] * 3 + ["not started"] * 4
    assert code == 1


_HANGS = """
import multiprocessing, time

def in_the_child():
    time.sleep(300)

def in_the_parent():
    child = multiprocessing.get_context("fork").Process(target=in_the_child)
    child.start()
    print("child", child.pid, flush=True)
    child.join()

in_the_parent()
"""


@pytest.mark.gloo
@pytest.mark.parametrize("own", [True, False], ids=["its limit", "the total"])
def test_a_part_that_hangs_leaves_its_stacks_and_no_process(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging.py").write_text(_HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    part = Part(name="part", about="a test", command=["hanging"], seconds=8 if own else 1000)
    outcome = run_part(part, tmp_path, limit=1000 if own else 8)
    assert outcome["result"] == "timed out" and 8 <= outcome["seconds"] < 100
    log = (tmp_path / "part.log").read_text()
    assert "in in_the_child" in log and "in in_the_parent" in log
    assert outcome["output"] == log.strip().splitlines()[-len(outcome["output"]) :]
    child = int(log.splitlines()[0].removeprefix("child "))
    deadline = time.monotonic() + 10
    while (status := cluster_network.process_status(child)) and status[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_ranks_that_share_a_gpu_are_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    names = ["nccl-collectives", "nccl-2x1", "nccl-no-mps", "nccl-deterministic"]
    done = _report("try", "--parts", ",".join(names), out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "try" / "report.json").read_text())
    assert {name: part["result"] for name, part in report["parts"].items()} == dict.fromkeys(names, "passed")
    results = {name: json.loads((tmp_path / "try" / f"{name}.json").read_text()) for name in names}
    assert [results[name]["ranks"] for name in names] == [4, 2, 2, 2]
    assert [check["name"] for check in results["nccl-no-mps"]["checks"]] == ["facts", "collectives"]
    cluster = results["nccl-2x1"]
    assert (cluster["transport"], cluster["device"]) == ("gloo", "cpu")
    assert cluster["label"] == "emulated cluster, TCP, gloo, CPU"
    rows = {row["strategy"]: row for row in cluster["rows"]}
    assert set(rows) == {"compute", "fsdp2", "fsdp2-bf16", "ddp-bf16", "sdp4bit", "sdp4bit-w3g3.5"}
    assert rows["sdp4bit"]["bytes_agree"]
    losses = {row["loss"] for row in results["nccl-deterministic"]["rows"]}
    assert len(results["nccl-deterministic"]["rows"]) == 3 and len(losses) == 1


def test_pages_show_what_was_sent(tmp_path: Path) -> None:
    """Kernel times of a report join the tables of their device."""
    folder = tmp_path / "results" / "gpu" / "h100"
    folder.mkdir(parents=True)
    row = {"op": "copy", "bits": None, "elements": 1024, "seconds": 1e-3, "share_of_copy": 1.0}
    machine = {
        **{"cpu": "a CPU", "cores": 8, "gpu": "an H100", "commit": "unknown", "command": "c"},
        **{"versions": {"torch": "2"}, "date": "2026-11-25"},
    }
    (folder / "kernels.json").write_text(json.dumps({"machine": machine, "rows": [row]}))
    (folder / "report.json").write_text(
        json.dumps({"machine": machine, "device": "cuda", "parts": {"tests": {"result": "passed"}}})
    )
    results = Results(root=tmp_path)
    assert [run["machine"]["gpu"] for run in results.kernels] == ["an H100"]
    assert results.gpu_reports == {"h100": {"tests": "passed"}}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], dict[str, Any]]:
    """Report some parts of a machine with this GPU, none of which runs; return the file's parts."""
    calls = itertools.count()

    def report(gpu: str, wanted: str) -> dict[str, Any]:
        number = next(calls)
        monkeypatch.setattr(gpu_report, "describe_machine", lambda: {"gpu": gpu})
        monkeypatch.setattr(
            gpu_report, "run_part", lambda part, _, limit: {"result": "passed", "call": number}
        )
        arguments = ["try", "--out", str(tmp_path), *(["--parts", wanted] if wanted else [])]
        monkeypatch.setattr(sys, "argv", ["gpu_report", *arguments])
        with pytest.raises(SystemExit) as exit_:
            gpu_report.main()
        assert not exit_.value.code, exit_.value.code
        written = json.loads((tmp_path / "try" / "report.json").read_text())
        return {name: part["call"] for name, part in written["parts"].items()}

    return report


@pytest.mark.gloo
def test_parts_of_earlier_calls_are_kept_unless_all_are_wanted(machine: Callable[..., Any]) -> None:
    assert machine("H200", "tests,kernels") == {"tests": 0, "kernels": 0}
    assert machine("H200", "kernels,profile") == {"tests": 0, "kernels": 1, "profile": 1}
    assert set(machine("H200", "").values()) == {2}


@pytest.mark.gloo
def test_the_report_of_another_gpu_is_not_continued(
    machine: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("H200", "tests")
    before = (tmp_path / "try" / "report.json").read_text()
    with pytest.raises(AssertionError, match="2"):
        machine("H100", "kernels")
    assert "report.json is of H200: give this machine another name" in capsys.readouterr().err
    assert (tmp_path / "try" / "report.json").read_text() == before


_TUNED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
from benchmarks import gpu_tuning
from benchmarks.gpu_tuning import Settings
from sdp4bit.kernels.triton import backend, launch
before = backend._WAVES, backend._REGISTERS, backend._warps, backend._tile
both = [Settings(waves=1), Settings(waves=2, warps=2, tile=4, registers=32)]
seen = []
real = backend._launch
def launch_seen(kernel, grid, tensors, numbers, constants, warps, **options):
    seen.append((backend._WAVES, backend._REGISTERS, grid[0], warps))
    real(kernel, grid, tensors, numbers, constants, warps, **options)
backend._launch = launch_seen
found = gpu_tuning.tune(4096, "cpu", both)
assert before == (backend._WAVES, backend._REGISTERS, backend._warps, backend._tile)
print([row[0] for row in found["rows"]], {len(row) == len(found["columns"]) == 11 for row in found["rows"]})
print(sorted({each[:2] for each in seen}))
first, second = ([each[2:] for each in seen if each[0] == waves] for waves in (1, 2))
pairs = list(zip(first, second, strict=True))
print({(a[0] >= b[0], 2 * a[1] <= b[1]) for a, b in pairs}, any(a[0] > b[0] for a, b in pairs), len(pairs))
"""


@pytest.mark.gloo
@pytest.mark.slow
def test_settings_of_the_kernels_are_varied_and_restored() -> None:
    """In Triton's interpreter: the settings reach each launch."""
    done = subprocess.run(
        [sys.executable, "-c", _TUNED], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    *_, names, settings, compared = done.stdout.splitlines()
    assert names == "['1 wave', '2 x the warps, 4 x the tile, 32 registers more, 2 waves'] {True}"
    assert settings == "[(1, 80), (2, 112), (8, 80)]"  # the last while the messages are made
    # Two calls of ten operators, each a single launch, by which gpu_limits finds the operator of a launch.
    assert compared == "{(True, True)} True 20"
