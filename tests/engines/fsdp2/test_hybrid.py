"""FSDP2 integration, HSDP: the all-reduce over replicas, in any placement of shards and replicas.

Layer: 4 real processes over gloo, 2 nodes x 2 ranks. What replicas hold is compared bit for bit.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sdp4bit import (
    AlertConfig,
    AuditConfig,
    GradientConfig,
    ReplicaMismatchError,
    SDP4BitConfig,
    quantize_communication,
)
from sdp4bit.engines.fsdp2.hooks import ReplicateGroup
from sdp4bit.traffic import Grid, Traffic
from tests import mutations
from tests.engines.fsdp2.test_bytes import count_sent_bytes
from tests.oracles.traffic import all_reduce_exchange, gradient_exchange
from tests.ranks import first_rank_warns, on_ranks
from tests.toy import (
    IDENTITY,
    QUANTIZED,
    Run,
    assert_close,
    assert_close_to_plain,
    assert_equal,
    assert_near,
    build,
)

PLACEMENTS = {
    "shards in the node": [[0, 1], [2, 3]],
    "replicas in the node": [[0, 2], [1, 3]],
    "replicas only": [[0], [1], [2], [3]],
    "three replicas": [[0, 1], [2, 3], [4, 5]],
}
"""Ranks of each replica; ranks 0 and 1 are one node, and so are the following pairs."""
GRIDS = {
    "shards in the node": (Grid(nodes=1, ranks_per_node=2), Grid(nodes=2, ranks_per_node=1)),
    "replicas in the node": (Grid(nodes=2, ranks_per_node=1), Grid(nodes=1, ranks_per_node=2)),
    "replicas only": (Grid(nodes=1, ranks_per_node=1), Grid(nodes=2, ranks_per_node=2)),
    "three replicas": (Grid(nodes=1, ranks_per_node=2), Grid(nodes=3, ranks_per_node=1)),
}
"""Nodes and ranks of the reduction over shards, and of that over replicas."""
USUAL = "shards in the node"
GRADIENTS = replace(QUANTIZED, weights=None)


def mesh_of(placement: str) -> DeviceMesh:
    return DeviceMesh("cpu", PLACEMENTS[placement], mesh_dim_names=("replicate", "shard"))


class HybridRun(Run):
    """The toy model on a 2-D mesh; replicas see different data."""

    def __init__(self, config: SDP4BitConfig | None, placement: str = USUAL, **options: Any) -> None:
        mesh = mesh_of(placement)
        self.replicas = mesh.get_group("replicate")
        with warnings.catch_warnings():
            # Weights in the node are not quantized.
            warnings.filterwarnings("ignore", "sdp4bit: .* sharded inside one node")
            super().__init__(build(mesh=mesh), config, **options)

    def check_replicas(self) -> None:
        """Weights and what the optimizer keeps of them are the same bits on all ranks with the same shard."""
        self.model.reshard()
        states = [s for state in self.optimizer.state.values() for s in state.values()]
        held = [t.to_local() if isinstance(t, DTensor) else t for t in (*self.model.parameters(), *states)]
        peers: list[Any] = [None] * self.replicas.size()
        dist.all_gather_object(peers, [t.detach().clone() for t in held], group=self.replicas)
        assert len(peers) > 1
        for other in peers:
            assert all(map(torch.equal, held, other))


def counted(run: HybridRun) -> Traffic:
    """What the all-reduces of the last step sent."""
    run.evaluate()
    counters = [g.gradients.all_reduce_traffic for g in run.comm.groups]
    return sum((c.current_step if run.comm._state.step_pending else c.last_step for c in counters), Traffic())


def training(config: SDP4BitConfig | None, placement: str, steps: int) -> list[float]:
    """Replicas stay equal."""
    run = HybridRun(config, placement).train(steps)
    result = run.finish()
    run.check_replicas()
    return result


def check_bytes(placement: str, inter_bits: float) -> None:
    """What is sent is what is counted, and what the planner says; equal weights are rounded alike."""
    sharded, replicated = GRIDS[placement]
    gradients = replace(QUANTIZED.gradients, inter_bits=inter_bits)
    run = HybridRun(replace(QUANTIZED, gradients=gradients), placement)
    with count_sent_bytes(2) as sent:
        run.train(1)
    first = dict(sent)
    run.train(1).evaluate()
    config, reduced, summed = run.comm.config.gradients, [], []
    for group in (each.view for each in run.comm.groups):
        row, sections = group.shard_numel, group.gradient_sections(group.shard_numel, unit=128, separate=True)
        reduced.append(gradient_exchange(row, grid=sharded, config=config, sections=sections))
        summed.append(all_reduce_exchange(row, grid=replicated, config=config, sections=sections))
    traffic = counted(run)
    assert traffic.inter_bytes == sum(each.inter_bytes for each in summed)
    assert traffic.intra_bytes == sum(each.intra_bytes for each in summed)
    assert traffic.collectives == sum(each.collectives for each in summed)
    stats = run.comm.stats()
    if placement != "replicas in the node":  # where weights go between nodes
        assert first["intra"] == sum(each.intra_bytes for each in (*reduced, *summed))
        assert first["inter"] == sum(each.inter_bytes for each in (*reduced, *summed))
        assert first["inter"] == stats["last_step"]["inter_bytes"]
    bits = 8 if placement == "replicas in the node" else inter_bits
    assert [group.gradients.bits for group in run.comm.groups] == [bits] * 4
    # The random bits of weights are those of the shard, the bits of gradients differ on all ranks.
    (replica,) = (ranks for ranks in PLACEMENTS[placement] if dist.get_rank() in ranks)
    shard_rank = replica.index(dist.get_rank())
    data_rank = PLACEMENTS[placement].index(replica) * len(replica) + shard_rank
    assert {g.view.data_rank for g in run.comm.groups} == {data_rank}
    table = run.comm.explain(full=True)
    assert table.count("all-reduce ") == 4
    shapes = f"{sharded.nodes} x {sharded.ranks_per_node}, replicated {replicated.nodes} x "
    assert table.count(shapes + f"{replicated.ranks_per_node} ") == 4
    assert 0.0 < stats["gradient_error"] < 0.4 and stats["nonfinite_groups"] == 0
    assert run.comm.audit()


@pytest.mark.like_plain
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name != "shards in the node" else [])
        for name in ("shards in the node", "replicas in the node", "replicas only")
    ],
)
@on_ranks(4, timeout=400.0)
def test_replicas_stay_equal_and_train_as_with_plain_fsdp2(placement: str) -> None:
    if placement == USUAL:
        assert_close_to_plain(training, placement, 1, harmless=mutations.WEIGHTS)
    elif placement == "replicas in the node":
        assert_close_to_plain(training, placement, 2)
    else:
        # Four gradients are added in another order, by at most 3 roundings of 2**-24 each.
        checks = [(IDENTITY, partial(assert_near, gradient=1e-6)), (QUANTIZED, assert_close)]
        assert_close_to_plain(training, placement, 1, checks=checks, harmless=mutations.WEIGHTS)
    for bits in (4, 3.5):
        check_bytes(placement, bits)


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(6, timeout=280.0)
def test_three_replicas_stay_equal_and_train_as_with_plain_fsdp2() -> None:
    # Three sums are added in another order, and divided by 6 instead of 2 and 3: at most 4 roundings.
    checks = [(IDENTITY, partial(assert_near, gradient=1e-6)), (QUANTIZED, assert_close)]
    placement = "three replicas"
    assert_close_to_plain(training, placement, 1, checks=checks, harmless=mutations.WEIGHTS)
    check_bytes(placement, 4)


class Accumulating(HybridRun):
    """Three micro-batches a step: one not even reduced over shards, one not over replicas.

    Replicas exchange once per step whatever is accumulated.
    """

    def train(self, steps: int) -> Accumulating:
        for _ in range(steps):
            for reduces, all_reduces in ((False, False), (True, False), (True, True)):
                self.model.set_requires_gradient_sync(reduces)
                self.model.set_requires_all_reduce(all_reduces)
                self.backward()
            self.step()
        return self


def accumulating(config: SDP4BitConfig | None) -> list[float]:
    """Gradients are clipped by a common norm."""
    run = Accumulating(config, clip=0.5).train(1)
    result = run.finish()
    run.check_replicas()
    if config is not None:
        assert [(group.gradients.reductions, group.gradients.all_reduces) for group in run.comm.groups] == [
            (2, 1)
        ] * 4
    return result


@on_ranks(4)
def test_communication_does_not_change_within_an_accumulation() -> None:
    """FSDP2 holds sums over shards until replicas are summed; their divisor depends on the operation."""
    plain, run, late = HybridRun(None), HybridRun(IDENTITY), HybridRun(None)
    for each in (plain, run, late):
        each.train(1).model.set_requires_all_reduce(False)
        each.backward()
    refused = partial(pytest.raises, match="finish the accumulation first")
    with refused(RuntimeError), run.comm.full_precision():
        pass
    with refused(RuntimeError):
        run.comm.time_steps(lambda: None)
    with refused(RuntimeError):
        run.comm.remove()
    with refused(ValueError):
        quantize_communication(late.model, topology=2, config=IDENTITY)
    for each in (plain, run, late):
        each.model.set_requires_all_reduce(True)
        each.train(1)
    assert run.comm.is_attached
    run.comm.remove()
    late.comm = quantize_communication(late.model, topology=2, config=IDENTITY)
    expected = plain.train(1).finish()
    for each in (run, late):
        assert_equal(each.train(1).finish(), expected)


def check_resume() -> None:
    """A resumed run repeats the next losses and weights bit for bit."""
    run = HybridRun(QUANTIZED, clip=1.0).train(1)
    saved = io.BytesIO()
    states = {"model": run.model, "optimizer": run.optimizer, "comm": run.comm}
    torch.save({name: part.state_dict() for name, part in states.items()}, saved)
    expected = run.train(1).finish()[1:]
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    resumed = HybridRun(QUANTIZED, clip=1.0)
    next(resumed.data)
    resumed.model.load_state_dict(loaded["model"])
    resumed.optimizer.load_state_dict(loaded["optimizer"])
    resumed.comm.load_state_dict(loaded["comm"])
    assert resumed.train(1).finish() == expected
    resumed.check_replicas()


@pytest.mark.like_plain
@on_ranks(4, timeout=400.0)
def test_accumulation_clipping_and_resume() -> None:
    assert_close_to_plain(accumulating, checks=[(IDENTITY, assert_equal)], harmless=mutations.WEIGHTS)
    check_resume()


def check_measures() -> None:
    """Each quantizer, that over replicas included, adds its error; alerts see it on all ranks."""
    alerts = AlertConfig(gradient_error=1e-6, weight_drift=None, weight_error=None)
    run = HybridRun(replace(QUANTIZED, alerts=alerts, audit=AuditConfig(interval=1))).train(1)
    run.evaluate()
    run.check_replicas()
    assert {group.gradients.bits for group in run.comm.groups} == {4}
    # 8 bits alone have an error of about 0.01.
    assert run.comm.stats()["gradient_error"] > 0.1
    assert {alert.group for alert in run.comm.alerts()} == {group.view.name for group in run.comm.groups}


def check_settings() -> None:
    """What is not quantized is FSDP2's own all-reduce, counted as a ring; remove() gives the group back."""
    plain = HybridRun(None).train(3).finish()
    rows: list[int] = []
    for config in (SDP4BitConfig(weights=None, gradients=None), starting_at(3)):
        run = HybridRun(config).train(3)
        assert run.finish() == plain
        rows = [group.view.shard_numel for group in run.comm.groups]
        traffic = counted(run)
        assert traffic.inter_bytes == traffic.plain_inter_bytes == sum(4 * row for row in rows)
        assert all(isinstance(group.view.comms.replicate, ReplicateGroup) for group in run.comm.groups)
        stock = run.replicas
        assert all(group.view.comms.replicate == stock for group in run.comm.groups)
        run.comm.remove()
        assert all(module_group(block) is stock for block in run.model.blocks)
    late = HybridRun(starting_at(2)).train(2)
    assert late.losses == plain[:2]
    assert [group.gradients.all_reduces for group in late.comm.groups] == [0] * 4
    assert late.train(1).finish() != plain
    assert [group.gradients.all_reduces for group in late.comm.groups] == [1] * 4

    bypassed = HybridRun(GRADIENTS)
    info = bypassed.comm.groups[1].view._fsdp_group.mesh_info
    info.replicate_process_group = bypassed.replicas
    with first_rank_warns(r"not over the replicate dimension since \(blocks\.0\)"):
        bypassed.train(1)

    # A block is quantized over its shards and over replicas, the root's halves are too short for the latter.
    block, root = max(rows), rows[0]
    assert root < block
    run = HybridRun(replace(GRADIENTS, gradients=GradientConfig(min_numel=root))).train(2)
    for group in run.comm.groups:
        is_block = group.view.shard_numel == block
        assert group.gradients.bits == (4 if is_block else None)
        assert group.gradients.reductions == (2 if group.view.shard_numel >= root else 0)
    assert (
        " ".join(run.comm.explain(full=True).split()).count(f"all-reduce: part below min_numel={root}") == 2
    )


def starting_at(step: int) -> SDP4BitConfig:
    return replace(GRADIENTS, gradients=GradientConfig(min_numel=0, start_step=step))


def module_group(module: Any) -> Any:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return groups[0].mesh_info.replicate_process_group


def check_audit() -> None:
    """Main weights that differ between replicas are found on all ranks that hold them, and no others."""
    for action in ("error", "resync"):
        run = HybridRun(replace(QUANTIZED, audit=AuditConfig(on_mismatch=action))).train(1)
        assert run.comm.audit()
        if dist.get_rank() == 3:
            run.model.reshard()
            run.model.blocks[0].qkv.bias.to_local().data[0] += 2.0**-20
        if dist.get_rank() in (0, 2):
            assert run.comm.audit()
            continue
        with pytest.raises(
            ReplicaMismatchError, match=r"blocks\.0 \(main weights\).* of rank 1 and of rank 3 "
        ):
            run.comm.audit()


@pytest.mark.slow
@on_ranks(4, timeout=400.0)
def test_measures_the_audit_and_what_is_left_to_fsdp2() -> None:
    check_measures()
    check_audit()
    check_settings()
