"""Events that end a replica's state: evaluation after a step, NaN, loads.

Layer: gloo, 2 ranks as 2 nodes, against plain FSDP2.
"""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from sdp4bit import SDP4BitConfig
from sdp4bit.engines.fsdp2 import observers
from tests.ranks import on_ranks
from tests.toy import LOSSLESS, QUANTIZED, Run, assert_replicas_identical, build


def exact_groups(run: Run) -> list[bool]:
    """Return for each group whether the replica equals this rank's main shard as it is gathered."""
    return [
        torch.equal(comm.replica.own_shard, comm.group.main_shard(comm.replica.rows.dtype))
        for comm in run.comm.groups
    ]


@on_ranks(2)
def test_evaluation_right_after_a_step_uses_the_averages_that_were_put_in() -> None:
    """In evaluation mode the size of a change decides after a step, too."""
    run = Run(build(), QUANTIZED, topology=1).train(1)
    run.model.eval()
    for factor, is_exact in ((0.5, True), (1.001, False)):
        with torch.no_grad():
            for param in run.model.parameters():
                param.data.mul_(factor)
        run.evaluate()
        run.model.reshard()
        assert exact_groups(run) == [is_exact] * 4
        run.comm.mark_step()


def poisoned(config: SDP4BitConfig | None, *, by_overflow: bool) -> list[float]:
    """A loop steps with weights that are not finite when they are gathered, rewinds, and goes on."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.float16 if by_overflow else torch.bfloat16, reduce_dtype=torch.float32
    )
    run = Run(build(policy=policy), config, topology=1, lr=1e-3).train(1)
    params: list[DTensor] = list(run.model.parameters())
    with torch.no_grad():
        backup = [param.detach().clone() for param in params]
        for param in params[:1] if by_overflow else params:
            if by_overflow:
                param.data.to_local().view(-1)[:1] = 7e4
            else:
                param.data.mul_(float("nan"))
    run.backward()
    for param in params:
        param.grad = torch.zeros_like(param)  # the optimizer's own state stays finite
    run.step()
    with torch.no_grad():
        for param, kept in zip(params, backup, strict=True):
            param.data.copy_(kept.data)
    run.train(2)
    if run.comm is not None:
        assert_replicas_identical(run.comm)
    return run.losses[2:]


@on_ranks(2)
def test_a_replica_recovers_from_values_that_are_not_finite() -> None:
    for by_overflow in (False, True):
        plain = poisoned(None, by_overflow=by_overflow)
        assert all(loss == loss for loss in plain)
        assert poisoned(LOSSLESS, by_overflow=by_overflow) == plain
        losses = poisoned(QUANTIZED, by_overflow=by_overflow)
        assert losses == pytest.approx(plain, rel=0.003), (losses, plain)


def loaded_on_one_rank(config: SDP4BitConfig | None, moment: str) -> list[float]:
    """After a step, or a forward; or only a layer, after an evaluation that left the root unsharded."""
    run = Run(build(), config, topology=1).train(1)
    if moment != "after a step":
        run.evaluate()
    if moment == "after a forward":
        run.model.reshard()
    if dist.get_rank() == 1:
        module = run.model.blocks[0].fc1 if moment == "a part" else run.model
        module.load_state_dict({name: value.detach() * 0.9 for name, value in module.state_dict().items()})
    return run.train(1).finish()


@on_ranks(2)
def test_a_load_on_one_rank_alone_is_followed_by_all() -> None:
    for moment in ("after a step", "after a forward", "a part"):
        assert loaded_on_one_rank(LOSSLESS, moment) == loaded_on_one_rank(None, moment)


@on_ranks(2)
def test_a_state_dict_that_is_kept_is_looked_at_once_per_forward() -> None:
    run = Run(build(), LOSSLESS, topology=1).train(1)
    kept = run.model.state_dict()
    for _ in range(20):  # a loop that only saves holds on to nothing
        copy.copy(run.model.state_dict())
    handed_out = run.comm._state.aliases._kept.values()
    assert max(len(each) for each in handed_out) <= 2
    run.train(1)
    versions = mock.Mock(side_effect=observers.tensor_version)
    with mock.patch.object(observers, "tensor_version", versions):
        run.evaluate()
    # Its tensors are asked twice each: whether they were written to, and what they are from now on.
    assert 0 < versions.call_count <= 2 * len(kept)
