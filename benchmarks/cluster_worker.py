"""Run one rank of the emulated cluster, controlled by its standard input.

Every input line is a JSON command, and every output line its answer:

    {"build": [names], "workload": {...}, "nodes": n, "ranks_per_node": g, "deterministic": false}
        ->  {"parameters": n}
        A second build replaces the strategies of the first.
    {"run": name, "steps": n}
        ->  {"seconds": [...], "issued": [...], "losses": means of all ranks, "sent_bytes": n or null, ...}
    {"profile": name, "steps": n, "trace": file or null}
        ->  the profile of this rank, see benchmarks/step_profile.py; rank 0 writes the file

`issued` are the seconds in which the host has issued a step; on a GPU, kernels may still run then. The end of
the input ends the process. With the argument `cuda` ranks share the first visible GPU over NCCL.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import profiler
from torch.profiler import record_function

from benchmarks.cluster_strategies import Cluster, TrainingStep, Workload, build_model, device
from benchmarks.cluster_studies import BUILDERS
from benchmarks.step_profile import STEP, WAIT, device_times, hooks_of, host_parts, read_trace
from sdp4bit.collectives.transport import PendingTransfer


def build(command: dict[str, Any]) -> dict[str, TrainingStep]:
    if command["deterministic"]:
        # Warnings only, because some operators have no such algorithm.
        torch.use_deterministic_algorithms(True, warn_only=True)
    workload = Workload(**command["workload"])
    cluster = Cluster(nodes=command["nodes"], ranks_per_node=command["ranks_per_node"])
    return {name: BUILDERS[name](workload, cluster) for name in command["build"]}


def run(step: TrainingStep, steps: int, *, hosts: dist.ProcessGroup | None) -> dict[str, Any]:
    """Train steps, each of which lasts until all ranks have finished it.

    Args:
        hosts: group of the barriers on the host; None for the default group.
    """
    before = step.sent_bytes()
    seconds, issued, losses = [], [], []
    for _ in range(steps):
        step.load()
        _meet(hosts)
        start = time.perf_counter()
        with record_function(STEP):
            losses.append(step())
        issued.append(time.perf_counter() - start)
        with record_function(WAIT):
            _meet(hosts)
        seconds.append(time.perf_counter() - start)
    total = torch.stack(losses).float().cpu()
    dist.all_reduce(total, group=hosts)
    after = step.sent_bytes()
    return {
        "seconds": seconds,
        "issued": issued,
        "losses": (total / dist.get_world_size()).tolist(),
        "sent_bytes": None if before is None or after is None else after - before,
        "peak_bytes": torch.cuda.max_memory_allocated() if device().type == "cuda" else None,
    }


def _meet(hosts: dist.ProcessGroup | None) -> None:
    """Wait until all ranks' devices have finished their work."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(hosts)


def profile(
    step: TrainingStep, steps: int, trace: str | None, *, hosts: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Return the parts of a step's time on this rank, and its time without the profiler."""
    alone = run(step, steps, hosts=hosts)
    wait = record_function("wait")(PendingTransfer.wait)
    activities = [profiler.ProfilerActivity.CPU]
    if device().type == "cuda":
        activities.append(profiler.ProfilerActivity.CUDA)
    with (
        mock.patch.object(PendingTransfer, "wait", wait),
        profiler.profile(activities=activities) as profiled,
    ):
        seconds = run(step, steps, hosts=hosts)["seconds"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        if trace is not None and dist.get_rank() == 0:
            path = Path(trace)
        profiled.export_chrome_trace(str(path))
        events = read_trace(path)
    return {
        "ms": host_parts(profiled.key_averages(), seconds, is_cuda=device().type == "cuda"),
        "seconds": alone["seconds"],
        "issued": alone["issued"],
        "device": device_times(events),
        **hooks_of(events),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Reserve the original standard output for answers, because libraries may print.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    hosts = None
    if sys.argv[1:] == ["cuda"]:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl")
        hosts = dist.new_group(backend="gloo")
    else:
        dist.init_process_group("gloo")
    steps: dict[str, TrainingStep] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if "build" in command:
            # Release the memory of an earlier build first; two of a large model may not fit.
            steps.clear()
            gc.collect()
            torch.cuda.empty_cache()
            steps = build(command)
            model = build_model(Workload(**command["workload"]))
            answer: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
        elif "profile" in command:
            name, trace = command["profile"], command["trace"]
            answer = profile(steps[name], command["steps"], trace, hosts=hosts)
        else:
            answer = run(steps[command["run"]], command["steps"], hosts=hosts)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
