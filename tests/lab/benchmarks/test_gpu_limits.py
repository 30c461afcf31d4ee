"""The limiters of the kernels, from text in the form of Nsight Compute's output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_limits
from benchmarks.gpu_limits import COLUMNS, DURATION, METRICS, PEAK, SKIPPED, UNITS, parse
from benchmarks.tables import kernels_section

_FIRST = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size"'
)
_DRAM, _XU, _OCCUPANCY = UNITS["DRAM"] + PEAK, UNITS["XU"] + PEAK, gpu_limits.OTHERS["occupancy, %"]
_STALL = gpu_limits.STALLS["wait"]
_SAMPLE = f"""==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "vectorized_elementwise_kernel" - 0: 0%....50%....100% - 9 passes
{_FIRST},"{_DRAM}","{DURATION}","{_XU}","{_STALL}","{_OCCUPANCY}"
"","","","","","","","","","%","ns","%","inst","%"
"0","4242","python","host","neg","1","7","(128, 1, 1)","(9, 1, 1)","93.1","600,000","n/a","1.5","90"
"1","4242","python","host","quantize","1","7","(32, 1, 1)","(3, 2, 4)","41.25","1,200,000","88.5","n/a","nan"
==PROF== Disconnected from process 4242
"""
_LONG = f"""{_FIRST},"Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","p","h","neg","1","7","(1, 1, 1)","(1, 1, 1)","Raw","{_DRAM}","%","93.1"
"0","1","p","h","neg","1","7","(1, 1, 1)","(1, 1, 1)","Raw","{DURATION}","msecond","0.6"
"1","1","p","h","quantize","1","7","(1, 1, 1)","(1, 1, 1)","Raw","{DURATION}","ns","1,200,000"
"""
_SIZES = {"copy": 2_000_000, "hadamard_quantize": 3_000_000}


def test_metrics_of_each_launch() -> None:
    copy, quantized = parse(_SAMPLE)
    assert (copy[DURATION], copy[_DRAM], copy[_XU], copy[_STALL]) == (600.0, 93.1, None, 1.5)
    assert (quantized[DURATION], quantized[_XU], quantized[_STALL]) == (1200.0, 88.5, None)
    assert quantized[_OCCUPANCY] is None
    assert set(copy) == set(METRICS), "metrics that are not in the file are None"


def test_a_row_per_metric() -> None:
    copy, quantized = parse(_LONG)
    assert (copy[DURATION], copy[_DRAM]) == (600.0, 93.1)
    assert (quantized[DURATION], quantized[_DRAM]) == (1200.0, None)


@pytest.mark.parametrize("log", ["", "==ERROR== nothing was profiled\n", f"{_FIRST}\n"])
def test_no_launch(log: str) -> None:
    assert parse(log) == []


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """Run the program with an ncu that writes these logs, one per call; return its exit code and file."""

    def run(*logs: str, sizes: dict[str, int] | None = None, more: tuple[str, ...] = ()) -> tuple[Any, Path]:
        bin_folder, file = tmp_path / "bin", tmp_path / "limits.json"
        bin_folder.mkdir()
        for number, log in enumerate(logs):
            (bin_folder / f"log{number}").write_text(log)
        printed = "" if sizes is None else json.dumps(sizes)
        (bin_folder / "ncu").write_text(
            "#!/bin/bash\n"
            f'cd {bin_folder}; while [ "$1" != --log-file ]; do shift; done\n'
            'n=$(ls calls* 2>/dev/null | wc -l); cat log$n > "$2"; echo "$4" > calls$n\n'
            f"echo '{printed}'\n"
        )
        (bin_folder / "ncu").chmod(0o755)
        monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin" if logs else "")
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr(gpu_limits, "describe_machine", lambda: {"gpu": "a GPU"})
        monkeypatch.setattr(sys, "argv", ["gpu_limits", str(file), *more])
        try:
            gpu_limits.main()
        except SystemExit as exit_:
            return exit_.code, file
        return 0, file

    return run


@pytest.mark.gloo
def test_limiters(report: Callable[..., tuple[Any, Path]]) -> None:
    code, file = report(_SAMPLE, sizes=_SIZES)
    assert code == 0
    written = json.loads(file.read_text())
    copy, quantized = (dict(zip(written["columns"], row, strict=True)) for row in written["rows"])
    assert (copy["limiter"], copy["DRAM, %"], copy["XU, %"]) == ("DRAM", 93.1, None)
    assert (quantized["limiter"], quantized["us"], quantized["share of a copy, %"]) == ("XU", 1200, 75)
    assert (copy["stalls"], quantized["stalls"]) == ("wait 1.5", None)
    assert "| hadamard_quantize | 1200.0 | 75 | XU |" in kernels_section("Limits", written)


@pytest.mark.gloo
def test_only_slow_operators(report: Callable[..., tuple[Any, Path]]) -> None:
    _, file = report(_SAMPLE, sizes=_SIZES, more=("--below", "90"))
    assert [row[0] for row in json.loads(file.read_text())["rows"]] == ["hadamard_quantize"]


@pytest.mark.gloo
def test_an_unknown_metric_is_left_out(report: Callable[..., tuple[Any, Path]], tmp_path: Path) -> None:
    base = UNITS["FMA heavy"]
    code, file = report(f"==ERROR== Failed to find metric regex:^{base}\\.avg$\n", _SAMPLE, sizes=_SIZES)
    assert code == 0
    assert base in (tmp_path / "bin" / "calls0").read_text()
    assert base not in (tmp_path / "bin" / "calls1").read_text()
    assert {row[COLUMNS.index("FMA heavy, %")] for row in json.loads(file.read_text())["rows"]} == {None}


@pytest.mark.gloo
def test_no_permission(report: Callable[..., tuple[Any, Path]], capsys: pytest.CaptureFixture[str]) -> None:
    said = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access the counters"
    code, file = report(f"==PROF== Connected\n==ERROR== something before\n{said}\n", sizes=_SIZES)
    assert code == SKIPPED
    assert not file.exists()
    assert capsys.readouterr().out == f"skipped: ncu may not read the counters of this GPU: {said}\n"


@pytest.mark.gloo
def test_no_ncu(report: Callable[..., tuple[Any, Path]], capsys: pytest.CaptureFixture[str]) -> None:
    if Path("/usr/local/cuda/bin/ncu").exists():
        pytest.skip("this machine has Nsight Compute in the place of CUDA")
    code, _ = report()
    assert code == SKIPPED
    assert "ncu of Nsight Compute is not in PATH" in capsys.readouterr().out


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({**_SIZES, "third": 1}, "ncu profiled 2 launches of 3 operators"),
        (None, "ncu profiled 2 launches of 0 operators"),
    ],
)
def test_launches_without_an_operator(
    report: Callable[..., tuple[Any, Path]], sizes: dict[str, int] | None, text: str
) -> None:
    code, file = report(_SAMPLE, sizes=sizes)
    assert text in code
    assert not file.exists()
