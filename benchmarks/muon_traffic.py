"""Count the bytes that `torch.optim.Muon` itself sends in a step, compared with its model's training.

    python -m benchmarks.muon_traffic --out results/muon_traffic.json

The matrices of a GPT block are sharded over all ranks, or inside each node with replicas on other nodes
(HSDP). A third case is HSDP with Muon on views over the ranks of one node (`node_views`). Every functional
collective that DTensor issues in `optimizer.step()` counts as a ring in rank order, the minimum of any
algorithm. Bytes are per parameter, sent by one node to others.

`measured`: FSDP2 on four gloo processes as two nodes of two ranks; `step` is the bytes of one forward and
backward with this library, `step_plain` without it. `traced`: collectives of Muon alone at larger sizes, with
fake tensors and torch's fake process group. Both give the same count where both run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernels import describe_machine
from sdp4bit import GradientConfig, SDP4BitConfig, quantize_communication

MEASURED, TRACED = (2, 2, 1024), [(2, 2, 1024), (2, 8, 4096), (16, 8, 4096)]
"""Nodes, ranks per node, hidden size."""
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RINGS = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": 2, "all_to_all_single": 1}
"""Number of times that a ring sends the full tensor around."""
FLAT, HYBRID, VIEWS = "shards over all ranks", "HSDP", "HSDP, Muon on views over the node"


class CollectiveCounter(TorchDispatchMode):
    """Count calls and inter-node bytes of the collectives below DTensor."""

    def __init__(self, ranks_per_node: int) -> None:
        super().__init__()
        self._ranks_per_node = ranks_per_node
        self.calls: Counter[str] = Counter()
        self.inter_bytes = 0.0
        """Sent by one node."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor calls again with its collectives
        name = function._schema.name.partition("::")[2]
        if function.namespace == "_c10d_functional" and name in RINGS:
            self._count(name, args[0], str(args[-1]))
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, tensor: torch.Tensor, group_name: str) -> None:
        group = torch._C._distributed_c10d._resolve_process_group(group_name)
        ranks = dist.get_process_group_ranks(group)
        # The full tensor: the result of a gather, the input of other collectives.
        whole = tensor.nbytes * (len(ranks) if name == "all_gather_into_tensor" else 1)
        nodes = len({rank // self._ranks_per_node for rank in ranks})
        self.calls[f"{name} {'between nodes' if nodes > 1 else 'inside a node'}"] += 1
        if nodes > 1:
            # A ring over all ranks leaves a node once, rings over replicas once per rank of the node.
            rings = self._ranks_per_node * nodes // len(ranks)
            self.inter_bytes += rings * RINGS[name] * whole * (len(ranks) - 1) / len(ranks)


def matrices(hidden: int) -> dict[str, tuple[int, int]]:
    """Return the matrices of a GPT block as (outputs, inputs)."""
    return {
        "attention qkv": (3 * hidden, hidden),
        "attention projection": (hidden, hidden),
        "MLP in": (4 * hidden, hidden),
        "MLP out": (hidden, 4 * hidden),
    }


def meshes(nodes: int, per_node: int) -> dict[str, DeviceMesh]:
    """Return the mesh of each way to shard."""
    hybrid = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("replicate", "shard"))
    return {FLAT: init_device_mesh("cpu", (nodes * per_node,)), HYBRID: hybrid, VIEWS: hybrid}


def on_node(tensor: DTensor) -> DTensor:
    """Return the shard as a DTensor over the ranks of the node, sharing memory."""
    mesh = tensor.device_mesh["shard"]
    return DTensor.from_local(
        tensor.to_local(),
        mesh,
        tensor.placements[-1:],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def node_views(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return views of HSDP parameters and gradients whose collectives stay inside the node."""
    views = []
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        view = nn.Parameter(on_node(parameter.detach()))
        view.grad = on_node(parameter.grad)
        views.append(view)
    return views


def step_muon(parameters: Sequence[nn.Parameter], *, placement: str, per_node: int) -> CollectiveCounter:
    """Take the first optimizer step and return the traffic."""
    chosen = node_views(parameters) if placement == VIEWS else parameters
    optimizer = torch.optim.Muon(chosen, lr=1e-2)
    with CollectiveCounter(per_node) as counter:
        optimizer.step()
    return counter


def measure(shape: tuple[int, int], mesh: DeviceMesh, *, placement: str, per_node: int) -> dict[str, Any]:
    """Return the bytes per parameter that one node sends in a step of this matrix, on real processes."""
    torch.manual_seed(0)
    layer = fully_shard(nn.Linear(shape[1], shape[0], bias=False), mesh=mesh, mp_policy=POLICY)
    config = SDP4BitConfig(gradients=GradientConfig(min_numel=0))
    comm = quantize_communication(layer, topology=per_node, config=config)
    for _ in range(2):
        layer.zero_grad()
        layer(torch.randn(8, shape[1])).square().mean().backward()
        counter = step_muon([*layer.parameters()], placement=placement, per_node=per_node)
        comm.mark_step()
    layer(torch.randn(8, shape[1]))  # ends the step
    stats = comm.stats()
    comm.remove()
    # All ranks of a node send equal amounts.
    step = stats["last_step"]["inter_bytes"] * per_node
    return {
        **_counted(counter, shape),
        "step": step / (shape[0] * shape[1]),
        "step_plain": step * stats["compression_ratio"] / (shape[0] * shape[1]),
    }


def trace(shape: tuple[int, int], mesh: DeviceMesh, *, placement: str, per_node: int) -> dict[str, Any]:
    """Return the bytes per parameter that one node would send, as DTensor chooses collectives by shape."""
    local = (shape[0] // mesh.shape[-1], shape[1])
    placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    with FakeTensorMode():
        parameter, gradient = (
            DTensor.from_local(torch.randn(*local), mesh, placements, run_check=False) for _ in range(2)
        )
        parameter = nn.Parameter(parameter)
        parameter.grad = gradient
        return _counted(step_muon([parameter], placement=placement, per_node=per_node), shape)


def _counted(counter: CollectiveCounter, shape: tuple[int, int]) -> dict[str, Any]:
    return {"muon": counter.inter_bytes / (shape[0] * shape[1]), "collectives": dict(counter.calls)}


def count(rank: int, store: str, sizes: tuple[int, int, int], out: str) -> None:
    """Count all matrices on all meshes as one rank; without a store, on the fake process group."""
    nodes, per_node, hidden = sizes
    world = nodes * per_node
    if store:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    function = measure if store else trace
    found = {
        placement: {
            name: function(shape, mesh, placement=placement, per_node=per_node)
            for name, shape in matrices(hidden).items()
        }
        for placement, mesh in meshes(nodes, per_node).items()
    }
    if rank == 0:
        record = {"nodes": nodes, "ranks_per_node": per_node, "hidden": hidden}
        Path(out).write_text(json.dumps({**record, "block": _totals(found, hidden), "matrices": found}))
    if store:
        dist.barrier()
    dist.destroy_process_group()


def _totals(found: dict[str, Any], hidden: int) -> dict[str, dict[str, float]]:
    sizes = {name: rows * columns for name, (rows, columns) in matrices(hidden).items()}
    return {
        placement: {
            what: sum(each[name][what] * size for name, size in sizes.items()) / sum(sizes.values())
            for what in ("muon", "step", "step_plain")
            if what in each["MLP in"]
        }
        for placement, each in found.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/result.json"
        for store, sizes in [(f"{folder}/store", MEASURED), *(("", each) for each in TRACED)]:
            ranks = sizes[0] * sizes[1] if store else 1
            multiprocessing.spawn(count, args=(store, sizes, out), nprocs=ranks)
            results.append(json.loads(Path(out).read_text()))
    measured, *traced = results
    record = {
        "unit": "bytes per parameter and step that one node sends to others",
        **describe_machine(),
        "command": shlex.join(["python", "-m", "benchmarks.muon_traffic", *sys.argv[1:]]),
        "measured": measured,
        "traced": traced,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps([each["block"] for each in results], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
