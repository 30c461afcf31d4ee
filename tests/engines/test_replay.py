"""Two steady steps of FSDP2 are the same operations, but for the number of the step: a CUDA graph needs that.

A graph repeats operators with their streams, addresses and scalars, and runs no Python. Memory that is new
in a step has its turn as the address, because the pool of a graph gives the same memory in the same order.

Layer: one process, whose operators are those of a simulated GPU (`simulated_cuda`). Nothing is captured.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple
from unittest import mock

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engines.simulated_cuda import PackedTable, simulate
from tests.engines.stream_scenarios import FSDPRun
from tests.engines.stream_simulator import Block, Event, Simulator, has_memory, is_library
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def caller() -> str:
    """Return file and function of the innermost call of the library; "" of others."""
    frame: Any = sys._getframe(1)
    while frame is not None and not is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename.rpartition('sdp4bit/')[2]} {frame.f_code.co_name}"


class Operation(NamedTuple):
    caller: str
    what: str
    stream: str
    places: tuple[object, ...]
    scalars: tuple[object, ...]


class Step:
    """The operations of a step, and what the host does in it, which a replay would not do."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._kept = {id(block): block for block in sim._blocks.values()}
        self._new: list[Block] = []  # in the order of their first use
        self._waits, self._collectives = len(sim.host_waits), len(sim.collectives)
        self.operations: list[Operation] = []
        self.on_host: set[str] = set()

    def note(
        self, what: str, *, tensors: Iterable[Tensor] = (), stream: str = "", scalars: Iterable[object] = ()
    ) -> None:
        places = tuple(self._place(tensor) for tensor in tensors if has_memory(tensor))
        self.operations.append(Operation(caller(), what, stream, places, tuple(scalars)))

    def _place(self, tensor: Tensor) -> tuple[object, ...]:
        block = self._sim._block(tensor.untyped_storage())
        view = tensor.storage_offset(), (*tensor.shape,), (*tensor.stride(),)
        if id(block) in self._kept:
            return id(block), *view
        if block not in self._new:
            self._new.append(block)
        return "new", self._new.index(block), *view

    def end(self) -> None:
        self.on_host.update(f"waits: {wait}" for wait in self._sim.host_waits[self._waits :])
        self.on_host.update(
            f"agrees: {call.place.partition(':')[0]}"
            for call in self._sim.collectives[self._collectives :]
            if call.alike[0] == "all_reduce"  # the only one without replicas of HSDP
        )


class _Scalars(TorchDispatchMode):
    """Notes the numbers that operators of torch are given."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._step = step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        numbers = [each for each in (*args, *kwargs.values()) if isinstance(each, int | float)]
        self._step.note(func._schema.name, scalars=numbers)
        return func(*args, **kwargs)


def trained(run: FSDPRun, sim: Simulator) -> Step:
    """Train a step, and return what it was."""
    step = Step(sim)
    launch, query, table = Simulator.launch, Event.query, PackedTable.run

    def launched(self: Simulator, what: str, *, reads: Any, writes: Any, on: Any = None) -> None:
        launch(self, what, reads=reads, writes=writes, on=on)
        step.note(what, tensors=[*reads, *writes], stream=(on or self.stream).name)

    def asked(self: Event) -> bool:
        step.on_host.add(f"asks for an event: {caller()}")
        return query(self)

    def ran(self: PackedTable, call: int, tensors: Any) -> None:
        step.note("a table", scalars=[call])
        table(self, call, tensors)

    with (
        mock.patch.object(Simulator, "launch", launched),
        mock.patch.object(Event, "query", asked),
        mock.patch.object(PackedTable, "run", ran),
        _Scalars(step),
    ):
        run.train(1)
    step.end()
    return step


def steps(*, resyncs: bool = False) -> tuple[set[str], int, set[str]]:
    """Return where two steady steps differ, in how many operations, and what the host does in the second."""
    with simulate() as sim:
        run = FSDPRun()
        run._data = itertools.repeat(next(run._data))  # a graph has one input
        run.train(4)
        before = trained(run, sim)
        if resyncs:
            run.comm.resync()
        now = trained(run, sim)
    pairs = list(itertools.zip_longest(before.operations, now.operations))
    places = {f"{one.caller}: {one.what}" for pair in pairs if pair[0] != pair[1] for one in pair if one}
    return places, abs(len(before.operations) - len(now.operations)), now.on_host


def test_two_steady_steps_differ_in_the_number_of_the_reduction_alone() -> None:
    ((places, more, on_host),) = run_ranks(steps, 1, timeout=240.0)
    assert places == {"quantization/tables.py run: a table"} and more == 0
    assert on_host == {
        "asks for an event: collectives/streams.py arrived",  # of the flag for NaN
        "agrees: sdp4bit/collectives/host.py",  # on the refreshes that are due
    }


def steps_around_a_resync() -> tuple[set[str], int, set[str]]:
    return steps(resyncs=True)


def test_a_refresh_in_full_precision_is_another_step() -> None:
    ((places, more, _),) = run_ranks(steps_around_a_resync, 1, timeout=240.0)
    assert more > 0 and any("weight_replica.py _send_rows" in place for place in places), places
