"""Run ranks as threads of one process, so that several can share one GPU, which NCCL and gloo cannot do.

torch's tests have a process group of threads (`multi_threaded_pg`): a collective copies between the tensors
of its ranks. That group orders the threads. `ThreadGroup` also orders their CUDA streams, as NCCL does, and
reports a missing rank instead of waiting for it forever.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from sdp4bit.collectives.errors import ranks_in_words
from sdp4bit_lab.common.ranks import Ranks

T = TypeVar("T")
BACKEND = "threads"
_c10d: Any = torch._C._distributed_c10d
_ProcessLocalGroup: Any = threaded.ProcessLocalGroup
_POLL = 0.2


@dataclass(kw_only=True)
class _Meeting:
    """One collective that ranks are joining; ranks are those of its group."""

    kinds: dict[int, str] = field(default_factory=dict)
    data: dict[int, Any] = field(default_factory=dict)
    arrivals: dict[int, torch.cuda.Event | None] = field(default_factory=dict)
    """Last work of each rank's stream before the collective; None on a CPU."""
    end: torch.cuda.Event | None = None
    is_done: bool = False
    failure: str = ""


class _World:
    """State that the threads share."""

    def __init__(self, *, device: torch.device, timeout: timedelta) -> None:
        self.device, self.timeout = device, timeout
        self.changed = threading.Condition()
        self.meetings: dict[str, _Meeting] = {}
        """Collectives that not all ranks have joined, by the group's name."""
        self.messages: dict[tuple[str, int, int, int], deque[Tensor]] = {}
        """Sent and not yet received, by group, sender, receiver and tag."""
        self.ended: set[int] = set()
        """Global ranks that take part in no further collective."""
        self.streams: dict[str, torch.cuda.Stream] = {}
        """The stream of each communicator, by the group's name."""

    def end(self, rank: int) -> None:
        """End the waits for a rank."""
        with self.changed:
            self.ended.add(rank)
            self.changed.notify_all()

    def event(self) -> torch.cuda.Event | None:
        """Return an event after all work of the current stream; None on a CPU."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    @contextmanager
    def stream_after(self, name: str, events: Sequence[torch.cuda.Event | None]) -> Iterator[None]:
        """Make a communicator's stream current, after these events."""
        if self.device.type != "cuda":
            yield
            return
        stream = self.streams.get(name) or torch.cuda.Stream(self.device)
        self.streams[name] = stream
        for event in events:
            assert event is not None
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield

    def wait_for(self, is_over: Callable[[], bool], missing: Callable[[], list[int]], *, what: str) -> None:
        """Wait, with `changed` held, until a condition holds.

        Args:
            missing: returns the global ranks that are waited for.

        Raises:
            RuntimeError: one of them has ended, or the timeout has passed. The texts are those of gloo, which
                the library knows.
        """

        def is_hopeless() -> bool:
            return not self.ended.isdisjoint(missing())

        seconds = self.timeout.total_seconds()
        in_time = self.changed.wait_for(lambda: is_over() or is_hopeless(), seconds)
        if is_over():
            return
        if not in_time:
            raise RuntimeError(f"{what}: Timed out waiting {seconds:g} s for {ranks_in_words(missing())}")
        ended = sorted(self.ended.intersection(missing()))
        raise RuntimeError(f"{what}: Connection closed by peer: {ranks_in_words(ended)} ended")


_world: _World
"""Process-wide, because torch creates groups from a name."""


class _Work(dist._Work):  # type: ignore[misc,name-defined]
    """A collective that the host has issued; it keeps its tensors until somebody waits, like NCCL's."""

    def __init__(self, end: torch.cuda.Event | None, tensors: object) -> None:
        super().__init__()
        self._end, self._tensors = end, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the collective."""
        if self._end is not None:
            torch.cuda.current_stream(_world.device).wait_event(self._end)
        self._tensors = None
        return True

    def is_completed(self) -> bool:
        return self._end is None or bool(self._end.query())


class _Receipt(dist._Work):  # type: ignore[misc,name-defined]
    """A message on the CPU that arrives in wait(), because receives are posted before sends."""

    def __init__(self, output: Tensor, key: tuple[str, int, int, int], sender: int) -> None:
        super().__init__()
        self._output, self._key, self._sender = output, key, sender

    def wait(self, timeout: timedelta | None = None) -> bool:
        with _world.changed:
            queue = _world.messages.setdefault(self._key, deque())
            what = f"message of rank {self._sender}"
            _world.wait_for(lambda: bool(queue), lambda: [self._sender], what=what)
            self._output.copy_(queue.popleft())
        return True


class ThreadGroup(_ProcessLocalGroup):  # type: ignore[misc]
    """torch's process group of threads, with ordered streams, timeouts and point-to-point messages.

    1. A rank leaves its tensors and an event of its current stream.
    2. The last rank makes the communicator's stream wait for all events and copies on it.
    3. Every rank returns a work whose wait() makes the rank's current stream wait for the copies.
    """

    _name = ""

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        # Remembered, because torch asks for it again after it has removed the name from this table.
        self._name = str(self._world().pg_names.get(self, self._name))
        return self._name

    def _join(self, collective: Any, data: Any) -> _Work:
        name, rank, kind = self.group_name, self.rank(), type(collective).__name__
        members = dist.get_process_group_ranks(self)
        with _world.changed:
            meeting = _world.meetings.setdefault(name, _Meeting())
            meeting.kinds[rank], meeting.data[rank], meeting.arrivals[rank] = kind, data, _world.event()
            if len(meeting.kinds) == self.size():
                del _world.meetings[name]
                meeting.failure = self._work(collective, meeting, name)
                meeting.is_done = True
                _world.changed.notify_all()
            _world.wait_for(
                lambda: meeting.is_done,
                lambda: [member for r, member in enumerate(members) if r not in meeting.kinds],
                what=f"{kind} of {ranks_in_words(members)}",
            )
        if meeting.failure:
            raise RuntimeError(meeting.failure)
        return _Work(meeting.end, data)

    def _work(self, collective: Any, meeting: _Meeting, name: str) -> str:
        """Copy between the ranks' tensors; return the reason if that is impossible."""
        if len(set(meeting.kinds.values())) > 1:
            kinds = ", ".join(f"rank {rank}: {kind}" for rank, kind in sorted(meeting.kinds.items()))
            return f"ranks of a group call different collectives ({kinds})"
        try:
            with _world.stream_after(name, list(meeting.arrivals.values())):
                collective.work([meeting.data[rank] for rank in range(self.size())])
                meeting.end = _world.event()
        except Exception as error:  # all ranks raise it
            return f"{type(collective).__name__}: {type(error).__name__}: {error}"
        return ""

    # torch 2.13 renames the first one.
    def all_to_all_single(self, output: Any, input: Any, received: Any, sent: Any, opts: Any = None) -> Any:
        return self._join(threaded.AllToAllBase(), (output, input, received, sent))

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._join(threaded.AllToAll(), (outputs, inputs))

    def allreduce(self, tensor_list: Any, opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        return self._join(threaded.AllReduce(opts.reduceOp), tensor_list)

    allreduce_coalesced = allreduce

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._join(threaded.AllGather(), (outputs, inputs))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._join(threaded.ReduceScatter(opts.reduceOp), (outputs, inputs))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._join(threaded.Broadcast(opts.rootRank), tensors)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._join(threaded.Scatter(opts.rootRank), (outputs, inputs))

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._join(threaded.Gather(opts.rootRank), (outputs, inputs))

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> Any:
        # A copy, so that the sender does not wait for its receiver.
        message, key = tensors[0].clone(), (self.group_name, self.rank(), receiver, tag)
        with _world.changed:
            _world.messages.setdefault(key, deque()).append(message)
            _world.changed.notify_all()
        return _Work(None, None)

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> Any:
        members = dist.get_process_group_ranks(self)
        return _Receipt(tensors[0], (self.group_name, sender, self.rank(), tag), members[sender])


def _create_group(store: Any, rank: int, size: int, timeout: timedelta) -> ThreadGroup:
    group = ThreadGroup(rank, size)
    # Threads create groups independently; none may join a collective that others do not know.
    barrier: Any = dist.distributed_c10d._store_based_barrier
    barrier(rank, store, "", size, timeout)
    return group


if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(BACKEND, _create_group, devices=["cpu", "cuda"])


def run_on_threads(program: Callable[[Ranks], T], *, size: int, device: str, timeout: timedelta) -> list[T]:
    """Call a program on so many threads, each of them a rank; return their results in rank order.

    On a GPU each rank has its own compute stream, because the default stream would order the ranks' work.

    Args:
        device: "cpu", or "cuda" for the current GPU.
        timeout: timeout of collectives. A rank that ends early ends the waits of the others at once.

    Raises:
        BaseException: that of the rank that failed first.
    """
    global _world
    results: list[T | None] = [None] * size
    errors: list[BaseException] = []
    place = torch.device(device) if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    world = _World(device=place, timeout=timeout)
    _world, store = world, _c10d.HashStore()
    store.set_timeout(timeout)

    def run(rank: int) -> None:
        try:
            with _compute_stream(place):
                dist.init_process_group(BACKEND, rank=rank, world_size=size, store=store, timeout=timeout)
                try:
                    results[rank] = program(
                        Ranks(
                            rank=rank, world_size=size, local_rank=rank, local_world_size=size, device=place
                        )
                    )
                except BaseException as error:
                    errors.append(error)  # before it ends the waits of the others, which then fail, too
                finally:
                    world.end(rank)
                    dist.destroy_process_group()
        except BaseException as error:
            errors.append(error)
        finally:
            world.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    with _groups_of_threads():
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_POLL)  # in short waits, so that Ctrl-C is seen
    if errors:
        raise errors[0]
    return cast(list[T], results)


@contextmanager
def _groups_of_threads() -> Iterator[None]:
    """Make torch keep process groups by thread instead of by process."""
    # Every rank that joins prefixes the traceback of errors with its number.
    report = sys.excepthook
    # Names of groups are those of a thread.
    _c10d._set_thread_isolation_mode(True)
    installed = threaded._install_threaded_pg()  # kept referenced, because torch holds it weakly
    if not hasattr(installed, "comms"):
        installed.comms = []  # torch 2.11 reads it when a group is destroyed
    try:
        with _one_fake_mode():
            yield
    finally:
        threaded._uninstall_threaded_pg()
        sys.excepthook = report
        _c10d._set_thread_isolation_mode(False)
        del installed


@contextmanager
def _one_fake_mode() -> Iterator[None]:
    """Let DTensors infer shapes in one thread at a time, because torch's fake tensors are not thread-safe."""
    propagator: Any = ShardingPropagator
    lock = threading.RLock()
    if hasattr(propagator, "_fake_mode_lock"):  # for tests like this one
        with patch.object(propagator, "_fake_mode_lock", lock):
            yield
        return
    infer = propagator._propagate_tensor_meta_non_cached  # torch 2.11, which has no lock

    def infer_alone(*args: Any) -> Any:
        with lock:
            return infer(*args)

    with patch.object(propagator, "_propagate_tensor_meta_non_cached", infer_alone):
        yield


@contextmanager
def _compute_stream(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
