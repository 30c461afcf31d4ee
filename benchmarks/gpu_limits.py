"""Which unit of the GPU limits each Triton operator, measured with Nsight Compute.

    python -m benchmarks.gpu_limits results/gpu/h200/limits.json

profiles one launch of each operator, and of an elementwise kernel that moves as many fp32 values as a copy.
The exit code is 77 if this machine cannot profile: without a GPU, without `ncu`, or without permission.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.kernels import describe_machine
from benchmarks.operator_cases import COPY, make_cases
from sdp4bit.quantization import ops

SKIPPED = 77
"""Exit code of a program that cannot run on this machine, as in Automake's tests."""
_FORBIDDEN = "ERR_NVGPUCTRPERM"
"""Part of ncu's message that it lacks permission."""
PEAK = ".avg.pct_of_peak_sustained_elapsed"
UNITS = {
    "DRAM": "gpu__dram_throughput",
    "L2": "lts__throughput",
    "L1": "l1tex__throughput",
    "LSU": "sm__inst_executed_pipe_lsu",
    "issue slots": "sm__inst_issued",
    "ALU": "sm__pipe_alu_cycles_active",
    "FMA": "sm__pipe_fma_cycles_active",
    "FMA heavy": "sm__pipe_fmaheavy_cycles_active",  # integer products
    "XU": "sm__inst_executed_pipe_xu",  # conversions
}
OTHERS = {
    "SM, %": f"sm__throughput{PEAK}",  # its busiest part, so it never names the limiter
    "occupancy, %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "waves": "launch__waves_per_multiprocessor",
}
STALLS = {
    reason: f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"
    for reason in (
        *("long_scoreboard", "short_scoreboard", "wait", "math_pipe_throttle", "mio_throttle", "barrier"),
        *("lg_throttle", "not_selected", "no_instruction", "dispatch_stall", "branch_resolving", "drain"),
    )
}
DURATION = "gpu__time_duration.sum"
METRICS = [DURATION, *(base + PEAK for base in UNITS.values()), *OTHERS.values(), *STALLS.values()]
COLUMNS = ["operator", "us", "share of a copy, %", "limiter", *(f"{u}, %" for u in UNITS), *OTHERS, "stalls"]
NOTE = (
    "Nsight Compute, {:,} fp32 values, 4 bits, one launch each: busy parts in % of their peak. The limiter "
    "is the busiest unit. Below about 80 % it is not at its limit, and the stalls (warps per issued "
    "instruction) show the reason. Shares are of the bandwidth of an elementwise kernel on fp32 values"
)
_MICROSECONDS = {"n": 1e-3, "u": 1.0, "m": 1e3, "s": 1e6}
"""By the first letter of ncu's unit: versions write ns or nsecond."""


def launch_each(elements: int) -> None:
    """Launch each operator once while the profiler is on; print the bytes that each moves, as JSON."""
    with ops.use_backend("triton"):
        cases = make_cases(elements, "cuda")
        copy = cases[COPY]
        # `Tensor.copy_` is a transfer, which ncu does not profile.
        runs = {name: case.run for name, case in cases.items()}
        runs[COPY] = lambda: torch.neg(copy.inputs[0], out=copy.output)
        for switch in (None, torch.cuda.profiler):  # the first round compiles
            if switch:
                switch.start()
            for run in runs.values():
                run()
            torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    print(json.dumps({name: case.nbytes for name, case in cases.items()}))


def parse(log: str) -> list[dict[str, float | None]]:
    """Return the metrics of each launch in ncu's CSV, a row per launch or per metric; times in us."""
    lines = log.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, dict[str, float | None]] = {}
    units: dict[str, str] = {}
    for row in csv.DictReader(lines[start:]):
        cells = {name: cell or "" for name, cell in row.items() if name is not None}
        if not cells["ID"].isdigit():
            units = units or cells  # the row below the names; later ones are messages
            continue
        if name := cells.get("Metric Name"):
            units[name], cells[name] = cells["Metric Unit"], cells["Metric Value"]
        found = {name: number(cells[name]) for name in METRICS if name in cells}
        if (duration := found.get(DURATION)) is not None:
            found[DURATION] = duration * _MICROSECONDS[units[DURATION][0]]
        launches.setdefault(cells["ID"], dict.fromkeys(METRICS)).update(found)
    return list(launches.values())


def number(cell: str) -> float | None:
    """Return a number such as 1,234.5; None for "n/a" and all else."""
    try:
        value = float(cell.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def describe(name: str, metrics: dict[str, float | None], nbytes: int, copy_rate: float | None) -> list[Any]:
    """Return an operator's row of `COLUMNS`; a value that ncu does not know is None."""
    rounded = {key: None if value is None else round(value, 2) for key, value in metrics.items()}
    busy = {unit: rounded[base + PEAK] for unit, base in UNITS.items()}
    limiter = max((unit for unit in busy if busy[unit] is not None), key=lambda u: busy[u] or 0, default=None)
    duration = metrics[DURATION]
    share = round(100 * nbytes / duration / copy_rate) if duration and copy_rate else None
    top = sorted(((rounded[metric] or 0.0, reason) for reason, metric in STALLS.items()), reverse=True)[:3]
    reasons = ", ".join(f"{reason} {warps:.1f}" for warps, reason in top if warps) or None
    others = [rounded[metric] for metric in OTHERS.values()]
    return [name, rounded[DURATION], share, limiter, *busy.values(), *others, reasons]


def profile(ncu: str, elements: int, wanted: list[str]) -> tuple[str, dict[str, int], str]:
    """Return ncu's log, the bytes by operator, and the error of ncu or of the operators."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            *(ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"),
            *("--profile-from-start", "off", "--log-file", str(log), "--metrics", ",".join(wanted)),
            *(sys.executable, "-m", "benchmarks.gpu_limits", "--run", "--elements", str(elements)),
        ]
        # The language decides which character separates thousands.
        environment = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        text = log.read_text() if log.exists() else ""
    errors = [line for line in text.splitlines() if line.startswith("==ERROR==")]
    # Newer versions end at a name that they do not know; older ones write n/a.
    unknown = "".join(line for line in errors if "Failed to find metric" in line)
    known = [name for name in wanted if name.split(".")[0] not in unknown]
    if known != wanted:
        return profile(ncu, elements, known)
    lines = done.stdout.splitlines()
    sizes = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    errors.sort(key=lambda line: _FORBIDDEN not in line)
    return text, sizes, (errors or done.stderr.splitlines()[-1:] or lines[-1:] or ["ncu printed nothing"])[0]


def skip(reason: str) -> NoReturn:
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_limits", description=__doc__.split("\n")[0]
    )
    parser.add_argument("json", type=Path, nargs="?", help="file to write")
    parser.add_argument("--elements", type=int, default=1 << 28, help="values of a row")
    parser.add_argument(
        "--below", type=float, default=math.inf, help="write only smaller shares of a copy, %%"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu profiles nothing")
    parser.add_argument("--run", action="store_true", help="launch the operators; ncu starts this")
    arguments = parser.parse_args()
    if arguments.run:
        launch_each(arguments.elements)
        return
    if arguments.json is None:
        parser.error("name the file to write")
    ncu = shutil.which("ncu", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if arguments.device == "cpu" or not torch.cuda.is_available():
        skip("Nsight Compute needs a GPU")
    if ncu is None:
        skip("ncu of Nsight Compute is not in PATH or /usr/local/cuda/bin")
    log, sizes, said = profile(ncu, arguments.elements, METRICS)
    launches = parse(log)
    if not launches and _FORBIDDEN in said:
        skip(f"ncu may not read the counters of this GPU: {said}")
    if not launches or len(launches) != len(sizes):
        sys.exit(f"ncu profiled {len(launches)} launches of {len(sizes)} operators: {said}")
    duration = launches[0][DURATION]
    copy_rate = sizes[COPY] / duration if duration else None
    rows = [describe(name, each, sizes[name], copy_rate) for name, each in zip(sizes, launches, strict=True)]
    rows = [row for row in rows if row[2] is None or row[2] < arguments.below]
    for row in rows:
        print(*row[:4], row[-1], sep="  ")
    command = shlex.join(["python", "-m", "benchmarks.gpu_limits", *sys.argv[1:]])
    machine = describe_machine() | {"command": command}
    result = {"note": NOTE.format(arguments.elements), "columns": COLUMNS, "rows": rows, "machine": machine}
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
