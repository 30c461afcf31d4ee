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
from benchmarks.gpu_tables import nccl_page
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
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3500)


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
@pytest.mark.timeout(3600)
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_all_parts_on_a_cpu(tmp_path: Path) -> None:
    """The rehearsal: every part runs, and the page shows each of their results."""
    done = _report("try", "--runs", str(tmp_path / "runs"), out=tmp_path)
    folder = tmp_path / "try"
    report = json.loads((folder / "report.json").read_text())
    results = {name: part["result"] for name, part in report["parts"].items()}
    assert results.pop("tests") == results.pop("limits") == "skipped"
    assert set(results.values()) == {"passed"}, done.stdout
    read = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert set(read) == {"report", *results}
    profiles = {each["strategy"]: each for each in read["profile"]["profiles"]}
    assert [profiles[name]["groups"] for name in ("compute", "sdp4bit", "sdp4bit-threes")] == [0, 4, 2]
    assert profiles["sdp4bit"]["host_us_per_group"]["FSDP::all_gather"] > 0
    assert {path.name for path in (folder / "traces").iterdir()} == {f"{name}.json.gz" for name in profiles}
    assert not [name for name, result in read.items() if "complete" in result]  # False while a part runs
    large = {row["strategy"]: row["rounds"] for row in read["steps-2x1-620m"]["rows"]}
    assert large == dict.fromkeys(("compute", "fsdp2", "fsdp2-bf16", "ddp-bf16", "sdp4bit"), 2)
    exact = read["losses-deterministic"]["losses"]
    assert exact["fair"] == exact["hierarchical"] == exact["fsdp2"] and len(exact["fsdp2"]) == 6
    assert {run["steps"] for run in read["training"]["runs"].values()} == {2}
    (tmp_path / "predictions-nccl.json").write_text('{"rows": [], "date": "", "note": ""}')
    page = nccl_page(tmp_path)
    for heading in ("profile", "losses", "125 million parameters", "2 nodes x 1 rank, steps-2x1-620m"):
        assert f"## try: {heading}\n" in page


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["../elsewhere"], "is no name"),
        (["try", "--parts", "kernel"], "--parts kernel is unknown: use profile, steps-2x1"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str, tmp_path: Path) -> None:
    done = _report(*arguments, out=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
    assert not any(tmp_path.iterdir())


def test_ten_minutes(tmp_path: Path) -> None:
    """The first call of 570 s answers the first two questions, and a piece of training fits into a call."""
    every = parts(tmp_path, tmp_path, device="cuda")
    first = ["profile", "steps-2x1", "steps-2x1-620m"]
    assert [part.name for part in every[:3]] == first
    assert sum(part.seconds for part in every[:3]) <= 570
    assert max(part.seconds for part in every) <= 570


def test_the_page_has_one_script(tmp_path: Path) -> None:
    parts(tmp_path, tmp_path, device="cuda")
    script = (tmp_path / "share_gpu.sh").read_text()
    assert script.startswith("#!/bin/bash\n") and script.endswith('exec python "$@"\n')
    for page in ("no script", f"```bash\n{script}```\n```bash\n{script}```\n"):
        with pytest.raises(ValueError, match="not one"):
            gpu_report.wrapper_of(page)


STEPS = ["steps-2x1", "steps-2x1-620m", "steps-2x2", "steps-2x2-deferred", "steps-2x2-channels"]
SLOW = "steps-620m-slow"
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
        runs = ["--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
        monkeypatch.setattr(sys, "argv", ["gpu_report", "try", *runs, *arguments])
        with pytest.raises(SystemExit) as exit_:
            gpu_report.main()
        written = json.loads((tmp_path / "try" / "report.json").read_text())
        return calls, written["parts"], exit_.value.code

    return report


@pytest.mark.gloo
def test_a_first_word_selects_several_parts(started: Callable[..., tuple[Started, Any, Any]]) -> None:
    calls, written, code = started("--parts", "steps")
    assert [name for name, _ in calls] == list(written) == [*STEPS, SLOW] and not code
    assert {limit for _, limit in calls} == {float("inf")}
    calls, _, _ = started("--parts", "steps-2x2,kernels")
    assert [name for name, _ in calls] == ["steps-2x2", "kernels"]


@pytest.mark.gloo
def test_the_total_time_leaves_out_parts_that_need_more(
    started: Callable[..., tuple[Started, Any, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    calls, written, code = started("--parts", "steps", "--seconds", "330")
    # The second and the last need 280 and 200 s: with 230 s left the second starts, with 30 s no part does.
    assert calls == [("steps-2x1", 330.0), ("steps-2x1-620m", 230.0), ("steps-2x2", 130.0)]
    assert [written[name]["result"] for name in (*STEPS, SLOW)] == ["passed"] * 3 + ["not started"] * 3
    assert code == 1
    assert "The same command with --resume continues" in capsys.readouterr().out
    calls, written, code = started("--parts", "steps", "--resume")
    assert [name for name, _ in calls] == [*STEPS[3:], SLOW] and not code
    assert {part["result"] for part in written.values()} == {"passed"}


@pytest.mark.parametrize(
    ("result", "limit", "done"),
    [
        *(("passed", 5, True), ("skipped", 5, True), ("failed", 20, False), ("unfinished", 20, False)),
        *(("timed out", 20, True), ("timed out", 19, False), ("not started", 0, False)),
    ],
)
def test_parts_that_a_later_call_repeats(result: str, limit: float, done: bool) -> None:
    part = Part(name="part", about="a test", command=[], seconds=20)
    assert gpu_report.is_done(part, {"result": result, "limit": limit}) is done
    assert not gpu_report.is_done(part, None)


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
        runs = ["--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
        arguments = ["try", *runs, *(["--parts", wanted] if wanted else [])]
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
