"""FSDP2 integration, a mesh per parameter: modules with several parameter groups, each on ranks of its own.

Layer: 4 real processes over gloo, 2 nodes x 2 ranks, a model with experts.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common

from sdp4bit import AlertConfig, ReplicaMismatchError, SDP4BitConfig, quantize_communication
from sdp4bit.collectives.reasons import Cause, Unquantized
from sdp4bit.engines.fsdp2.torch_internals import param_groups_of
from sdp4bit.traffic import Grid
from tests.engines.fsdp2 import toy_moe
from tests.engines.fsdp2.test_bytes import count_sent_bytes
from tests.engines.fsdp2.toy_moe import MoERun, build_moe, expert_mesh
from tests.oracles.traffic import gradient_exchange, weight_gather, weight_refresh
from tests.ranks import fake_world, on_ranks
from tests.tables import flat
from tests.toy import QUANTIZED, assert_close_to_plain, assert_variants_equal

pytestmark = pytest.mark.skipif(not toy_moe.HAS_MESH_PER_PARAM, reason="torch 2.12 and newer")

ACROSS, INSIDE, ALONE = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]
"""Ranks 0 and 1 are a node. Columns shard the same experts: across the nodes, inside one, not at all."""
NAMES = ["(root)", "blocks.0", "blocks.0.moe.experts", "blocks.1", "blocks.1.moe.experts"]
BETWEEN = {True: Grid(nodes=2, ranks_per_node=1), False: Grid(nodes=2, ranks_per_node=2)}
"""Of the experts' groups, and of the others."""
LIMIT = 400.0


def training(
    config: SDP4BitConfig | None, ranks: list[list[int]], separate: bool = False, hybrid: Any = None
) -> list[float]:
    """Groups of one module train as the same groups as modules do."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sdp4bit: .* sharded inside one node")
        run = MoERun(config, ranks, separate=separate, replicate=hybrid, ordered=True)
        return run.train(1).finish()


@pytest.mark.like_plain
@on_ranks(4, timeout=LIMIT)
def test_every_group_sends_over_its_own_mesh_what_the_planner_says() -> None:
    assert_variants_equal(training, (ACROSS, False), (ACROSS, True))
    run = MoERun(QUANTIZED, ACROSS).train(1)
    with count_sent_bytes(2) as sent:
        run.train(1)
    counted = run.comm.stats()["last_step"]
    assert [group.view.name for group in run.comm.groups] == NAMES
    parts = []
    for group in (each.view for each in run.comm.groups):
        row, grid = group.shard_numel, BETWEEN[group.name.endswith("experts")]
        reduced, refreshed = (group.gradient_sections(row, unit=unit, separate=True) for unit in (128, 2048))
        parts += [
            gradient_exchange(row, grid=grid, config=QUANTIZED.gradients, sections=reduced),
            weight_refresh(row, grid=grid, config=QUANTIZED.weights, sections=refreshed),
            # The root's weights stay since the forward.
            weight_gather(row, grid=grid, config=QUANTIZED.weights, times=1 if group.name == "(root)" else 2),
        ]
    assert sent["inter"] == counted["inter_bytes"] == sum(part.inter_bytes for part in parts)
    assert sent["intra"] == counted["intra_bytes"] == sum(part.intra_bytes for part in parts)
    run.evaluate()
    table = run.comm.explain(full=True)
    assert table.count("2 x 1") == 2 and table.count("2 x 2") == 3
    run.comm.remove()
    stock = [g for block in run.model.blocks for g in param_groups_of(block)]
    names = [type(c).__name__ for g in stock for c in (g._all_gather_comm, g._reduce_scatter_comm)]
    assert names == ["DefaultAllGather", "DefaultReduceScatter"] * 4


def reasons(
    ranks: list[list[int]], **options: Any
) -> dict[str, tuple[Unquantized | None, Unquantized | None]]:
    """Return why the groups of each name are not quantized, weights and gradients."""
    model = build_moe(expert_mesh(ranks))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sdp4bit: .* have their ranks on one node")
        comm = quantize_communication(model, topology=2, **options)
    found = {
        group.view.name: (group.weights.unquantized_reason, group.gradients.unquantized_reason)
        for group in comm.groups
    }
    table = comm.explain(full=True)
    comm.remove()
    assert all(str(why) in flat(table) for pair in found.values() for why in pair if why)
    return found


@on_ranks(4, timeout=LIMIT)
def test_groups_that_gain_nothing_are_left_to_fsdp2_with_the_reason() -> None:
    experts, others = NAMES[2::2], NAMES[:2] + NAMES[3:4]
    inside = reasons(INSIDE)
    on_one_node = Unquantized(Cause.ONE_NODE_WEIGHTS), Unquantized(Cause.ONE_NODE_GRADIENTS)
    assert all(inside[name] == on_one_node for name in experts), inside
    assert all(inside[name] == (None, None) for name in others)
    alone = reasons(ALONE)
    assert all(alone[name] == (Unquantized(Cause.ONE_RANK),) * 2 for name in experts), alone
    assert all(alone[name] == (None, None) for name in others)
    # By the name of the group, and of the module.
    skipped = reasons(ACROSS, skip=["*.experts"])
    assert {
        name for name, pair in skipped.items() if pair == (Unquantized(Cause.SKIPPED, " by '*.experts'"),) * 2
    } == set(experts)
    skipped = reasons(ACROSS, skip=lambda name: name == "blocks.1")
    assert {name for name, pair in skipped.items() if pair == (Unquantized(Cause.SKIPPED),) * 2} == set(
        NAMES[3:]
    )


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(4, timeout=LIMIT)
def test_experts_inside_a_node_and_alone_train_as_with_plain_fsdp2() -> None:
    assert_close_to_plain(training, INSIDE)
    assert_close_to_plain(training, ALONE)


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(4, timeout=LIMIT)
def test_groups_on_hybrid_meshes_of_one_record_all_reduce_for_themselves() -> None:
    """Placement functions give all blocks one record of the mesh, which holds the replicas' process group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert_close_to_plain(training, ACROSS, False, mesh)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sdp4bit: .* have their ranks on one node")
        run = MoERun(QUANTIZED, ACROSS, replicate=mesh).train(1)
        sent = {g.view.name: g.gradients.all_reduce_traffic.current_step.inter_bytes for g in run.comm.groups}
        assert {name for name, nbytes in sent.items() if nbytes} == {"blocks.0", "blocks.1"}
    hybrid = [g.view for g in run.comm.groups if g.view.is_hybrid]
    run.comm.remove()
    assert [group.comms.replicate for group in hybrid] == [mesh.get_group("replicate")] * 2


@pytest.mark.slow
@on_ranks(4, timeout=LIMIT)
def test_audit_and_alerts_see_every_group_on_its_own_ranks() -> None:
    strict = AlertConfig(gradient_error=0.05, weight_error=None)
    run = MoERun(replace(QUANTIZED, alerts=strict), ACROSS).train(2)
    run.comm.audit()
    assert {alert.group for alert in run.comm.alerts()} == {group.view.name for group in run.comm.groups}
    run.evaluate()
    (experts,) = (group for group in run.comm.groups if group.view.name == "blocks.0.moe.experts")
    if dist.get_rank() == 3:
        experts.weights.replica.rows.view(torch.int16)[0, 0] ^= 1
    # The ranks that hold these experts find it; the others have nothing to find.
    if dist.get_rank() in (1, 3):
        with pytest.raises(ReplicaMismatchError, match=r"group blocks.0.moe.experts: .*ranks? .*3"):
            run.comm.audit()
    else:
        run.comm.audit()


def test_groups_of_one_owner_are_numbered() -> None:
    """A module with a parameter on each of two meshes, of a fake process group."""
    with fake_world(4, rank=0):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        meshes = {8: init_device_mesh("cpu", (4,)), 12: mesh["inner"]}
        infos = {size: _fsdp_common.FSDPMeshInfo(mesh=m, shard_mesh_dim=0) for size, m in meshes.items()}
        model = nn.Module()
        model.a, model.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(12))
        fully_shard(
            model,
            mesh=meshes[8],
            shard_placement_fn=lambda p: _fsdp_common.ShardPlacementResult(None, infos[p.shape[0]]),
        )
        comm = quantize_communication(model, topology=1)
        assert [group.view.name for group in comm.groups] == ["(root)", "(root) (2)"]
