"""Reductions that are in flight over several hooks, for devices with one hardware queue."""

from __future__ import annotations

from typing import Any

import torch

from sdp4bit.collectives.streams import CompletedWork, Running, SideStream, advance


class JointWork:
    """Several works as one."""

    def __init__(self, *works: Any) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class StagedCollectives:
    """Runs collectives on a side stream and advances all of them by a step when another starts.

    A step ends with a transfer in flight, whose result the next step reads. So no kernel is issued directly
    after its transfer. If all streams of a device share one hardware queue (`has_one_queue`), such a kernel
    would block everything issued after it, computation included.
    """

    def __init__(self, device: torch.device, stream: SideStream) -> None:
        self._device = device
        self._stream = stream
        self._under_way: list[Running] = []

    def start(self, collective: Running) -> StagedWork:
        """Advance each collective in flight by a step, oldest first, and start this one."""
        work = StagedWork(self)
        self._under_way.append(self._run(collective, work))
        self._advance()
        return work

    def finish(self) -> None:
        """Complete all collectives, in the same order on all ranks."""
        while self._under_way:
            self._advance()

    def _run(self, collective: Running, work: StagedWork) -> Running:
        yield from collective
        work.completed = CompletedWork(self._device)

    def _advance(self) -> None:
        self._stream.run(self._do_steps)

    def _do_steps(self) -> None:
        self._under_way = advance(self._under_way)


class StagedWork:
    """A collective with several steps."""

    def __init__(self, staged: StagedCollectives) -> None:
        self._staged = staged
        self.completed: CompletedWork | None = None  # set once the last step has been issued

    def wait(self) -> None:
        self._staged.finish()
        assert self.completed is not None
        self.completed.wait()
