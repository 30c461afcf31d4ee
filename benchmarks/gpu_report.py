"""Everything that one machine with a GPU can tell about the library, in two calls of ten minutes.

    python -m benchmarks.gpu_report h100-name --parts nccl
    python -m benchmarks.gpu_report h100-name

The first runs several ranks on one GPU over NCCL: collectives, self-test, step times on shaped links. The
second runs these and all other parts. Both write results/gpu/h100-name/: report.json after each part, and the
part's own JSON file. A part that fails or takes too long does not stop the others, and no part needs .git, a
network or several GPUs. `--device cpu` tries the program without a GPU: the same parts with small sizes, over
gloo.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cluster_network import process_status
from benchmarks.gpu_limits import SKIPPED
from benchmarks.kernels import describe_machine

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "results" / "gpu"
_LINES = 12
"""Last lines of a failed part's output that the report keeps."""
_LEAST_SECONDS = 5.0
"""A part that has less time left is not started."""
_STACK_SECONDS = 0.3
_PROBLEMS = ("failed", "timed out", "not started")


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
    flags = [] if gpu else ["--device", "cpu"]
    kernels = ["--backends", "triton", "--bits", "4,3.5,3", "--elements", f"{1 << 20},{1 << 24},{1 << 28}"]
    if not gpu:
        kernels = ["--backends", "numba", "--elements", "65536", "--threads", "1", "--budget", "0.1"]

    def selftest(name: str, checks: str, *more: str, ranks: int = 4) -> list[str]:
        layout = ["--share-gpu", str(ranks), "--ranks-per-node", str(ranks // 2)]
        file = ["--json", str(folder / f"{name}.json")]
        return ["sdp4bit_lab", "selftest", "--only", checks, *layout, *file, *more, *flags]

    def cluster(name: str, ranks_per_node: int, rates: str, strategies: str, *more: str) -> list[str]:
        model = ["--hidden", "1024", "--layers", "12", "--seconds-per-rate", "6"]
        if not gpu:
            model = ["--hidden", "64", "--layers", "1", "--seconds-per-rate", "1", "--sequence", "16"]
            rates = "1gbit"
        layout = ["--nodes", "2", "--ranks-per-node", str(ranks_per_node), "--rates", rates]
        file = ["--json", str(folder / f"{name}.json")]
        options = [*layout, "--strategies", strategies, *model, *more, *file, "--device", device]
        return ["benchmarks.cluster", *options]

    runs = scratch / "runs"
    card = ["--preset", "125M"] if gpu else ["--num-layers", "1", "--hidden-size", "64"]
    every = [
        Part(
            name="nccl-collectives",
            about="values of all collectives between 2 x 2 ranks that share the GPU",
            command=selftest("nccl-collectives", "facts,collectives"),
            seconds=45,
        ),
        Part(
            name="nccl-2x1",
            about="step times of 2 nodes with a rank each",
            command=cluster(
                "nccl-2x1",
                1,
                "1gbit,10gbit,40gbit,unshaped",
                "compute,fsdp2,fsdp2-bf16,ddp-bf16,sdp4bit,sdp4bit-w3g3.5",
            ),
            seconds=120,
        ),
        Part(
            name="nccl-2x2",
            about="step times of 2 nodes with 2 ranks each",
            command=cluster(
                "nccl-2x2", 2, "1gbit,10gbit", "compute,fsdp2-bf16,hsdp-bf16,sdp4bit,hsdp-sdp4bit"
            ),
            seconds=95,
        ),
        Part(
            name="nccl-2x2-deferred",
            about="the same with 4 micro-batches, HSDP's all-reduce in the last one",
            command=cluster(
                "nccl-2x2-deferred",
                2,
                "10gbit",
                "hsdp-bf16,hsdp-bf16-deferred,sdp4bit,hsdp-sdp4bit-deferred",
                *("--micro-batches", "4"),
            ),
            seconds=65,
        ),
        Part(
            name="nccl-deterministic",
            about="losses of this library's exchange in full precision equal those of FSDP2",
            command=cluster(
                "nccl-deterministic", 1, "unshaped", "fsdp2,fair,hierarchical", "--deterministic"
            ),
            seconds=55,
        ),
        Part(
            name="nccl-no-mps",
            about="collectives of 2 ranks that take turns on the GPU",
            command=selftest("nccl-no-mps", "facts,collectives", "--mps", "off", ranks=2),
            seconds=35,
        ),
        Part(
            name="nccl-selftest",
            about="exchanges, training and removal with 2 x 2 ranks",
            command=selftest(
                "nccl-selftest", "facts,exchanges,training,removal", "--steps", "5" if gpu else "2"
            ),
            # Triton compiles some 180 variants first: 145 s on an H100's host of 16 cores.
            seconds=280,
        ),
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
            name="profile",
            about="launches and host time of a step per parameter group",
            command=[
                *("benchmarks.gpu_profile", str(folder / "profile.json"), "--ranks", "2"),
                # Narrow, so that the host never waits for a full queue of the device. A CPU multiplies bf16
                # at a hundredth of the speed, and a step of width 256 takes 3 s there.
                *("--width", "256" if gpu else "64", "--device", device),
            ],
            seconds=60,
        ),
        Part(
            name="training",
            about="losses of plain FSDP2 and sdp4bit on simulated ranks",
            command=[
                *("sdp4bit_lab", "compare", "--strategies", "baseline,sdp4bit", "--seeds", "1"),
                *("--simulated-ranks", "8", "--ranks-per-node", "4", *card),
                *("--train-iters", "50" if gpu else "2", "--out", str(runs)),
            ],
            seconds=120,
            result=runs / "summary.json",
        ),
        Part(
            name="streams",
            about="random delays on all streams of 2 x 2 ranks change no bit",
            command=selftest("streams", "streams", "--delay-rounds", "1"),
            seconds=180,
        ),
    ]
    # On a CPU the program is only tried, perhaps on a busy one.
    return every if gpu else [replace(part, seconds=15 * 60) for part in every]


def run_part(part: Part, folder: Path, *, limit: float | None = None) -> dict[str, Any]:
    """Run a part; return its command, its result ("passed", "skipped", "failed", "timed out") and seconds.

    A part that fails or takes too long leaves its output in NAME.log, with the stacks of processes that hang.

    Args:
        limit: seconds, if fewer are left than the part's own.
    """
    print(f"{part.name:17} {part.about} ...", flush=True)
    start = time.monotonic()
    # A session of its own, so that a part that hangs is ended with all of its processes.
    process = subprocess.Popen(
        [sys.executable, "-m", *part.command],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )
    try:
        output, _ = process.communicate(timeout=min(part.seconds, limit or part.seconds))
        result = {0: "passed", SKIPPED: "skipped"}.get(process.returncode, "failed")
    except subprocess.TimeoutExpired:
        # Python prints its stacks at this signal. One process after another, because they share the pipe.
        for each in _members(process.pid):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGABRT)
            time.sleep(_STACK_SECONDS)  # nothing announces the end of its output
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        result = "timed out"
    seconds = time.monotonic() - start
    if result == "passed" and part.result is not None:
        (folder / f"{part.name}.json").write_bytes(part.result.read_bytes())
    lines = output.strip().splitlines()
    if result == "passed" and part.command[0] == "pytest" and " passed" not in lines[-1]:
        result = "skipped"  # pytest succeeds if it skips all tests
    if result in _PROBLEMS:
        (folder / f"{part.name}.log").write_text(output)
    print(f"{'':17} {result}, {seconds:.0f} s", flush=True)
    return {
        "result": result,
        "seconds": round(seconds, 1),
        "command": shlex.join(["python", "-m", *part.command]),
        "output": lines[-_LINES:] if result in _PROBLEMS else lines[-1:],
    }


def _members(group: int) -> list[int]:
    """Return the processes of a process group; only its first where there is no /proc."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if process_status(pid)[2:3] == [str(group)]] or [group]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_report", description=__doc__.split("\n")[0]
    )
    parser.add_argument("name", help="folder of the results, such as h100-pcie")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--parts",
        default="",
        help="some parts, separated by commas, or the first word of several, such as nccl; the others keep "
        "their results",
    )
    parser.add_argument("--seconds", type=float, help="for all parts together, such as 570")
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
        first_words = {part.name.partition("-")[0] for part in every}
        if unknown := sorted({*wanted} - {part.name for part in every} - first_words):
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
        begin = time.monotonic()
        results: dict[str, dict[str, Any]] = {}  # of this call alone
        for part in every:
            if {part.name, part.name.partition("-")[0]} & {*wanted}:
                left = (arguments.seconds or math.inf) - (time.monotonic() - begin)
                if left < _LEAST_SECONDS:
                    results[part.name] = {"result": "not started", "seconds": 0.0}
                    report["parts"].setdefault(part.name, results[part.name])
                else:
                    results[part.name] = run_part(part, folder, limit=left)
                    report["parts"][part.name] = results[part.name]
                # After each part: the machine may be gone before the last one ends.
                file.write_text(json.dumps(report, indent=1) + "\n")
    print(f"Wrote {folder}. Send it with a pull request, see CONTRIBUTING.md.")
    sys.exit(any(each["result"] in _PROBLEMS for each in results.values()))


if __name__ == "__main__":
    main()
