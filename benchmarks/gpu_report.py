"""Everything that one machine with GPUs can tell about the library, in ten minutes.

    python -m benchmarks.gpu_report h100-name

writes results/gpu/h100-name/: report.json after each part, and the part's own JSON file. A part that fails or
takes too long does not stop the others, and no part needs .git, a network or several GPUs. `--device cpu`
tries the program without a GPU: the same parts with small sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_limits import SKIPPED
from benchmarks.kernels import describe_machine

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "results" / "gpu"
_LINES = 12
"""Last lines of a failed part's output that the report keeps."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One program of the report."""

    name: str
    about: str
    command: Sequence[str]  # after `python -m`
    seconds: int  # it is ended then
    result: Path | None = None  # a file that the program writes elsewhere


def parts(folder: Path, scratch: Path, *, device: str) -> list[Part]:
    """Return the parts, the most valuable first, because the time may end early."""
    gpu = device == "cuda"
    ranks = 8 if gpu else 4
    flags = [] if gpu else ["--device", "cpu"]
    kernels = ["--backends", "triton", "--bits", "4,3.5,3", "--elements", f"{1 << 20},{1 << 24},{1 << 28}"]
    if not gpu:
        kernels = ["--backends", "numba", "--elements", "65536", "--threads", "1", "--budget", "0.1"]

    def selftest(name: str, checks: str) -> list[str]:
        layout = ["--ranks-as-threads", str(ranks), "--ranks-per-node", str(ranks // 2)]
        file = ["--json", str(folder / f"{name}.json")]
        return ["sdp4bit_lab", "selftest", "--only", checks, *layout, *file, *flags]

    runs = scratch / "runs"
    card = ["--preset", "125M"] if gpu else ["--num-layers", "1", "--hidden-size", "64"]
    every = [
        Part(
            name="tests",
            about="bytes of all kernels equal to the reference on the device",
            command=[
                *("pytest", "-q", "-n", str(min(8, os.cpu_count() or 1))),
                *(f"tests/kernels/{file}" for file in ("test_triton.py", "test_triton_device.py")),
            ],
            seconds=120,
        ),
        Part(
            name="kernels",
            about="times of the operators, beside the predictions",
            command=["benchmarks.kernels", *kernels, "--json", str(folder / "kernels.json")],
            seconds=90,
        ),
        Part(
            name="limits",
            about="the unit of the GPU that limits each operator",
            command=["benchmarks.gpu_limits", str(folder / "limits.json"), *flags],
            seconds=75,
        ),
        Part(
            name="selftest",
            about=f"exchanges and training with {ranks} ranks as threads",
            # Without the kernels, which the tests have compared.
            command=[*selftest("selftest", "facts,exchanges,training"), *([] if gpu else ["--steps", "2"])],
            seconds=150,
        ),
        Part(
            name="profile",
            about="launches and host time of a step per parameter group",
            command=[
                *("benchmarks.gpu_profile", str(folder / "profile.json"), "--ranks", str(ranks)),
                # Narrow, so that the host never waits for a full queue of the device.
                *("--width", "256", "--device", device),
            ],
            seconds=60,
        ),
        Part(
            name="training",
            about="losses of plain FSDP2 and sdp4bit on simulated ranks",
            command=[
                *("sdp4bit_lab", "compare", "--strategies", "baseline,sdp4bit", "--seeds", "1"),
                *("--simulated-ranks", str(ranks), "--ranks-per-node", str(ranks // 2), *card),
                *("--train-iters", "50" if gpu else "2", "--out", str(runs)),
            ],
            seconds=120,
            result=runs / "summary.json",
        ),
        Part(
            name="streams",
            about="random delays on all streams change no bit",
            command=[*selftest("streams", "streams"), *("--delay-rounds", "1")],
            seconds=180,
        ),
    ]
    # On a CPU the program is only tried, perhaps on a busy one.
    return every if gpu else [replace(part, seconds=15 * 60) for part in every]


def run_part(part: Part, folder: Path) -> dict[str, Any]:
    """Run a part; return its command, its result ("passed", "skipped", "failed", "timed out") and seconds."""
    print(f"{part.name:9} {part.about} ...", flush=True)
    start = time.monotonic()
    # A session of its own, so that a part that hangs is ended with all of its processes.
    process = subprocess.Popen(
        [sys.executable, "-m", *part.command],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=part.seconds)
        result = {0: "passed", SKIPPED: "skipped"}.get(process.returncode, "failed")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        result = "timed out"
    seconds = time.monotonic() - start
    if result == "passed" and part.result is not None:
        (folder / f"{part.name}.json").write_bytes(part.result.read_bytes())
    lines = output.strip().splitlines()
    if result == "passed" and part.command[0] == "pytest" and " passed" not in lines[-1]:
        result = "skipped"  # pytest succeeds if it skips all tests
    print(f"{'':9} {result}, {seconds:.0f} s", flush=True)
    return {
        "result": result,
        "seconds": round(seconds, 1),
        "command": shlex.join(["python", "-m", *part.command]),
        "output": lines[-_LINES:] if result in ("failed", "timed out") else lines[-1:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_report", description=__doc__.split("\n")[0]
    )
    parser.add_argument("name", help="folder of the results, such as h100-pcie")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--parts", default="", help="some of the parts, separated by commas; the others keep their results"
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the folder")
    arguments = parser.parse_args()
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", arguments.name):
        parser.error(f"{arguments.name!r} is no name: use lower-case letters, digits, '.' and '-'")
    machine = describe_machine()
    if arguments.device == "cuda" and machine["gpu"] is None:
        parser.error("torch sees no GPU here; --device cpu tries the program without one")
    # `describe_machine` states the command of its own program.
    machine["command"] = shlex.join(["python", "-m", "benchmarks.gpu_report", *sys.argv[1:]])
    folder = arguments.out / arguments.name
    with tempfile.TemporaryDirectory() as scratch:
        every = parts(folder, Path(scratch), device=arguments.device)
        wanted = arguments.parts.split(",") if arguments.parts else [part.name for part in every]
        if unknown := sorted({*wanted} - {part.name for part in every}):
            names = ", ".join(part.name for part in every)
            parser.error(f"--parts {','.join(unknown)} is unknown: use {names}")
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "report.json"
        report: dict[str, Any] = {"machine": machine, "device": arguments.device, "parts": {}}
        if arguments.parts and file.exists():
            before = json.loads(file.read_text())
            if before["machine"]["gpu"] != machine["gpu"]:
                parser.error(f"{file} is of {before['machine']['gpu']}: give this machine another name")
            report["parts"] = before["parts"]
        for part in every:
            if part.name in wanted:
                report["parts"][part.name] = run_part(part, folder)
                # After each part: the machine may be gone before the last one ends.
                file.write_text(json.dumps(report, indent=1) + "\n")
    print(f"Wrote {folder}. Send it with a pull request, see CONTRIBUTING.md.")
    sys.exit(any(each["result"] in ("failed", "timed out") for each in report["parts"].values()))


if __name__ == "__main__":
    main()
