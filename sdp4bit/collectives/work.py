"""Work handles for callers that expect torch.distributed's."""

from __future__ import annotations

from collections.abc import Callable
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
    """Runs collectives in order beside the current stream; where there are no streams, at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, function: Callable[[], None]) -> CompletedWork:
        """Issue the function's work behind all that the current stream has been given so far."""
        if self._stream is None:
            function()
            return CompletedWork(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            function()
            return CompletedWork(self._device)


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
