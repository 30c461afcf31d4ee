"""Weights of tensor subclasses: gathered in high precision they come from the replica, else FSDP2 gathers.

Layer: gloo, 2 and 4 processes as 2 nodes, against plain FSDP2 with the same subclasses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sdp4bit
from sdp4bit import SDP4BitConfig
from sdp4bit.collectives.weight_replica import WeightReplica
from tests import mutations, toy
from tests.ecosystem import on_cpu
from tests.engines.fsdp2 import subclasses, test_bytes, test_checkpoint
from tests.engines.fsdp2.subclasses import BlockScaled, InFp8, InHighPrecision, convert
from tests.ranks import first_rank_warns, on_ranks, run_ranks
from tests.tables import flat
from tests.toy import LOSSLESS, POLICY, QUANTIZED, Run, data_mesh

pytestmark = pytest.mark.gloo

WEIGHTS_ONLY = SDP4BitConfig(gradients=None)
TRAINS = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="losses of these subclasses are NaN under plain FSDP2 of torch 2.9"
)


def build(kind: type[InHighPrecision], **options: Any) -> toy.ToyGPT:
    torch.manual_seed(0)
    return toy.shard(convert(toy.ToyGPT(), kind), **options)


# -- gathered in high precision ---------------------------------------------------------------------------


def training(config: SDP4BitConfig | None, hybrid: bool) -> list[float]:
    """Blocks of fp8 weights beside plain biases and norms, on uneven shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")) if hybrid else None
    run = Run(build(BlockScaled, mesh=mesh), config, topology=1 if hybrid else 2, ordered=not hybrid)
    run.train(2).evaluate(torch.inference_mode)
    run.train(1)
    if config is not None:
        assert all(comm.weights.replica is not None for comm in run.comm.groups)
        assert "BlockScaled" not in run.comm.explain(full=True)
    return run.finish()


@pytest.mark.like_plain
@TRAINS
@on_ranks(4)
def test_high_precision_gathers_are_served_from_the_replica() -> None:
    toy.assert_close_to_plain(training, False)


@pytest.mark.like_plain
@TRAINS
@pytest.mark.slow
@on_ranks(4)
def test_high_precision_gathers_under_hsdp() -> None:
    toy.assert_close_to_plain(training, True)


@TRAINS
@on_ranks(2)
def test_subclasses_without_quantized_weights_train_as_with_plain_fsdp2() -> None:
    plain = Run(build(BlockScaled), None, topology=1).train(2).finish()
    for config in (LOSSLESS, SDP4BitConfig(weights=None, gradients=None)):
        toy.assert_equal(Run(build(BlockScaled), config, topology=1).train(2).finish(), plain)


@TRAINS
@on_ranks(2)
def test_differences_are_those_of_the_fp32_weights() -> None:
    """A difference is taken from what the subclass holds, not from the bf16 values that it would gather."""
    run = Run(build(BlockScaled), WEIGHTS_ONLY, topology=1).train(1)
    sent: dict[WeightReplica, Tensor] = {}
    start = WeightReplica.start_quantized_refresh

    def spy(self: WeightReplica, row: Tensor, **options: Any) -> None:
        sent[self] = row.clone()
        start(self, row, **options)

    with patch.object(WeightReplica, "start_quantized_refresh", spy):
        run.evaluate()
    for comm in run.comm.groups:
        row, held = sent[comm.weights.replica], {}
        for param in comm.view.params:
            local = param.local
            held[param.name] = local.held if isinstance(local, InHighPrecision) else local
            assert torch.equal(param.local_view(row), held[param.name]), param.name
        assert row.dtype == torch.float32 and not torch.equal(row, row.bfloat16().float())


def refreshes_of(run: Run) -> dict[str, int]:
    return {comm.view.name: comm.weights.full_refreshes + comm.weights.refreshes for comm in run.comm.groups}


@TRAINS
@on_ranks(2)
def test_edits_are_found_and_what_is_unchanged_is_not_sent() -> None:
    plain, ours = (Run(build(BlockScaled), config, topology=1) for config in (None, LOSSLESS))
    for run in (plain, ours):
        run.train(1).evaluate()
    before = refreshes_of(ours)
    assert ours.evaluate() == plain.evaluate()
    assert refreshes_of(ours) == before
    for run in (plain, ours):
        with torch.no_grad():
            run.model.blocks[1].fc1.weight.mul_(1.5)
    assert ours.evaluate() == plain.evaluate()
    assert [name for name, count in refreshes_of(ours).items() if count > before[name]] == ["blocks.1"]


@on_ranks(2)
def test_attaching_after_a_forward_that_left_weights_gathered() -> None:
    model = fully_shard(convert(nn.Linear(8, 8, bias=False), BlockScaled), mesh=data_mesh(), mp_policy=POLICY)
    x = torch.ones(1, 8)
    with torch.no_grad():
        expected = model(x)
        comm = sdp4bit.quantize_communication(model, topology=1, config=LOSSLESS)
        assert comm.groups[0].weights.replica is not None and torch.equal(model(x), expected)
        assert comm.stats()["total"]["inter_bytes"] > 0


def check_bytes(nodes: int, per_node: int) -> None:
    """Per parameter and step 1.02 bytes between nodes, as of plain parameters, and 8 of plain FSDP2."""
    for is_quantized in (False, True):
        model = convert(nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(2)]), BlockScaled)
        for layer in model.children():
            fully_shard(layer, mesh=data_mesh(), mp_policy=POLICY)
        fully_shard(model, mesh=data_mesh(), mp_policy=POLICY)
        comm = sdp4bit.quantize_communication(model, topology=per_node) if is_quantized else None
        optimizer = toy.adamw(model)
        for _ in range(2):
            with test_bytes.count_sent_bytes(per_node) as messages, on_cpu.count_sent_bytes() as dense:
                model(torch.randn(2, 512)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        numel, apart = 2 * 512 * 512, (nodes - 1) / nodes
        if comm is None:
            # Rings over all ranks: two gathers in bf16, and a reduction in fp32.
            shard = numel / (nodes * per_node) * (nodes * per_node - 1)
            assert (dense["gathers"], dense["reductions"]) == (2 * 2 * shard, 4 * shard)
            assert messages["inter"] == 0
        else:
            assert dense["gathers"] == dense["reductions"] == 0
            between = numel / per_node * (1 / 2 + 2 / 128 + 1 / 2 + 2 / 2048) * apart
            assert messages["inter"] == comm.stats()["last_step"]["inter_bytes"] == between


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="plain bytes are counted by this name")
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_bytes_are_those_of_a_plain_weight(nodes: int, per_node: int) -> None:
    run_ranks(check_bytes, nodes * per_node, nodes, per_node)


# -- checkpoints ------------------------------------------------------------------------------------------


class Job(test_checkpoint.Job):
    """With weights of a tensor subclass."""

    def __init__(self, kind: type[InHighPrecision], *, at: int = 0) -> None:
        torch.manual_seed(0)
        self.model = toy.shard(convert(toy.ToyGPT(layers=1, hidden=108), kind))
        self.comm = sdp4bit.quantize_communication(self.model, topology=1, config=test_checkpoint.NODE)
        self.optimizer = toy.adamw(self.model, fused=None, foreach=False)
        self.data = toy.batches()
        for _ in range(at):
            next(self.data)


def save(folder: str, kind: type[InHighPrecision]) -> list[float]:
    job = Job(kind)
    job.train(1)
    job.save(f"{folder}/after-step", comm=job.comm)
    job.logits()
    job.save(f"{folder}/after-eval", comm=job.comm)
    return job.train(3)


def resume(folder: str, kind: type[InHighPrecision], losses: list[list[float]]) -> None:
    left = ["weights are left to FSDP2 in blocks.0 (InFp8 of"] * 2 if kind is InFp8 else []
    with test_checkpoint.expect_warnings(*left):
        for name in ("after-step", "after-eval"):
            job = Job(kind, at=1).load(f"{folder}/{name}", comm="before")
            assert job.train(3) == losses[dist.get_rank()], name


@pytest.mark.parametrize("kind", [BlockScaled, pytest.param(InFp8, marks=pytest.mark.slow)])
def test_a_resumed_run_continues_bit_for_bit(kind: type[InHighPrecision], tmp_path: Path) -> None:
    losses = run_ranks(save, 2, str(tmp_path), kind)
    run_ranks(resume, 2, str(tmp_path), kind, losses)


# -- left to FSDP2 ----------------------------------------------------------------------------------------


def in_fp8(config: SDP4BitConfig | None) -> list[float]:
    """Weights that travel in fp8 are FSDP2's, exactly; the others come from replicas."""
    run = Run(build(InFp8), config, topology=2, ordered=True).train(2)
    result = run.finish()
    if config is not None:
        root, *others = run.comm.groups
        assert root.weights.replica is not None
        for comm in others:
            assert comm.weights.replica is None
            sent = comm.weights.traffic.last_step
            assert sent.intra_bytes + sent.inter_bytes == sent.plain_intra_bytes + sent.plain_inter_bytes > 0
        reason = "InFp8 of blocks.0.qkv.weight: gathers float8_e4m3fn and float32 itself"
        assert reason in flat(run.comm.explain(full=True))
        run.comm.state_dict()
    return result


@pytest.mark.like_plain
@on_ranks(4)
def test_fp8_gathers_stay_with_fsdp2() -> None:
    # Embeddings alone come from a replica: a message of theirs that is applied twice shows too little.
    toy.assert_close_to_plain(in_fp8, harmless=[mutations.TWICE])


REASONS = {
    subclasses.InFp8ByAllReduce: "gathers float8_e4m3fn itself",
    subclasses.Doubled: "gathers other values than it holds",
    subclasses.Communicates: "RuntimeError: fsdp_pre_all_gather calls c10d.allreduce_.default",
    subclasses.Unprepared: "RuntimeError: no scale yet",
}
MIXED = "types bfloat16 and float32 in one group"


@on_ranks(2)
def test_each_reason_is_given_with_the_name() -> None:
    layers = [convert(nn.Sequential(nn.Linear(8, 8, bias=False)), kind) for kind in REASONS]
    # Without a policy its bias is fp32, and the shards of 5 bf16 values do not align with that.
    layers.append(convert(nn.Sequential(nn.Linear(1, 10)), BlockScaled))
    model = nn.Sequential(*layers, nn.Linear(8, 8))
    for layer in layers:
        fully_shard(layer, mesh=data_mesh())
    fully_shard(model, mesh=data_mesh())
    with first_rank_warns("weights are left to FSDP2 in"):
        comm = sdp4bit.quantize_communication(model, topology=1)
    table = flat(comm.explain(full=True))
    reasons = [
        f"{kind.__name__} of {index}.0.weight: {reason}"
        for index, (kind, reason) in enumerate(REASONS.items())
    ]
    assert [reason for reason in [*reasons, MIXED] if reason not in table] == [], table
    assert [each.weights.replica is None for each in comm.groups] == [False] + [True] * len(layers)


class DoubledLater(subclasses.Doubled):
    """What it gathers looks like what it holds as long as both are zero."""


def doubled(config: SDP4BitConfig | None) -> list[float]:
    torch.manual_seed(0)
    model = convert(toy.ToyGPT(), DoubledLater)
    with torch.no_grad():
        for weight in model.parameters():
            if isinstance(weight.data, DoubledLater):
                weight.zero_()
    run = Run(toy.shard(model), config, topology=1, ordered=True).train(4)
    if config is not None:
        assert all(comm.weights.replica is not None for comm in run.comm.groups)
    return run.finish()


@on_ranks(2)
def test_values_that_come_to_differ_from_what_is_held_are_the_ones_that_count() -> None:
    plain = doubled(None)
    toy.assert_close(doubled(QUANTIZED), plain)


@on_ranks(2)
def test_a_rank_that_cannot_gather_its_shard_fails_on_all_ranks() -> None:
    class Uneven(InHighPrecision):
        def padded(self, *_: Any) -> Tensor:
            return self.held

    model = fully_shard(convert(nn.Sequential(nn.Linear(8, 7)), Uneven), mesh=data_mesh(), mp_policy=POLICY)
    with pytest.raises(ValueError, match=r"unevenly sharded") as refusal:
        sdp4bit.quantize_communication(model, topology=1)
    assert "[rank 1]" in str(refusal.value)
