"""Replica audit on Megatron-Core: a flipped bit of the parameters is found, named and healed.

Layer: real Megatron-Core in 4 processes over gloo, through `fake_cuda`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from sdp4bit import AuditConfig, ReplicaMismatchError
from tests.engines.megatron.runs import QUANTIZED, MegatronRun
from tests.ranks import on_ranks, run_ranks

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")

PRELOAD = ["tests.engines.megatron.imports"]


def flip_bit(run: MegatronRun, *, rank: int) -> str:
    """One bit of one rank's parameters is another; returns the bucket's name."""
    bucket = run.comm._state.groups[0].group
    if dist.get_rank() == rank:
        bucket.weights.view(torch.int16)[7] ^= 1 << 2
    return str(bucket.name)


def check_error() -> list[str]:
    run = MegatronRun(dataclasses.replace(QUANTIZED, audit=AuditConfig(interval=2)), overlap=True).train(2)
    assert run.comm.audit()
    name = flip_bit(run, rank=3)
    run.train(1)
    run.backward()
    with pytest.raises(ReplicaMismatchError) as error:
        run.step()
    run.comm.resync()
    assert run.comm.audit()
    return [name, str(error.value)]


def test_a_flipped_bit_is_an_error_that_names_bucket_and_rank_on_all_ranks() -> None:
    results = run_ranks(check_error, 4)
    assert all(result == results[0] for result in results)
    name, message = results[0]
    assert f"group {name}: the replica of rank 3 differs from that of ranks 0, 1, 2 (checksums" in message


@pytest.mark.slow
@on_ranks(4)
def test_audits_change_nothing_and_a_resync_heals() -> None:
    audit = AuditConfig(interval=2, on_mismatch="resync")
    quiet = MegatronRun(QUANTIZED).train(4).finish()
    run = MegatronRun(dataclasses.replace(QUANTIZED, audit=audit)).train(4)
    assert run.finish() == quiet
    run.train(1)
    flip_bit(run, rank=1)
    with pytest.warns(UserWarning, match="the replica of rank 1 differs from that of ranks 0, 2, 3"):
        run.train(1)
    run.finish()
    assert run.comm.audit()
