"""Time what is watched in training steps: 2 nodes x 2 ranks over gloo on this machine, one GPT.

    python -m experiments.telemetry.run --rounds 20 --json telemetry.json

Each variant (off, and every `--intervals`) has a model of its own, built from the same weights; a round runs
a block of as many steps as the longest interval of each, in an order drawn anew, so that a disturbance hits
them alike. Two numbers are given. `seconds` and `ratio` compare wall-clock times: the median over the rounds
of a block's seconds per step, and of its ratio to the block without telemetry in the same round. `share` is
the processor time that a rank's main thread spends in what telemetry adds, over all processor time of its
process in these blocks: other programs on the machine do not disturb it. Losses of all variants must be
equal bit for bit. The search for edits of the weights is in every variant; its share is given as `edits`.
With `--micro-batches` each step has several forwards, and all but the first look for edits since the last.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

import sdp4bit
from benchmarks.cluster_strategies import TrainingStep, Workload, build_model, shard
from benchmarks.kernels import describe_machine
from sdp4bit.config import SDP4BitConfig, TelemetryConfig
from sdp4bit.engines.fsdp2.group_state import FSDPCommunication
from sdp4bit.engines.fsdp2.refresh import FSDPModelCommunication
from sdp4bit.engines.handle import ModelCommunication

RANKS, RANKS_PER_NODE = 4, 2
WARM_UP_STEPS = 4


class ThreadTime:
    """Sums the processor time of this thread in the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start

        return timed


def _build(workload: Workload, interval: int) -> TrainingStep:
    """Return a model with telemetry at this interval; 0 for none."""
    model = shard(build_model(workload))
    telemetry = TelemetryConfig(interval=interval) if interval else None
    sdp4bit.quantize_communication(model, topology=RANKS_PER_NODE, config=SDP4BitConfig(telemetry=telemetry))
    return TrainingStep(model, workload=workload)


def _work(rank: int, store: str, arguments: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    measuring, watching = ThreadTime(), ThreadTime()
    # Only what telemetry adds to a step; counting what is not finite is a few operations on scales.
    ModelCommunication.measure_step = measuring.around(ModelCommunication.measure_step)  # type: ignore[method-assign]
    FSDPCommunication.sample_gradient = measuring.around(FSDPCommunication.sample_gradient)  # type: ignore[method-assign]
    FSDPModelCommunication._agree = watching.around(FSDPModelCommunication._agree)  # type: ignore[method-assign]
    FSDPCommunication.note_refresh = watching.around(FSDPCommunication.note_refresh)  # type: ignore[method-assign]
    workload = Workload(layers=arguments.layers, hidden=arguments.hidden, micro_batch=arguments.micro_batch)
    intervals = [0, *arguments.intervals]
    steps = {interval: _build(workload, interval) for interval in intervals}
    losses, wall, share, edits = ({interval: [] for interval in intervals} for _ in range(4))
    for interval, step in steps.items():
        for _ in range(WARM_UP_STEPS):
            losses[interval].append(step(micro_batches=arguments.micro_batches).item())
    block, order = max(arguments.intervals), random.Random(0)
    for _ in range(arguments.rounds):
        for interval in order.sample(intervals, len(intervals)):
            dist.barrier()
            measuring.seconds = watching.seconds = 0.0
            start, processor = time.perf_counter(), time.process_time()
            block_losses = [steps[interval](micro_batches=arguments.micro_batches) for _ in range(block)]
            dist.barrier()
            wall[interval].append((time.perf_counter() - start) / block)
            used = time.process_time() - processor
            share[interval].append(measuring.seconds / used)
            edits[interval].append(watching.seconds / used)
            losses[interval] += [loss.item() for loss in block_losses]
    if any(losses[interval] != losses[0] for interval in intervals):
        raise AssertionError("telemetry has changed the losses")
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, (share, edits))
    if rank == 0:
        results.put(
            {
                "parameters": sum(p.numel() for p in build_model(workload).parameters()),
                "variants": [
                    {
                        "interval": interval,
                        "seconds": statistics.median(wall[interval]),
                        "ratio": _spread(a / b for a, b in zip(wall[interval], wall[0], strict=True)),
                        "share": _spread(value for share, _ in gathered for value in share[interval]),
                        "edits": _spread(value for _, edits in gathered for value in edits[interval]),
                    }
                    for interval in intervals
                ],
            }
        )
    dist.barrier()
    dist.destroy_process_group()


def _spread(values: Any) -> dict[str, float]:
    known = sorted(values)
    return {"median": statistics.median(known), "lowest": known[0], "highest": known[-1]}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the ranks have measured."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_work, args=(f"{folder}/store", arguments, results), nprocs=RANKS)
    measured: dict[str, Any] = results.get()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.telemetry.run", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--intervals", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=192, help="a multiple of 6")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences of 128 tokens per rank")
    parser.add_argument("--micro-batches", type=int, default=1, help="forwards and backwards per step")
    parser.add_argument("--json", type=Path)
    parser.set_defaults(intervals=[1, 10])
    arguments = parser.parse_args()
    measured = measure(arguments)
    machine = describe_machine()
    machine["command"] = shlex.join(["python", "-m", "experiments.telemetry.run", *sys.argv[1:]])
    print(f"{measured['parameters'] / 1e6:.1f} million parameters, {RANKS} ranks, {machine['cpu']}")
    for variant in measured["variants"]:
        name = f"every {variant['interval']} steps" if variant["interval"] else "off"
        ratio, share, edits = variant["ratio"], variant["share"], variant["edits"]
        print(
            f"{name:>15}: {1000 * variant['seconds']:.1f} ms a step, {ratio['median']:.3f} x "
            f"({ratio['lowest']:.3f} to {ratio['highest']:.3f}), "
            f"{100 * share['median']:.2f} % of processor time (at most {100 * share['highest']:.2f} %), "
            f"{100 * edits['median']:.2f} % to find edits (at most {100 * edits['highest']:.2f} %)"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, **measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
