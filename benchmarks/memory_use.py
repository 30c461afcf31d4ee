"""Measure the peak memory of tensors in a training step, and compare it with the planner's.

    python -m benchmarks.memory_use --out results/memory.json

Four gloo processes, as two nodes of two ranks, train a GPT with AdamW for three steps: with plain FSDP2, and
with sdp4bit. The profiler records every allocation of tensors. The peak of the last step counts, on the rank
with the largest one. It includes activations, which are small here, and excludes buffers of gloo.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

# Imported here once, because the first optimizer of each rank would do it.
import torch._dynamo
import torch.distributed as dist
from torch import multiprocessing, profiler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import record_function

from benchmarks.cluster_strategies import Workload
from benchmarks.kernels import describe_machine
from sdp4bit import SDP4BitConfig, quantize_communication
from sdp4bit_lab.plan.costs import Cluster, StepCost
from sdp4bit_lab.plan.layout import ParallelLayout
from sdp4bit_lab.plan.memory import parts
from sdp4bit_lab.plan.model import gpt_groups
from sdp4bit_lab.plan.step import plan_step
from sdp4bit_lab.pretrain.model.gpt import GPT, Block

NODES, RANKS_PER_NODE, STEPS = 2, 2, 3
WORKLOAD = Workload(layers=6, hidden=256, heads=4, vocabulary=2048, sequence_length=16)
LAST = "last step"


def train(rank: int, folder: str, is_quantized: bool) -> None:
    """Train as one rank, and write the peak of the last step."""
    torch.set_num_threads(1)
    size = NODES * RANKS_PER_NODE
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{is_quantized}", rank=rank, world_size=size
    )
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        model = GPT(WORKLOAD.shape, compute_dtype=torch.bfloat16)
        model.reset_parameters(seed=0)
        mesh = init_device_mesh("cpu", (size,))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for block in (module for module in model.modules() if isinstance(module, Block)):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if is_quantized:
            comm = quantize_communication(model, topology=RANKS_PER_NODE)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for step in range(STEPS):
            with record_function(LAST if step == STEPS - 1 else "step"):
                model(*WORKLOAD.batch(step, rank=rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
    Path(f"{folder}/{is_quantized}-{rank}").write_text(str(peak_of(profiled)))
    if is_quantized:
        comm.remove()
    dist.destroy_process_group()


def peak_of(profiled: profiler.profile) -> int:
    """Return the largest sum of allocated bytes during the last step."""
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == LAST)
    allocated = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        allocated += event.nbytes()
        if event.start_ns() >= start:
            peak = max(peak, allocated)
    return peak


def planned() -> dict[str, StepCost]:
    """Return the planner's costs of the same job."""
    plan = plan_step(
        gpt_groups(WORKLOAD.shape),
        flops_per_sequence=0.0,
        cluster=Cluster(
            name="gloo",
            nodes=NODES,
            devices_per_node=RANKS_PER_NODE,
            inter_bandwidth=1.0,
            intra_bandwidth=1.0,
            device_flops=1.0,
        ),
        layout=ParallelLayout(),
        config=SDP4BitConfig(),
    )
    return {"FSDP2": plan.baseline, "sdp4bit": plan.quantized}


def measure() -> list[dict[str, Any]]:
    """Return the measured and the planned bytes of both jobs."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, cost in planned().items():
            is_quantized = name == "sdp4bit"
            multiprocessing.start_processes(
                train, args=(folder, is_quantized), nprocs=NODES * RANKS_PER_NODE, start_method="fork"
            )
            measured = max(
                int(Path(f"{folder}/{is_quantized}-{rank}").read_text())
                for rank in range(NODES * RANKS_PER_NODE)
            )
            # gloo has no communicators that use device memory.
            by_use = {use: size for use, size in parts(cost.memory).items() if use != "communicators"}
            rows.append({"strategy": name, "measured": measured, "planned": by_use})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    record = {
        **describe_machine(),
        "command": shlex.join(["python", "-m", "benchmarks.memory_use", *sys.argv[1:]]),
        "parameters": sum(group.numel for group in gpt_groups(WORKLOAD.shape)),
        "rows": measure(),
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in record["rows"]:
        expected = sum(row["planned"].values())
        print(f"{row['strategy']}: {row['measured'] / 1e6:.1f} MB, planned {expected / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
