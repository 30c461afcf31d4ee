"""Megatron-Core integration over time: skipped steps, forced syncs, checkpoints, audits.

Layer: real Megatron-Core in 2 and 4 processes over gloo, through `fake_cuda`.
"""

from __future__ import annotations

import io
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sdp4bit import AuditConfig, ReplicaMismatchError, SDP4BitConfig
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.quantization import ops
from tests.megatron.runs import (
    EXACT_AND_CLOSE,
    FP16,
    LOSSLESS,
    MICROBATCHES,
    QUANTIZED,
    STOCHASTIC,
    MegatronRun,
    load,
    save,
)
from tests.ranks import first_rank_warns, on_ranks, run_ranks
from tests.toy import Result, assert_close_to_plain

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")

PRELOAD = ["tests.megatron.imports"]

BOTH = pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
"""Collectives behind computation, or not."""


# -- skipped steps and forced syncs ---------------------------------------------------------------------


def skipping(config: SDP4BitConfig | None, overlap: bool) -> Result:
    """A step that overflows changes nothing and sends no weights."""
    run = MegatronRun(config, topology=1, overlap=overlap, **FP16)
    taken = []
    for _ in range(5):
        run.backward()
        before = run.weights()
        sent = run.comm.stats()["total"]["collectives"] if run.comm else 0
        taken.append(run.step())
        if not taken[-1]:
            assert all(map(torch.equal, before, run.weights()))
            run.evaluate()
            assert all(map(torch.equal, before, run.weights()))
            if run.comm:
                assert run.comm.stats()["total"]["collectives"] == sent
    assert not taken[0] and taken[-1] and taken == sorted(taken), taken  # the first loss scale is too large
    if run.comm:
        assert run.comm.stats()["steps"] == sum(taken)
    result = run.finish()
    return Result([*taken, *result], result.gradients)


def forced_syncs(overlap: bool) -> None:
    """How often one evaluates does not change the run."""
    expected = MegatronRun(STOCHASTIC, topology=1, overlap=overlap).train(2).finish()
    run = MegatronRun(STOCHASTIC, topology=1, overlap=overlap)
    run.evaluate()
    for _ in range(2):
        run.train(1)
        first = run.evaluate()
        before = run.weights()
        for chunk in run.chunks:
            chunk.start_param_sync(force_sync=True)
        assert all(map(torch.equal, before, run.weights()))
        assert run.evaluate() == first
    assert run.finish() == expected


@pytest.mark.like_plain
@BOTH
@on_ranks(2)
def test_skipped_steps_and_forced_syncs(overlap: bool) -> None:
    assert_close_to_plain(skipping, overlap, checks=EXACT_AND_CLOSE)
    forced_syncs(overlap)


# -- exceptions -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_an_exception_in_a_refresh_leaves_equal_replicas() -> None:
    """All ranks repeat it after the next step, in full precision if it had begun on one of them."""
    for config in (LOSSLESS, QUANTIZED):
        run = MegatronRun(config, topology=1).train(1)
        for owner, name, ranks in (
            (WeightReplica, "_start", (0, 1)),
            (ops, "dequantize_add", (0, 1)),
            (ops, "dequantize_add", (1,)),
        ):
            if owner is ops and config is LOSSLESS:
                continue  # copies rows instead
            real, here, failed = getattr(owner, name), dist.get_rank() in ranks, list[str]()

            @wraps(real)  # with the name and the arguments by which it is recorded
            def fail(*args: Any, **given: Any) -> Any:
                # Measures dequantize differences, too, and add them to nothing.
                if here and not failed and given.get("accumulate", True):  # noqa: B023
                    failed.append(name)  # noqa: B023
                    raise torch.OutOfMemoryError("on purpose")
                return real(*args, **given)  # noqa: B023

            run.backward()
            raised = pytest.raises(torch.OutOfMemoryError) if here else nullcontext()
            with mock.patch.object(owner, name, fail), raised:
                run.step()
            full = run.comm.stats()["full_refreshes"]
            run.train(1)
            assert run.comm.stats()["full_refreshes"] == full + 1, (name, ranks)
            run.assert_replicas_identical()
        run.finish()


# -- checkpoints ----------------------------------------------------------------------------------------


def resumed(saved: bytes, *, overlap: bool, attach_first: bool, communication: bool = True) -> MegatronRun:
    """Train one step from a checkpoint, having started from other weights."""
    run = MegatronRun(STOCHASTIC, topology=1, overlap=overlap, seed=7, attach=attach_first)
    load(run, saved, communication=communication)
    if not attach_first:
        run.attach(STOCHASTIC, topology=1)
        state = torch.load(io.BytesIO(saved), weights_only=False)
        run.comm.load_state_dict(state["optimizer"]["optimizer"]["sdp4bit"])
    for _ in range(2 * MICROBATCHES):
        next(run.data)
    return run.train(1)


def sharded_formats(run: MegatronRun) -> None:
    """Megatron's distributed checkpoint formats carry the communication state in the optimizer's entry."""
    model = run.chunks[0].module.sharded_state_dict()
    for kind in ("dp_reshardable", "fully_reshardable"):
        metadata = {"distrib_optim_sharding_type": kind}
        entry = run.optimizer.sharded_state_dict(model, metadata=metadata)["optimizer"]
        assert getattr(entry, "data", entry)["sdp4bit"] == run.comm.state_dict()


def stock_checkpoint() -> None:
    """A run continues from a plain checkpoint, and a plain run from one of ours."""
    plain = MegatronRun(None).train(1)
    saved = save(plain)
    assert "sdp4bit" not in plain.optimizer.state_dict()["optimizer"]
    run = MegatronRun(LOSSLESS, topology=1, seed=7)
    load(run, saved)
    for _ in range(MICROBATCHES):
        next(run.data)
    ours = save(run.train(1))
    expected = plain.train(1).finish()[1:]
    assert run.finish() == expected
    other = MegatronRun(None, seed=9)
    load(other, ours)
    assert all(map(torch.equal, other.weights(), run.weights()))


def wrong_states(comm: Any) -> None:
    good = comm.state_dict()
    for bad, message in (
        ([], "a list"),
        ({}, "it lacks format_version, steps"),
        ({**good, "format_version": 9}, "format 9, but this version of sdp4bit reads 2"),
        ({**good, "reductions": -1}, "reductions should be counts"),
    ):
        with pytest.raises(ValueError, match=message):
            comm.load_state_dict(bad)
    assert comm.state_dict() == good


@BOTH
@on_ranks(2)
def test_resume_is_bit_exact(overlap: bool) -> None:
    whole = MegatronRun(STOCHASTIC, topology=1, overlap=overlap).train(2)
    unsent = save(whole)
    # With overlap the last step's differences are sent with the next forward, or on resume.
    assert whole.comm.state_dict()["due"] == overlap
    if overlap:  # as Megatron does before it saves
        for chunk in whole.chunks:
            chunk.disable_forward_pre_hook()
            chunk.enable_forward_pre_hook()
    saved = save(whole)
    losses = whole.train(1).finish()[2:]
    for state, attach_first in ((unsent, True), (saved, False)):
        run = resumed(state, overlap=overlap, attach_first=attach_first)
        assert run.finish() == losses
        assert all(map(torch.equal, run.weights(), whole.weights()))
        assert run.comm.state_dict() == whole.comm.state_dict()
    # Without the counters the rounding bits are those of the first steps.
    other = resumed(saved, overlap=overlap, attach_first=True, communication=False)
    assert other.finish() != losses
    sharded_formats(whole)
    wrong_states(whole.comm)
    stock_checkpoint()


# -- audits: a flipped bit of the parameters is detected and repaired ---------------------------------


def flip_bit(run: MegatronRun, *, rank: int) -> str:
    """Flip one bit of one rank's parameters; return the bucket's name."""
    bucket = run.comm.groups[0].view
    if dist.get_rank() == rank:
        bucket.weights.view(torch.int16)[7] ^= 1 << 2
    return str(bucket.name)


def check_error() -> list[str]:
    run = MegatronRun(replace(QUANTIZED, audit=AuditConfig(interval=2)), overlap=True).train(2)
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
def test_audits_change_nothing_and_a_resync_repairs() -> None:
    audit = AuditConfig(interval=2, on_mismatch="resync")
    quiet = MegatronRun(QUANTIZED).train(4).finish()
    run = MegatronRun(replace(QUANTIZED, audit=audit)).train(4)
    assert run.finish() == quiet
    run.train(1)
    flip_bit(run, rank=1)
    with first_rank_warns("the replica of rank 1 differs from that of ranks 0, 2, 3"):
        run.train(1)
    run.finish()
    assert run.comm.audit()
