"""CPU reductions that overlap the backward pass, like those of a GPU on its streams."""

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
    """Pending reductions of the current backward pass.

    Each hook starts its own transfer and then advances every earlier reduction by one step, so that no hook
    waits for the transfer it has just started. An autograd callback takes the remaining steps at the end of
    the backward pass; nothing may read the outputs before that.
    """

    def __init__(self) -> None:
        self._under_way: list[_Reduction] = []
        self._backward = -1

    def start(self, start: Callable[[Tensor], Turns], output: Tensor, *, divisor: float) -> None:
        """Start a reduction whose divided output is complete at the end of the backward pass.

        Args:
            start: starts a reduction to an output and returns the remaining steps.

        Raises:
            ExchangeError: an earlier reduction failed.
        """
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self.finish()  # left by a backward pass that failed
            self._backward = backward
            # FSDP2 ends its backward pass with such a callback; they run in the order of these calls.
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        older = list(self._under_way)
        # Not the output itself, which FSDP2 divides after the hook, before the total is complete.
        total = torch.empty_like(output)
        turns = start(total)
        self._under_way.append(_Reduction(turns=turns, total=total, output=output, divisor=divisor))
        for each in older:
            self._advance(each)

    def finish(self) -> None:
        """Complete all pending reductions."""
        # A second root of the same backward pass may start reductions after this and queue another call.
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
