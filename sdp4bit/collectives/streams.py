"""Collectives that pause while a transfer is in flight, CUDA streams, and works that FSDP2 waits for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

Running = Iterator[None]
"""A collective: a generator that pauses when a transfer is in flight, for which its next step waits.

All ranks advance their collectives in the same order."""


def run(collective: Running) -> None:
    """Run a collective to its end."""
    for _ in collective:
        pass


def advance(running: Iterable[Running]) -> list[Running]:
    """Advance each collective to its next pause, in this order; return those that have not ended."""
    ended = object()  # a pause returns None
    return [each for each in running if next(each, ended) is not ended]


def pipelined(chunks: Sequence[Running]) -> Running:
    """Run chunks, each one pause behind its predecessor, and pause after each turn."""
    running: list[Running] = []
    for each in chunks:
        # Newest first, so that its transfer starts before the stream waits for an older one.
        running = advance([each, *running])
        yield
    while running:
        running = advance(running)
        yield


class CompletedWork(dist._Work):  # type: ignore[misc,name-defined]
    """A collective that was issued on the current stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            # On the stream that is current now, which is the side stream inside `SideStream.run`.
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the collective; the host does not block."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())


class HostCopy:
    """An asynchronous copy of a tensor to the host; a CPU tensor is not copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            # Pinned, because a copy to other memory would block the host.
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def arrived(self) -> Tensor | None:
        """Return the copy if it has arrived, else None."""
        return self._host if self._event is None or self._event.query() else None


class SideStream:
    """Runs collectives in order on a second CUDA stream, or immediately on other devices.

    The stream has a high priority, like those of FSDP2's collectives. Transfers need few multiprocessors but
    would start late if computation occupied all of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def run(self, function: Callable[[], None]) -> CompletedWork:
        """Issue the function's work after all current work of the current stream."""
        if self._stream is None:
            function()
            return CompletedWork(self._device)
        # The function reads tensors that the current stream writes, and overwrites those that it reads.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            function()
            return CompletedWork(self._device)


def has_one_queue(device: torch.device) -> bool:
    """Return whether all streams of a device share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1).

    Megatron-LM requires this setting with tensor parallelism.
    """
    return device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


class DeferredWork(dist._Work):  # type: ignore[misc,name-defined]
    """A CPU collective whose last steps run in wait()."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        # Taken first: a second wait() does nothing, even after an exception.
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None
