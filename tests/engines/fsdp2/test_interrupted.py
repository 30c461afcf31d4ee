"""A refresh that an exception interrupts, such as a lack of memory that the loop catches, is repeated.

Layer: 2 processes over gloo, as 2 nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from sdp4bit import SDP4BitConfig, WeightConfig
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.quantization import ops
from tests.ranks import on_ranks
from tests.toy import POLICY, Run, assert_replicas_identical, build, data_mesh

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="this FSDP2 cannot go on after a failed forward"
)
CONFIG = SDP4BitConfig(weights=WeightConfig(bits=8, group_size=32), gradients=None)


@contextmanager
def failing(name: str, *, ranks: tuple[int, ...] = (0, 1)) -> Iterator[None]:
    """Let the next call of a method of replicas, or of an operator, fail on these ranks."""
    owner = WeightReplica if hasattr(WeightReplica, name) else ops
    real, left = getattr(owner, name), [dist.get_rank() in ranks]

    @wraps(real)  # an operator is recorded by its name
    def fail_once(*args: Any, **options: Any) -> Any:
        if any(left):
            left.clear()
            raise torch.OutOfMemoryError("on purpose")
        return real(*args, **options)

    with mock.patch.object(owner, name, fail_once):
        yield
    assert not any(left), "nothing has failed"


def interrupt(run: Run, name: str) -> set[str]:
    """A forward fails, and the loop goes on with the next batch; return the groups with a torn replica."""
    with failing(name), pytest.raises(torch.OutOfMemoryError):
        run.evaluate()
    torn = {group.view.name for group in run.comm.groups if group.weights.replica.is_torn}
    for module in run.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    run.model.reset_iter_state()
    return torn


def losses(between: Callable[[Run], object], *, steps: int = 1) -> list[float]:
    run = Run(build(), CONFIG, topology=1, lr=1e-2).train(steps)
    between(run)
    return run.train(2).finish()


@on_ranks(2)
def test_a_refresh_that_was_not_sent_stays_due() -> None:
    undisturbed = losses(lambda _: None)
    assert losses(lambda run: interrupt(run, "start_quantized_refresh")) == undisturbed
    assert losses(lambda run: interrupt(run, "start_full_refresh"), steps=0) == losses(
        lambda _: None, steps=0
    )


@on_ranks(2)
def test_a_refresh_that_was_applied_in_part_is_followed_by_one_in_full_precision() -> None:
    torn: set[str] = set()
    repeated = losses(lambda run: torn.update(interrupt(run, "dequantize_add")))

    def resync(run: Run) -> None:
        run.comm._state.request_resync([group for group in run.comm.groups if group.view.name in torn])

    assert len(torn) == 1 and repeated == losses(resync) != losses(lambda _: None)


@on_ranks(2)
def test_all_ranks_repeat_a_refresh_that_failed_on_one() -> None:
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(64, 64), mesh=data_mesh(), mp_policy=POLICY)
    run, x = Run(model, CONFIG, topology=1), torch.ones(2, 64)
    for ranks in ((), (0,), ()):
        raised = pytest.raises(torch.OutOfMemoryError) if dist.get_rank() in ranks else nullcontext()
        with torch.no_grad(), failing("dequantize_add", ranks=ranks), raised:
            model(x)
        model.reshard()
        model.reset_iter_state()
        model(x).float().square().sum().backward()
        run.step()
    run.comm.measure()
    assert_replicas_identical(run.comm)
    assert run.comm.stats()["full_refreshes"] == 1
