"""Runs whose weights are edited, and a check that the replicas held by the devices follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sdp4bit import SDP4BitConfig
from sdp4bit.engines.fsdp2 import edits
from tests import mutations
from tests.toy import (
    IDENTITY,
    QUANTIZED,
    Result,
    Run,
    assert_close,
    assert_equal,
    assert_replicas_identical,
    build,
)

_INT4_MAXIMUM = 7
_BF16_HALF_ULP = 2.0**-8
"""Of any value x it is at most |x| * 2**-8."""


class EditedRun(Run):
    """Losses include those of evaluations; replicas that do not hold the weights are noted."""

    def __init__(self, model: nn.Module, config: SDP4BitConfig | None, *, topology: int) -> None:
        super().__init__(model, config, topology=topology)
        self.config, self.topology = config, topology
        self.stale: list[str] = []
        self._last: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def params(self) -> list[DTensor]:
        """The parameters, sharded."""
        return list(self.model.parameters())

    def another(self, model: nn.Module) -> EditedRun:
        """Return a second root beside this one; its losses, and what is stale, are noted here."""
        other = EditedRun(model, self.config, topology=self.topology)
        other.losses, other.gradients, other.stale = self.losses, self.gradients, self.stale
        return other

    def backward(self) -> None:
        """One forward and backward."""
        with self._compared(), torch.enable_grad():
            super().backward()

    def evaluate(self, mode: Callable[[], Any] = torch.no_grad) -> float:
        """Note the loss on always the same data. The root, which FSDP2 leaves unsharded, is freed."""
        with self._compared():
            self.losses.append(super().evaluate(mode))
        self.model.reshard()
        return self.losses[-1]

    @contextmanager
    def _compared(self) -> Iterator[None]:
        """After the enclosed forward every replica holds this rank's shards as exactly as it must."""
        comms = [] if self.comm is None else self.comm.groups
        held = [
            None if c.weights.replica.rows is None else c.weights.replica.own_shard.double().clone()
            for c in comms
        ]
        yield
        for comm, before in zip(comms, held, strict=True):
            is_exact = self.config is IDENTITY or before is None
            dtype = comm.weights.replica.rows.dtype if is_exact else torch.float32
            name, main = comm.view.name, comm.view.main_shard(dtype).double()
            bound = torch.zeros_like(main) if before is None or is_exact else self._bound(name, before, main)
            excess = (comm.weights.replica.own_shard.double() - main).abs() - bound
            self._last[name] = main, bound
            if not bool((excess <= 0).all()):
                where = int(excess.argmax())
                self.stale.append(f"{name} is {excess[where] + bound[where]:.3g} off, not {bound[where]:.3g}")

    def _bound(self, name: str, before: Tensor, main: Tensor) -> Tensor:
        """Return how far each value of a replica may be from its main weight."""
        last, bound = self._last.get(name, (None, main))
        if last is not None and torch.equal(last, main):
            return bound  # nothing has to be sent
        # The difference is rounded to the nearest of 7 steps on each side, of a size that is rounded up to
        # bf16; the sum is rounded to bf16.
        largest = (main - before).abs().max() * (1 + _BF16_HALF_ULP)
        return largest / (2 * _INT4_MAXIMUM) + (main.abs() + largest) * _BF16_HALF_ULP


Way = Callable[[EditedRun], Any]
WAYS: dict[str, tuple[Way, Callable[[], nn.Module]]] = {}
"""Ways of changing weights, by name, and what builds the model that each is tried on."""


def way(model: Callable[[], nn.Module] = build) -> Callable[[Way], Way]:
    """Register a way. Its model has been trained and evaluated, and is sharded; gradients are off."""

    def register(function: Way) -> Way:
        WAYS[function.__name__] = function, model
        return function

    return register


def losses_of(name: str, config: SDP4BitConfig | None, topology: int) -> tuple[Result, list[str]]:
    """Return the losses of a way, and what was stale: trained, edited, used, trained on.

    The gradient is that of the step before the edit: a pruned or clipped model may have hardly any.
    """
    function, model = WAYS[name]
    run = EditedRun(model(), config, topology=topology).train(1)
    run.evaluate()
    with torch.no_grad():
        function(run)
    run.evaluate()
    run.train(1).evaluate()
    if run.comm is not None:
        assert_replicas_identical(run.comm)
        run.comm.remove()
    return Result(run.losses, run.gradients[:1]), run.stale


# Gradients are FSDP2's: an edit does not depend on how they were reduced.
WEIGHTS = replace(QUANTIZED, gradients=None, telemetry=None)
METHODS = {
    "full precision": (IDENTITY, assert_equal),
    "on a GPU": (IDENTITY, assert_equal),
    "4 bits": (WEIGHTS, partial(assert_close, loss=0.01)),
}
"""Edited weights may be far from trained ones: then rounding moves losses further than usual. On a GPU
the host does not wait for a comparison in every micro-batch."""


def _decides_as_on_a_gpu(method: str) -> AbstractContextManager[Any]:
    if method != "on a GPU":
        return nullcontext()
    return mock.patch.object(edits, "_is_on_host", return_value=False)


def check_way(name: str, topology: int, method: str) -> None:
    """A model whose weights are edited in this way trains with one of `METHODS` as with plain FSDP2."""
    config, assert_right = METHODS[method]
    plain, _ = losses_of(name, None, topology)

    def check() -> None:
        with _decides_as_on_a_gpu(method):
            losses, stale = losses_of(name, config, topology)
        assert_right(losses, plain)
        assert not stale, stale

    check()
    harmless = [] if method == "4 bits" else [mutations.TWICE]
    mutations.check_that_mutations_are_noticed(name, check, harmless=harmless)
