"""Megatron-Core integration, exactness: the weights of all ranks, the losses, and the bytes that are sent.

Layer: real Megatron-Core in 2 and 4 processes over gloo, through `fake_cuda`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp4bit import GradientConfig, SDP4BitConfig, TelemetryConfig
from sdp4bit.collectives.reasons import Cause
from tests.megatron.runs import (
    EXACT_AND_CLOSE,
    IDENTITY,
    LOSSLESS,
    LOSSLESS_AND_CLOSE,
    MOE,
    QUANTIZED,
    STOCHASTIC,
    MegatronRun,
    close,
    expected_traffic,
    training,
)
from tests.ranks import on_ranks, run_ranks
from tests.rounding_keys import check_unique, drawn_keys
from tests.tables import explained, flat
from tests.toy import Result, assert_close_to_plain, assert_equal

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")

PRELOAD = ["tests.megatron.imports"]

SYNC: dict[str, Any] = {}
OVERLAP_GRADIENTS: dict[str, Any] = {"overlap": True, "overlap_gather": False}
OVERLAP: dict[str, Any] = {"overlap": True}
MODES = [SYNC, OVERLAP_GRADIENTS, OVERLAP]
MIXED = replace(
    STOCHASTIC,
    weights=None,
    gradients=replace(QUANTIZED.gradients, inter_bits=3.5, intra_rounding="nearest"),
)


def check_modes(
    modes: list[dict[str, Any]],
    exact: list[SDP4BitConfig],
    lossy: list[SDP4BitConfig],
    topology: int = 1,
) -> None:
    checks = [(config, assert_equal) for config in exact] + [(config, close) for config in lossy]
    for options in modes:
        assert_close_to_plain(training, {"topology": topology, **options}, checks=checks)


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(2)
def test_two_ranks() -> None:
    check_modes([SYNC, OVERLAP], [IDENTITY], [QUANTIZED])
    fp32_buffer()


@pytest.mark.like_plain
@pytest.mark.slow
def test_two_ranks_in_every_mode_with_every_rounding() -> None:
    run_ranks(check_modes, 2, MODES, [IDENTITY], [QUANTIZED, STOCHASTIC, MIXED])


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(2)
def test_buffers_and_settings() -> None:
    expert_buffer()
    counted_bytes(nodes=2, ranks_per_node=1)
    counted_bytes(nodes=1, ranks_per_node=2)
    first_steps_in_full_precision()
    different_initial_weights()
    # Megatron then asks for a mean instead of scaling first; a half of a sum of two is exact.
    averaged = MegatronRun(IDENTITY, topology=1, ddp={"average_in_collective": True}).train(2).finish()
    assert averaged == MegatronRun(None).train(2).finish()


def fp32_buffer() -> None:
    """fp32 parameters have a buffer of their own, which stays Megatron's, in one bucket group or several."""
    options = {"topology": 1, "fp32_norm": True, **OVERLAP}
    assert_close_to_plain(training, options, 2, checks=EXACT_AND_CLOSE)
    quantized = MegatronRun(QUANTIZED, **options).train(3)
    quantized.evaluate()
    assert "float32 parameters" in explained(quantized.comm.explain(full=True))["chunk0.float32.0"]
    total = quantized.comm.stats()["last_step"]
    dense = next(c for c in quantized.comm.groups if c.weights.replica is None)
    assert total["collectives"] == 2 * len(quantized.comm.groups)
    # 48 + 48 values padded to 128, in rows of 64; gathered in fp32 and reduced in fp32.
    assert quantized.comm._state.traffic_of(dense).inter_bytes == 2 * 64 * 4
    quantized.comm.remove()


def expert_buffer() -> None:
    """Experts on one rank each stay Megatron's, as explain() reports; the others are quantized."""
    assert_close_to_plain(training, {"topology": 1, "transformer": MOE}, 2, checks=EXACT_AND_CLOSE)
    run = MegatronRun(QUANTIZED, topology=1, transformer=MOE)
    stock = run.chunks[0].expert_parallel_bucket_groups
    assert stock and not any("start_grad_sync" in vars(group) for group in stock)
    groups = explained(run.comm.explain(full=True))
    assert Cause.ONE_RANK.value in groups["chunk0.expert.bfloat16.0"]
    assert "int4/2048" in groups["chunk0.bfloat16.0"]


def counted_bytes(*, nodes: int, ranks_per_node: int) -> None:
    """A step sends the messages' bytes by their layouts, in the collectives of both exchanges."""
    whole = replace(QUANTIZED, telemetry=TelemetryConfig(interval=3, sample_numel=1 << 20))
    run = MegatronRun(whole, topology=ranks_per_node, **OVERLAP).train(3)
    assert {(c.layout.nodes, c.layout.ranks_per_node) for c in run.comm.groups} == {(nodes, ranks_per_node)}
    expected, stats = expected_traffic(run), run.comm.stats()
    assert expected.items() <= stats["last_step"].items()
    inter = expected["inter_bytes"]
    row_bytes = sum(comm.view.shard_numel for comm in run.comm.groups) * (4 + 2)
    if nodes > 1:
        plain = row_bytes * (nodes * ranks_per_node - 1) / ranks_per_node
        assert stats["compression_ratio"] == pytest.approx(plain / inter)
        assert stats["compression_ratio"] > 5
    assert 0 < stats["gradient_error"] < 0.5 and 0 < stats["weight_error"] < 0.5
    assert stats["steps"] == stats["sampled_step"] == 3
    groups = run.comm.group_stats()
    assert sum(group["inter_bytes"] for group in groups) == inter
    assert {(group["weight_bits"], group["gradient_bits"]) for group in groups} == {
        (4, 8 if nodes == 1 else 4)
    }
    assert all(0 < group["weight_drift"] < group["weight_error"] for group in groups)
    before = run.comm.measure()
    assert before["weight_error"] == pytest.approx(stats["weight_error"], rel=1e-6)
    run.evaluate()  # the replicas have followed the last step, which was measured before
    after = run.comm.measure()
    assert 0 == after["pending"] < before["weight_drift"] < before["pending"]
    for measured in (before, after):
        assert measured["weight_drift"] == pytest.approx(stats["weight_drift"], rel=1e-6)


def first_steps_in_full_precision() -> None:
    """start_step and min_numel leave gradients to Megatron."""
    plain = MegatronRun(None).train(3).finish()
    late = SDP4BitConfig(weights=None, gradients=GradientConfig(start_step=2, min_numel=0))
    run = MegatronRun(late, topology=1).train(2)
    assert run.losses == plain[:2]
    run.train(1)
    assert run.losses == plain[:3]
    assert run.evaluate() != plain[3]
    assert "from step 2" in flat(run.comm.explain(full=True))

    long = SDP4BitConfig(weights=None, gradients=GradientConfig(min_numel=10_000))
    short_rows = MegatronRun(long, topology=1, **OVERLAP)
    reduced = [comm for comm in short_rows.comm.groups if comm.gradients.reduction is not None]
    assert 0 < len(reduced) < len(short_rows.comm.groups)
    assert "row below min_numel=10000" in flat(short_rows.comm.explain(full=True))
    short_rows.train(1)
    with_short = MegatronRun(QUANTIZED, topology=1, **OVERLAP).train(1)
    sent = [r.comm.stats()["last_step"]["inter_bytes"] for r in (short_rows, with_short)]
    assert sent[0] > sent[1]


def different_initial_weights() -> None:
    """Ranks that start from different random weights hold one replica once attached."""
    run = MegatronRun(QUANTIZED, topology=1, seed=dist.get_rank(), attach=False)
    with pytest.raises(AssertionError):
        run.assert_replicas_identical()
    run.attach(QUANTIZED, topology=1)
    run.assert_replicas_identical()
    run.train(1).finish()


@pytest.mark.like_plain
@on_ranks(4)
def test_two_nodes_of_two_ranks() -> None:
    assert_close_to_plain(training, OVERLAP, 2, checks=LOSSLESS_AND_CLOSE)
    counted_bytes(nodes=2, ranks_per_node=2)


@pytest.mark.like_plain
@pytest.mark.slow
def test_two_nodes_of_two_ranks_in_every_mode() -> None:
    run_ranks(check_modes, 4, MODES, [LOSSLESS], [QUANTIZED, STOCHASTIC, MIXED], 2)


def replicated(run: MegatronRun) -> dict[str, torch.Tensor]:
    """Return main weights and replicas of the parameters that tensor parallelism does not divide."""
    tensors = {}
    for name, parameter in run.parameters().items():
        if not getattr(parameter, "tensor_model_parallel", False):
            tensors[name] = parameter.detach().clone()
    part = run.optimizer.chained_optimizers[0]
    names = {id(p): n for c in run.chunks for n, p in c.named_parameters()}
    for params, mains in zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
        for param, main in zip(params, mains, strict=True):
            if not getattr(param, "tensor_model_parallel", False):
                tensors[f"main {names[id(param)]}"] = main.detach().clone()
    return tensors


def assert_equal_in(group: Any, tensors: dict[str, torch.Tensor], *, at_least: int) -> None:
    """All ranks of the group hold the same bits."""
    everybody: list[Any] = [None] * group.size()
    dist.all_gather_object(everybody, tensors, group=group)
    assert len(tensors) >= at_least
    for other in everybody:
        assert other.keys() == tensors.keys()
        for name, values in tensors.items():
            assert torch.equal(values, other[name]), name


def tensor_parallel(config: SDP4BitConfig | None, options: dict[str, Any]) -> Result:
    run = MegatronRun(config, tp=2, **options).train(3)
    result = run.finish()
    if config is not None:
        assert {(c.layout.nodes, c.layout.ranks_per_node) for c in run.comm.groups} == {(2, 1)}
        assert_equal_in(run.state.get_tensor_model_parallel_group(), replicated(run), at_least=15)
        assert config.weights is not None
        is_quantized = config.weights.bits is not None  # else all values travel exactly
        assert ("exact (equal under TP)" in flat(run.comm.explain(full=True))) == is_quantized
    return result


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(4)
def test_tensor_parallelism() -> None:
    for options in (SYNC, OVERLAP):
        assert_close_to_plain(tensor_parallel, options, checks=[*EXACT_AND_CLOSE, (STOCHASTIC, close)])
    one_node = MegatronRun(QUANTIZED, tp=2, topology=4).train(2)
    assert {(c.layout.nodes, c.layout.ranks_per_node) for c in one_node.comm.groups} == {(1, 2)}
    one_node.finish()
    one_node.comm.remove()
    marked = [
        p for c in one_node.chunks for p in c.parameters() if hasattr(p, "average_gradients_across_tp_domain")
    ]
    assert not marked


def pipelined(config: SDP4BitConfig | None, chunks: int, mode: dict[str, Any]) -> Result:
    run = MegatronRun(config, pp=2, chunks=chunks, layers=2 * chunks, **mode).train(3)
    result = run.finish()
    if config is not None:
        names = {comm.view.name.partition(".")[0] for comm in run.comm.groups}
        assert names == {f"chunk{number}" for number in range(chunks)}
        ends = ("word_embeddings.weight", "output_layer.weight")
        (tied,) = (p for name, p in run.parameters().items() if name.endswith(ends))
        assert_equal_in(
            run.state.get_pipeline_model_parallel_group(), {"tied": tied.detach().clone()}, at_least=1
        )
    return result


@pytest.mark.like_plain
@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
@on_ranks(4)
def test_pipeline(chunks: int) -> None:
    stochastic = replace(STOCHASTIC, gradients=QUANTIZED.gradients)
    for mode in (SYNC, OVERLAP):
        assert_close_to_plain(pipelined, chunks, mode, checks=[*EXACT_AND_CLOSE, (stochastic, close)])


@pytest.mark.parametrize("mode", MODES)
@on_ranks(4)
def test_no_rounding_key_is_drawn_twice(mode: dict[str, Any]) -> None:
    with drawn_keys() as keys:
        run = MegatronRun(STOCHASTIC, **mode).train(2)
        resumed = MegatronRun(STOCHASTIC, **mode)
        resumed.comm.load_state_dict(run.comm.state_dict())
        resumed.train(1)
    check_unique(keys, at_least=18)
