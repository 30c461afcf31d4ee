"""Calls of the operators that a back end must answer like the reference: any shape, every kind of trouble."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdp4bit.config import QUANTIZED_BITS
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import FULL_PRECISION, MessageLayout
from sdp4bit.quantization.random import RoundingKey, derive_keys
from sdp4bit_lab.selftest.kernel_buffers import (
    DTYPES,
    difference,
    guarded_messages,
    guarded_values,
    make_messages,
    make_special_values,
    make_values,
)

KEY = RoundingKey(*derive_keys(1234, 7))
DITHER = KEY._replace(dither=True)
ROUNDINGS = (None, KEY, DITHER._replace(sender=5))
DITHERS = (None, DITHER._replace(first=96, row_stride=32 * 555))
ALL_BITS = (*QUANTIZED_BITS, FULL_PRECISION)
CLIPS = (1.0, 0.6, 0.25)
_HOPS = (
    *((8, 4), (4, 8), (4, 4), (8, 8), (32, 8), (32, 4), (8, 32), (32, 32)),
    *((8, 3), (8, 2), (3, 2), (2, 3), (4, 2), (3, 4), (2, 8), (3, 32)),
)
"""Bits that come in and that go out."""


class KernelCase(NamedTuple):
    """One call of an operator."""

    operator: Callable[..., None]
    first: Tensor
    named: dict[str, Any]

    def __str__(self) -> str:
        named = {name: _text(value) for name, value in self.named.items()}
        listed = ", ".join(f"{name}={value}" for name, value in named.items())
        return f"{self.operator.__name__}({_text(self.first)}, {listed})"

    def difference(self, backend: ops.BackendName, device: torch.device) -> str | None:
        """Return how a back end differs from the reference; None if it does not."""
        return difference(self.operator, self.first, backend=backend, device=device, **self.named)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return str(value)


def _case(operator: Callable[..., None], first: Tensor, **named: Any) -> KernelCase:
    return KernelCase(operator, first, named)


class Shape(NamedTuple):
    """A group size and a row length, numbered to give each its own choice of other arguments."""

    number: int
    group_size: int
    numel: int

    def layout(self, bits: int, *, parts: int = 1, group_size: int | None = None) -> MessageLayout:
        """Return the layout of a message of these rows."""
        size = self.group_size if group_size is None else group_size
        return MessageLayout(numel=self.numel, bits=bits, group_size=size, parts=parts)

    def choose(self, *columns: tuple[Any, ...]) -> list[Any]:
        """Return one of each column, which run through their values at different paces."""
        return [column[self.number // pace % len(column)] for pace, column in enumerate(columns, start=1)]


# Group sizes: the defaults, the smallest, halves that begin within a block of 32 (32, 96, 160), more than
# a tile of the CPU (2048, 5120). Lengths: none, below, at and above a block; a tail of an odd and an even
# number of blocks; more than a tile.
_SIZES = [
    *((128, 0), (128, 1), (128, 31), (128, 32), (128, 33), (128, 128), (128, 128 + 64)),
    *((128, 3 * 128 + 96), (128, 128 * 17 + 64), (128, 4096 + 16)),
    *((32, 100), (32, 1024 + 100), (64, 64 * 5 + 32), (96, 96 * 3), (96, 96 + 50), (96, 96 * 25 + 50)),
    *((160, 160 * 2 + 96 + 7), (160, 160 * 8 + 96 + 7), (192, 192 * 2 + 64), (512, 512 + 480)),
    *((2048, 2048), (2048, 2048 * 2), (2048, 2048 + 96 + 5), (2048, 1000), (5120, 5120 + 160)),
]
SHAPES = [Shape(number, *size) for number, size in enumerate(_SIZES)]
LONG_SHAPES = [Shape(0, 8224, 8224 + 160), Shape(1, 16384, 9000)]
"""Groups that do not fit in the registers of a GPU's program."""


def subtract_quantize(shape: Shape) -> Iterator[KernelCase]:
    """Yield calls for rows of this shape; so do the others."""
    for bits in ALL_BITS:
        numel, layout = shape.numel, shape.layout(bits)
        dtype, replica_dtype = shape.choose(DTYPES, (torch.bfloat16, None, torch.float16, torch.float32))
        named = {"layout": layout, "clip": CLIPS[(shape.number + bits) % len(CLIPS)]}
        main = guarded_values(make_values(numel, seed=1, dtype=dtype), offset=numel % 3)
        replica = None if replica_dtype is None else make_values(numel, seed=2, dtype=replica_dtype)
        out = guarded_messages(1, layout)[0]
        yield _case(ops.subtract_quantize, main, replica=replica, out=out, **named)


def dequantize_add(shape: Shape) -> Iterator[KernelCase]:
    """See subtract_quantize."""
    for bits in ALL_BITS:
        layout = shape.layout(bits)
        accumulate, dtype, rows = shape.choose((True, False), DTYPES, (1, 3))
        values = make_values(rows, shape.numel, seed=4, dtype=dtype)
        replica = guarded_values(values, offset=shape.numel % 3)
        messages = make_messages(rows, layout, seed=3)
        named = {"layout": layout, "accumulate": accumulate}
        yield _case(ops.dequantize_add, messages, replica=replica, **named)


def hadamard_quantize(shape: Shape) -> Iterator[KernelCase]:
    """Yield calls on a transposed view: gradients lie as [parts, destinations, numel]."""
    for bits in ALL_BITS:
        layout = shape.layout(bits, parts=2)
        rounding, dtype = shape.choose(ROUNDINGS[::-1], DTYPES)
        values = make_values(2, 3, shape.numel, seed=5, dtype=dtype)
        for transform in (False, True):
            yield _case(
                ops.hadamard_quantize,
                guarded_values(values, offset=shape.numel % 3).transpose(0, 1),
                out=guarded_messages(3, layout),
                layout=layout,
                hadamard=transform,
                rounding=rounding and rounding._replace(first=32 * 3, row_stride=32 * 1000),
            )


def dequantize_reduce_quantize(shape: Shape) -> Iterator[KernelCase]:
    """See subtract_quantize."""
    for bits_in, bits_out in _HOPS:
        group_size_in, count, rounding, dither = shape.choose(
            (None, 96, 32, None, 160, 2048, 128, 512), (1, 2, 4, 16, 3, 17, 9, 0), ROUNDINGS[::-1], DITHERS
        )
        received = shape.layout(bits_in, parts=2, group_size=group_size_in)
        yield _case(
            ops.dequantize_reduce_quantize,
            make_messages(count, received, seed=6),
            received=received,
            out=guarded_messages(2, shape.layout(bits_out)),
            sent=shape.layout(bits_out),
            rounding=rounding and rounding._replace(first=64, row_stride=32 * 777),
            dither=dither,
        )


def dequantize_reduce_hadamard(shape: Shape) -> Iterator[KernelCase]:
    """See subtract_quantize."""
    for bits in ALL_BITS:
        layout = shape.layout(bits)
        transform, dtype, count, dither = shape.choose(
            (True, False), DTYPES, (2, 1, 4, 3, 0, 9, 16, 33), DITHERS
        )
        poison = torch.full((shape.numel,), float("nan"), dtype=dtype)
        yield _case(
            ops.dequantize_reduce_hadamard,
            make_messages(count, layout, seed=7),
            out=guarded_values(poison, offset=shape.numel % 3),
            layout=layout,
            hadamard=transform,
            multiplier=1 / 96,
            dither=dither,
        )


def long_groups() -> Iterator[KernelCase]:
    """Yield calls with groups of more values than a GPU's program holds."""
    for long in LONG_SHAPES:
        for bits in QUANTIZED_BITS:
            layout, numel, sent = long.layout(bits), long.numel, guarded_messages(1, long.layout(bits))
            written = {"out": sent, "layout": layout}
            main = make_values(numel, seed=4)
            for clip in CLIPS[:2]:
                named = written | {"out": sent[0], "clip": clip}
                yield _case(ops.subtract_quantize, main, replica=None, **named)
            for transform in (False, True):
                values = make_values(1, 1, numel, seed=13)
                yield _case(ops.hadamard_quantize, values, hadamard=transform, rounding=KEY, **written)
            received = long.layout(8, group_size=4096)
            named = {"received": received, "out": sent, "sent": layout, "rounding": KEY, "dither": DITHER}
            yield _case(ops.dequantize_reduce_quantize, make_messages(2, received, seed=17), **named)


def special_values() -> Iterator[KernelCase]:
    """Yield calls on zeros of both signs, NaN, infinities, subnormals, ties and the ends of the range."""
    for bits in ALL_BITS:
        for group_size in (64, 96):
            for dtype in (torch.float32, torch.bfloat16):
                main = make_special_values(group_size, seed=8, dtype=dtype)
                layout = MessageLayout(numel=main.numel(), bits=bits, group_size=group_size)
                out, replica = guarded_messages(1, layout), torch.zeros_like(main)
                for clip in CLIPS:
                    clipped: dict[str, Any] = {"out": out[0], "layout": layout, "clip": clip}
                    yield _case(ops.subtract_quantize, main, replica=replica, **clipped)
                for transform in (False, True):
                    for rounding in ROUNDINGS:
                        named: dict[str, Any] = {"hadamard": transform, "rounding": rounding}
                        yield _case(ops.hadamard_quantize, main[None, None], out=out, layout=layout, **named)


def special_scales() -> Iterator[KernelCase]:
    """Yield calls on messages whose scales are zeros, NaN, infinities and the ends of the range."""
    for bits in ALL_BITS:
        for dtype in DTYPES:
            replica = make_special_values(64, seed=9, dtype=dtype)
            layout = MessageLayout(numel=replica.numel(), bits=bits, group_size=64)
            messages = make_messages(3, layout, seed=10, special=True)
            for accumulate in (False, True):
                target: dict[str, Any] = {
                    "replica": replica[None],
                    "layout": layout,
                    "accumulate": accumulate,
                }
                yield _case(ops.dequantize_add, messages[:1], **target)
            for dither in DITHERS:
                for transform, multiplier in ((False, 1.0), (True, 0.1), (True, 2.0**-12)):
                    named: dict[str, Any] = {
                        "hadamard": transform,
                        "multiplier": multiplier,
                        "dither": dither,
                    }
                    named |= {"out": torch.empty_like(replica), "layout": layout}
                    yield _case(ops.dequantize_reduce_hadamard, messages, **named)


def special_sums() -> Iterator[KernelCase]:
    """Yield sums of messages with such scales."""
    for bits_in, bits_out in ((8, 4), (4, 8), (32, 8), (3, 2), (2, 3)):
        received = MessageLayout(numel=1280, bits=bits_in, group_size=32)
        sent = MessageLayout(numel=1280, bits=bits_out, group_size=64)
        messages = make_messages(2, received, seed=11, special=True)
        named = {"received": received, "out": guarded_messages(1, sent), "sent": sent}
        for rounding, dither in ((KEY, None), (DITHER, DITHER)):
            yield _case(ops.dequantize_reduce_quantize, messages, rounding=rounding, dither=dither, **named)


def scales_that_round_up() -> Iterator[KernelCase]:
    """Yield groups whose scale, before it is rounded up to bf16, ends in each of the bits around 0xFFFD."""
    for bits in QUANTIZED_BITS:
        candidates = (torch.arange(1 << 22, dtype=torch.int32) + 0x40400000).view(torch.float32)
        step = candidates * torch.tensor(1.0 / (2 ** (bits - 1) - 1), dtype=torch.float32)
        low = step.view(torch.int32) & 0xFFFF
        edges = [candidates[low == edge % 0x10000][:2] for edge in range(0xFFF8, 0x10008)]
        main = torch.zeros(32, 32)
        main[:, 3] = torch.cat(edges)
        main[:, 4] = -main[:, 3] / 3
        layout = MessageLayout(numel=1024, bits=bits, group_size=32)
        named = {"out": guarded_messages(1, layout)[0], "layout": layout}
        yield _case(ops.subtract_quantize, main.view(-1), replica=None, **named)


def ends_of_random_numbers() -> Iterator[KernelCase]:
    """Yield calls whose keys and counters are at the ends of their range."""
    for bits in QUANTIZED_BITS:
        layout = MessageLayout(numel=64, bits=bits, group_size=64, parts=2)
        values, out = make_values(1, 2, 64, seed=12), guarded_messages(1, layout)
        for k0, k1 in ((0xFFFFFFFF, 0x80000000), (0, 1)):
            for first, row_stride in ((0, 0), ((1 << 32) - 64, (1 << 32) - 32)):
                for dither in (False, True):
                    key = RoundingKey(k0, k1, first, row_stride, dither=dither, sender=255)
                    named = {"layout": layout, "hadamard": True, "rounding": key}
                    yield _case(ops.hadamard_quantize, values, out=out, **named)


BY_SHAPE: tuple[Callable[[Shape], Iterator[KernelCase]], ...] = (
    subtract_quantize,
    dequantize_add,
    hadamard_quantize,
    dequantize_reduce_quantize,
    dequantize_reduce_hadamard,
)
TROUBLE: tuple[Callable[[], Iterator[KernelCase]], ...] = (
    long_groups,
    special_values,
    special_scales,
    special_sums,
    scales_that_round_up,
    ends_of_random_numbers,
)


def all_cases() -> Iterator[KernelCase]:
    """Yield every call."""
    for shape in SHAPES:
        for make in BY_SHAPE:
            yield from make(shape)
    for make_trouble in TROUBLE:
        yield from make_trouble()
