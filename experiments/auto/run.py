"""Let config="auto" choose on emulated links, then time its choice against each candidate in turns.

    python experiments/auto/run.py --out experiments/auto/result.json [--cells 2x1-fsdp2-250mbit,...]

Run it as root from the root of the repository: it creates network namespaces (benchmarks/cluster_network.py).
Each cell is a layout, an engine and a rate. In a cell every rank trains one model with config="auto" until it
has chosen. Then all models (plain, which sdp4bit has never touched, each candidate alone, and auto) take
steps in turns, three at a time, of which the first is not counted. Cells that are in the file are not run
again. The cell "2x1-fsdp2-change" limits the link to 250mbit, 60 steps after the choice, and waits for the
next choice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

RATES = ("unshaped", "1gbit", "250mbit", "100mbit")
CELLS = [
    *(f"2x1-{engine}-{rate}" for rate in RATES for engine in ("fsdp2", "ddp")),
    *(f"2x2-{engine}-{rate}" for rate in RATES for engine in ("fsdp2", "ddp")),
    "2x1-fsdp2-change",
]
ROUNDS = 5
NOTE = (
    "A GPT of 13.8 million parameters, 128 tokens per rank and step, on emulated links over gloo. `steps` "
    "and `seconds` are those until the choice, with `warmup_steps=4`. Speeds are medians of 5 rounds, "
    "in which all settings take steps in turns."
)


def worker(engine: str, ranks_per_node: int) -> None:
    """Answer commands of the parent: {"search": most steps} and {"time": names}."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import sdp4bit
    from benchmarks.cluster_strategies import TrainingStep, Workload, build_model, shard

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload, handles, steps = Workload(), dict[str, Any](), dict[str, TrainingStep]()

    def build(name: str) -> TrainingStep:
        config: Any = sdp4bit.Auto(warmup_steps=4) if name == "auto" else name
        if engine == "ddp":
            model: Any = DistributedDataParallel(build_model(workload), gradient_as_bucket_view=True)
            if name != "plain":
                handles[name] = sdp4bit.DDPCommState(topology=ranks_per_node, config=config)
                model.register_comm_hook(handles[name], sdp4bit.ddp_comm_hook)
        else:
            model = shard(build_model(workload))
            if name != "plain":
                handles[name] = sdp4bit.quantize_communication(model, topology=ranks_per_node, config=config)
        return TrainingStep(model, workload=workload)

    def timed(name: str) -> float:
        steps[name].load()
        dist.barrier()
        start = time.perf_counter()
        steps[name]()
        dist.barrier()
        return time.perf_counter() - start

    for line in sys.stdin:
        command = json.loads(line)
        if "search" in command:
            if "auto" not in steps:
                steps["auto"] = build("auto")
            start, taken, before = time.perf_counter(), 0, handles["auto"].stats()["auto"]
            while taken < command["search"]:
                steps["auto"].load()
                steps["auto"]()
                taken += 1
                state = handles["auto"].stats()["auto"]
                if state["is_chosen"] and (not before["is_chosen"] or state["seconds"] != before["seconds"]):
                    break
            answer = {**state, "steps": taken, "search_seconds": time.perf_counter() - start}
        else:
            for name in command["time"]:
                if name not in steps:
                    steps[name] = build(name)
                    timed(name)
            answer = {name: [timed(name) for _ in range(3)][1:] for name in command["time"]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    dist.destroy_process_group()


class Cell:
    """Workers of one layout and engine on an emulated network."""

    def __init__(self, network: Any, layout: str, engine: str) -> None:
        from benchmarks.cluster import _MALLOC, _PRIORITY

        self.nodes, self.per_node = map(int, layout.split("x"))
        cores = sorted(os.sched_getaffinity(0))
        self.workers = []
        for rank in range(self.nodes * self.per_node):
            environment = {
                **os.environ,
                **_MALLOC,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.nodes * self.per_node),
                "MASTER_ADDR": network.address(0),
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": network.interface,
                "OMP_NUM_THREADS": "1",
                "NUMBA_NUM_THREADS": "1",
            }
            pin = ["taskset", "-c", str(cores[rank % len(cores)])]
            command = [*_PRIORITY, *pin, sys.executable, __file__, "--worker", engine, str(self.per_node)]
            node = rank // self.per_node
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.workers.append(network.start(node, command, env=environment, **pipes))

    def ask(self, **command: Any) -> dict[str, Any]:
        """Return rank 0's answer; times are those of barriers, so equal on all ranks."""
        for each in self.workers:
            each.stdin.write(json.dumps(command) + "\n")
            each.stdin.flush()
        lines = [each.stdout.readline() for each in self.workers]
        if not all(lines):
            raise RuntimeError("a rank exited")
        answer: dict[str, Any] = json.loads(lines[0])
        return answer


def run_cell(name: str) -> dict[str, Any]:
    from benchmarks.cluster_network import Network

    layout, engine, rate = name.split("-")
    with Network(int(layout[0])) as network:
        cell = Cell(network, layout, engine)
        network.set_rate(None if rate in ("unshaped", "change") else rate)
        result: dict[str, Any] = {"search": cell.ask(search=90)}
        if rate == "change":
            cell.ask(search=60)  # the usual time of a step is that of the first 50 after the choice
            network.set_rate("250mbit")
            result["before"], result["search"] = result["search"], cell.ask(search=400)
        names = ["plain", "bf16-wire", "sdp4bit", "auto"]
        seconds: dict[str, list[list[float]]] = {each: [] for each in names}
        for number in range(ROUNDS):
            turn = names[number % 4 :] + names[: number % 4]
            for each, times in cell.ask(time=turn).items():
                seconds[each].append(times)
        medians = {n: statistics.median(itertools.chain(*blocks)) for n, blocks in seconds.items()}
        # Ratios of the same round, because the machine's speed drifts.
        per_round = {n: [statistics.median(block) for block in blocks] for n, blocks in seconds.items()}
        best = min(names[:3], key=medians.__getitem__)
        against = {
            other: statistics.median(t / a for t, a in zip(per_round[other], per_round["auto"], strict=True))
            for other in names[:3]
        }
        return {**result, "medians": medians, "best": best, "speed_of_auto": against, "seconds": seconds}


def describe() -> dict[str, Any]:
    """Return a result without cells: what was run, where and with what."""
    from benchmarks.cluster_report import describe_machine

    command = "python experiments/auto/run.py --out experiments/auto/result.json"
    return {"machine": {**describe_machine([]), "command": command}, "note": NOTE, "cells": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", default=",".join(CELLS))
    chosen = parser.parse_args()
    result = json.loads(chosen.out.read_text()) if chosen.out.exists() else describe()
    for name in chosen.cells.split(","):
        if name in result["cells"]:
            continue
        start = time.monotonic()
        cell = result["cells"][name] = run_cell(name)
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
        print(
            f"{name}: chose {cell['search']['candidate']} after {cell['search']['steps']} steps and "
            f"{cell['search']['search_seconds']:.0f} s; best {cell['best']}; "
            + ", ".join(f"{other} {ratio:.3f}" for other, ratio in cell["speed_of_auto"].items())
            + f" ({time.monotonic() - start:.0f} s)",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]))
    else:
        main()
