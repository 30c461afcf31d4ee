"""What the kernels of every back end are tested with: any shape, every kind of trouble, bit for bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from sdp4bit.quantization import ops
from sdp4bit.quantization.hadamard import Hadamard
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import RoundingKey, derive_keys
from tests.kernels.kernel_buffers import (
    DTYPES,
    compare,
    guarded_messages,
    guarded_values,
    make_messages,
    make_special_values,
    make_values,
)

KEY = RoundingKey(*derive_keys(1234, 7))
ROUNDINGS = (None, KEY)
TRANSFORMS = (None, Hadamard(), Hadamard(0x99999999))


class Shape(NamedTuple):
    """A group size and a row length, numbered to give each its own choice of other arguments."""

    index: int
    group_size: int
    numel: int

    def layout(self, bits: int, *, parts: int = 1, group_size: int | None = None) -> MessageLayout:
        size = self.group_size if group_size is None else group_size
        return MessageLayout(numel=self.numel, bits=bits, group_size=size, parts=parts)

    def choose(self, *columns: tuple[Any, ...]) -> list[Any]:
        """One of each column, which run through their values at different paces."""
        return [column[self.index // pace % len(column)] for pace, column in enumerate(columns, start=1)]


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
SHAPES = [Shape(index, *size) for index, size in enumerate(_SIZES)]
# Groups that do not fit in the registers of a GPU's program.
LONG_SHAPES = pytest.mark.parametrize("long", [Shape(0, 8224, 8224 + 160), Shape(1, 16384, 9000)])
ANY_BITS = pytest.mark.parametrize("bits", [4, 8, 32])


class ByteTests:
    """The operators write the bytes of the reference, and nothing else, on the `backend` of a subclass.

    Its module has a fixture `shape`.
    """

    backend: str
    device = torch.device("cpu")

    def compare(self, *args: Any, **named: Any) -> None:
        compare(*args, backend=self.backend, device=self.device, **named)

    @ANY_BITS
    def test_subtract_quantize(self, bits, shape):
        numel, layout = shape.numel, shape.layout(bits)
        rounding, dtype, replica_dtype = shape.choose(
            ROUNDINGS, DTYPES, (torch.bfloat16, None, torch.float16, torch.float32)
        )
        main = guarded_values(make_values(numel, seed=1, dtype=dtype), offset=numel % 3)
        replica = None if replica_dtype is None else make_values(numel, seed=2, dtype=replica_dtype)
        out = guarded_messages(1, layout)[0]
        self.compare(ops.subtract_quantize, main, replica=replica, out=out, layout=layout, rounding=rounding)

    @ANY_BITS
    def test_dequantize_add(self, bits, shape):
        layout = shape.layout(bits)
        accumulate, dtype, rows = shape.choose((True, False), DTYPES, (1, 3))
        values = make_values(rows, shape.numel, seed=4, dtype=dtype)
        replica = guarded_values(values, offset=shape.numel % 3)
        messages = make_messages(rows, layout, seed=3)
        self.compare(ops.dequantize_add, messages, replica=replica, layout=layout, accumulate=accumulate)

    @pytest.mark.parametrize("hadamard", [False, True])
    @ANY_BITS
    def test_hadamard_quantize(self, bits, hadamard, shape):
        """From a transposed view: gradients lie as [parts, destinations, numel]."""
        layout = shape.layout(bits, parts=2)
        rounding, dtype, signs = shape.choose(ROUNDINGS[::-1], DTYPES, (0, 0xDEADBEEF))
        values = make_values(2, 3, shape.numel, seed=5, dtype=dtype)
        self.compare(
            ops.hadamard_quantize,
            guarded_values(values, offset=shape.numel % 3).transpose(0, 1),
            out=guarded_messages(3, layout),
            layout=layout,
            hadamard=Hadamard(signs) if hadamard else None,
            rounding=rounding and rounding._replace(first=32 * 3, row_stride=32 * 1000),
        )

    @pytest.mark.parametrize(
        ("bits_in", "bits_out"), [(8, 4), (4, 8), (4, 4), (8, 8), (32, 8), (32, 4), (8, 32), (32, 32)]
    )
    def test_dequantize_reduce_quantize(self, bits_in, bits_out, shape):
        group_size_in, count, rounding = shape.choose(
            (None, 96, 32, None, 160, 2048, 128, 512), (1, 2, 4, 16, 3, 17, 9, 0), ROUNDINGS[::-1]
        )
        received = shape.layout(bits_in, parts=2, group_size=group_size_in)
        self.compare(
            ops.dequantize_reduce_quantize,
            make_messages(count, received, seed=6),
            received=received,
            out=guarded_messages(2, shape.layout(bits_out)),
            sent=shape.layout(bits_out),
            rounding=rounding and rounding._replace(first=64, row_stride=32 * 777),
        )

    @ANY_BITS
    def test_dequantize_reduce_hadamard(self, bits, shape):
        layout = shape.layout(bits)
        transform, dtype, count = shape.choose(
            (Hadamard(), None, Hadamard(0xDEADBEEF), None), DTYPES, (2, 1, 4, 3, 0, 9, 16, 33)
        )
        poison = torch.full((shape.numel,), float("nan"), dtype=dtype)
        self.compare(
            ops.dequantize_reduce_hadamard,
            make_messages(count, layout, seed=7),
            out=guarded_values(poison, offset=shape.numel % 3),
            layout=layout,
            hadamard=transform,
            multiplier=1 / 96,
        )

    @LONG_SHAPES
    @pytest.mark.parametrize("bits", [4, 8])
    def test_long_groups(self, bits, long):
        layout, numel, sent = long.layout(bits), long.numel, guarded_messages(1, long.layout(bits))
        written = {"out": sent, "layout": layout, "rounding": KEY}
        self.compare(
            ops.subtract_quantize, make_values(numel, seed=4), replica=None, **written | {"out": sent[0]}
        )
        for transform in (None, Hadamard(0x80000001)):
            values = make_values(1, 1, numel, seed=13)
            self.compare(ops.hadamard_quantize, values, hadamard=transform, **written)
        received = long.layout(8, group_size=4096)
        messages = make_messages(2, received, seed=17)
        named = {"received": received, "out": sent, "sent": layout, "rounding": KEY}
        self.compare(ops.dequantize_reduce_quantize, messages, **named)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("group_size", [64, 96])
    @ANY_BITS
    def test_special_values(self, bits, group_size, dtype):
        """Zeros of both signs, NaN, infinities, subnormals, ties and the ends of the range."""
        main = make_special_values(group_size, seed=8, dtype=dtype)
        layout = MessageLayout(numel=main.numel(), bits=bits, group_size=group_size)
        out, replica = guarded_messages(1, layout), torch.zeros_like(main)
        for rounding in ROUNDINGS:
            named = {"layout": layout, "rounding": rounding}
            self.compare(ops.subtract_quantize, main, replica=replica, out=out[0], **named)
        for transform in TRANSFORMS:
            self.compare(ops.hadamard_quantize, main[None, None], out=out, hadamard=transform, **named)

    @pytest.mark.parametrize("dtype", DTYPES)
    @ANY_BITS
    def test_special_scales(self, bits, dtype):
        replica = make_special_values(64, seed=9, dtype=dtype)
        layout = MessageLayout(numel=replica.numel(), bits=bits, group_size=64)
        messages = make_messages(3, layout, seed=10, special=True)
        for accumulate in (False, True):
            named = {"replica": replica[None], "layout": layout, "accumulate": accumulate}
            self.compare(ops.dequantize_add, messages[:1], **named)
        for transform, multiplier in zip(TRANSFORMS, (1.0, 0.1, 2.0**-12), strict=True):
            named = {"layout": layout, "hadamard": transform, "multiplier": multiplier}
            self.compare(ops.dequantize_reduce_hadamard, messages, out=torch.empty_like(replica), **named)

    @pytest.mark.parametrize(("bits_in", "bits_out"), [(8, 4), (4, 8), (32, 8)])
    def test_special_sums(self, bits_in, bits_out):
        received = MessageLayout(numel=1280, bits=bits_in, group_size=32)
        sent = MessageLayout(numel=1280, bits=bits_out, group_size=64)
        messages = make_messages(2, received, seed=11, special=True)
        named = {"received": received, "out": guarded_messages(1, sent), "sent": sent, "rounding": KEY}
        self.compare(ops.dequantize_reduce_quantize, messages, **named)

    @pytest.mark.parametrize("bits", [4, 8])
    def test_scales_at_the_edge_of_rounding_up(self, bits):
        """The largest values whose scale, before it is rounded up, ends in each of the bits around 0xFFFD."""
        candidates = (torch.arange(1 << 22, dtype=torch.int32) + 0x40000000).view(torch.float32)
        step = candidates * torch.tensor(1.0 / (2 ** (bits - 1) - 1), dtype=torch.float32)
        low = step.view(torch.int32) & 0xFFFF
        edges = [candidates[low == edge % 0x10000][:2] for edge in range(0xFFF8, 0x10008)]
        main = torch.zeros(32, 32)
        main[:, 3] = torch.cat(edges)
        main[:, 4] = -main[:, 3] / 3
        layout = MessageLayout(numel=1024, bits=bits, group_size=32)
        named = {"out": guarded_messages(1, layout)[0], "layout": layout, "rounding": None}
        self.compare(ops.subtract_quantize, main.view(-1), replica=None, **named)

    @pytest.mark.parametrize("bits", [4, 8])
    def test_ties_of_every_scale(self, bits):
        """Values half way between two codes, whose rounding shows the last bit of the scale's reciprocal."""
        scales = torch.arange(0x3F80, 0x4000).to(torch.int16).view(torch.bfloat16)
        largest = 2 ** (bits - 1) - 1
        main = (torch.arange(32) % (2 * largest - 3) - largest + 2.5) * scales.float()[:, None]
        # A scale is rounded up from that of the largest value, which here is the next lower one's exactly.
        main[:, 0] = largest * (scales.view(torch.int16) - 1).view(torch.bfloat16).float()
        for exponent in (-90, 0, 100):
            layout = MessageLayout(numel=main.numel(), bits=bits, group_size=32)
            out = guarded_messages(1, layout)[0]
            scaled = (main * 2.0**exponent).view(-1)
            named = {"out": out, "layout": layout, "rounding": None}
            self.compare(ops.subtract_quantize, scaled, replica=None, **named)
            with ops.use_backend("reference"):
                ops.subtract_quantize(scaled, replica=None, **named)
            written = out[layout.scales_offset : layout.payload_bytes].view(torch.bfloat16)
            assert torch.equal(written.float(), scales.float() * 2.0**exponent)

    @pytest.mark.parametrize("bits", [4, 8])
    def test_random_numbers_at_the_ends_of_their_range(self, bits):
        layout = MessageLayout(numel=64, bits=bits, group_size=64, parts=2)
        values, out = make_values(1, 2, 64, seed=12), guarded_messages(1, layout)
        for k0, k1 in ((0xFFFFFFFF, 0x80000000), (0, 1)):
            for first, row_stride in ((0, 0), ((1 << 32) - 64, (1 << 32) - 32)):
                key = RoundingKey(k0, k1, first, row_stride)
                named = {"layout": layout, "hadamard": Hadamard(), "rounding": key}
                self.compare(ops.hadamard_quantize, values, out=out, **named)
