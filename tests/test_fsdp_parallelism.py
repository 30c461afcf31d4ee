"""FSDP2 integration, other parallelism: tensor parallelism, hybrid sharding, pipelines.

Layer: 4 real processes over gloo. Results are held against plain FSDP2's as in test_fsdp_compositions.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sdp4bit
from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig
from tests.ranks import run_ranks
from tests.toy import (
    LOSSLESS,
    POLICY,
    QUANTIZED,
    Run,
    ToyGPT,
    adamw,
    assert_close_to_plain,
    assert_replicas_identical,
    batches,
    build,
    data_mesh,
    shard,
    train,
)

IDENTITY = SDP4BitConfig(
    weights=WeightConfig(bits=None), gradients=GradientConfig(intra_bits=None, inter_bits=None, min_numel=0)
)
"""Both hops run without quantizers; a sum over two ranks is then exact."""


STOCHASTIC = SDP4BitConfig(
    weights=WeightConfig(group_size=32, rounding="stochastic"),
    gradients=GradientConfig(intra_group_size=32, inter_group_size=32, min_numel=0),
)
"""All is rounded by random bits, and parameters whose rows are multiples of 32 share no scale."""


@cache
def tensor_parallel(config: SDP4BitConfig | None, topology: int) -> list[float]:
    """Two data-parallel ranks by two tensor-parallel ones, which are neighbours."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = ToyGPT(width=64, hidden=128)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    shard(model, mesh=mesh["dp"])
    # One operation of the optimizer takes parameters of one mesh.
    params = [{"params": [p for p in model.parameters() if p.device_mesh.ndim == ndim]} for ndim in (1, 2)]
    run = Run(model, config, topology=topology, data_rank=mesh.get_local_rank("dp"), params=params)
    if run.comm is not None:
        layouts = {(g.layout.nodes, g.layout.ranks_per_node) for g in run.comm._state.groups}
        assert layouts == {(2, 1) if topology == 2 else (1, 2)}
    losses = run.train(2).finish()
    model.reshard()
    replicated = [p.to_local().detach() for p in model.blocks[0].parameters() if p.device_mesh.ndim == 1]
    peers: list[Any] = [None] * 4
    dist.all_gather_object(peers, (losses[:-1], replicated))  # all but the size of the rank's own weights
    if config is not QUANTIZED:  # there, neighbours in a row share scales
        for (first, ours), (second, theirs) in (peers[:2], peers[2:]):
            assert first == second and len(ours) == 8 and all(map(torch.equal, ours, theirs))
    return losses


def check_tensor_parallelism() -> None:
    assert_close_to_plain(tensor_parallel, 2)
    plain = tensor_parallel(None, 2)
    for topology in (2, 4):
        assert tensor_parallel(IDENTITY, topology) == plain
        assert tensor_parallel(STOCHASTIC, topology) != plain


def test_tensor_parallelism_trains_as_with_plain_fsdp2() -> None:
    run_ranks(check_tensor_parallelism, 4)


@cache
def hybrid(config: SDP4BitConfig | None, topology: int) -> list[float]:
    """Two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build(mesh=mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run(model, config, topology=topology)
    assert (config is None) == (not any("HSDP" in str(w.message) for w in caught))
    losses = run.train(2).finish()
    model.reshard()
    held = [parameter.to_local().detach() for parameter in model.parameters()]
    if run.comm is not None:
        held += [group.replica.rows for group in run.comm._state.groups]
        # Equal weights are rounded alike, gradients of different data are not.
        assert {g.group.shard_rank for g in run.comm._state.groups} == {dist.get_rank() % 2}
        assert {g.group.data_rank for g in run.comm._state.groups} == {dist.get_rank()}
    everybody: list[Any] = [None] * 4
    dist.all_gather_object(everybody, held)
    assert all(map(torch.equal, everybody[0], everybody[2]))
    assert all(map(torch.equal, everybody[1], everybody[3]))
    return losses


def check_hybrid() -> None:
    assert_close_to_plain(hybrid, 1)
    assert_close_to_plain(hybrid, 2)
    assert hybrid(IDENTITY, 1) == hybrid(None, 1) != hybrid(STOCHASTIC, 1)


def test_hybrid_sharding_warns_and_trains_as_with_plain_fsdp2() -> None:
    run_ranks(check_hybrid, 4)


class Front(nn.Module):
    """The first stage of a pipeline."""

    def __init__(self, gpt: ToyGPT) -> None:
        super().__init__()
        self.embed, self.position, self.block = gpt.embed, gpt.position, gpt.blocks[0]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embed(tokens) + self.position.weight[: tokens.shape[1]])


class Back(nn.Module):
    """The last stage of a pipeline."""

    def __init__(self, gpt: ToyGPT) -> None:
        super().__init__()
        self.block, self.norm, self.head = gpt.blocks[1], gpt.norm, gpt.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.block(x))).float()


def stages(mesh: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    gpt = ToyGPT()
    pair = Front(gpt), Back(gpt)
    for stage in pair:
        fully_shard(stage.block, mesh=mesh, mp_policy=POLICY)
        fully_shard(stage, mesh=mesh, mp_policy=POLICY)
    return pair


def two_roots(config: SDP4BitConfig | None) -> list[float]:
    """Both stages on every rank: two roots, one handle."""
    pair = stages(data_mesh())
    comm = config and sdp4bit.quantize_communication(pair, topology=2, config=config)
    model = nn.Sequential(*pair)
    losses = train(model, adamw(model), batches(), 2)
    if comm:
        assert [g.group.name for g in comm._state.groups] == ["part0", "part0.block", "part1", "part1.block"]
        assert comm.stats()["steps"] == 2
        assert_replicas_identical(comm)
    return losses


@cache
def pipelined(config: SDP4BitConfig | None) -> list[float]:
    """Each stage on two data-parallel ranks of its own; four micro-batches a step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    index = mesh.get_local_rank("pp")
    model = stages(mesh["dp"])[index]
    comm = config and sdp4bit.quantize_communication(model, topology=1, config=config)
    optimizer = adamw(model)
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    if torch.__version__ < (2, 13):  # connections are opened with a message of a wrong size for gloo
        stage._get_init_p2p_neighbors_ops = list
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()))
    data, losses = batches(rank=mesh.get_local_rank("dp")), []
    for _ in range(2):
        tokens, targets = next(data)
        parts: list[Tensor] = []
        schedule.step(*([tokens] if index == 0 else []), target=targets, losses=parts)
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(part.detach()) for part in parts]
    if comm:
        assert_replicas_identical(comm)
        assert comm.stats()["steps"] == 2
        if config is not LOSSLESS:
            assert [group.reductions for group in comm._state.groups] == [2, 2]
    everybody: list[Any] = [None] * 4
    dist.all_gather_object(everybody, losses)
    return everybody[2 + mesh.get_local_rank("dp")]


def check_pipelines() -> None:
    assert_close_to_plain(two_roots)
    assert_close_to_plain(pipelined)
    assert pipelined(IDENTITY) == pipelined(None)


def test_pipeline_stages_train_as_with_plain_fsdp2() -> None:
    run_ranks(check_pipelines, 4)
