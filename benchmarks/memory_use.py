"""Measure the peak memory of tensors in a training step, and compare it with the planner's.

    python -m benchmarks.memory_use --out results/memory.json

Four gloo processes, as two nodes of two ranks, train a GPT with AdamW for three steps: with plain FSDP2, and
with sdp4bit. The memory in use before the last step is that of all live tensors. Its growth within the step
is read from the allocator of the C library before and after every operator. The sum counts, on the rank with
the largest one. It includes activations, which are small here, and excludes buffers of gloo's sockets.

torch's profiler cannot count this: it misses tensors that gloo's threads free.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
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
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

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
WORKLOAD = Workload(layers=6, hidden=512, heads=8, vocabulary=4096, sequence_length=16)


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


_mallinfo = ctypes.CDLL(None).mallinfo2
_mallinfo.restype = _MallocInfo


def bytes_in_use() -> int:
    """Return the bytes that the C library has allocated for this process, of all threads."""
    info = _mallinfo()
    return int(info.uordblks + info.hblkhd)


class PeakMode(TorchDispatchMode):
    """Record the largest memory in use before and after the operators, of all threads."""

    def __init__(self) -> None:
        super().__init__()
        self._start = bytes_in_use()
        self.growth = 0

    def _sample(self) -> None:
        self.growth = max(self.growth, bytes_in_use() - self._start)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._sample()
        result = function(*args, **(kwargs or {}))
        self._sample()
        return result


def bytes_of_tensors() -> int:
    """Return the bytes of all live tensors; those that share memory count once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        # isinstance would ask deprecated proxies of modules for their class.
        if issubclass(type(each), torch.Tensor):
            local = each.to_local() if isinstance(each, DTensor) else each
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def train(rank: int, folder: str, is_quantized: bool) -> None:
    """Train as one rank, and write the peak of the last step."""
    torch.set_num_threads(1)
    size = NODES * RANKS_PER_NODE
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{is_quantized}", rank=rank, world_size=size
    )
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

    def step(number: int) -> None:
        model(*WORKLOAD.batch(number, rank=rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(STEPS - 1):
        step(number)
    kept = bytes_of_tensors()
    with PeakMode() as mode:
        step(STEPS - 1)
    Path(f"{folder}/{is_quantized}-{rank}").write_text(json.dumps([kept, mode.growth]))
    if is_quantized:
        comm.remove()
    dist.destroy_process_group()


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
            found = [
                json.loads(Path(f"{folder}/{is_quantized}-{rank}").read_text())
                for rank in range(NODES * RANKS_PER_NODE)
            ]
            kept, growth = max(found, key=sum)
            # gloo has no communicators that use device memory.
            by_use = {use: size for use, size in parts(cost.memory).items() if use != "communicators"}
            rows.append(
                {"strategy": name, "measured": kept + growth, "between_steps": kept, "planned": by_use}
            )
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
