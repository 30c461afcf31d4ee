"""Run one rank of the emulated cluster, controlled by its standard input.

Every input line is a JSON command, and every output line its answer:

    {"build": [names], "workload": {...}, "nodes": n, "ranks_per_node": g}  ->  {"parameters": n}
    {"run": name, "steps": n}  ->  {"seconds": [...], "loss": mean of all ranks, "sent_bytes": n or null}

The end of the input ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster_strategies import STRATEGIES, Cluster, TrainingStep, Workload, build_model


def build(command: dict[str, Any]) -> dict[str, TrainingStep]:
    workload = Workload(**command["workload"])
    cluster = Cluster(nodes=command["nodes"], ranks_per_node=command["ranks_per_node"])
    return {name: STRATEGIES[name](workload, cluster) for name in command["build"]}


def run(step: TrainingStep, steps: int) -> dict[str, Any]:
    """Train steps, each of which lasts until all ranks have finished it."""
    before = step.sent_bytes()
    seconds = []
    loss = torch.zeros(())
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        loss = step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    dist.all_reduce(loss)
    after = step.sent_bytes()
    return {
        "seconds": seconds,
        "loss": loss.item() / dist.get_world_size(),
        "sent_bytes": None if before is None or after is None else after - before,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Reserve the original standard output for answers, because libraries may print.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    dist.init_process_group("gloo")
    steps: dict[str, TrainingStep] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if "build" in command:
            steps = build(command)
            model = build_model(Workload(**command["workload"]))
            answer: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
        else:
            answer = run(steps[command["run"]], command["steps"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
