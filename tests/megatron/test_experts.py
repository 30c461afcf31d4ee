"""Megatron-Core integration, experts: their buckets are exchanged over the ranks that hold the same ones.

Layer: real Megatron-Core, its MoE layer included, in 4 processes over gloo, through `fake_cuda`: 2 nodes x 2
ranks, neighbours with different experts. Grouped matrix products and Transformer Engine need a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from sdp4bit_megatron.handle import EXPERTS_SPLIT
from tests.engines.fsdp2.test_bytes import count_sent_bytes
from tests.megatron.runs import (
    LOSSLESS_AND_CLOSE,
    MICROBATCHES,
    MOE,
    QUANTIZED,
    MegatronRun,
    expected_traffic,
    load,
    save,
    training,
)
from tests.ranks import on_ranks
from tests.tables import explained
from tests.toy import assert_close_to_plain

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")

PRELOAD = ["tests.megatron.imports"]
EXPERTS: dict[str, Any] = {"transformer": {**MOE, "num_moe_experts": 4}}
LIMIT = 500.0


def check_bytes(run: MegatronRun) -> None:
    """Every bucket's messages go over its own ranks; their bytes on the wire are those reported."""
    with count_sent_bytes(2) as sent:
        run.train(1)
    for comm in run.comm.groups:
        grid = (2, 1) if comm.view.is_expert else (2, 2)
        assert (comm.layout.nodes, comm.layout.ranks_per_node) == grid
    expected = expected_traffic(run)
    assert sent == {"intra": expected["intra_bytes"], "inter": expected["inter_bytes"]}
    assert expected.items() <= run.comm.stats()["last_step"].items()


def check_mode(overlap: bool) -> None:
    assert_close_to_plain(training, {"overlap": overlap, **EXPERTS}, checks=LOSSLESS_AND_CLOSE)
    run = MegatronRun(QUANTIZED, overlap=overlap, **EXPERTS).train(1)
    check_bytes(run)
    run.train(1).finish()
    assert {g["gradient_bits"] for g in run.comm.group_stats()} == {4}
    assert run.comm.stats()["steps"] == run.comm.stats()["sampled_step"] == 3
    assert all(g["weight_drift"] > 0 for g in run.comm.group_stats() if "expert" not in g["name"])
    run.comm.audit()
    rows = explained(run.comm.explain(full=True))
    assert "2 x 1" in rows["chunk0.expert.bfloat16.0"] and "int4/2048" in rows["chunk0.expert.bfloat16.0"]


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(4, timeout=LIMIT)
def test_experts_are_quantized_over_their_own_ranks() -> None:
    check_mode(overlap=False)
    check_mode(overlap=True)


@pytest.mark.slow
@on_ranks(4, timeout=LIMIT)
def test_a_resume_with_experts_repeats_the_run_and_remove_leaves_plain_groups() -> None:
    run = MegatronRun(QUANTIZED, **EXPERTS).train(2)
    saved = save(run)
    whole = run.train(2).finish()
    resumed = MegatronRun(QUANTIZED, **EXPERTS)
    load(resumed, saved)
    for _ in range(2 * MICROBATCHES):
        next(resumed.data)
    assert resumed.train(2).finish() == whole[2:]
    groups = resumed.chunks[0].expert_parallel_bucket_groups
    assert all("start_grad_sync" in vars(group) for group in groups)
    resumed.comm.remove()
    assert not any("start_grad_sync" in vars(group) for group in groups)


@pytest.mark.slow
@on_ranks(4, timeout=LIMIT)
def test_experts_under_tensor_parallelism_are_left_in_full_precision() -> None:
    """Attached, not trained: Megatron-Core wants sequence parallelism then, whose layer norms need a GPU."""
    run = MegatronRun(
        QUANTIZED, tp=2, transformer={**EXPERTS["transformer"], "expert_tensor_parallel_size": 1}
    )
    rows = explained(run.comm.explain(full=True))
    assert "int4/2048" in rows["chunk0.bfloat16.0"]
    assert str(EXPERTS_SPLIT) in rows["chunk0.expert.bfloat16.0"], rows
