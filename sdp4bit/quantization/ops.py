"""The five fused operators, registered with torch.library, and their dispatch to a back end.

Every operator writes into a caller's buffer and returns nothing, so that buffers can be kept from step to
step. Tensors on the CPU are served by numba if it is installed and by the reference otherwise; CUDA tensors
by Triton. All back ends give the same bytes, so ranks may differ in what they use.

`k0` and `k1` come from :func:`sdp4bit.quantization.random.derive_keys`; they are ignored unless `stochastic`.
Bits are 4, 8, or 32 for unquantized fp32; group sizes are multiples of 32.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from sdp4bit.quantization import reference
from sdp4bit.quantization.checks import (
    check_device,
    check_keys,
    check_messages,
    check_numbering,
    check_signs,
    check_values,
)
from sdp4bit.quantization.layout import message_layout

BackendName = Literal["auto", "reference", "numba", "triton"]

_REQUIREMENT = {"numba": "numba", "triton": "triton"}
_MODULE = {"numba": "sdp4bit.kernels.cpu.backend", "triton": "sdp4bit.kernels.triton.backend"}
_AUTOMATIC = {"cpu": "numba", "cuda": "triton"}

_loaded: dict[str, ModuleType] = {}
_forced: list[BackendName] = []


def _is_available(name: str) -> bool:
    return all(importlib.util.find_spec(part) is not None for part in (_REQUIREMENT[name], _MODULE[name]))


def _load(name: str) -> ModuleType:
    if name not in _loaded:
        # numba starts its threads on import and with them sets the number of torch's, if both use one OpenMP.
        threads = torch.get_num_threads()
        _loaded[name] = importlib.import_module(_MODULE[name])
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
    return _loaded[name]


def _automatic_backend(device_type: str) -> ModuleType:
    key = f"auto:{device_type}"
    if key not in _loaded:
        name = _AUTOMATIC.get(device_type)
        if name is not None and _is_available(name):
            _loaded[key] = _load(name)
        else:
            wanted = "" if name is None else f"; `pip install {_REQUIREMENT[name]}` brings the fast ones"
            warnings.warn(
                f"sdp4bit: no fast kernels for {device_type} tensors, using the plain PyTorch reference, "
                f"which is many times slower{wanted}",
                stacklevel=3,
            )
            _loaded[key] = reference
    return _loaded[key]


def _backend(tensor: Tensor) -> ModuleType:
    name = _forced[-1] if _forced else "auto"
    if name == "reference":
        return reference
    if name == "auto":
        return _automatic_backend(tensor.device.type)
    return _load(name)


def backend_name(device_type: str) -> str:
    """Return what serves tensors of a device type now: "reference", "numba" or "triton"."""
    if _forced and _forced[-1] != "auto":
        return _forced[-1]
    module = _automatic_backend(device_type)
    return next((name for name, path in _MODULE.items() if path == module.__name__), "reference")


@contextmanager
def use_backend(name: BackendName) -> Iterator[None]:
    """Inside the block every operator runs on the named back end (for tests and measurements).

    Raises:
        ValueError: an unknown name.
        ModuleNotFoundError: its package is not installed.
    """
    if name not in ("auto", "reference", *_MODULE):
        raise ValueError(f"unknown back end {name!r}: use auto, reference, {', '.join(_MODULE)}")
    if name in _MODULE:
        _load(name)
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


# Plain definitions cost a few microseconds a call; torch.library.custom_op costs a hundred.
_library = torch.library.Library("sdp4bit", "DEF")


def _register(schema: str, check: Callable[..., None]) -> None:
    """Define an operator for all devices; its tensors are checked alike when traced and when run."""
    name = schema.partition("(")[0]
    _library.define(schema + " -> ()", tags=[torch.Tag.needs_fixed_stride_order])
    arguments = getattr(torch.ops.sdp4bit, name).default._schema.arguments
    parameters = [argument.name for argument in arguments]
    written = next(i for i, argument in enumerate(arguments) if argument.is_write)
    required = [i for i, argument in enumerate(arguments) if str(argument.type) == "Tensor"]

    def check_all(*args: Any) -> None:
        for i in required:
            if args[i] is None:  # which the dispatcher lets through
                raise ValueError(f"{name}: {parameters[i]} must be a tensor, got None")
        check(*args)

    def run(*args: Any) -> None:
        check_all(*args)
        # The dispatcher leaves out trailing arguments that have their default.
        getattr(_backend(args[written]), name)(**dict(zip(parameters, args, strict=False)))

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sdp4bit::{name}", check_all)


def _check_subtract_quantize(
    main: Tensor,
    replica: Tensor | None,
    out: Tensor,
    bits: int,
    group_size: int,
    stochastic: bool,
    k0: int,
    k1: int,
) -> None:
    if main.dim() != 1 or (replica is not None and replica.shape != main.shape):
        other = None if replica is None else list(replica.shape)
        raise ValueError(f"main and replica must be 1-D of equal length, got {list(main.shape)} and {other}")
    if not main.is_contiguous() or (replica is not None and not replica.is_contiguous()):
        raise ValueError("main and replica must be contiguous")
    layout = message_layout(numel=main.shape[0], bits=bits, group_size=group_size)
    if out.dim() != 1:
        raise ValueError(f"out must be uint8 [{layout.nbytes}], got {out.dtype} {list(out.shape)}")
    check_messages("out", out.unsqueeze(0), 1, layout)
    check_values("main", main, out)
    if replica is not None:
        check_values("replica", replica, out)
    if stochastic:
        check_keys(k0, k1)


def subtract_quantize(
    main: Tensor,
    replica: Tensor | None,
    out: Tensor,
    bits: int,
    group_size: int,
    stochastic: bool,
    k0: int,
    k1: int,
) -> None:
    """The message `out` carries main - replica (paper algorithm 2), or main if there is no replica.

    Args:
        main: [n], fp32, bf16 or fp16.
        replica: [n], any of these types, or None; the difference is taken in fp32.
        out: uint8 [nbytes] of MessageLayout(numel=n).

    Raises:
        ValueError: shapes or types that do not fit; so for all operators.
    """
    torch.ops.sdp4bit.subtract_quantize(main, replica, out, bits, group_size, stochastic, k0, k1)


def _check_dequantize_add(messages: Tensor, replica: Tensor, bits: int, group_size: int, *_: Any) -> None:
    if replica.dim() != 2 or (replica.shape[1] > 1 and replica.stride(1) != 1):
        raise ValueError(f"replica must be 2-D with contiguous rows, got {list(replica.shape)}")
    layout = message_layout(numel=replica.shape[1], bits=bits, group_size=group_size)
    check_messages("messages", messages, replica.shape[0], layout)
    check_values("replica", replica, messages)


def dequantize_add(messages: Tensor, replica: Tensor, bits: int, group_size: int, accumulate: bool) -> None:
    """Row i of the replica has message i added, or is replaced by it; fp32 sum, rounded to nearest even.

    Args:
        messages: uint8 [k, nbytes] of MessageLayout(numel=n).
        replica: [k, n], fp32, bf16 or fp16, changed in place; rows contiguous.
        accumulate: True adds (differences), False replaces (weights themselves).
    """
    torch.ops.sdp4bit.dequantize_add(messages, replica, bits, group_size, accumulate)


def _check_hadamard_quantize(
    values: Tensor,
    out: Tensor,
    bits: int,
    group_size: int,
    hadamard: bool,
    stochastic: bool,
    k0: int,
    k1: int,
    first: int,
    row_stride: int,
    signs: int = 0,
) -> None:
    if values.dim() != 3 or (values.shape[2] > 1 and values.stride(2) != 1):
        raise ValueError(f"values must be 3-D with contiguous rows, got {list(values.shape)}")
    destinations, parts, numel = values.shape
    layout = message_layout(numel=numel, bits=bits, group_size=group_size, parts=parts)
    check_messages("out", out, destinations, layout)
    check_values("values", values, out)
    check_signs(signs, hadamard)
    if stochastic:
        check_keys(k0, k1)
        check_numbering(first, row_stride, destinations * parts, numel)


def hadamard_quantize(
    values: Tensor,
    out: Tensor,
    bits: int,
    group_size: int,
    hadamard: bool,
    stochastic: bool,
    k0: int,
    k1: int,
    first: int,
    row_stride: int,
    signs: int = 0,
) -> None:
    """Message i of `out` carries values[i], transformed if `hadamard` (paper algorithm 3, steps 1 and 2).

    Args:
        values: [destinations, parts, n], fp32, bf16 or fp16; any strides with contiguous rows, so that a
            transposed view of the gradient is sent without a copy.
        out: uint8 [destinations, nbytes] of MessageLayout(numel=n, parts=parts).
        first: number of the first value of a row, for its random bits; a multiple of 32.
        row_stride: how far apart in numbers consecutive rows begin; a multiple of 32.
        signs: 32 bits; before the transform, element k of each block of 32 changes its sign if bit k is set.
    """
    torch.ops.sdp4bit.hadamard_quantize(
        values, out, bits, group_size, hadamard, stochastic, k0, k1, first, row_stride, signs
    )


def _check_dequantize_reduce_quantize(
    messages: Tensor,
    out: Tensor,
    numel: int,
    bits_in: int,
    group_size_in: int,
    bits_out: int,
    group_size_out: int,
    stochastic: bool,
    k0: int,
    k1: int,
    first: int,
    row_stride: int,
) -> None:
    if out.dim() != 2:
        raise ValueError(f"out must be 2-D, one message per row, got {list(out.shape)}")
    parts = out.shape[0]
    received = message_layout(numel=numel, bits=bits_in, group_size=group_size_in, parts=parts)
    sent = message_layout(numel=numel, bits=bits_out, group_size=group_size_out)
    check_messages("messages", messages, None, received)
    check_messages("out", out, parts, sent)
    check_device("messages", messages, out)
    if stochastic:
        check_keys(k0, k1)
        check_numbering(first, row_stride, parts, numel)


def dequantize_reduce_quantize(
    messages: Tensor,
    out: Tensor,
    numel: int,
    bits_in: int,
    group_size_in: int,
    bits_out: int,
    group_size_out: int,
    stochastic: bool,
    k0: int,
    k1: int,
    first: int,
    row_stride: int,
) -> None:
    """Message i of `out` carries part i of the sum of all messages (paper algorithm 3, steps 4 and 5).

    Args:
        messages: uint8 [k, nbytes] of MessageLayout(numel=numel, parts=parts), one per rank of the node.
        out: uint8 [parts, nbytes] of MessageLayout(numel=numel), one per node.
        numel: values in a row.
        first: number of the first value of a row, for its random bits; a multiple of 32.
        row_stride: how far apart in numbers consecutive rows begin; a multiple of 32.
    """
    torch.ops.sdp4bit.dequantize_reduce_quantize(
        messages,
        out,
        numel,
        bits_in,
        group_size_in,
        bits_out,
        group_size_out,
        stochastic,
        k0,
        k1,
        first,
        row_stride,
    )


def _check_dequantize_reduce_hadamard(
    messages: Tensor, out: Tensor, bits: int, group_size: int, hadamard: bool, _: float, signs: int = 0
) -> None:
    if out.dim() != 1 or not out.is_contiguous():
        raise ValueError(f"out must be 1-D and contiguous, got {list(out.shape)}")
    layout = message_layout(numel=out.shape[0], bits=bits, group_size=group_size)
    check_messages("messages", messages, None, layout)
    check_values("out", out, messages)
    check_signs(signs, hadamard)


def dequantize_reduce_hadamard(
    messages: Tensor,
    out: Tensor,
    bits: int,
    group_size: int,
    hadamard: bool,
    multiplier: float,
    signs: int = 0,
) -> None:
    """`out` holds the sum of all messages, transformed if `hadamard`, times the multiplier.

    Paper algorithm 3, steps 7 and 8. The transform is unnormalized: fold 1/32 into the multiplier, which
    is applied once, in fp32.

    Args:
        messages: uint8 [k, nbytes] of MessageLayout(numel=n).
        out: [n], fp32, bf16 or fp16; contiguous.
        signs: those of the values that were sent; they change back after the transform.
    """
    torch.ops.sdp4bit.dequantize_reduce_hadamard(messages, out, bits, group_size, hadamard, multiplier, signs)


_register(
    "subtract_quantize(Tensor main, Tensor? replica, Tensor(a!) out, int bits, int group_size, "
    "bool stochastic, int k0, int k1)",
    _check_subtract_quantize,
)
_register(
    "dequantize_add(Tensor messages, Tensor(a!) replica, int bits, int group_size, bool accumulate)",
    _check_dequantize_add,
)
_register(
    "hadamard_quantize(Tensor values, Tensor(a!) out, int bits, int group_size, bool hadamard, "
    "bool stochastic, int k0, int k1, int first, int row_stride, int signs=0)",
    _check_hadamard_quantize,
)
_register(
    "dequantize_reduce_quantize(Tensor messages, Tensor(a!) out, int numel, int bits_in, int group_size_in, "
    "int bits_out, int group_size_out, bool stochastic, int k0, int k1, int first, int row_stride)",
    _check_dequantize_reduce_quantize,
)
_register(
    "dequantize_reduce_hadamard(Tensor messages, Tensor(a!) out, int bits, int group_size, bool hadamard, "
    "float multiplier, int signs=0)",
    _check_dequantize_reduce_hadamard,
)
