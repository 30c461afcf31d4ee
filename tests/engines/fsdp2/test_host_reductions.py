"""Reductions on the host go on beside the backward pass, and nothing else changes.

Layer: 4 processes over gloo, as 2 nodes of 2 ranks. What may come late is compared with the same run whose
reductions end inside their hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch

from sdp4bit.engines.fsdp2.groups import FSDPGroup
from sdp4bit.engines.fsdp2.host_reductions import HostReductions
from tests.ranks import on_ranks
from tests.toy import POLICY, QUANTIZED, Run, build, gradient_of


def micro_batches(run: Run) -> None:
    """The second gradient is added to the first; then one is reduced that was accumulated unreduced."""
    run.backward()
    run.train(1)
    run.model.set_requires_gradient_sync(False)
    run.backward()
    run.model.set_requires_gradient_sync(True)
    run.train(1)


def stepping_in_backward(run: Run) -> None:
    """Hooks of parameters read their gradients in the backward pass."""
    norms: list[torch.Tensor] = []
    for parameter in run.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.to_local().norm()))
    run.train(1)
    run.losses += torch.stack(norms).tolist()


def read_at_once(run: Run) -> None:
    """One group's gradient is read in the backward pass while those of others are on their way."""
    run.model.blocks[0].fc1.weight.register_post_accumulate_grad_hook(lambda _: None)
    run.train(2)


def divided(run: Run) -> None:
    """By a factor of the user's own."""
    run.model.set_gradient_divide_factor(3.0)
    run.train(2)


def failing(run: Run) -> None:
    """A backward pass fails on all ranks when some gradients are on their way; the next ones do not mind."""

    def fail(*_: object) -> None:
        raise ArithmeticError("on purpose")

    hook = run.model.blocks[0].register_full_backward_pre_hook(fail)
    with pytest.raises(ArithmeticError, match="on purpose"):
        run.backward()
    hook.remove()
    run.optimizer.zero_grad()
    run.train(2)


SCENARIOS: dict[str, Callable[[Run], object]] = {
    "steps": lambda run: run.train(2),
    "micro-batches": micro_batches,
    "stepping in backward": stepping_in_backward,
    "read at once": read_at_once,
    "divided": divided,
    "failing": failing,
}


SLICED = replace(QUANTIZED, gradients=replace(QUANTIZED.gradients, pipeline_chunks=3))
WHOLE = replace(POLICY, param_dtype=None, reduce_dtype=None)


@on_ranks(4)
def test_gradients_that_come_late_are_the_same_bit_for_bit() -> None:
    cases = [("steps", QUANTIZED, POLICY), ("steps", QUANTIZED, WHOLE)]
    cases += [(name, SLICED, POLICY) for name in SCENARIOS]
    for name, config, policy in cases:
        results = []
        for may_come_late in (FSDPGroup.gradients_may_come_late, lambda *_: False):
            with mock.patch.object(FSDPGroup, "gradients_may_come_late", may_come_late):
                run = Run(build(policy=policy), config, topology=2)
                SCENARIOS[name](run)
                run.backward()
                results.append((run.losses, gradient_of(run.model).tolist(), run.comm.stats()["total"]))
        assert results[0] == results[1], name


@on_ranks(4)
def test_transfers_are_under_way_until_the_backward_pass_ends() -> None:
    run = Run(build(), QUANTIZED, topology=2).train(1)
    reductions, seen = run.comm._state.host_reductions, []

    def start(self: HostReductions, *args: object, **named: object) -> None:
        plain(self, *args, **named)
        seen.append(len(self._under_way))

    plain = HostReductions.start
    with mock.patch.object(HostReductions, "start", start):
        run.backward()
    # norm and head, two blocks, the root: a reduction takes a turn in either of the next two hooks.
    assert seen == [1, 2, 2, 2]
    assert not reductions._under_way
