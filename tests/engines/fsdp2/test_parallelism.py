"""FSDP2 integration, other parallelism: tensor parallelism, hybrid sharding, pipelines.

Layer: 4 real processes over gloo. Results are held against plain FSDP2's as in test_compositions.py.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import sdp4bit
from sdp4bit import AuditConfig, SDP4BitConfig, WeightConfig
from sdp4bit.collectives.sections import common_ranges
from sdp4bit.engines.fsdp2.view import reduce_over_copies
from tests import mutations
from tests.ranks import first_rank_warns, on_ranks
from tests.tables import flat
from tests.toy import (
    IDENTITY,
    POLICY,
    QUANTIZED,
    Result,
    Run,
    ToyGPT,
    adamw,
    assert_close,
    assert_close_to_plain,
    assert_equal,
    assert_replicas_identical,
    batches,
    data_mesh,
    gradient_of,
    shard,
)

RANDOM = SDP4BitConfig(
    weights=WeightConfig(group_size=32),
    gradients=replace(QUANTIZED.gradients, intra_group_size=32, inter_group_size=32, inter_rounding="dither"),
)
"""Gradients are dithered, and parameters whose rows are multiples of 32 share no scale."""
CHECKS = [(IDENTITY, assert_equal), (RANDOM, assert_close)]


def split_layers(block: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Split the feed-forward layers over the mesh, and the sequence before them if asked for."""
    before = Shard(1) if sequence else Replicate()
    if sequence:
        entry = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
        for style in (entry, SequenceParallel()):
            parallelize_module(block, mesh, {"ln2": style})
    styles = {"fc1": ColwiseParallel(input_layouts=before), "fc2": RowwiseParallel()}
    parallelize_module(block, mesh, styles)


class TensorParallelRun(Run):
    """Two data-parallel ranks by two tensor-parallel ones, which are neighbours.

    With `hybrid` the data-parallel ranks are replicas of one rank each.
    """

    def __init__(
        self,
        config: SDP4BitConfig | None,
        *,
        topology: int = 2,
        sequence: bool = False,
        unused: bool = False,
        hybrid: bool = False,
    ) -> None:
        if hybrid:
            mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
        else:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = ToyGPT(width=64, hidden=128)
        for block in model.blocks:
            if unused:
                block.unused = nn.Parameter(torch.ones(6))
            split_layers(block, mesh["tp"], sequence=sequence)
        shard(model, mesh=mesh["replicate", "shard"] if hybrid else mesh["dp"])
        # One operation of the optimizer takes parameters of one mesh.
        params = [
            {"params": [p for p in model.parameters() if p.device_mesh.ndim == ndim]}
            for ndim in (mesh.ndim - 1, mesh.ndim)
        ]
        super().__init__(model, config, topology=topology, data_rank=mesh.get_local_rank(0), params=params)
        self.mesh = mesh

    def check_copies(self) -> None:
        """What tensor parallelism does not split is equal on its ranks: main shards and what is gathered.

        All main shards are equal on all replicas.
        """
        self.model.reshard()
        params = {name: p.to_local().detach() for name, p in self.model.named_parameters()}
        copies = {
            name: params[name]
            for name, p in self.model.named_parameters()
            if p.device_mesh.ndim < self.mesh.ndim or p.placements[-1].is_replicate()
        }
        assert len(copies) == len(params) - 6  # two matrices and a bias per block
        for group in self.comm.groups if self.comm is not None else []:
            for param in group.view.params:
                assert bool(param.split_over) == (param.name not in copies)
                if param.name in copies and group.weights.replica is not None:
                    copies[f"held {param.name}"] = group.weights.replica.rows[..., param.start : param.end]
        peers: list[Any] = [None] * 4
        dist.all_gather_object(peers, (self.losses, copies))
        for (first, ours), (second, theirs) in (peers[:2], peers[2:]):
            assert first == second
            assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
        if self.mesh.ndim == 3:
            dist.all_gather_object(peers, params)
            for ours, theirs in (peers[::2], peers[1::2]):
                assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@cache
def tensor_parallel(config: SDP4BitConfig | None, topology: int, sequence: bool = False) -> list[float]:
    run = TensorParallelRun(config, topology=topology, sequence=sequence)
    if run.comm is not None:
        layouts = {(g.layout.nodes, g.layout.ranks_per_node) for g in run.comm.groups}
        assert layouts == {(2, 1) if topology == 2 else (1, 2)}
    losses = run.train(1).finish()
    run.check_copies()
    return losses


@pytest.mark.like_plain
@on_ranks(4)
def test_tensor_parallelism_trains_as_with_plain_fsdp2() -> None:
    assert_close_to_plain(tensor_parallel, 2, checks=CHECKS)
    assert_equal(tensor_parallel(IDENTITY, 4), tensor_parallel(None, 2))


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(4)
def test_sequence_parallelism_trains_as_with_plain_fsdp2() -> None:
    assert_close_to_plain(tensor_parallel, 2, True)


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(4)
def test_tensor_parallelism_over_replicas_trains_as_with_plain_fsdp2() -> None:
    def trained(config: SDP4BitConfig | None) -> list[float]:
        run = TensorParallelRun(config, hybrid=True).train(2)
        result = run.finish()
        run.check_copies()
        return result

    assert_close_to_plain(trained, harmless=mutations.WEIGHTS)


def check_sections() -> None:
    """Tensor-parallel copies share no section with what is split."""
    run = TensorParallelRun(QUANTIZED).train(2)
    run.evaluate()
    group = run.comm.groups[1].view
    for separate in (True, False):  # copies are apart in any case
        sections = group.gradient_sections(group.shard_numel, unit=128, separate=separate)
        for section in sections:
            inside = [
                bool(param.split_over)
                for param in group.params
                if common_ranges(section.ranges, [(param.start, param.end)])
            ]
            assert len(set(inside)) == 1
        assert any(section.is_fine for section in sections) == separate
    assert (
        flat(run.comm.explain(full=True)).count("1-D in 8 bits") == 8
    )  # weights and gradients of four groups

    run = TensorParallelRun(replace(QUANTIZED, separate_parameters=False))
    for block in run.model.blocks:  # of both parts; what trains is then all that is in a row
        for parameter in (block.ln1.weight, block.qkv.bias, block.fc1.bias):
            parameter.requires_grad_(False)
    run.train(1).finish()
    run.check_copies()
    assert [group.gradients.bits for group in run.comm.groups] == [4] * 4


def check_rows_that_cannot_be_told_apart() -> None:
    run = TensorParallelRun(QUANTIZED, unused=True)
    told = r"got no gradient.* gradients in full precision.*\(blocks\.1\)"
    with first_rank_warns(told, firsts=(0, 1)):
        run.train(1).finish()
    run.check_copies()
    assert [group.gradients.bits for group in run.comm.groups] == [4, None, None, 4]


def check_edits_of_what_is_split() -> None:
    """An edit that only one of two tensor-parallel ranks sees leaves the copies beside it equal."""
    run = TensorParallelRun(QUANTIZED, topology=1).train(1)
    for factor in (1.001, 1.5):  # a difference, and full precision
        run.evaluate()
        run.model.reshard()
        if dist.get_rank() % 2 == 0:
            run.model.blocks[0].fc1.weight.to_local().data.mul_(factor)
        run.evaluate()
        run.check_copies()
    assert [group.weights.full_refreshes for group in run.comm.groups] == [0, 1, 0, 0]


@on_ranks(4)
def test_tensor_parallel_copies_have_sections_of_their_own() -> None:
    check_sections()
    check_rows_that_cannot_be_told_apart()
    check_edits_of_what_is_split()


@on_ranks(4)
def test_tensor_parallel_ranks_decide_together_how_copies_are_refreshed() -> None:
    """What concerns the split weights of one tensor-parallel rank refreshes those of its peers too."""
    run = TensorParallelRun(replace(QUANTIZED, audit=AuditConfig(on_mismatch="resync"))).train(2)
    run.evaluate()
    group = run.comm.groups[1]
    assert [len(g.view.copied_over) for g in run.comm.groups] == [0, 1, 1, 0]
    if dist.get_rank() == 1:
        split = next(param for param in group.view.params if param.split_over)
        with torch.no_grad():
            group.weights.replica.rows[0, ..., split.start] += 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not run.comm.audit()
    run.train(1).evaluate()
    run.check_copies()

    # Of groups without copies one rank may list others than its peer.
    rank, groups = dist.get_rank(), run.comm.groups
    listed = groups[1:3] if rank % 2 else groups
    flags = torch.full((len(listed),), rank)
    reduce_over_copies(flags, [each.view for each in listed], host=None, op=dist.ReduceOp.MAX)
    assert flags.tolist() == [rank | 1 if each.view.copied_over else rank for each in listed]

    saved = run.comm.state_dict()
    if rank % 2:
        with torch.no_grad():
            run.model.blocks[0].fc1.weight.to_local().mul_(0.5)
    run.comm.load_state_dict(saved)
    with first_rank_warns("not saved with these weights", firsts=(0, 1)):
        run.evaluate()
    run.check_copies()


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
    run = Run(nn.Sequential(*pair), None, ordered=config is None)
    run.comm = config and sdp4bit.quantize_communication(pair, topology=2, config=config)
    run.train(1)
    if config:
        names = [group.view.name for group in run.comm.groups]
        assert names == ["part0", "part0.block", "part1", "part1.block"]
        assert run.comm.stats()["steps"] == 1
    return run.finish()


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
    data = batches(rank=mesh.get_local_rank("dp"))
    losses: list[float] = []
    gradients: list[Tensor] = []
    for _ in range(2):
        tokens, targets = next(data)
        parts: list[Tensor] = []
        schedule.step(*([tokens] if index == 0 else []), target=targets, losses=parts)
        gradients.append(gradient_of(model))
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(part.detach()) for part in parts]
    if comm:
        assert_replicas_identical(comm)
        assert comm.stats()["steps"] == 2
        assert [group.gradients.reductions for group in comm.groups] == [2, 2]
    everybody: list[Any] = [None] * 4
    dist.all_gather_object(everybody, losses)
    return Result(everybody[2 + mesh.get_local_rank("dp")], gradients)


@pytest.mark.like_plain
@on_ranks(4)
def test_pipeline_stages_train_as_with_plain_fsdp2() -> None:
    assert_close_to_plain(two_roots, checks=[(IDENTITY, assert_equal)], harmless=[mutations.TWICE])
    assert_close_to_plain(pipelined)


@on_ranks(2)
def test_each_of_two_roots_is_refreshed_once_after_a_load_in_place() -> None:
    """As torch.distributed.checkpoint loads; the second root notices the load when the first has used it."""
    pair = stages(data_mesh())
    run = Run(nn.Sequential(*pair), None)
    run.comm = sdp4bit.quantize_communication(pair, topology=1, config=QUANTIZED)
    run.train(1)
    with torch.no_grad():
        for value in run.model.state_dict().values():
            value._local_tensor.mul_(0.9)
    run.evaluate()
    run.evaluate()
    assert [comm.weights.full_refreshes for comm in run.comm.groups] == [1, 1, 1, 1]
