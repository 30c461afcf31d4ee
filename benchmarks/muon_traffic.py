"""Count the bytes that `torch.optim.Muon` sends by itself in a step, beside those of its model's training.

    python -m benchmarks.muon_traffic --out results/muon_traffic.json

Four gloo processes represent two nodes of two ranks. FSDP2 shards each matrix of a GPT block over all ranks,
or inside each node with replicas on the other (HSDP), there also with tall matrices cut along dimension 1.
Every functional collective that DTensor issues in `optimizer.step()` is counted as a ring in rank order, the
least that any algorithm needs. `step` are the bytes of FSDP2 for one forward and backward with this library,
`step_plain` without it. The unit is bytes per parameter that one node sends to the other.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernels import describe_machine
from sdp4bit import GradientConfig, SDP4BitConfig, quantize_communication

NODES, RANKS_PER_NODE = 2, 2
RANKS = NODES * RANKS_PER_NODE
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RINGS = {
    "all_gather_into_tensor": 1.0,
    "reduce_scatter_tensor": 1.0,
    "all_reduce": 2.0,
    "all_to_all_single": 1.0,
}
"""How often a ring sends the whole tensor around."""
FLAT, HYBRID, TALL = "shards over all ranks", "HSDP", "HSDP, tall matrices cut along dimension 1"


class CollectiveCounter(TorchDispatchMode):
    """Counts calls and bytes between nodes of the collectives below DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.inter_bytes = 0.0
        """Sent by one node."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor comes back with its collectives
        name = function._schema.name.partition("::")[2]
        if function.namespace == "_c10d_functional" and name in RINGS:
            self._count(name, args[0], str(args[-1]))
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, tensor: torch.Tensor, group_name: str) -> None:
        group = torch._C._distributed_c10d._resolve_process_group(group_name)
        ranks = dist.get_process_group_ranks(group)
        # The whole tensor: of a gather its result, of the others their input.
        whole = tensor.nbytes * (len(ranks) if name == "all_gather_into_tensor" else 1)
        is_between = len({rank // RANKS_PER_NODE for rank in ranks}) > 1
        self.calls[f"{name} {'between nodes' if is_between else 'inside a node'}"] += 1
        if is_between:
            # A ring over all ranks leaves a node once, one over replicas for each of its ranks.
            rings = RANKS // len(ranks)
            self.inter_bytes += rings * RINGS[name] * whole * (len(ranks) - 1) / len(ranks)


def matrices(hidden: int) -> dict[str, tuple[int, int]]:
    """Return the matrices of a GPT block: outputs and inputs."""
    return {
        "attention qkv": (3 * hidden, hidden),
        "attention projection": (hidden, hidden),
        "MLP in": (4 * hidden, hidden),
        "MLP out": (hidden, 4 * hidden),
    }


def cut_tall(parameter: nn.Parameter) -> Shard:
    """Return the dimension that DTensor gathers in Muon's products, rather than reducing them."""
    return Shard(int(parameter.shape[0] > parameter.shape[1]))


def measure(shape: tuple[int, int], mesh: DeviceMesh, *, placement: str) -> dict[str, Any]:
    """Return what one node sends per parameter in a steady step of this matrix."""
    torch.manual_seed(0)
    rows, columns = shape
    cut = cut_tall if placement == TALL else None
    layer = nn.Linear(columns, rows, bias=False)
    fully_shard(layer, mesh=mesh, mp_policy=POLICY, shard_placement_fn=cut)
    optimizer = torch.optim.Muon(layer.parameters(), lr=1e-2)
    config = SDP4BitConfig(gradients=GradientConfig(min_numel=0))
    comm = quantize_communication(layer, topology=RANKS_PER_NODE, config=config)
    for _ in range(2):
        layer(torch.randn(8, columns)).square().mean().backward()
        with CollectiveCounter() as counter:
            optimizer.step()
        optimizer.zero_grad()
    layer(torch.randn(8, columns))  # ends the step
    sent = comm.stats()
    comm.remove()
    # All ranks of a node send as much as this one.
    step_bytes = sent["last_step"]["inter_bytes"] * RANKS_PER_NODE
    return {
        "muon": counter.inter_bytes / (rows * columns),
        "muon_collectives": dict(counter.calls),
        "step": step_bytes / (rows * columns),
        "step_plain": step_bytes * sent["compression_ratio"] / (rows * columns),
    }


def work(rank: int, store: str, hidden: int, out: str) -> None:
    """Measure all matrices on both meshes, as one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    flat = init_device_mesh("cpu", (RANKS,))
    hybrid = init_device_mesh("cpu", (NODES, RANKS_PER_NODE), mesh_dim_names=("replicate", "shard"))
    result = {
        placement: {
            name: measure(shape, mesh, placement=placement) for name, shape in matrices(hidden).items()
        }
        for placement, mesh in {FLAT: flat, HYBRID: hybrid, TALL: hybrid}.items()
    }
    if rank == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def block_totals(result: dict[str, Any], hidden: int) -> dict[str, dict[str, float]]:
    """Return bytes per parameter over all matrices of the block."""
    sizes = {name: rows * columns for name, (rows, columns) in matrices(hidden).items()}
    whole = sum(sizes.values())
    return {
        placement: {
            what: sum(each[name][what] * size for name, size in sizes.items()) / whole
            for what in ("muon", "step", "step_plain")
        }
        for placement, each in result.items()
    }


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256, help="hidden size; a multiple of 4")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/result.json"
        multiprocessing.spawn(work, args=(f"{folder}/store", arguments.hidden, out), nprocs=RANKS)
        result = json.loads(Path(out).read_text())
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    record = {
        "unit": "bytes per parameter and step that one node sends to the other",
        "commit": commit.stdout.strip(),
        **describe_machine(),
        "command": shlex.join(["python", "-m", "benchmarks.muon_traffic", *sys.argv[1:]]),
        "ranks": {"nodes": NODES, "ranks_per_node": RANKS_PER_NODE, "backend": "gloo"},
        "hidden": arguments.hidden,
        "block": block_totals(result, arguments.hidden),
        "matrices": result,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["block"], indent=1))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
