"""CUDA streams, events and memory as vector clocks, to find what nothing orders; `simulated_cuda` drives it.

What happens is real: FSDP2 or Megatron-Core, the library, the operators on small CPU tensors, in the order
of the program. Simulated is when a GPU could do it. Every stream, and the host, has a clock: for each stream,
the last operation that is known to be over. An operation on a stream comes after what that stream was given
before, after what it was made to wait for, and after what the host had waited for when it launched it.

- Race: two operations on the same bytes, one of them a write, of which neither comes after the other.
- Use after free: memory goes back to the stream that it was allocated on, whose next allocation may be given
  it, and an operation on another stream does not come before that allocation. This is the caching allocator
  without record_stream(), which neither FSDP2 nor the library calls.
- Wait of the host: it needs a value from the device, or asks for a stream or an event to be over.

Not simulated: time, what a kernel does outside the arguments of its operator, CUDA graphs, and NCCL itself.
"""

from __future__ import annotations

import linecache
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests import ADAPTERS, ROOT

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
Clock = dict["Stream", int]

_sim: Simulator


def start(simulator: Simulator) -> None:
    """This is the simulation of the process from now on."""
    global _sim
    _sim = simulator


def running() -> Simulator:
    """Return the simulation of this process."""
    return _sim


class Stream:
    """A CUDA stream, or the host."""

    cuda_stream = property(id)

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "") -> None:
        caller = sys._getframe(1)
        line = linecache.getline(caller.f_code.co_filename, caller.f_lineno)
        self.name = name or line.partition("=")[0].strip().removeprefix("self.")
        self.clock: Clock = {self: 0}
        self.device = CUDA
        self.priority = priority

    def wait(self, clock: Clock) -> None:
        """What follows on this stream comes after the operations of the clock."""
        for stream, time in clock.items():
            self.clock[stream] = max(time, self.clock.get(stream, 0))

    def is_after(self, stream: Stream, time: int) -> bool:
        """Whether what follows on this stream comes after that operation."""
        return self.clock.get(stream, 0) >= time

    def wait_stream(self, other: Stream) -> None:
        if not _sim.leaves_out("wait_stream"):
            self.wait(other.clock)

    def wait_event(self, event: Event) -> None:
        if not _sim.leaves_out("wait_event"):
            self.wait(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _sim.host_waits_for(self.clock, "Stream.synchronize")

    def __enter__(self) -> Stream:
        _sim.current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _sim.current.pop()


class Event:
    """A CUDA event; before it is recorded, nothing waits for it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        if _sim.leaves_out("record"):
            return
        self.clock = dict((stream or _sim.stream).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _sim.stream).wait(self.clock)

    def query(self) -> bool:
        """The device is as late as it can be: only what the host has waited for has passed."""
        return all(_sim.host.is_after(stream, time) for stream, time in self.clock.items())

    def synchronize(self) -> None:
        _sim.host_waits_for(self.clock, "Event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "an event has not passed"
        return 1.0


@dataclass(frozen=True)
class Access:
    """Bytes [start, end) of a block were read or written."""

    start: int
    end: int
    writes: bool
    stream: Stream
    time: int
    what: str

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.what} on {self.stream.name}"


class Block:
    """Memory of one storage, from its allocation until it is freed; of the host if it has no stream."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self.nbytes = 0  # that are counted as allocated
        self.accesses: list[Access] = []


@dataclass(frozen=True)
class Collective:
    """One call of this rank, and what NCCL wants to be alike on all ranks of the communicator."""

    group: tuple[str, tuple[int, ...]]
    """The communicator's name, and its ranks."""
    alike: tuple[Any, ...]
    place: str


class Simulator:
    """What one rank has done so far."""

    def __init__(self, *, left_out: str = "") -> None:
        self.left_out = left_out
        self.ordering: set[str] = set()
        """Where the library orders streams: file, function, and what it calls there."""
        self.host, compute = Stream(name="the host"), Stream(name="the compute stream")
        self.current = [compute]
        """The streams that have been made current, innermost last."""
        self.faults: list[str] = []
        """Races and uses after free, each pair of operations once."""
        self.host_waits: list[str] = []
        """Where the host waited for the device."""
        self.collectives: list[Collective] = []
        self.launched: Clock = {}
        """The last operation of every stream."""
        self.allocates_on_host = False
        self.allocated: dict[Stream, int] = {}
        self.peak: dict[Stream, int] = {}
        """Bytes in use of those that each stream has allocated here, and the most that there have been.
        Memory of one stream is not given to another."""
        self._blocks: dict[int, Block] = {}
        self._freed: dict[Stream, list[Block]] = {}

    @property
    def stream(self) -> Stream:
        """The current stream."""
        return self.current[-1]

    def leaves_out(self, call: str) -> bool:
        """Whether the library makes this call where the simulation is to do as if it were not there."""
        code = sys._getframe(2).f_code
        if not is_library(code.co_filename):
            return False
        site = f"{code.co_filename.rpartition('/')[2]} {code.co_name} {call}"
        self.ordering.add(site)
        return site == self.left_out

    # -- operations --------------------------------------------------------------------------------

    def launch(
        self, what: str, *, reads: Sequence[Tensor], writes: Sequence[Tensor], on: Stream | None = None
    ) -> None:
        """An operation on these tensors has been given to a stream, or done by the host if it holds them."""
        tensors = [tensor for tensor in (*reads, *writes) if has_memory(tensor)]
        if not tensors:
            return
        on_host = [self.is_on_host(tensor) for tensor in tensors]
        stream = self.host if all(on_host) else (on or self.stream)
        stream.wait(self.host.clock)
        stream.clock[stream] += 1
        self.launched[stream] = stream.clock[stream]
        what = f"{what} [{place()}]"
        written = {id(tensor) for tensor in writes}
        for tensor, is_host_tensor in zip(tensors, on_host, strict=True):
            # A number that lies on the host is read when a kernel is launched.
            user = self.host if is_host_tensor and tensor.ndim == 0 else stream
            self._access(tensor, writes=id(tensor) in written, stream=user, what=what)

    def _access(self, tensor: Tensor, *, writes: bool, stream: Stream, what: str) -> None:
        if not tensor.numel():
            return
        block = self._block(tensor.untyped_storage())
        start = tensor.storage_offset() * tensor.element_size()
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (last + 1) * tensor.element_size()
        new = Access(start, end, writes, stream, stream.clock[stream], what)
        kept = []
        for old in block.accesses:
            ordered = old.stream is stream or stream.is_after(old.stream, old.time)
            overlaps = old.start < end and start < old.end
            if overlaps and not ordered and (writes or old.writes):
                self._fault(f"race: {new}, not ordered after {old}")
                # Who comes after this access comes after all that it follows.
            covered = ordered and start <= old.start and old.end <= end and (writes or not old.writes)
            if not covered:
                kept.append(old)
        block.accesses = [*kept, new]

    def _fault(self, text: str) -> None:
        if text not in self.faults:
            self.faults.append(text)

    def host_waits_for(self, clock: Clock, why: str) -> None:
        """The host goes on when these operations are over; all that it launches later comes after them."""
        self.host_waits.append(f"{why} [{place()}]")
        self.host.wait(clock)

    def host_reads(self, tensor: Tensor, why: str) -> None:
        """The host needs the values: at once if it holds them, else when the current stream is done."""
        if has_memory(tensor) and not self.is_on_host(tensor):
            self.host_waits_for(self.stream.clock, why)
        self.launch(why, reads=[tensor], writes=[])

    # -- memory ------------------------------------------------------------------------------------

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether a CUDA tensor's place would be taken by one in the memory of the host."""
        return self._block(tensor.untyped_storage()).stream is None

    def _block(self, storage: torch.UntypedStorage) -> Block:
        """Return the storage's block; what was there before the simulation belongs to the first stream."""
        return self._blocks.get(storage._cdata) or self._new_block(storage, self.current[0])

    def _new_block(self, storage: torch.UntypedStorage, stream: Stream | None) -> Block:
        block = self._blocks[storage._cdata] = Block(stream)
        weakref.finalize(storage, self.free, storage._cdata, block)
        return block

    def allocate(self, tensor: Tensor, *, on_host: bool) -> None:
        """A storage has come up. Where its memory was in use before, that was on the stream it belongs to."""
        if not has_memory(tensor):
            return
        storage = tensor.untyped_storage()
        if on_host:
            self._new_block(storage, None)
            return
        stream = self.stream
        stream.wait(self.host.clock)
        # Blocks are split and merged: any of those that are free may be given away, whatever the size.
        for freed in self._freed.pop(stream, []):
            for old in freed.accesses:
                if old.stream is not stream and not stream.is_after(old.stream, old.time):
                    self._fault(f"use after free: {old}, of memory that {stream.name} may reuse at {place()}")
        stream.clock[stream] += 1
        block = self._new_block(storage, stream)
        block.nbytes = storage.nbytes()
        self.allocated[stream] = self.allocated.get(stream, 0) + block.nbytes
        self.peak[stream] = max(self.peak.get(stream, 0), self.allocated[stream])
        time = stream.clock[stream]
        block.accesses = [Access(0, storage.nbytes(), True, stream, time, f"allocation [{place()}]")]

    def free(self, key: int, block: Block | None = None) -> None:
        """The storage has gone, or has given its memory back."""
        if block is None or self._blocks.get(key) is block:
            block = self._blocks.pop(key, None)
            if block is not None and block.stream is not None:
                self.allocated[block.stream] = self.allocated.get(block.stream, 0) - block.nbytes
                self._freed.setdefault(block.stream, []).append(block)


def has_memory(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta


_LIBRARY = tuple(f"{ROOT}/{name}/" for name in ("sdp4bit", *ADAPTERS))


@cache
def is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARY)


@cache
def _shown(filename: str) -> str:
    """Return what a place calls a file; empty for one that it leaves out."""
    if is_library(filename):
        return filename.removeprefix(f"{ROOT}/")
    named = "_fully_shard/" in filename or "megatron/" in filename or "stream_scen" in filename
    return filename.rpartition("/")[2] if named else ""


def place() -> str:
    """Return the lines of the library, or else of FSDP2, Megatron-Core and the tests, that are being run."""
    lines: list[str] = []
    others: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(lines) < 3:
        filename = frame.f_code.co_filename
        name = _shown(filename)
        if name:
            found = lines if is_library(filename) else others
            if len(found) < 3:
                found.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines or others)
