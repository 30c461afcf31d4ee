"""Reductions on the host that go on beside the backward pass, as those of a GPU do on its streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Turns = list[Callable[[], None]]


@dataclass(kw_only=True, eq=False)
class _Reduction:
    turns: Turns
    total: Tensor
    output: Tensor
    divisor: float


class HostReductions:
    """Reductions that have been started in this backward pass, and wait for transfers.

    A hook that waited for its own transfer would keep the backward pass from computing. So a hook starts its
    transfer, and then takes a turn of every reduction before it; a callback of autograd takes those that are
    left at the end of the backward pass. Nothing may read the outputs before that.
    """

    def __init__(self) -> None:
        self._under_way: list[_Reduction] = []
        self._backward = -1

    def start(self, start: Callable[[Tensor], Turns], output: Tensor, *, divisor: float) -> None:
        """Start a reduction in a backward pass, by whose end the output, divided, is there.

        Args:
            start: starts a reduction to an output, and returns the turns that are left.

        Raises:
            ExchangeError: of an older reduction.
        """
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self.finish()  # those of a backward pass that has failed
            self._backward = backward
            # FSDP2 ends its backward pass by the same means; callbacks run in the order of these calls.
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        older = list(self._under_way)
        # Not the output itself: FSDP2 divides that behind the hook, when a part of the total is there.
        total = torch.empty_like(output)
        turns = start(total)
        self._under_way.append(_Reduction(turns=turns, total=total, output=output, divisor=divisor))
        for each in older:
            self._advance(each)

    def finish(self) -> None:
        """Take all turns that are left."""
        # A second root of the same backward pass may start reductions behind this, and asks for another call.
        self._backward = -1
        try:
            while self._under_way:
                for each in list(self._under_way):
                    self._advance(each)
        finally:
            self._under_way.clear()

    @torch.no_grad()
    def _advance(self, reduction: _Reduction) -> None:
        if reduction.turns:
            reduction.turns.pop(0)()
        if not reduction.turns:
            self._under_way.remove(reduction)
            torch.div(reduction.total, reduction.divisor, out=reduction.output)
