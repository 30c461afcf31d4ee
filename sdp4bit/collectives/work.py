"""Work handles for callers that expect torch.distributed's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class CompletedWork(dist._Work):  # type: ignore[misc,name-defined]
    """A collective that has been issued on the current stream; wait() orders later streams behind it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the collective; the host does not block."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        """Return whether the collective has finished."""
        return self._event is None or bool(self._event.query())


class HostCopy:
    """A copy of a tensor on its way to the host, which goes on; a tensor on the host is there at once."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def arrived(self) -> Tensor | None:
        """Return the copy if it is there; nobody waits for it."""
        return self._host if self._event is None or self._event.query() else None


class JointWork:
    """Several works as one."""

    def __init__(self, *works: Any) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all; on CUDA, the current stream does."""
        for work in self._works:
            work.wait()


class SideStream:
    """Runs collectives in order beside the current stream; where there are no streams, at once.

    What it runs comes before other work that the device could do, as FSDP2's own collectives do: transfers
    need few of its processors, and start late if computation holds all of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def run(self, function: Callable[[], None]) -> CompletedWork:
        """Issue the function's work behind all that the current stream has been given so far."""
        if self._stream is None:
            function()
            return CompletedWork(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            function()
            return CompletedWork(self._device)


class StagedCollectives:
    """Runs collectives of several steps on a side stream, a step of each whenever another one starts.

    A step ends with a transfer under way, and its result is looked at in the next one. So no kernel is
    issued behind a transfer that has only just begun: where all streams of a device share one hardware queue
    (`has_one_queue`), such a kernel would keep whatever is issued after it, computation too, from starting.
    """

    def __init__(self, device: torch.device, stream: SideStream) -> None:
        self._device = device
        self._stream = stream
        self._under_way: list[StagedWork] = []

    def start(self, steps: Iterator[None]) -> StagedWork:
        """Do a step of each collective that is under way, oldest first, and then the first of this one."""
        work = StagedWork(self, steps, device=self._device)
        self._under_way.append(work)
        self._advance()
        return work

    def finish(self) -> None:
        """Do all that is left to do, in the same order on all ranks that have started the same."""
        while self._under_way:
            self._advance()

    def _advance(self) -> None:
        self._stream.run(self._do_steps)

    def _do_steps(self) -> None:
        for work in self._under_way:
            work.advance()
        self._under_way = [work for work in self._under_way if work.completed is None]


class StagedWork:
    """A collective of several steps."""

    def __init__(
        self, all_of_them: StagedCollectives, steps: Iterator[None], *, device: torch.device
    ) -> None:
        self._all_of_them = all_of_them
        self._device = device
        self._steps = steps
        self.completed: CompletedWork | None = None
        """When the last step has been issued."""

    def advance(self) -> None:
        """Issue the next step on the current stream."""
        try:
            next(self._steps)
        except StopIteration:
            self.completed = CompletedWork(self._device)

    def wait(self) -> None:
        """Wait for the collective; on CUDA, the current stream does."""
        self._all_of_them.finish()
        assert self.completed is not None
        self.completed.wait()


def has_one_queue(device: torch.device) -> bool:
    """Return whether what is issued to a device starts in the order of the host, whatever its stream.

    Megatron-LM asks for that with tensor parallelism, by CUDA_DEVICE_MAX_CONNECTIONS=1.
    """
    return device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


class DeferredWork(dist._Work):  # type: ignore[misc,name-defined]
    """A collective on the host whose last steps are done when somebody waits for it."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Finish the collective; further calls do nothing."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        """Return whether the collective has finished."""
        return self._finish is None
