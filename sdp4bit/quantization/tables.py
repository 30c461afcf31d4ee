"""Tables: the calls of an operator on all sections of a row, recorded once and run by one call of the host.

A collective records its calls with the ordinary operators' arguments. Message buffers stay where they are.
Stand-ins without memory represent the other tensors, which differ in every step, and a run passes these. A
table runs call by call the first time. Then the back end packs it, if it can: on CPUs into one block of
parameters, on GPUs into launches for all sections of a kind.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from sdp4bit.profiling import profiler_range
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import KeySeries, RoundingKey

P = ParamSpec("P")
T = TypeVar("T")


def stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, strides and dtype without memory, to record calls with."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class View(NamedTuple):
    """A view of a tensor that each run passes."""

    tensor: int  # its index
    offset: int  # from its first value
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the view of the tensor that was passed."""
        base = tensors[self.tensor]
        return base.as_strided(self.shape, self.stride, base.storage_offset() + self.offset)


class Call(NamedTuple):
    """A recorded call of an operator."""

    operator: str
    arguments: Mapping[str, Any]
    """By name; the first one is passed by position. Keys of the random bits have a source."""

    def bind(self, call: int, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Return the arguments of a run: its tensors, and the keys of the call with this number."""
        bound = dict(self.arguments)
        for name, each in bound.items():
            if isinstance(each, View):
                bound[name] = each.of(tensors)
            elif isinstance(each, RoundingKey | KeySeries):
                bound[name] = each.of_call(call)
        return bound

    @property
    def layouts(self) -> list[MessageLayout]:
        """The layouts of its messages."""
        return [each for each in self.arguments.values() if isinstance(each, MessageLayout)]


def _identity(argument: object) -> object:
    if not isinstance(argument, Tensor):
        return argument
    # A table of blocks is never written again. If it has been made twice, the record keeps the first one.
    place = None if argument.dtype is torch.int64 else argument.data_ptr()
    return place, argument.shape, argument.stride(), argument.dtype


@cache
def _signature(operator: Callable[..., None]) -> inspect.Signature:
    return inspect.signature(operator)


def record(operator: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs) -> Call:
    """Record a call of an operator of `ops` instead of running it."""
    return Call(operator.__name__, _signature(operator).bind(*args, **kwargs).arguments)


class Recording(threading.local, Generic[T]):
    """Work that the calling thread notes instead of doing it; None if it does it."""

    noted: list[T] | None = None

    def of(self, operator: Callable[..., None], arguments: Mapping[str, Any]) -> list[T]:
        """Return the work of an operator, which is not done."""
        first, *others = arguments.items()
        self.noted = noted = list[T]()
        try:
            operator(first[1], **dict(others))
        finally:
            self.noted = None
        return noted


class Packed(Protocol):
    """A table in the form in which a back end runs it."""

    def run(self, call: int, tensors: Sequence[Tensor]) -> None:
        """Run the calls of a table."""

    def check(self, call: int, tensors: Sequence[Tensor]) -> None:
        """Fail unless the run that has just ended used the parameters of the operators themselves."""


class Table:
    """Recorded calls of one operator on the sections of a row.

    No call reads the output of another, so their order does not matter.
    """

    def __init__(self, calls: Sequence[Call], *, moving: Sequence[Tensor]) -> None:
        """Make a table.

        Args:
            moving: the stand-ins of the tensors that a run passes, in this order.
        """
        places = {each.untyped_storage()._cdata: index for index, each in enumerate(moving)}
        self.calls = [_with_views(each, places) for each in calls]
        self._packed: dict[str, Packed | None] = {}
        """By back end, from the second run on; None if it runs the calls one by one."""
        self._known: str | None = None

    def run(self, call: int, *tensors: Tensor) -> None:
        """Run the calls.

        Args:
            call: number of the collective's run, from which random bits follow.
            tensors: the tensors that move; they must have the dtypes and strides of their stand-ins.
        """
        backend = ops.forced_backend()
        packed = self._packed.get(backend)
        if packed is None and backend not in self._packed:
            packed = self._pack(backend, tensors)
        if packed is None:
            self._run_one_by_one(call, tensors)
            return
        if is_checked := ops.is_checked():
            for each in self.calls:
                ops.CHECKS[each.operator](**each.bind(call, tensors))
        with profiler_range(f"sdp4bit::{self.calls[0].operator}"):
            packed.run(call, tensors)
        if is_checked:
            packed.check(call, tensors)

    def _run_one_by_one(self, call: int, tensors: Sequence[Tensor]) -> None:
        for each in self.calls:
            first, *others = each.bind(call, tensors).items()
            name = each.operator
            run = getattr(ops, name) if ops.is_checked() else partial(ops.run_unchecked, name)
            run(first[1], **dict(others))

    def _pack(self, backend: str, tensors: Sequence[Tensor]) -> Packed | None:
        """Pack the calls at their second run: rows whose lengths change in every step have no second one."""
        if self._known != backend:
            self._known = backend
            return None
        layouts = [each for call in self.calls for each in call.layouts]
        pack = getattr(ops.backend_of(tensors[0].device, layouts), "pack", None)
        self._packed[backend] = pack(self.calls, tensors) if pack and self.calls else None
        return self._packed[backend]

    def describe(self) -> list[tuple[object, ...]]:
        """Return a description that a second record of the same calls must equal."""
        return [(each.operator, *map(_identity, each.arguments.values())) for each in self.calls]


def _with_views(call: Call, places: Mapping[int, int]) -> Call:
    """Replace views of stand-ins, which have no memory."""
    arguments = {
        name: View(
            places[each.untyped_storage()._cdata],
            int(each.storage_offset()),
            (*each.shape,),
            (*each.stride(),),
        )
        if isinstance(each, Tensor) and each.is_meta
        else each
        for name, each in call.arguments.items()
    }
    return call._replace(arguments=arguments)


_PLACES = ("blocks", "stride")
"""Arguments that may differ in a launch: tables of blocks, and the distance between the pieces of a row."""


def launches(calls: Sequence[Call]) -> list[list[Call]]:
    """Return the calls in groups that can share a launch: they differ in lengths, places and keys only."""
    kinds: dict[Hashable, list[Call]] = {}
    for call in calls:
        kind = tuple(_kind(name, each) for name, each in call.arguments.items())
        kinds.setdefault(kind, []).append(call)
    return list(kinds.values())


def _kind(name: str, argument: Any) -> Hashable:
    if name in _PLACES:
        return argument is None
    if isinstance(argument, View):
        return View, argument.tensor
    if isinstance(argument, MessageLayout):
        return argument.format.name, argument.group_size, argument.parts
    if isinstance(argument, Tensor):
        return int(argument.untyped_storage()._cdata)
    if isinstance(argument, RoundingKey):
        return argument.dither, argument.sender
    kind: Hashable = KeySeries if isinstance(argument, KeySeries) else argument
    return kind
