"""CPU time that a training step takes on the host, with and without sdp4bit.

Rank 0 of 2 nodes x 2 trains one model of small blocks with plain FSDP2 and with sdp4bit, in turns. Each has a
parameter group per block, or one per three blocks ("merged"). The process group is torch's fake
one, which transfers nothing, and values are so few that kernels take little of the time. The rest is Python
and dispatch. The CPU time is that of the thread that trains. Run:

    OMP_NUM_THREADS=1 python -m benchmarks.host_time --out results/host_time.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import sdp4bit
from benchmarks.kernels import describe_machine
from sdp4bit.engines.fsdp2 import events

GROUPS, WIDTH = 16, 64
"""Blocks of two linear layers and a norm."""
MERGED = 3
"""Blocks of a merged group."""


def train(quantized: bool, *, together: int = 1) -> Any:
    """Return a function that trains one step, with this many blocks in a parameter group."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        for _ in range(GROUPS)
    ]
    model = nn.Sequential(*blocks)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for start in range(0, GROUPS, together):
        fully_shard(blocks[start : start + together], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if quantized:
        sdp4bit.quantize_communication(model, topology=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    inputs = torch.randn(4, WIDTH)

    def step() -> None:
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the microseconds per block and step of each round."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    programs = {
        "plain FSDP2": train(False),
        "sdp4bit": train(True),
        "plain FSDP2, merged": train(False, together=MERGED),
        "sdp4bit, merged": train(True, together=MERGED),
    }
    found: dict[str, list[float]] = {name: [] for name in programs}
    # The agreement of the hosts is one message per step over gloo, which has no fake ranks.
    with mock.patch.object(events, "all_reduce_on_host"):
        for number in range(rounds + 1):
            for name, step in programs.items():
                start = time.thread_time()
                for _ in range(steps):
                    step()
                if number:  # the first round compiles kernels and makes plans
                    found[name].append((time.thread_time() - start) / steps / GROUPS * 1e6)
    dist.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file to add the result to, by commit")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    found = measure(args.rounds, args.steps)
    medians = {name: statistics.median(values) for name, values in found.items()}
    result = {
        **describe_machine(),
        "command": shlex.join(["python", "-m", "benchmarks.host_time", *sys.argv[1:]]),
        "layout": f"fake ranks as 2 x 2, {GROUPS} blocks of {2 * WIDTH * WIDTH + 4 * WIDTH:,} values, bf16",
        "n": args.rounds,
        "merged": MERGED,
        "unit": "microseconds of CPU time of the training thread per block and step",
        "medians": medians,
        "added": medians["sdp4bit"] - medians["plain FSDP2"],
        "added_merged": medians["sdp4bit, merged"] - medians["plain FSDP2, merged"],
        "load": os.getloadavg()[0],
        "rounds": found,
    }
    print(json.dumps(result, indent=2))
    if args.out:
        known = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else []
        args.out.write_text(json.dumps([*known, result], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
