"""Run one rank of the emulated cluster, controlled by its standard input.

Every input line is a JSON command, and every output line its answer:

    {"build": [names], "workload": {...}, "nodes": n, "ranks_per_node": g, "deterministic": false}
        ->  {"parameters": n}
    {"run": name, "steps": n}  ->  {"seconds": [...], "loss": mean of all ranks, "sent_bytes": n or null, ...}
    {"profile": name, "steps": n}  ->  {"milliseconds": {part of a step: its time}}

The end of the input ends the process. With the argument `cuda` ranks share the first visible GPU over NCCL.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import profiler
from torch.profiler import record_function

from benchmarks.cluster_strategies import Cluster, TrainingStep, Workload, build_model, device
from benchmarks.cluster_studies import BUILDERS
from sdp4bit.collectives.transport import PendingTransfer

OUTSIDE = "Python outside of operators"
PARTS = {
    "matrix products and attention": r"aten::(mm|addmm|bmm)$|attention",
    "system calls of transfers": r"^c10d::",
    "waiting for transfers": r"^wait$",
    "operators of sdp4bit": r"sdp4bit::(subtract_quantize|hadamard_quantize|dequantize_\w+)$",
    "optimizer": r"adamw|^Optimizer",
    "copies": r"aten::(copy_|cat|fill_)$",
    "other operators": r"^aten::",
    OUTSIDE: "",
}
"""Parts of a step, by the names of the profiler's events; the first that matches counts."""


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
    seconds = []
    loss = torch.zeros(())
    for _ in range(steps):
        step.load()
        _meet(hosts)
        start = time.perf_counter()
        loss = step()
        _meet(hosts)
        seconds.append(time.perf_counter() - start)
    loss = loss.float().cpu()
    dist.all_reduce(loss, group=hosts)
    after = step.sent_bytes()
    return {
        "seconds": seconds,
        "loss": loss.item() / dist.get_world_size(),
        "sent_bytes": None if before is None or after is None else after - before,
        "peak_bytes": torch.cuda.max_memory_allocated() if device().type == "cuda" else None,
    }


def _meet(hosts: dist.ProcessGroup | None) -> None:
    """Wait until all ranks' devices have finished their work."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(hosts)


def profile(step: TrainingStep, steps: int, *, hosts: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return the time of one step by its parts, on this rank."""
    wait = record_function("wait")(PendingTransfer.wait)
    with (
        mock.patch.object(PendingTransfer, "wait", wait),
        profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as profiled,
    ):
        seconds = run(step, steps, hosts=hosts)["seconds"]
    spent = dict.fromkeys(PARTS, 0.0)
    for event in profiled.key_averages():
        part = next(part for part, names in PARTS.items() if re.search(names, event.key))
        spent[part] += event.self_cpu_time_total / 1e3 / steps
    # Events overlap only with their own children, so the rest of the step is outside all of them.
    spent[OUTSIDE] += 1e3 * sum(seconds) / steps - sum(spent.values())
    return {"milliseconds": spent}


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
            steps = build(command)
            model = build_model(Workload(**command["workload"]))
            answer: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
        elif "profile" in command:
            answer = profile(steps[command["profile"]], command["steps"], hosts=hosts)
        else:
            answer = run(steps[command["run"]], command["steps"], hosts=hosts)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
