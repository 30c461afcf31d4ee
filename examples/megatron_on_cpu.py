"""Lets Megatron-Core train on a CPU over gloo: to try things and to test its logic, never for anything else.

Streams and events do nothing, so neither overlap nor ordering between streams is there, and no NCCL.
install() goes before the first import of Megatron-Core, in a process that does nothing else afterwards.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class Nothing:
    """A stream, an event or the properties of a device, of which only these attributes are looked at."""

    device, device_index, stream_id, cuda_stream = CPU, 0, 0, 0
    major, minor, multi_processor_count, name, total_memory = 8, 0, 1, "none", 1 << 34

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or Nothing()

    def query(self) -> bool:
        return True

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    return CPU if isinstance(value, str) and value.startswith("cuda") else value


class OnCPU(TorchFunctionMode):
    """Sends what asks for a CUDA device to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: _on_cpu(v) if name == "device" else v for name, v in (kwargs or {}).items()}
        return func(*(_on_cpu(v) if isinstance(v, str | torch.device) else v for v in args), **named)


_type = torch.Tensor.type
_all_reduce = dist.all_reduce


def _cuda_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Tensor.type(), by whose text the distributed optimizer tells parameters apart."""
    if dtype is None:
        # Under OnCPU the built-in method comes here a second time.
        return "torch.cuda." + _type(self).removeprefix("torch.").removeprefix("cuda.")
    return _type(self, dtype.replace("cuda.", "") if isinstance(dtype, str) else dtype, *args, **kwargs)


def _all_reduce_with_mean(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any
) -> Any:
    """all_reduce() that knows AVG, as NCCL's does and gloo's does not."""
    if op != dist.ReduceOp.AVG:
        return _all_reduce(tensor, op, *args, **kwargs)
    _all_reduce(tensor, dist.ReduceOp.SUM, *args, **kwargs)
    group = kwargs.get("group", args[0] if args else None)
    return tensor.div_(dist.get_world_size(group))


def _returning(value: Any) -> Callable[..., Any]:
    """A new function each time: torch.compile's tables refuse one function under two names."""
    return lambda *_, **__: value


@cache
def install() -> None:
    """This process takes its CPU for a CUDA device from now on."""
    values = {
        "current_device": CPU,
        "device_count": 1,
        "get_device_properties": Nothing(),
        "get_device_capability": (8, 0),
        "is_current_stream_capturing": False,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        **dict.fromkeys(("synchronize", "empty_cache", "set_device", "manual_seed"), None),
        **dict.fromkeys(("current_stream", "default_stream"), Nothing()),
    }
    for name, value in values.items():
        setattr(torch.cuda, name, _returning(value))
    torch.cuda.Stream = torch.cuda.Event = Nothing  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.Tensor.type = _cuda_type  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    dist.all_reduce = torch.distributed.all_reduce = _all_reduce_with_mean
    OnCPU().__enter__()

    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # Both generators are one here, which Megatron-Core warns of in every layer.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state" not in record.getMessage())
    if not hasattr(moe_utils, "te_general_gemm"):  # read, but not defined, without Transformer Engine
        moe_utils.te_general_gemm = None
