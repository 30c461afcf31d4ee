"""One rank of a job on GPUs, simulated in a process without one; see `stream_simulator` for what is found.

Operators are seen by a TorchDispatchMode. A TorchFunctionMode tells the library, and only the library, that
tensors are on "cuda", so that it takes the branches of a GPU; FSDP2 finds the streams in torch.cpu.
Collectives go to a back end of torch.distributed that plays one rank: it does as if all ranks held the same,
sums nothing, uses streams as NCCL's does, and notes every call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from sdp4bit.engines.fsdp2.view import FSDPView
from sdp4bit.quantization import ops, reference
from sdp4bit.quantization.tables import Call, launches
from tests.engines.stream_simulator import (
    CPU,
    CUDA,
    Collective,
    Event,
    Simulator,
    Stream,
    has_memory,
    is_library,
    place,
    running,
    start,
)

_WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2"}
"""Operators that give the host a value, or a tensor whose size depends on values."""
_NOT_WRITTEN = ("empty", "new_empty", "lift_fresh")
"""Operators whose result is memory without contents, or what it was."""


class _Operators(TorchDispatchMode):
    """Every operator is an operation on the current stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # comes back with the local tensors
        result = func(*args, **kwargs)
        namespace, _, name = func._schema.name.partition("::")
        reads, writes, is_view = _operands(func, args, kwargs)
        if name == "set_" or (is_view and not writes):
            return result
        inputs = [tensor for tensor in (*reads, *writes) if has_memory(tensor)]
        places = {running().is_on_host(tensor) for tensor in inputs}
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in _tensors(result):
            if has_memory(tensor) and tensor.untyped_storage()._cdata not in known:
                running().allocate(tensor, on_host=all(places) if places else running().allocates_on_host)
                writes.append(tensor)
        if namespace == "_c10d_functional" or name.startswith(_NOT_WRITTEN):
            return result  # the back end has seen the collective
        indices = args[1] if name in ("index", "index_put", "index_put_") else []
        if name in _WAITS or any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(indices)):
            running().host_reads(reads[0], name)
        running().launch(name, reads=reads, writes=writes)
        if name == "copy_" and len(places) > 1 and not (args[2:] or kwargs.get("non_blocking")):
            running().host_waits_for(running().stream.clock, "a copy between host and device")
        return result


class Kernels:
    """The library's kernels: one operation on the current stream for each call of an operator."""

    def __getattr__(self, name: str) -> Any:
        def launch(first: Tensor, **named: Any) -> None:
            self.launch(name, [(first, named)])

        return launch

    def pack(self, calls: Sequence[Call], tensors: Sequence[Tensor]) -> PackedTable:
        """One operation for the calls that the back end of a GPU launches together."""
        return PackedTable(self, launches(calls))

    @staticmethod
    def launch(name: str, calls: Sequence[tuple[Tensor, dict[str, Any]]]) -> None:
        """Run an operator on several sections in one operation."""
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for first, named in calls:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                getattr(reference, name)(first, **named)
            written = [named["replica" if name == "dequantize_add" else "out"], named.get("nonfinite")]
            written += [named.get("own")] if name == "dequantize_reduce_quantize" else []
            writes += [each for each in written if each is not None]
            tensors = [first, *(each for each in named.values() if isinstance(each, Tensor))]
            reads += [each for each in tensors if not any(each is one for one in writes)]
        running().launch(name, reads=reads, writes=writes)


class PackedTable:
    """A table whose calls of a kind are one operation."""

    def __init__(self, kernels: Kernels, kinds: list[list[Call]]) -> None:
        self._kernels, self._kinds = kernels, kinds

    def run(self, call: int, tensors: Sequence[Tensor]) -> None:
        for kind in self._kinds:
            name = kind[0].operator
            getattr(self._kernels, name)  # which tests count
            bound = [tuple(each.bind(call, tensors).items()) for each in kind]
            self._kernels.launch(name, [(each[0][1], dict(each[1:])) for each in bound])

    def check(self, call: int, tensors: Sequence[Tensor]) -> None:
        """Nothing is packed."""


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    # Most arguments are numbers.
    nested = tree_leaves(value) if isinstance(value, list | tuple | dict) else ()
    return [leaf for leaf in nested if isinstance(leaf, Tensor)]


@cache
def _arguments(func: Any) -> list[tuple[str, bool, bool]]:
    """Return of each argument of an operator its name, whether it is written, and whether it has an alias."""
    return [
        (each.name, bool(each.alias_info and each.alias_info.is_write), each.alias_info is not None)
        for each in func._schema.arguments
    ]


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor], bool]:
    """Return what an operator reads, what it writes, and whether its result is a view of what it reads."""
    if func._schema.name == "fsdp::all_gather_copy_in":  # the schema does not say what it writes
        sources, target, _, numel, rank = args
        return sources, [target.narrow(0, numel * rank, numel)], False
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    is_view = False
    for index, (name, is_written, has_alias) in enumerate(_arguments(func)):
        tensors = _tensors(args[index] if index < len(args) else kwargs.get(name))
        if is_written:
            writes += tensors
        else:
            reads += tensors
            is_view = is_view or bool(tensors and has_alias)
    return reads, writes, is_view


_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor, torch.arange)


class _OnCUDA(TorchFunctionMode):
    """The library sees CUDA tensors; what it asks for on CUDA it gets on the CPU, and known as such."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            kwargs = dict(kwargs)
            with self:  # which is left while it handles a call, and hooks call the library
                return torch.autograd.backward(*args, kwargs.pop("gradient"), **kwargs)
        if func in (Tensor.tolist, Tensor.numpy, Tensor.cpu):
            running().host_reads(args[0], func.__name__)
        if not is_library(sys._getframe(1).f_code.co_filename):
            return func(*args, **kwargs)
        if func == _DEVICE:
            return CPU if running().is_on_host(args[0]) else CUDA
        kwargs = dict(kwargs)
        if kwargs.get("device") == "meta":  # the stand-ins of a record
            return func(*args, **kwargs)
        # FSDP2 asks the library for memory on what it takes for the device: the host has to be named.
        devices = [v for v in (*args, kwargs.get("device")) if isinstance(v, torch.device | str)]
        is_pinned = kwargs.pop("pin_memory", False)
        wants_device = bool(devices) and devices != ["cpu"] and not is_pinned
        if func is Tensor.cpu or (func is Tensor.to and devices):
            args = (_moved(args[0], to_host=not wants_device), *args[1:])
        args = [CPU if isinstance(v, torch.device) else v for v in args]
        if "device" in kwargs:
            kwargs["device"] = CPU
        with mock.patch.object(running(), "allocates_on_host", func in _FACTORIES and not wants_device):
            result = func(*args, **kwargs)
            if func is torch.tensor:
                running().allocate(result, on_host=running().allocates_on_host)
        if func is torch.tensor and wants_device:
            running().host_waits_for(running().stream.clock, "torch.tensor, a copy to the device")
        return result


def _moved(tensor: Tensor, *, to_host: bool) -> Tensor:
    if running().is_on_host(tensor) == to_host:
        return tensor
    with mock.patch.object(running(), "allocates_on_host", to_host):
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copy.copy_(tensor)


_resize = torch.UntypedStorage.resize_


def _resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """FSDP2 frees and allocates the memory of unsharded parameters by the size of their storage."""
    before = storage.size()
    result = _resize(storage, size)
    if size == 0:
        running().free(storage._cdata)
    elif before == 0:
        running().allocate(torch.empty(0, dtype=torch.uint8).set_(storage), on_host=False)
    return result


# -- collectives -------------------------------------------------------------------------------------


ASYNCHRONOUS = SimpleNamespace(asyncOp=True)
"""Options of a call that is given none, as torch 2.9 calls a coalesced all-gather."""


class _Work(dist._Work):  # type: ignore[misc,name-defined]
    """An asynchronous collective; as with NCCL, its tensors are kept until somebody waits."""

    def __init__(self, event: Event, *tensors: Tensor) -> None:
        super().__init__()
        self._event = event
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        if not running().leaves_out("Work.wait"):
            running().stream.wait(self._event.clock)
            self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return self._event.query()


class _Group(dist.ProcessGroup):
    """A communicator. Synchronous calls run on the current stream, asynchronous ones on its own."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._stream: Stream | None = None

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def _run(self, kind: str, outputs: Any, inputs: Any, options: Any, *more: Any) -> _Work:
        """All tensors of the call have been sent or received: `outputs` come from ranks like this one."""
        tensors = [*outputs, *inputs]
        for tensor in tensors:
            if not tensor.is_contiguous() or tensor.dtype != tensors[0].dtype:
                raise ValueError(f"{kind}: {tensor.shape} {tensor.stride()} {tensor.dtype}")
        name, ranks = self.group_name, tuple(dist.get_process_group_ranks(self))
        alike = (
            kind,
            tensors[0].dtype,
            *(tuple(t.numel() for t in each) for each in (outputs, inputs)),
            *more,
        )
        running().collectives.append(Collective((name, ranks), alike, place()))
        stream = running().stream
        if options.asyncOp:
            self._stream = self._stream or Stream(name=f"the stream of communicator {name}")
            self._stream.wait_stream(stream)
            stream = self._stream
        with _disable_current_modes(), torch.no_grad():
            for output, input in zip(outputs, inputs, strict=True):
                if output.data_ptr() != input.data_ptr() or output.numel() != input.numel():
                    # Of n equal rows; or the first of n rows.
                    count = max(output.numel(), input.numel()) // max(1, min(output.numel(), input.numel()))
                    source = input.reshape(-1)[: output.numel()].clone()
                    output.view(-1).copy_(source.repeat(count) if output.numel() > input.numel() else source)
        if not all(map(running().is_on_host, (*inputs, *outputs))):  # else over gloo, and done
            running().launch(kind, reads=inputs, writes=outputs, on=stream)
        return _Work(stream.record_event(), *tensors)

    def _run_on_device(self, kind: str, output: Tensor, input: Tensor, options: Any, *more: Any) -> _Work:
        """Weights, gradients and messages stay on the device; objects and flags travel by other calls."""
        if running().is_on_host(output) or running().is_on_host(input):
            raise ValueError(f"{kind} of memory of the host: {output.dtype} {output.shape}, {input.shape}")
        return self._run(kind, [output], [input], options, *more)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> _Work:
        if output.numel() != self.size() * input.numel():
            raise ValueError(f"all-gather of {input.numel()} into {output.numel()} over {self.size()} ranks")
        return self._run_on_device("all_gather", output, input, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> _Work:
        if input.numel() != self.size() * output.numel():
            raise ValueError(
                f"reduce-scatter of {input.numel()} into {output.numel()} over {self.size()} ranks"
            )
        return self._run_on_device("reduce_scatter", output, input, opts, str(opts.reduceOp.op))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Any, input_sizes: Any, opts: Any
    ) -> _Work:
        if output.shape[0] % self.size() or output.numel() != input.numel():
            raise ValueError(f"all-to-all of {input.shape} into {output.shape} over {self.size()} ranks")
        return self._run_on_device("all_to_all", output, input, opts, tuple(output_sizes), tuple(input_sizes))

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Work:
        return self._run("all_reduce", tensors, tensors, opts, str(opts.reduceOp.op))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:
        return self._run("broadcast", tensors, tensors, opts, opts.rootRank)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> _Work:
        """The form of lists, which objects are gathered by."""
        return self._run("all_gather", *zip(*((o, inputs[0]) for o in outputs[0]), strict=True), opts)

    def barrier(self, opts: Any) -> _Work:
        running().host_waits_for(running().stream.clock, "barrier")
        return _Work(running().stream.record_event())

    def _coalesced(self, run: Any, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> _Work:
        return [run(*pair, opts) for pair in zip(outputs, inputs, strict=True)][-1]

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = ASYNCHRONOUS) -> _Work:
        return self._coalesced(self.all_gather_single, outputs, inputs, opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> _Work:
        return self._coalesced(self.reduce_scatter_single, outputs, inputs, opts)

    # Their names before torch 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
    )
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


BACKEND = "simulated"


def _register() -> None:
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(
            BACKEND, lambda store, rank, size, timeout: _Group(rank, size), devices=["cpu"]
        )


_new_group = dist.new_group


def _new_simulated_group(*args: Any, backend: Any = None, **options: Any) -> Any:
    return _new_group(*args, **options)


def _no_override(_: object) -> bool:
    return False


@contextmanager
def simulate(
    *, rank: int = 0, world: int = 4, sees_operators: bool = True, left_out: str = ""
) -> Iterator[Simulator]:
    """Inside the block this process is one rank of a job on GPUs; its process group is exchanged for that.

    Args:
        sees_operators: whether faults are looked for, and not only collectives noted, which is faster.
            Collectives must be noted inside the block, as otherwise nothing was simulated.
        left_out: one of `Simulator.ordering`; the call does nothing.
    """
    _register()
    start(Simulator(left_out=left_out))
    if dist.is_initialized():
        dist.barrier()  # others may still be connecting to this one
        dist.destroy_process_group()
    dist.init_process_group(BACKEND, rank=rank, world_size=world, store=dist.HashStore())

    @contextmanager
    def on(stream: Stream | None) -> Iterator[None]:
        with stream or nullcontext():
            yield

    handle = {
        "Stream": Stream,
        "Event": Event,
        "stream": on,
        "current_stream": lambda _=None: running().stream,
        "synchronize": lambda _=None: running().host_waits_for(running().launched, "synchronize"),
    }

    def default_stream(_: Any = None) -> Stream:
        return running().current[0]

    with ExitStack() as stack:
        stack.callback(dist.init_process_group, "gloo", rank=0, world_size=1, store=dist.HashStore())
        stack.callback(dist.destroy_process_group)
        for module in (torch.cpu, torch.cuda):
            stack.enter_context(mock.patch.multiple(module, **handle))
        # These would wait for other ranks, as groups on gloo would.
        for module_name in ("agreement", "arrival"):
            name = f"sdp4bit.engines.{module_name}.wait_for_ranks"
            stack.enter_context(mock.patch(name, return_value=None))
        stack.enter_context(mock.patch("torch.distributed.new_group", _new_simulated_group))
        stack.enter_context(mock.patch("torch.cuda.default_stream", side_effect=default_stream))
        stack.enter_context(mock.patch("torch.accelerator.current_stream", handle["current_stream"]))
        # Backward as a whole is no call that a mode has to handle; nor is a collective, which may call us.
        for module in ("autograd", "distributed.distributed_c10d"):  # no Mock, which would keep the tensors
            stack.enter_context(mock.patch(f"torch.{module}.has_torch_function", _no_override))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", _resized))
        stack.enter_context(mock.patch.object(FSDPView, "device", CUDA))
        kernels = Kernels()
        # Not a mock, which would keep the tensors of all calls.
        stack.enter_context(mock.patch.object(ops, "backend_of", lambda *_: kernels))  # noqa: PT008
        stack.enter_context(_OnCUDA())
        if sees_operators:
            stack.enter_context(_Operators())
        yield running()
        assert running().collectives, "no collective ran on the simulated device"
