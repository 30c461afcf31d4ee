"""Message buffers, tables, and records of operators that use them, which are reused in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from sdp4bit.collectives.plan import MOST_PLANS, Message
from sdp4bit.quantization import ops
from sdp4bit.quantization.tables import Table

MOST_VIEWS = 4096
"""Views of buffers that are kept; plans that are shared between groups need few."""
MOST_TABLES = 1024
"""Tables that are kept; each pattern of parameters without a gradient has its own."""


class Messages(NamedTuple):
    """Messages in a buffer, and the fields of each."""

    all: Tensor  # uint8 [count, nbytes]
    fields: tuple[Tensor, ...]  # views [count, nbytes of the field]


def stream_of(device: torch.device) -> int:
    """Return the number of the current stream of a device."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class Scratch:
    """Named byte buffers that only grow, so that nothing is allocated in a steady state.

    The next call with the same name on the same stream overwrites a buffer; the stream orders the two. Each
    CUDA stream has its own buffers, because several FSDP2 roots, or `unshard(async_op=True)` and an implicit
    prefetch, communicate at the same time. Concurrent transfers on one stream each take a slot and use its
    number in the names.
    """

    def __init__(self) -> None:
        self.generation = 0
        """Changes with every buffer that is replaced, because records hold addresses in the one before."""
        self._buffers: dict[tuple[str, torch.device, int], Tensor] = {}
        self._tables: dict[tuple[int, torch.device, int], tuple[tuple[int, ...], Tensor]] = {}
        self._slots: set[int] = set()
        self._views: dict[tuple[str, torch.device, int, int, Message], Messages] = {}

    def split(self, name: str, count: int, message: Message, *, device: torch.device) -> Messages:
        """Return uninitialized messages and their fields for use on the current stream.

        The views are made once, because the buffer is the same in every step.
        """
        key = (name, device, stream_of(device), count, message)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):
                whole = self.messages(name, count, message.nbytes, device=device)
                views = Messages(whole, tuple(whole[:, place] for place in message.places))
            self._views[key] = views
        return views

    def messages(self, name: str, count: int, nbytes: int, *, device: torch.device) -> Tensor:
        """Return uninitialized uint8 [count, nbytes] for use on the current stream."""
        key = (name, device, stream_of(device))
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count * nbytes:
            # A buffer first needed under inference_mode must still be writable in training.
            with torch.inference_mode(False):
                buffer = torch.empty(count * nbytes, dtype=torch.uint8, device=device)
            self._buffers[key] = buffer
            self.generation += 1
            self._views = {each: views for each, views in self._views.items() if each[:3] != key}
        return buffer[: count * nbytes].view(count, nbytes)

    def values(self, name: str, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized [numel] for use on the current stream."""
        return self.messages(name, 1, numel * dtype.itemsize, device=device)[0].view(dtype)

    def table(self, numbers: tuple[int, ...], *, device: torch.device) -> Tensor:
        """Return numbers as int64 [n] for use on the current stream; the host never waits for the copy.

        Args:
            numbers: found by identity, because hashing hundreds of them takes longer than a launch.
        """
        key = (id(numbers), device, stream_of(device))
        known = self._tables.get(key)
        if known is None:
            if len(self._tables) >= MOST_TABLES:
                self._tables.pop(next(iter(self._tables)))  # the oldest; its stream has the memory next
            with torch.inference_mode(False):
                host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
                table = torch.empty(len(numbers), dtype=torch.int64, device=device)
                table.copy_(host, non_blocking=True)
            # With the numbers, whose identity stays theirs as long as they live.
            known = self._tables[key] = numbers, table
        return known[1]

    def take_slot(self) -> int:
        """Reserve the lowest free slot until `free_slot`."""
        slot = next(number for number in range(len(self._slots) + 1) if number not in self._slots)
        self._slots.add(slot)
        return slot

    def free_slot(self, slot: int) -> None:
        self._slots.discard(slot)


R = TypeVar("R", bound=tuple[object, ...])


def _tables(recorded: object) -> Iterator[Table]:
    if isinstance(recorded, Table):
        yield recorded
    elif isinstance(recorded, tuple):
        for each in recorded:
            yield from _tables(each)


class Records(Generic[R]):
    """The records of a collective: tuples that hold tables, each for one plan, stream and set of dtypes.

    Records hold addresses of buffers, so those of the buffers before are dropped.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._generation = scratch.generation
        self._known: dict[tuple[object, ...], R] = {}

    def of(self, *key: object, device: torch.device, make: Callable[[], R]) -> R:
        """Return the record for the current stream.

        Args:
            key: everything but the buffers that the record depends on.
            make: records. Where operators check their arguments, it does so again at every call, to compare.
        """
        if self._generation != self._scratch.generation:
            self._known.clear()
            self._generation = self._scratch.generation
        key = (*key, stream_of(device))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST_PLANS:
                self._known.pop(next(iter(self._known)))  # the oldest
            known = make()
            while self._generation != self._scratch.generation:
                # A buffer that was too small has been replaced, perhaps after the record began.
                self._known.clear()
                self._generation = self._scratch.generation
                known = make()
            self._known[key] = known
        elif ops.is_checked():
            pairs = zip(_tables(known), _tables(make()), strict=True)
            if any(each.describe() != again.describe() for each, again in pairs):
                raise AssertionError(f"a record of {key} is stale")
        return known
