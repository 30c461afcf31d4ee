"""FSDP2 with quantized communication on a CUDA device that is not there: where tensors are, who waits for it.

    python -m tests.engines.fsdp2.fake_device LIBRARY

trains on FakeTensors, which have a device, a type and a shape, but no data, and prints what it saw as JSON.
LIBRARY is fake_device.cpp, compiled. Streams and events do nothing here: races and order are not looked at.
"""

from __future__ import annotations

import ctypes
import sys

if __name__ == "__main__":
    # Before torch, whose registries take what they meet first.
    LIBRARY = ctypes.CDLL(sys.argv[1])

import contextlib
import copy
import json
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # defines collectives of FakeTensors
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sdp4bit
from sdp4bit.collectives import process_groups
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.engines import measures
from sdp4bit.engines.fsdp2.hooks import AllGatherHook, ReduceScatterHook

RANKS, RANKS_PER_NODE, STEPS, WIDTH = 4, 2, 4, 32
AUDIT_INTERVAL = 3
CUDA = torch.device("cuda", 0)


class Waits:
    """Places at which the host has waited for the device."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self._seen = 0

    def add(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack()[:-2] if "/torch/" not in f.filename]
        here = [f"{Path(f.filename).name}:{f.lineno} ({f.name})" for f in reversed(frames[-3:])]
        self.places.append(f"{what} at {' < '.join(here)}")

    def take(self) -> list[str]:
        """Return the places since the last call."""
        below = LIBRARY.fake_device_waits() - self._seen
        self._seen += below
        places, self.places = self.places + ["through torch's interface to devices"] * below, []
        return places


WAITS = Waits()


class Stream:
    """A stream that has always done everything."""

    device, priority = CUDA, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = id(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)

    def wait_event(self, event: Event) -> None:
        assert event.recorded

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        WAITS.add("Stream.synchronize")


class Event:
    """An event that has passed when it is looked at for the second time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.recorded, self._looks = False, 0

    def record(self, stream: Stream | None = None) -> None:
        self.recorded, self._looks = True, 0

    def wait(self, stream: Stream | None = None) -> None:
        assert self.recorded

    def query(self) -> bool:
        self._looks += 1
        return not self.recorded or self._looks > 1

    def synchronize(self) -> None:
        WAITS.add("Event.synchronize")


def install_device() -> None:
    """torch.cuda describes one device, with streams and events that do nothing.

    It goes on saying that there is none: FakeTensors would put numbers from the host on a real one.
    """
    streams = [Stream()]

    def current_stream(*_: Any) -> Stream:
        # FakeTensorMode sets this in the thread that enters it. Backward has a thread of its own, where FSDP2
        # comes here before it calls a hook.
        torch._C._set_only_lift_cpu_tensors(True)
        return streams[-1]

    @contextlib.contextmanager
    def inside(stream: Stream | None) -> Iterator[None]:
        streams.append(streams[-1] if stream is None else stream)
        try:
            yield
        finally:
            streams.pop()

    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, inside
    cuda.current_stream = cuda.default_stream = torch.accelerator.current_stream = current_stream
    cuda._lazy_init = lambda: None
    cuda.current_device, cuda.device_count = lambda: 0, lambda: RANKS_PER_NODE
    cuda.set_device, cuda.is_current_stream_capturing = lambda *_: None, lambda: False
    cuda.synchronize = lambda *_: WAITS.add("torch.cuda.synchronize")
    # The device counts as initialized from now on; until then nobody waits for it.
    torch.accelerator.synchronize()


def install_ranks() -> None:
    """This process is rank 0 of 4; the others say what it says."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())

    def gather_objects(objects: list[Any], mine: Any, group: Any = None) -> None:
        objects[:] = [copy.copy(mine) for _ in objects]

    dist.all_gather_object = gather_objects
    # A number that the ranks agree on, once per attached model, without a real tensor to read it from.
    numbers = count()
    process_groups._agreed_number = lambda group: next(numbers)
    # Picks what is finite of what has arrived on the host: nothing has.
    measures.total_measures = lambda squares: measures.NOTHING_MEASURED


class Watch(TorchDispatchMode):
    """Notes operators that wait for the device, and looks at the tensors of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[str] = []
        self._pinned: dict[int, Tensor] = {}
        """Tensors in pinned memory, which they keep, by their storage."""

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_device = [each for each in tensors if each.device.type == "cuda"]
        name = func._schema.name
        if func.namespace == "c10d":
            self.collectives.append(f"{name.removeprefix('c10d::')} {tensors[0].dtype}")
            # Flags on which the ranks agree travel between hosts.
            device = torch.device("cpu") if tensors[0].dtype == torch.int32 else CUDA
            for tensor in tensors:
                assert tensor.device == device and tensor.is_contiguous(), (name, tensor)
            if name.endswith("coalesced_"):  # which torch has no definition of for FakeTensors
                return FakeWork().boxed()
        if tensors and torch.Tag.data_dependent_output in func.tags:
            # What the number would be nobody knows; all are the same.
            if on_device:
                WAITS.add(name)
            return _one(tensors[0].dtype) if name == "aten::_local_scalar_dense" else True
        if on_device and torch.Tag.dynamic_output_shape in func.tags:
            WAITS.add(name)
            if name == "aten::nonzero":
                return on_device[0].new_empty((1, on_device[0].dim()), dtype=torch.int64)
        result = func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self._pinned[result.untyped_storage()._cdata] = result
        if name in ("aten::copy_", "aten::_to_copy"):
            target, source = (args[0], args[1]) if name == "aten::copy_" else (result, args[0])
            host = [each for each in (target, source) if each.device.type == "cpu"]
            if len(host) == 1:
                non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
                if not non_blocking or not self.is_pinned(host[0]):
                    WAITS.add(f"{name} from {source.device.type} to {target.device.type}")
        return result


def _one(dtype: torch.dtype) -> float | int | bool:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def held_by(*roots: Any) -> list[Tensor]:
    """Return the tensors that objects of the library refer to, through whatever they hold."""
    found: list[Tensor] = []
    seen: set[int] = set()
    left = list(roots)
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list | tuple | set):
            left += each
        elif type(each).__module__.startswith("sdp4bit."):
            left += vars(each).values() if hasattr(each, "__dict__") else []
            left += [getattr(each, name) for name in getattr(type(each), "__slots__", ())]
    return found


def places_of(tensors: list[Tensor]) -> dict[str, int]:
    """Return how many tensors are where."""
    return dict(Counter(str(each.device) for each in tensors))


class Training:
    """A model with quantized communication, and what a step and an evaluation do."""

    def __init__(self, *, replica: str, audited: bool) -> None:
        # A mesh's table of ranks is a tensor of the host.
        with unset_fake_temporarily():
            mesh = init_device_mesh("cuda", (RANKS,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with torch.device("cuda"):
            self.model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))
        for block in self.model[:2]:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.comm = sdp4bit.quantize_communication(
            self.model,
            topology=RANKS_PER_NODE,
            config=sdp4bit.SDP4BitConfig(
                weights=sdp4bit.WeightConfig(replica=replica),  # type: ignore[arg-type]
                gradients=sdp4bit.GradientConfig(min_numel=0),
                telemetry=sdp4bit.TelemetryConfig(interval=1),
                audit=sdp4bit.AuditConfig(interval=AUDIT_INTERVAL) if audited else None,
            ),
        )
        # The flags that come back have no values here: what this rank has seen has been seen by all.
        state = self.comm._state
        reduce_flags = state._reduced_flags

        def own_flags(comms: Sequence[Any]) -> list[list[int]]:
            reduce_flags(comms)
            return [[int(comm.has_stepped), 0, 0, 0, 0, 0] for comm in comms]

        state._reduced_flags = own_flags
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.data = torch.randn(8, WIDTH, device="cuda")

    def step(self) -> None:
        self.model(self.data).float().square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(self.data).float().square().mean()


def train(watch: Watch, *, replica: str, audited: bool) -> dict[str, Any]:
    """Return what some steps and evaluations did."""
    run = Training(replica=replica, audited=audited)
    WAITS.take()
    steps, collectives = [], []
    for _ in range(STEPS):
        watch.collectives.clear()
        run.step()
        gradients = [parameter.grad.to_local() for parameter in run.model.parameters()]
        # What a training program asks for after each step.
        run.comm.stats()
        run.comm.group_stats()
        steps.append(WAITS.take())
        collectives.append(sorted(watch.collectives))
        run.optimizer.zero_grad()
    evaluations = []
    for _ in range(2):
        run.evaluate()
        evaluations.append(WAITS.take())
    held = held_by(run.comm)
    rows = [comm.replica.rows for comm in run.comm._state.groups if comm.replica is not None]
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    result = {
        "waits of each step": steps,
        "waits of each evaluation": evaluations,
        "collectives of each step": collectives,
        "replicas": places_of(rows),
        "held": places_of(held),
        "held on the host": [
            f"{x.dtype} {'' if watch.is_pinned(x) else 'not '}pinned" for x in held if x.device.type == "cpu"
        ],
        "gradients": places_of(gradients),
        "optimizer": places_of([each.to_local() for each in states if isinstance(each, DTensor)]),
        "sampled step": run.comm.stats()["sampled_step"],
    }
    run.comm.remove()
    return result


FAULTS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "truth": lambda x: bool(x.isfinite().all()),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "copy to the host": lambda x: x.cpu(),
    "copy to memory that is not pinned": lambda x: torch.empty(x.shape).copy_(x, non_blocking=True),
    "number to the device": lambda x: torch.tensor([1.0], device=x.device),
    "device": lambda _: torch.cuda.synchronize(),
    "accelerator": lambda _: torch.accelerator.synchronize(),
    "event": lambda _: torch.cuda.current_stream().record_event().synchronize(),
    "stream": lambda _: torch.cuda.current_stream().synchronize(),
}


def mutate(hook: Any) -> dict[str, Any]:
    """Return how many waits are seen of each fault, put one after another into a hook for a step."""
    run = Training(replica="node", audited=False)
    run.step()
    original = hook.__call__
    waits = dict.fromkeys(FAULTS, 0)
    threads = set()

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        threads.add("main" if threading.current_thread() is threading.main_thread() else "other")
        for name, fault in FAULTS.items():
            WAITS.take()
            fault(kwargs["input_tensor"])
            waits[name] += len(WAITS.take())
        return original(self, *args, **kwargs)

    hook.__call__ = faulty
    try:
        run.step()
    finally:
        hook.__call__ = original
    return {"waits": waits, "threads": sorted(threads)}


def misplace() -> str:
    """Return the error of a run whose messages are in the memory of the host."""
    messages = Scratch.messages
    run = Training(replica="node", audited=False)
    run.step()
    Scratch.messages = lambda self, *args, **kwargs: messages(  # type: ignore[method-assign]
        self, *args, **{**kwargs, "device": torch.device("cpu")}
    )
    try:
        run.step()
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Scratch.messages = messages  # type: ignore[method-assign]


def main() -> None:
    install_device()
    install_ranks()
    with FakeTensorMode(allow_non_fake_inputs=True), Watch() as watch:
        runs = {
            f"{replica}, {audit}": train(watch, replica=replica, audited=audit == "audited")
            for replica in ("node", "full")
            for audit in ("not audited", "audited")
        }
        faults = {hook.__name__: mutate(hook) for hook in (AllGatherHook, ReduceScatterHook)}
        print(json.dumps({"runs": runs, "faults": faults, "misplaced": misplace()}))


if __name__ == "__main__":
    main()
