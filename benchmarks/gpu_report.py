"""Everything that one machine with a GPU can tell about the library, one question after the other.

    python -m benchmarks.gpu_report h100-name --seconds 570
    python -m benchmarks.gpu_report h100-name --seconds 570 --resume

The first call asks the most important questions, on several ranks that share the GPU over NCCL: where the
time of a step goes, and how long steps take on links of a limited rate. Later calls continue: losses, a model
of the paper's size, the rest that has not run over NCCL, the kernels. All write results/gpu/h100-name/:
report.json after each part, and the part's own JSON file. A part that fails or takes too long does not stop
the others, and no part needs .git, a network or several GPUs. `--device cpu` tries the program without a GPU:
the same parts with small sizes, over gloo. results/gpu/predictions-second.json was written before.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.cluster_network import process_status
from benchmarks.gpu_limits import SKIPPED
from benchmarks.gpu_training import UNFINISHED
from benchmarks.kernels import describe_machine

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "results" / "gpu"
RUNS, TEXT = ROOT / "runs" / "gpu-report", ROOT / "build" / "text"
FAST_RATES = "unshaped,40gbit,25gbit,10gbit"
_LINES = 12
"""Last lines of a failed part's output that the report keeps."""
_LEAST_SHARE = 0.5
"""A part that has less of its time left is not started; a shorter one may be."""
_END_SECONDS = 20.0
"""Part of its time that a part leaves if it ends by itself."""
_STACK_SECONDS = 0.3
_PROBLEMS = ("failed", "timed out", "not started")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One program of the report."""

    name: str
    about: str
    command: Sequence[str]  # after `python -m`; {seconds} is replaced by the time that the part has
    seconds: int  # it is ended then
    variables: Mapping[str, str] = field(default_factory=dict)  # of its environment


def parts(folder: Path, scratch: Path, *, device: str, runs: Path = RUNS) -> list[Part]:
    """Return the parts, the most valuable first, because the time may end early.

    Args:
        folder: of the results.
        scratch: for files of this call.
        runs: for checkpoints that later calls need.
    """
    gpu = device == "cuda"
    flags = [] if gpu else ["--device", "cpu"]
    kernels = ["--backends", "triton", "--bits", "4,3.5,3", "--elements", f"{1 << 20},{1 << 24},{1 << 28}"]
    if not gpu:
        kernels = ["--backends", "numba", "--elements", "65536", "--threads", "1", "--budget", "0.1"]

    def selftest(name: str, checks: str, *more: str, ranks: int = 4) -> list[str]:
        layout = ["--share-gpu", str(ranks), "--ranks-per-node", str(ranks // 2)]
        file = ["--json", str(folder / f"{name}.json")]
        return ["sdp4bit_lab", "selftest", "--only", checks, *layout, *file, *more, *flags]

    def cluster(
        name: str, strategies: str, rates: str, *more: str, hidden: int = 1024, ranks_per_node: int = 1
    ) -> list[str]:
        size = ["--hidden", str(hidden), "--layers", "12", "--rounds", "20"]
        if not gpu:
            size = ["--hidden", str(hidden // 16), "--layers", "3", "--rounds", "2", "--sequence", "16"]
            rates = rates.partition(",")[0]
        layout = ["--nodes", "2", "--ranks-per-node", str(ranks_per_node)]
        file = ["--json", str(folder / f"{name}.json"), "--device", device]
        options = ["--strategies", strategies, "--rates", rates, *layout, *size, *more, *file]
        return ["benchmarks.cluster", *options]

    profiled = "compute,fsdp2-bf16,ddp-bf16,sdp4bit,fsdp2-bf16-threes,sdp4bit-threes"
    of_one = "compute,fsdp2,fsdp2-bf16,ddp-bf16,sdp4bit"
    qwd = "qwd-512,qwd-1024,qwd,qwd-4096"
    with_text = (
        ["--text", str(TEXT)]
        if gpu
        else [*("--strategies", "baseline,sdp4bit", "--steps", "2"), "--piece", "1", "--eval-interval", "1"]
    )
    tiny = [] if gpu else ["--options", "--num-layers", "1", "--hidden-size", "32", "--eval-iters", "1"]
    short = "5" if gpu else "2"
    wrapper = scratch / "share_gpu.sh"
    wrapper.write_text(wrapper_of((ROOT / "docs" / "one-gpu.md").read_text(encoding="utf-8")))
    wrapper.chmod(0o755)
    every = [
        Part(
            name="profile",
            about="where the time of a step goes, on the host and on the GPU",
            command=cluster(
                *("profile", profiled, "unshaped", "--profile", profiled, "--seconds-per-rate", "10"),
                *("--traces", str(folder / "traces")),
            ),
            seconds=120,
        ),
        Part(
            name="steps-2x1",
            about="step times of 2 nodes with a rank each",
            command=cluster("steps-2x1", of_one, f"{FAST_RATES},1gbit", "--seconds-per-rate", "26"),
            seconds=150,
        ),
        Part(
            name="steps-2x1-620m",
            about="the same with a model of 620 million parameters",
            command=cluster(
                *("steps-2x1-620m", of_one, FAST_RATES, "--separately", "--seconds-per-rate", "60"),
                hidden=2048,
            ),
            seconds=280,
        ),
        Part(
            name="steps-2x2",
            about="step times of 2 nodes with 2 ranks each",
            command=cluster(
                *("steps-2x2", "compute,fsdp2-bf16,hsdp-bf16,sdp4bit,hsdp-sdp4bit", f"{FAST_RATES},1gbit"),
                *("--seconds-per-rate", "25"),
                ranks_per_node=2,
            ),
            seconds=160,
        ),
        Part(
            name="steps-2x2-deferred",
            about="the same with 4 micro-batches, and HSDP's all-reduce in the last one",
            command=cluster(
                "steps-2x2-deferred",
                "hsdp-bf16,hsdp-bf16-deferred,sdp4bit,hsdp-sdp4bit,hsdp-sdp4bit-deferred",
                *("40gbit,10gbit", "--micro-batches", "4", "--seconds-per-rate", "40"),
                ranks_per_node=2,
            ),
            seconds=150,
        ),
        Part(
            name="steps-2x2-channels",
            about="the same with 4 channels between two ranks",
            command=cluster(
                *("steps-2x2-channels", "hsdp-bf16,sdp4bit,hsdp-sdp4bit", "unshaped,10gbit"),
                *("--seconds-per-rate", "20"),
                ranks_per_node=2,
            ),
            variables={"NCCL_NCHANNELS_PER_NET_PEER": "4"},
            seconds=90,
        ),
        Part(
            name="losses",
            about="losses of 50 steps with clipping: weights of 4 bits in four group sizes",
            command=cluster(
                *("losses", f"fsdp2,fsdp2-bf16,{qwd},sdp4bit", "unshaped", "--clip", "1"),
                *("--seconds-per-rate", "70", *(("--rounds", "46") if gpu else ())),
            ),
            seconds=110,
        ),
        Part(
            name="losses-deterministic",
            about="losses of this library's exchange in full precision equal those of FSDP2",
            command=cluster(
                *("losses-deterministic", "fsdp2,fair,hierarchical", "unshaped", "--deterministic"),
                *("--clip", "1", "--seconds-per-rate", "20"),
            ),
            seconds=60,
        ),
        Part(
            name="training",
            about="losses of a model of the paper's size on real text, 2 x 2 simulated ranks",
            command=[
                *("benchmarks.gpu_training", str(folder / "training.json"), "--runs", str(runs)),
                *("--seconds", "{seconds}", *with_text, *tiny),
            ],
            seconds=570,
        ),
        Part(
            name="nccl-training",
            about="training and removal with 2 x 2 ranks",
            command=selftest("nccl-training", "facts,training,removal", "--steps", short),
            seconds=120,
        ),
        Part(
            name="nccl-streams",
            about="random delays on all streams of 2 x 2 ranks change no bit",
            command=selftest("nccl-streams", "streams", "--delay-rounds", "1"),
            seconds=180,
        ),
        Part(
            name="nccl-send-limit",
            about="step times without network namespaces: send() is limited",
            command=cluster(
                *("nccl-send-limit", "fsdp2-bf16,sdp4bit", "10gbit,1gbit", "--links", "send"),
                *("--seconds-per-rate", "10"),
            ),
            seconds=60,
        ),
        Part(
            name="nccl-wrapper",
            about="training of 2 ranks that the wrapper script of docs/one-gpu.md starts",
            command=[
                *("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"),
                *(str(wrapper), "-m", "sdp4bit_lab", "selftest", "--only", "facts,training"),
                *("--ranks-per-node", "1", "--steps", short, "--json", str(folder / "nccl-wrapper.json")),
                *flags,
            ],
            # The script starts `python`.
            variables={"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"},
            seconds=90,
        ),
        Part(
            name="nccl-collectives",
            about="values of all collectives between 2 x 2 ranks",
            command=selftest("nccl-collectives", "facts,collectives"),
            seconds=45,
        ),
        Part(
            name="nccl-no-mps",
            about="collectives of 2 ranks that take turns on the GPU",
            command=selftest("nccl-no-mps", "facts,collectives", "--mps", "off", ranks=2),
            seconds=35,
        ),
        Part(
            name="nccl-exchanges",
            about="all exchanges of 2 x 2 ranks equal their definition",
            command=selftest("nccl-exchanges", "facts,exchanges"),
            # Triton compiles some 180 variants first: 145 s on an H100's host of 16 cores.
            seconds=280,
        ),
        Part(
            name="tests",
            about="bytes of all kernels equal to the reference on the device",
            command=[
                *("pytest", "-q", "-n", str(min(8, os.cpu_count() or 1))),
                # Without a GPU, two tests of the other file run in Triton's interpreter, for 5 minutes.
                *(["tests/kernels/test_triton.py"] if gpu else []),
                "tests/kernels/test_triton_device.py",
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
            name="steps-620m-slow",  # 39 s for a step of each strategy, which bytes alone decide
            about="step times of 620 million parameters on the slowest link",
            command=cluster(
                *("steps-620m-slow", of_one, "1gbit", "--separately", "--rounds", "2"),
                hidden=2048,
            ),
            seconds=200,
        ),
    ]
    # On a CPU the program is only tried, perhaps on a busy one.
    return every if gpu else [replace(part, seconds=15 * 60) for part in every]


def wrapper_of(page: str) -> str:
    """Return the script in bash of a page; ValueError if there is not one."""
    scripts = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", page, flags=re.DOTALL)
    if len(scripts) != 1:
        raise ValueError(f"docs/one-gpu.md has {len(scripts)} scripts that begin with #!/bin/bash, not one")
    return str(scripts[0])


def run_part(part: Part, folder: Path, *, limit: float | None = None) -> dict[str, Any]:
    """Run a part; return its command, its result and seconds.

    The result is "passed", "skipped", "unfinished" (a later call continues), "failed" or "timed out".

    A part that fails or takes too long leaves its output in NAME.log, with the stacks of processes that hang.

    Args:
        limit: seconds, if fewer are left than the part's own.
    """
    print(f"{part.name:20} {part.about} ...", flush=True)
    start = time.monotonic()
    seconds = min(part.seconds, limit or part.seconds)
    command = [each.replace("{seconds}", f"{max(1.0, seconds - _END_SECONDS):.0f}") for each in part.command]
    # A session of its own, so that a part that hangs is ended with all of its processes.
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **part.variables},
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        codes = {0: "passed", SKIPPED: "skipped", UNFINISHED: "unfinished"}
        result = codes.get(process.returncode, "failed")
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
    took = time.monotonic() - start
    lines = output.strip().splitlines()
    if result == "passed" and part.command[0] == "pytest" and " passed" not in lines[-1]:
        result = "skipped"  # pytest succeeds if it skips all tests
    if result in _PROBLEMS:
        (folder / f"{part.name}.log").write_text(output)
    print(f"{'':20} {result}, {took:.0f} s", flush=True)
    # The path of this Python is of no use to others.
    settings = [f"{name}={value}" for name, value in part.variables.items() if name != "PATH"]
    return {
        "result": result,
        "seconds": round(took, 1),
        "limit": round(seconds, 1),
        "command": shlex.join([*settings, "python", "-m", *command]),
        "output": lines[-_LINES:] if result in _PROBLEMS else lines[-1:],
    }


def is_done(part: Part, outcome: Mapping[str, Any] | None) -> bool:
    """Whether an earlier call has finished a part, or has given it all of its time in vain."""
    if outcome is None:
        return False
    had_its_time = outcome["result"] == "timed out" and outcome.get("limit", 0) >= part.seconds
    return outcome["result"] in ("passed", "skipped") or had_its_time


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
    parser.add_argument("--resume", action="store_true", help="continue an earlier call, part by part")
    parser.add_argument("--runs", type=Path, help="folder of checkpoints; default: runs/gpu-report/NAME")
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
    runs = arguments.runs or RUNS / arguments.name
    with tempfile.TemporaryDirectory() as scratch:
        every = parts(folder, Path(scratch), device=arguments.device, runs=runs)
        wanted = arguments.parts.split(",") if arguments.parts else [part.name for part in every]
        first_words = {part.name.partition("-")[0] for part in every}
        if unknown := sorted({*wanted} - {part.name for part in every} - first_words):
            names = ", ".join(part.name for part in every)
            parser.error(f"--parts {','.join(unknown)} is unknown: use {names}")
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "report.json"
        report: dict[str, Any] = {"machine": machine, "device": arguments.device, "parts": {}}
        if (arguments.parts or arguments.resume) and file.exists():
            before = json.loads(file.read_text())
            if before["machine"]["gpu"] != machine["gpu"]:
                parser.error(f"{file} is of {before['machine']['gpu']}: give this machine another name")
            report["parts"] = before["parts"]
        if not arguments.resume:
            shutil.rmtree(runs, ignore_errors=True)  # losses of an earlier library
        begin = time.monotonic()
        results: dict[str, dict[str, Any]] = {}  # of this call alone
        for part in every:
            is_wanted = {part.name, part.name.partition("-")[0]} & {*wanted}
            if is_wanted and not (arguments.resume and is_done(part, report["parts"].get(part.name))):
                left = (arguments.seconds or math.inf) - (time.monotonic() - begin)
                if left < part.seconds * _LEAST_SHARE:
                    results[part.name] = {"result": "not started", "seconds": 0.0}
                    report["parts"].setdefault(part.name, results[part.name])
                else:
                    results[part.name] = run_part(part, folder, limit=left)
                    report["parts"][part.name] = results[part.name]
                # After each part: the machine may be gone before the last one ends.
                file.write_text(json.dumps(report, indent=1) + "\n")
    print(f"Wrote {folder}. Send it with a pull request, see CONTRIBUTING.md.")
    if left_over := [
        name for name, each in results.items() if each["result"] in ("unfinished", "not started")
    ]:
        print(f"Not finished: {', '.join(left_over)}. The same command with --resume continues.")
    sys.exit(any(each["result"] in (*_PROBLEMS, "unfinished") for each in results.values()))


if __name__ == "__main__":
    main()
