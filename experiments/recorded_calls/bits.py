"""Digests of what training changes, for comparing two checkouts: losses, gradients, weights, counts.

    OMP_NUM_THREADS=1 PYTHONPATH=CHECKOUT python bits.py NODES RANKS_PER_NODE [CASE,CASE,...]

trains 20 steps of each case on gloo ranks with the compiled kernels. Equal digests mean equal bits on a rank.
THREE_LEVELS=1 makes pairs of nodes blocks.
"""

import hashlib
import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sdp4bit
from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.config import TelemetryConfig

CONFIGS = {
    "node": SDP4BitConfig(weights=WeightConfig(replica="node")),
    "paper": SDP4BitConfig(
        gradients=GradientConfig(exact_own=False, inter_rounding="stochastic"), separate_parameters=False
    ),
    "direct": SDP4BitConfig(
        weights=WeightConfig(mode="direct", bits=8),
        gradients=GradientConfig(inter_rounding="nearest", pipeline_chunks=2),
    ),
    "telemetry": SDP4BitConfig(telemetry=TelemetryConfig(interval=3)),
}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POLICIES = {"fp16": (FP16, FP16), "bf16 sums": (BF16, None), "fp32": (None, None)}
CASES = (
    *("default", "no biases", "dtypes", "unused", "fp16", "bf16 sums", "fp32", "resharded", "node", "paper"),
    *(
        "direct",
        "frozen",
        "edits",
        "accumulation",
        "nan",
        "evaluation",
        "inference mode",
        "hsdp",
        "telemetry",
    ),
    *("tensor parallel", "experts", "threads"),
)


class Block(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=bias)
        self.up, self.down = nn.Linear(width, 3 * width, bias=bias), nn.Linear(3 * width, width, bias=bias)
        self.extra = nn.Linear(width, width, bias=bias)
        self.uses_extra = True

    def forward(self, x):
        y = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + y + self.extra(x) if self.uses_extra else x + y


def build(case, nodes, per_node):
    torch.manual_seed(0)
    width, bias = (256 if case == "threads" else 72), case != "no biases"
    blocks = [Block(width, bias) for _ in range(3)]
    model = nn.Sequential(nn.Linear(24, width, bias=bias), *blocks, nn.Linear(width, 8, bias=bias))
    world = nodes * per_node
    mesh = init_device_mesh("cpu", (world,))
    if case == "hsdp":
        mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("replicate", "shard"))
    if case == "tensor parallel":
        grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        mesh = grid["data"]
        for block in blocks:
            parallelize_module(block, grid["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    gathered, reduced = POLICIES.get(case, (BF16, FP32))
    options = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced),
        "reshard_after_forward": case in ("resharded", "node"),
    }
    for block in blocks:
        if case == "dtypes":
            block.extra.to(FP16).requires_grad_(False)
            block.uses_extra = False
        if case == "frozen":
            block.up.weight.requires_grad_(False)
        if case == "experts":
            part = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("expert", "data"))
            fully_shard(block.extra, mesh=part["data"], **options)
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    topology = (per_node, 2 * per_node) if "THREE_LEVELS" in os.environ else per_node
    if case == "tensor parallel":
        topology = 1
    if case == "threads":
        torch.set_num_threads(3)
    comm = sdp4bit.quantize_communication(model, CONFIGS.get(case, SDP4BitConfig()), topology=topology)
    return model, blocks, comm, gathered or FP32


def bits_of(tensor):
    return tensor.detach().to_local().contiguous().view(torch.uint8).numpy().tobytes()


def digest_of(case, nodes, per_node):
    model, blocks, comm, dtype = build(case, nodes, per_node)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digest, rank = hashlib.sha256(), dist.get_rank()
    evaluate = {"evaluation": torch.no_grad, "inference mode": torch.inference_mode}.get(case)
    for step in range(20):
        for index, block in enumerate(blocks):
            if case == "unused":
                block.uses_extra = (step + index) % 3 == 0
        if case == "edits" and step == 9:
            with torch.no_grad():
                blocks[0].up.weight.mul_(1.001)
                blocks[1].norm.weight.add_(1.0)
        batches = 2 if case == "accumulation" else 1
        for batch in range(batches):
            model.set_requires_gradient_sync(batch + 1 == batches)
            generator = torch.Generator().manual_seed(1000 * step + 10 * rank + batch)
            x = torch.randn(4, 24, generator=generator).to(dtype)
            if case == "nan" and step == 7 and rank == 0:
                x[0, 0] = float("nan")
            loss = model(x).float().square().mean()
            loss.backward()
        if evaluate is not None and step % 4 == 2:
            model.eval()
            with evaluate():
                digest.update(model(x).float().numpy().tobytes())
            model.train()
        for param in model.parameters():
            digest.update(b"" if param.grad is None else bits_of(param.grad))
        optimizer.step()
        optimizer.zero_grad()
        for param in model.parameters():
            digest.update(bits_of(param))
        digest.update(repr(loss.item()).encode())
    digest.update(repr(comm.group_stats()).encode())
    return digest.hexdigest()[:16]


def run(rank, nodes, per_node, cases, store):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    size = nodes * per_node
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{store}")
    for case in cases:
        digests = [None] * size
        dist.all_gather_object(digests, digest_of(case, nodes, per_node))
        if rank == 0:
            print(case, f"{nodes} x {per_node}", *digests, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    layout = int(sys.argv[1]), int(sys.argv[2])
    cases = sys.argv[3].split(",") if len(sys.argv) > 3 else CASES
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (*layout, cases, os.path.join(folder, "store")), nprocs=layout[0] * layout[1])
