"""The fused operators: argument checks and dispatch to a back end.

Every operator writes to the caller's buffer and returns nothing, so that buffers can be reused. CPU tensors
use numba if it is installed and the reference otherwise, CUDA tensors use Triton. All back ends produce the
same bytes, so ranks may use different ones. They define functions with the same names and arguments.

Functions of this module check their arguments at every call. :func:`run_unchecked` checks nothing, for
callers that have checked once.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import ModuleType
from typing import Any, Literal, ParamSpec

import torch
from torch import Tensor

from sdp4bit.addresses import install
from sdp4bit.profiling import profiler_range
from sdp4bit.quantization import reference
from sdp4bit.quantization.checks import (
    check_blocks,
    check_clip,
    check_device,
    check_dither,
    check_index,
    check_layout,
    check_messages,
    check_own,
    check_rounding,
    check_values,
)
from sdp4bit.quantization.formats import BLOCK
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import KeySeries, RoundingKey
from sdp4bit.warn import warn_user

BackendName = Literal["auto", "reference", "numba", "triton"]

_EXTRA = {"numba": "cpu", "triton": "cuda"}
"""The extra that installs a back end's package."""
_MODULE = {"numba": "sdp4bit.kernels.cpu.backend", "triton": "sdp4bit.kernels.triton.backend"}
_AUTOMATIC = {"cpu": "numba", "cuda": "triton"}

_loaded: dict[str, ModuleType] = {}
_forced: list[BackendName] = []
_is_checked = False
"""Whether tables check the arguments of their operators."""


def _is_available(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _load(name: str) -> ModuleType:
    if name not in _loaded:
        if not _is_available(name):
            raise ModuleNotFoundError(
                f"the back end {name!r} needs the package {name}: {install(_EXTRA[name])}",
                name=name,
            )
        # On import numba starts its threads, which changes torch's number of threads if both share OpenMP.
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
            wanted = "" if name is None else f"; install them: {install(_EXTRA[name])}"
            _warn_on_host(
                f"no fast kernels for {device_type} tensors, using the plain PyTorch reference, "
                f"which is many times slower{wanted}"
            )
            _loaded[key] = reference
    return _loaded[key]


def backend_of(device: torch.device, layouts: Iterable[MessageLayout]) -> ModuleType:
    """Return the back end for these layouts on a device; one that packs tables has a function `pack`."""
    name = forced_backend()
    if name == "reference":
        return reference
    module = _automatic_backend(device.type) if name == "auto" else _load(name)
    for layout in layouts:
        if module is not reference and layout.format.name not in module.FORMATS:
            _warn_of_format(module.__name__, layout.format.name)
            return reference
    return module


@cache
def _warn_of_format(module: str, name: str) -> None:
    _warn_on_host(
        f"{module} has no format {name}, using the plain PyTorch reference, which is many times slower; "
        "add it to FORMATS there"
    )


def _warn_on_host(text: str) -> None:
    # The processes of a machine share their packages, so its first one speaks; without a launcher, each does.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        warn_user(text)


def backend_name(device_type: str) -> str:
    """Return the back end of a device type: "reference", "numba" or "triton"."""
    if _forced and _forced[-1] != "auto":
        return _forced[-1]
    module = _automatic_backend(device_type)
    return next((name for name, path in _MODULE.items() if path == module.__name__), "reference")


def compile_seconds() -> float:
    """Return the time in which this process has compiled CPU kernels or has waited for them, in seconds."""
    return _loaded["numba"].compile_seconds() if "numba" in _loaded else 0.0


@contextmanager
def use_backend(name: BackendName) -> Iterator[None]:
    """Run every operator inside the block on the named back end (for tests and measurements).

    Raises:
        ValueError: the name is unknown.
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


def run_unchecked(name: str, *args: Any, **kwargs: Any) -> None:
    """Run an operator of the back end for its tensors and layouts, as a named range of a profile.

    CPU kernels take raw addresses, so wrong arguments access foreign memory.
    """
    given = (*args, *kwargs.values())
    # All tensors are on one device: the checks require it.
    device = next(each.device for each in given if isinstance(each, Tensor))
    layouts = [each for each in given if isinstance(each, MessageLayout)]
    with profiler_range(f"sdp4bit::{name}"):
        getattr(backend_of(device, layouts), name)(*args, **kwargs)


P = ParamSpec("P")
CHECKS: dict[str, Callable[..., None]] = {}
"""The checks of each operator's arguments, by its name."""


def operator(check: Callable[P, None]) -> Callable[P, None]:
    """Make an operator from a function that has its signature and checks its arguments.

    The operator runs the checks, then the function of this name of the back end for its tensors and layouts.
    """

    @wraps(check)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        check(*args, **kwargs)
        run_unchecked(check.__name__, *args, **kwargs)

    CHECKS[check.__name__] = check
    return run


@operator
def subtract_quantize(
    main: Tensor,
    *,
    replica: Tensor | None,
    out: Tensor,
    layout: MessageLayout,
    clip: float = 1.0,
    blocks: Tensor | None = None,
    nonfinite: Tensor | None = None,
) -> None:
    """Quantize main - replica (paper algorithm 2), or main if there is no replica, into a message.

    Args:
        main: [n], fp32, bf16 or fp16; contiguous.
        replica: [n], any of these types, or None; the difference is taken in fp32.
        out: uint8 [nbytes] of the layout.
        layout: of n values, one part. Values are rounded to nearest.
        clip: fraction of a group's largest magnitude that the largest code represents, 0.1 to 1. Larger
            values saturate. It is not sent, because the scale includes it.
        blocks: as in hadamard_quantize, of `main` and of the replica.
        nonfinite: bool scalar; set to True if a group of the message is not finite.

    Raises:
        ValueError: shapes, dtypes, devices or numbers do not match; this applies to all operators.
    """
    if main.dim() != 1 or (replica is not None and replica.shape != main.shape):
        other = None if replica is None else list(replica.shape)
        raise ValueError(f"main and replica must be 1-D of equal length, got {list(main.shape)} and {other}")
    if not main.is_contiguous() or (replica is not None and not replica.is_contiguous()):
        raise ValueError("main and replica must be contiguous")
    check_layout("layout", layout, numel=main.shape[0] if blocks is None else layout.numel)
    if out.dim() != 1:
        raise ValueError(f"out must be uint8 [{layout.nbytes}], got {out.dtype} {list(out.shape)}")
    check_messages("out", out.unsqueeze(0), count=1, layout=layout)
    check_values("main", main, messages=out)
    if replica is not None:
        check_values("replica", replica, messages=out)
    check_clip(clip)
    if blocks is not None:
        check_blocks(blocks, layout=layout, messages=out)
    if nonfinite is not None:
        if nonfinite.dtype != torch.bool or nonfinite.dim():
            raise ValueError(
                f"nonfinite must be a bool scalar, got {nonfinite.dtype} {list(nonfinite.shape)}"
            )
        check_device("nonfinite", nonfinite, messages=out)


@operator
def dequantize_add(
    messages: Tensor,
    *,
    replica: Tensor,
    layout: MessageLayout,
    accumulate: bool,
    blocks: Tensor | None = None,
) -> None:
    """Add message i to row i of the replica or replace the row by it; fp32 sum, rounded to nearest even.

    Args:
        messages: uint8 [k, nbytes] of the layout.
        replica: [k, n], fp32, bf16 or fp16, changed in place; rows contiguous.
        layout: of n values, one part.
        accumulate: True adds differences, False replaces weights.
        blocks: as in hadamard_quantize, of each row; the rest of it is not changed.
    """
    if replica.dim() != 2 or (replica.shape[1] > 1 and replica.stride(1) != 1):
        raise ValueError(f"replica must be 2-D with contiguous rows, got {list(replica.shape)}")
    check_layout("layout", layout, numel=replica.shape[1] if blocks is None else layout.numel)
    check_messages("messages", messages, count=replica.shape[0], layout=layout)
    check_values("replica", replica, messages=messages)
    if blocks is not None:
        check_blocks(blocks, layout=layout, messages=messages)


@operator
def hadamard_quantize(
    values: Tensor,
    *,
    out: Tensor,
    layout: MessageLayout,
    hadamard: bool,
    rounding: RoundingKey | None,
    skip: int | None = None,
    blocks: Tensor | None = None,
) -> None:
    """Quantize values[i], transformed first (paper algorithm 3, steps 1 and 2), into message i.

    Args:
        values: [destinations, parts, n], fp32, bf16 or fp16; contiguous rows with any strides between them,
            such as a transposed view of the gradient.
        out: uint8 [destinations, nbytes] of the layout.
        layout: of n values, any number of parts.
        hadamard: transform blocks of 32 values first.
        rounding: key of stochastic rounding or of subtractive dither, which the receiver needs too; None
            rounds to nearest.
        skip: index of a message that is not written, nor its values read.
        blocks: int64 [padded_numel / 32], the blocks of a row in a longer row of `values`, which may be
            anywhere in it: 64 times the place of the first value, plus the number of values. The others of
            the 32 are zeros. None for rows as they are.
    """
    if values.dim() != 3 or (values.shape[2] > 1 and values.stride(2) != 1):
        raise ValueError(f"values must be 3-D with contiguous rows, got {list(values.shape)}")
    destinations, parts, numel = values.shape
    check_layout("layout", layout, numel=layout.numel if blocks is not None else numel, parts=parts)
    check_messages("out", out, count=destinations, layout=layout)
    check_values("values", values, messages=out)
    check_rounding(rounding, rows=destinations * parts, numel=layout.numel)
    check_index("skip", skip, count=destinations)
    if blocks is not None:
        check_blocks(blocks, layout=layout, messages=out)


@operator
def dequantize_reduce_quantize(
    messages: Tensor,
    *,
    received: MessageLayout,
    out: Tensor,
    sent: MessageLayout,
    rounding: RoundingKey | None,
    dither: RoundingKey | None,
    skip: int | None = None,
    own: Tensor | None = None,
    blocks: Tensor | None = None,
    hadamard: bool = False,
    multiplier: float = 1.0,
) -> None:
    """Sum messages and quantize the sums into messages (paper algorithm 3, steps 4 and 5).

    Args:
        messages: uint8 [k, nbytes] of the layout `received`, one per rank of the last hop.
        received: of n values, any number of parts.
        out: uint8 [m, nbytes] of the layout `sent`; part p of the sums is part p // m of message p % m.
        sent: of n values; m times its parts are those of `received`.
        rounding: as in hadamard_quantize.
        dither: key of messages with subtractive dither, None for others. Message i is from sender i, whatever
            the key's own sender, and part i is row i.
        skip: index of a message that is not written.
        own: fp32 [n], contiguous; receives part `skip` of the sum like the output of
            dequantize_reduce_hadamard, with these `hadamard` and `multiplier`. Messages then have one part.
        blocks: as in hadamard_quantize, places in `own`, which is longer.
    """
    if out.dim() != 2:
        raise ValueError(f"out must be 2-D, one message per row, got {list(out.shape)}")
    parts, destinations = received.parts, received.parts // sent.parts
    if parts % sent.parts:
        raise ValueError(f"the {sent.parts} parts of sent do not divide the {parts} of received")
    check_layout("received", received, numel=sent.numel, parts=parts)
    check_messages("messages", messages, count=None, layout=received)
    check_messages("out", out, count=destinations, layout=sent)
    check_device("messages", messages, messages=out)
    check_rounding(rounding, rows=parts, numel=sent.numel)
    check_dither(dither, rows=parts, numel=received.numel)
    check_index("skip", skip, count=destinations)
    if own is not None:
        check_own(own, numel=sent.numel if blocks is None else own.numel(), messages=messages)
        if own.dtype != torch.float32:
            raise ValueError(f"own must be fp32, got {own.dtype}")
        if blocks is not None:
            check_blocks(blocks, layout=sent, messages=messages)
        if skip is None or sent.parts != 1:
            raise ValueError(
                f"own needs skip, the part that it receives, and messages of one part, got skip={skip} and "
                f"{sent.parts} parts"
            )


@operator
def dequantize_reduce_hadamard(
    messages: Tensor,
    *,
    out: Tensor,
    layout: MessageLayout,
    hadamard: bool,
    multiplier: float,
    dither: RoundingKey | None,
    part: int = 0,
    skip: int | None = None,
    own: Tensor | None = None,
    own_multiplier: float = 1.0,
    blocks: Tensor | None = None,
) -> None:
    """Sum a part of messages, transform the sum and multiply it (paper algorithm 3, steps 7 and 8).

    The transform is unnormalized, so include 1/32 in the multiplier, which is applied once, in fp32.

    Args:
        messages: uint8 [k, nbytes] of the layout.
        out: [n], fp32, bf16 or fp16; contiguous.
        layout: of n values, any number of parts.
        hadamard: whether the sent values are transformed.
        dither: as in dequantize_reduce_quantize; the part is row 0.
        skip: index of a message that is not added.
        own: of the shape of `out`, fp32, bf16 or fp16; contiguous. The result is added to it in fp32; may be
            `out`.
        own_multiplier: is applied to `own` first, in fp32.
        blocks: as in hadamard_quantize, places in `out` and in `own`; the rest of `out` is not changed.
    """
    if out.dim() != 1 or not out.is_contiguous():
        raise ValueError(f"out must be 1-D and contiguous, got {list(out.shape)}")
    numel = out.shape[0] if blocks is None else layout.numel
    check_layout("layout", layout, numel=numel, parts=layout.parts)
    check_index("part", part, count=layout.parts)
    check_messages("messages", messages, count=None, layout=layout)
    check_values("out", out, messages=messages)
    check_dither(dither, rows=1, numel=layout.numel)
    check_index("skip", skip, count=messages.shape[0])
    if own is not None:
        check_own(own, numel=out.shape[0], messages=messages)
    if blocks is not None:
        check_blocks(blocks, layout=layout, messages=messages)


@operator
def dequantize_reduce_pieces(
    messages: Tensor,
    *,
    out: Tensor,
    layout: MessageLayout,
    pieces: int,
    stride: int,
    hadamard: bool,
    multiplier: float,
    dither: KeySeries | None,
) -> None:
    """Sum the messages of each piece of a row, transform and multiply the sums, and write the row.

    A piece begins at a multiple of the stride and ends with the next one, the last one after `layout.numel`
    values.

    Args:
        messages: uint8 [k * pieces, nbytes] of the layout; message i is for piece i % pieces.
        out: [(pieces - 1) * stride + layout.numel], fp32, bf16 or fp16; contiguous.
        layout: of at least `stride` values, one part.
        stride: a multiple of 32.
        hadamard: as in dequantize_reduce_hadamard.
        multiplier: as in dequantize_reduce_hadamard.
        dither: keys of messages with subtractive dither, None for others. The messages of a piece are from
            senders 0 to k - 1.
    """
    if pieces < 1 or stride < 0 or stride % BLOCK or stride > layout.numel:
        raise ValueError(
            f"pieces={pieces} must be at least 1, and stride={stride} a multiple of {BLOCK} from 0 to "
            f"{layout.numel}"
        )
    if out.dim() != 1 or not out.is_contiguous() or len(out) != (pieces - 1) * stride + layout.numel:
        raise ValueError(
            f"out must be contiguous [{(pieces - 1) * stride + layout.numel}], got {list(out.shape)}"
        )
    check_layout("layout", layout, numel=layout.numel)
    check_messages("messages", messages, count=None, layout=layout)
    if len(messages) % pieces:
        raise ValueError(f"messages must be a multiple of the {pieces} pieces, got {len(messages)}")
    check_values("out", out, messages=messages)


@operator
def add_checksum(values: Tensor, *, out: Tensor) -> None:
    """Add to `out`, int64 [], a number that any single flipped bit of values changes (`checksum.py`).

    Args:
        values: any shape, strides and dtype; read once.
    """
    if out.dtype != torch.int64 or out.shape != () or out.device != values.device:
        raise ValueError(
            f"out must be int64 [] on {values.device}, got {out.dtype} {list(out.shape)} on {out.device}"
        )


def checksum(values: Tensor) -> Tensor:
    """Return the checksum of values, int64 [] on their device; see :func:`add_checksum`."""
    out = torch.zeros((), dtype=torch.int64, device=values.device)
    add_checksum(values, out=out)
    return out


def forced_backend() -> BackendName:
    """Return the name of the innermost `use_backend`; "auto" without any."""
    return _forced[-1] if _forced else "auto"


def is_checked() -> bool:
    """Return whether operators check their arguments at every call; see :func:`checked`."""
    return _is_checked


@contextmanager
def checked() -> Iterator[None]:
    """Make tables check the arguments of their operators inside the block, in all threads (for tests)."""
    global _is_checked
    previous, _is_checked = _is_checked, True
    try:
        yield
    finally:
        _is_checked = previous
