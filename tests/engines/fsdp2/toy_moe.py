"""The toy GPT with experts, whose parameters are sharded over another mesh than the rest."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd as all_gather
from torch.distributed._functional_collectives import reduce_scatter_tensor_autograd as reduce_scatter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sdp4bit import SDP4BitConfig
from tests.toy import POLICY, Block, Run, ToyGPT

HAS_MESH_PER_PARAM = hasattr(_fsdp_common, "ShardPlacementResult")
"""Torch 2.12 and newer."""
EXPERTS, WIDTH, HIDDEN = 4, 40, 36


class Experts(nn.Module):
    """Feed-forward networks; a rank computes those that it holds, for all ranks with other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * HIDDEN**-0.5)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        return sum(gates[:, e, None] * (F.gelu(x @ up[e]) @ down[e]) for e in range(up.shape[0]))


class MoE(nn.Module):
    """Two of the experts for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()
        self.mesh: Any = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        gates = self.router(tokens).float().softmax(-1)
        chosen = torch.zeros_like(gates).scatter_(1, gates.topk(2, dim=-1).indices, 1.0)
        gates = gates * chosen
        own = EXPERTS // self.mesh.size()
        first = own * self.mesh.get_local_rank()
        group = self.mesh.get_group()
        # Sums in fp32: two addends are then added exactly alike by every implementation.
        every = all_gather(tokens.float(), 0, group).to(x.dtype)
        routed = all_gather(gates, 0, group)[:, first : first + own].to(x.dtype)
        summed = reduce_scatter(self.experts(every, routed).float(), "sum", 0, group)
        return summed.to(x.dtype).view_as(x)


class MoEBlock(Block):
    """A block whose feed-forward layers are experts."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 1)
        self.fc1, self.fc2 = nn.Identity(), nn.Identity()
        self.moe = MoE()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.moe(self.ln2(x))


def expert_mesh(ranks: list[list[int]]) -> DeviceMesh:
    """Return a mesh whose columns are the ranks that shard an expert, and whose rows hold different ones."""
    return DeviceMesh("cpu", ranks, mesh_dim_names=("edp", "ep"))


def build_moe(mesh: DeviceMesh, *, separate: bool = False, replicate: DeviceMesh | None = None) -> ToyGPT:
    """Return the sharded model with the same weights in every call.

    Args:
        mesh: of dimensions "edp" and "ep".
        separate: experts are FSDP modules of their own, inside those of the blocks.
        replicate: a mesh of (replicas, shards) for the blocks' parameters that are not experts'.
    """
    torch.manual_seed(0)
    model = ToyGPT(layers=0)
    model.blocks = nn.ModuleList(MoEBlock() for _ in range(2))
    everyone = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    experts = [block.moe.experts for block in model.blocks]
    for block in model.blocks:
        block.moe.mesh = mesh["ep"]
        for name, param in list(block.moe.experts.named_parameters()):
            placed = nn.Parameter(distribute_tensor(param.detach(), mesh["ep"], [Shard(0)]))
            setattr(block.moe.experts, name, placed)
    place = None
    if separate:
        for module in experts:
            fully_shard(module, mesh=mesh["edp"], mp_policy=POLICY, shard_placement_fn=lambda _: Shard(1))
    else:
        info = _fsdp_common.FSDPMeshInfo(mesh=mesh["edp"], shard_mesh_dim=0)
        on_mesh = _fsdp_common.ShardPlacementResult(placement=Shard(1), mesh_info=info)
        ours = {id(param) for module in experts for param in module.parameters()}
        others = None
        if replicate is not None:
            hybrid = _fsdp_common.HSDPMeshInfo(mesh=replicate, shard_mesh_dim=1, replicate_mesh_dim=0)
            others = _fsdp_common.ShardPlacementResult(placement=None, mesh_info=hybrid)

        def place(param: nn.Parameter) -> Any:
            return on_mesh if id(param) in ours else others

    for block in model.blocks:
        fully_shard(block, mesh=everyone, mp_policy=POLICY, shard_placement_fn=place)
    return fully_shard(model, mesh=everyone, mp_policy=POLICY)


class MoERun(Run):
    """One training run of it; the optimizer's operations take parameters of one mesh each."""

    def __init__(
        self,
        config: SDP4BitConfig | None,
        ranks: list[list[int]],
        *,
        replicate: DeviceMesh | None = None,
        separate: bool = False,
        **options: Any,
    ) -> None:
        model = build_moe(expert_mesh(ranks), replicate=replicate, separate=separate)
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for param in model.parameters():
            by_mesh.setdefault(param.device_mesh, []).append(param)
        params = [{"params": params} for params in by_mesh.values()]
        super().__init__(model, config, params=params, **options)
