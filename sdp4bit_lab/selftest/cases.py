"""Operator calls on which every back end must equal the reference bit for bit.

They cover row lengths, bit widths, dtypes and edge values. Outputs are poisoned and surrounded by guard
bytes, so that stray writes count as differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdp4bit.quantization import ops
from sdp4bit.quantization.checksum import STRIPE_WORDS
from sdp4bit.quantization.formats import BF16, BLOCK, FP32, Bits, choices, format_of, with_scales
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import KeySeries, RoundingKey, derive_keys, derive_series

CPU = torch.device("cpu")
POISON, GUARD = 0xAB, 16
"""Fill byte, and number of guard bytes around a message; a multiple of the message alignment."""
KEY = RoundingKey(*derive_keys(1234, 7))
DITHER = KEY._replace(dither=True)
ROUNDINGS = (None, KEY, DITHER._replace(sender=5))
DITHERS = (None, DITHER._replace(first=96, row_stride=32 * 555))
SERIES = (None, derive_series(1234, 7, rank_step=3), KeySeries((1 << 64) - 5, (1 << 63) + 1))
CLIPS = (1.0, 0.6, 0.25)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL_BITS = (*choices(), 32)
HOPS = (
    *((8, 4), (4, 8), (4, 4), (8, 8), (32, 8), (32, 4), (8, 32), (32, 32)),
    *((8, 3), (8, 2), (3, 2), (4, 2), (2, 3), (3, 4), (2, 8), (3, 32)),
    *((8, 3.5), (3.5, 3.5), (3.5, 4), (4, 3.5), (3.5, 32)),
    *((16, 16), (16, 4), (8, 16), (16, 32), (32, 16)),
)
"""Bits received and bits sent."""
EDGE_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": lambda x: x * 0.0,
    "negative zero": lambda x: x.abs() * -0.0,
    "subnormal": lambda x: x * 1e-40,
    "below 2**-100": lambda x: x * 2.0**-104,
    "around 2**-100": lambda x: x.sign() * 2.0**-100,
    "near the largest": lambda x: x.sign() * 3.4e38,
    "below the largest scale, 8 bits": lambda x: x.sign() * 1.6e38,
    "below the largest scale, 4 bits": lambda x: x.sign() * 9.2e36,
    "NaN": lambda x: x.index_fill(-1, torch.tensor(5), float("nan")),
    "infinity": lambda x: x.index_fill(-1, torch.tensor(7), float("inf")),
    "minus infinity": lambda x: x.index_fill(-1, torch.tensor(9), -float("inf")),
    "ties": lambda x: (torch.arange(x.shape[-1]) % 15 - 7) / 2 + 0.0 * x,
    "one value": lambda x: torch.zeros_like(x).index_fill(-1, torch.tensor(30), -3.0),
    "powers": lambda x: x * 2.0 ** (torch.arange(x.shape[-1]) % 40 - 20),
}
EDGE_SCALES = (0.0, -0.0, float("nan"), float("inf"), 1e-40, 2.0**-110, 1.9 * 2.0**119, -1.9 * 2.0**119)


def guarded_messages(count: int, layout: MessageLayout) -> Tensor:
    """Return poisoned messages, uint8 [count, nbytes], with poison around each."""
    buffer = torch.full((count + 1, layout.nbytes + 2 * GUARD), POISON, dtype=torch.uint8)
    return buffer[:count, GUARD : GUARD + layout.nbytes]


def guarded_values(values: Tensor, offset: int = 0) -> Tensor:
    """Return a copy whose rows have arbitrary alignment, surrounded by 77."""
    buffer = torch.full((*values.shape[:-1], values.shape[-1] + offset + 8), 77.0, dtype=values.dtype)
    view = buffer[..., offset : offset + values.shape[-1]]
    view.copy_(values)
    return view


def whole(tensor: Tensor) -> Tensor:
    """Return the whole storage of a view as a 1-D tensor."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def bits_of(tensor: Tensor) -> Tensor:
    """Return integers, or the bits of floats as such with -1 for every NaN, because payloads may differ."""
    if not tensor.is_floating_point():
        return tensor
    integers = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.view(integers).masked_fill(tensor.isnan(), -1)


def make_values(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal values whose magnitude changes every 32 values."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    blocks = -(-shape[-1] // 32)
    magnitude = torch.exp2(torch.randint(-12, 12, (*shape[:-1], blocks), generator=generator))
    return (values * magnitude.repeat_interleave(32, -1)[..., : shape[-1]]).to(dtype)


def make_messages(count: int, layout: MessageLayout, seed: int, special: bool = False) -> Tensor:
    """Return messages with random codes, including unused ones, and varied scales or edge values."""
    generator = torch.Generator().manual_seed(seed)
    messages = guarded_messages(count, layout)
    codes = torch.randint(0, 256, (count, layout.scales_offset), generator=generator, dtype=torch.uint8)
    if not layout.format.has_scales:
        values = make_values(count, layout.parts, layout.padded_numel, seed=seed)
        if special:
            # This NaN becomes -0 if its bits are rounded to bf16 like those of a number.
            values.view(torch.int32)[..., ::500] = 0x7FFFFFFF
        bits = values.view(torch.int32)
        sent = (bits >> 16).to(torch.int16) if layout.format is BF16 else bits
        codes = sent.view(torch.uint8).reshape(count, layout.scales_offset)
    messages[:, : layout.scales_offset] = codes
    scales = torch.randn(count, layout.parts * layout.groups, generator=generator).exp().bfloat16()
    if special and scales.numel():
        every_second = scales[:, ::2]
        edges = torch.tensor(EDGE_SCALES, dtype=torch.bfloat16).repeat(every_second.numel())
        scales[:, ::2] = edges[: every_second.numel()].view_as(every_second)
    messages[:, layout.scales_offset : layout.payload_bytes] = scales.view(torch.uint8)
    return messages


def make_blocks(layout: MessageLayout, seed: int) -> tuple[Tensor, int]:
    """Return a table of blocks, in any places and some of them short, and the length of their row."""
    generator = torch.Generator().manual_seed(seed)
    count = layout.padded_numel // BLOCK
    places = torch.randperm(count, generator=generator) * (BLOCK + 3) + 5
    sizes = torch.randint(1, BLOCK + 1, (count,), generator=generator)
    sizes[::3] = BLOCK
    if count:
        sizes[-1] = min(int(sizes[-1]), layout.numel - (count - 1) * BLOCK)
    return places * 64 + sizes, count * (BLOCK + 3) + 5


class Shape(NamedTuple):
    """Row shape; its number selects the other arguments of the calls."""

    number: int
    group_size: int
    numel: int
    edges: bool
    """Whether every second group has edge values or an edge scale."""

    def layout(self, bits: Bits, *, parts: int = 1, group_size: int | None = None) -> MessageLayout:
        return MessageLayout(
            numel=self.numel, bits=bits, group_size=group_size or self.group_size, parts=parts
        )

    def choose(self, *columns: tuple[Any, ...]) -> list[Any]:
        """Pick a value from each column; the columns advance at different rates."""
        return [column[self.number // pace % len(column)] for pace, column in enumerate(columns, start=1)]

    def values(self, *rows: int, seed: int, dtype: torch.dtype) -> Tensor:
        """Return guarded values [*rows, numel]."""
        values = make_values(*rows, self.numel, seed=seed)
        if self.edges:
            groups = values.view(*rows, -1, self.group_size)
            for index, change in enumerate(EDGE_VALUES.values()):
                groups[..., 2 * index, :] = change(groups[..., 2 * index, :])
        return guarded_values(values.to(dtype), offset=self.numel % 3)


# Group sizes: the defaults, the smallest one, halves that start within a block of 32 (32, 96, 160).
# Further more than a CPU tile (2048, 5120), and more than the registers of a GPU program (8224, 16384).
# Lengths: zero; below, at and above a block; tails of an odd and an even number of blocks; several tiles.
_ROWS = [
    *((128, 0), (128, 1), (128, 31), (128, 32), (128, 33), (128, 128), (128, 128 + 64)),
    *((128, 3 * 128 + 96), (128, 128 * 17 + 64), (128, 4096 + 16)),
    *((32, 100), (32, 1024 + 100), (64, 64 * 5 + 32), (96, 96 * 3), (96, 96 + 50), (96, 96 * 25 + 50)),
    *((160, 160 * 2 + 96 + 7), (160, 160 * 8 + 96 + 7), (192, 192 * 2 + 64), (512, 512 + 480)),
    *((2048, 2048), (2048, 2048 * 2), (2048, 2048 + 96 + 5), (2048, 1000), (5120, 5120 + 160)),
    *((8224, 8224 + 160), (16384, 9000)),
]
_EDGE_ROWS = [(size, 2 * len(EDGE_VALUES) * size) for size in (64, 64, 64, 96, 96, 96)]
SHAPES = [Shape(number, *row, False) for number, row in enumerate(_ROWS)]
SHAPES += [Shape(number, *row, True) for number, row in enumerate(_EDGE_ROWS)]


class KernelCase(NamedTuple):
    """One call of an operator."""

    operator: Callable[..., None]
    first: Tensor
    named: dict[str, Any]

    def __str__(self) -> str:
        texts = {name: _text(value) for name, value in {"first": self.first, **self.named}.items()}
        return f"{self.operator.__name__}({', '.join(f'{name}={text}' for name, text in texts.items())})"


def _text(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else str(value)


def subtract_quantize(shape: Shape) -> Iterator[KernelCase]:
    """Yield calls for rows of this shape, like the next four functions."""
    dtype, kind = shape.choose(DTYPES, (*DTYPES, None))
    for place, bits in enumerate(ALL_BITS):
        layout, clip = shape.layout(bits), CLIPS[(shape.number + place) % len(CLIPS)]
        main, blocks = shape.values(seed=1, dtype=dtype), None
        if (shape.number + place) % 3 == 0:
            blocks, numel = make_blocks(layout, seed=17)
            main = guarded_values(make_values(numel, seed=1, dtype=dtype))
        replica = None if kind is None else make_values(main.numel(), seed=2, dtype=kind)
        named = {"replica": replica, "out": guarded_messages(1, layout)[0], "layout": layout, "clip": clip}
        if place % 2:
            named["nonfinite"] = torch.zeros((), dtype=torch.bool)
        yield KernelCase(ops.subtract_quantize, main, {**named, "blocks": blocks})


def dequantize_add(shape: Shape) -> Iterator[KernelCase]:
    """See subtract_quantize."""
    accumulate, dtype, rows = shape.choose((True, False), DTYPES, (1, 3))
    for place, bits in enumerate(ALL_BITS):
        layout, blocks = shape.layout(bits), None
        messages = make_messages(rows, layout, seed=3, special=shape.edges)
        replica = shape.values(rows, seed=4, dtype=dtype)
        if (shape.number + place) % 3 == 0:
            blocks, numel = make_blocks(layout, seed=18)
            replica = guarded_values(make_values(rows, numel, seed=4, dtype=dtype))
        named = {"replica": replica, "layout": layout, "accumulate": accumulate, "blocks": blocks}
        yield KernelCase(ops.dequantize_add, messages, named)


def hadamard_quantize(shape: Shape) -> Iterator[KernelCase]:
    """Yield calls on a transposed view: gradients are stored as [parts, destinations, numel]."""
    rounding, dtype, skip = shape.choose(ROUNDINGS[::-1], DTYPES, (None, 1, None, 2, 0))
    rounding = rounding and rounding._replace(first=32 * 3, row_stride=32 * 1000)
    for place, bits in enumerate(ALL_BITS):
        layout = shape.layout(bits, parts=2)
        for transform in (False, True):
            values, blocks = shape.values(2, 3, seed=5, dtype=dtype), None
            if (shape.number + place) % 3 == transform:
                blocks, numel = make_blocks(layout, seed=15)
                values = guarded_values(make_values(2, 3, numel, seed=5, dtype=dtype))
            named = {"out": guarded_messages(3, layout), "layout": layout, "hadamard": transform}
            named |= {"rounding": rounding, "skip": skip, "blocks": blocks}
            yield KernelCase(ops.hadamard_quantize, values.transpose(0, 1), named)


def dequantize_reduce_quantize(shape: Shape) -> Iterator[KernelCase]:
    """See subtract_quantize."""
    sizes, counts = (None, 96, 32, None, 160, 2048, 128, 512), (1, 2, 4, 16, 3, 17, 9, 0)
    received_size, count = shape.choose(sizes, counts)
    # Messages of two parts are those of a hop that another one follows.
    parts = 1 if shape.number % 3 else 2
    for place, (bits_in, bits_out) in enumerate(HOPS):
        # Two of six ways of rounding and reading per hop: each takes seconds to compile.
        way = place + shape.number % 2
        rounding, dither = ROUNDINGS[::-1][way % 3], DITHERS[(place // 3 + shape.number) % 2]
        rounding = rounding and rounding._replace(first=64, row_stride=32 * 777)
        received = shape.layout(bits_in, parts=2 * parts, group_size=received_size)
        sent = shape.layout(bits_out, parts=parts)
        messages = make_messages(count, received, seed=6, special=shape.edges)
        named: dict[str, Any] = {"received": received, "sent": sent}
        named |= {"rounding": rounding, "dither": dither}
        named["skip"] = 1 if shape.number % 6 == 3 else (None, 0, 1)[shape.number % 3]
        if shape.number % 3 == 1:
            blocks, length = make_blocks(sent, seed=17) if place % 2 else (None, shape.numel)
            named["own"] = guarded_values(torch.full((length,), float("nan")), offset=shape.numel % 3)
            named |= {"blocks": blocks, "hadamard": shape.number % 2 == 0, "multiplier": 1 / 96}
        yield KernelCase(
            ops.dequantize_reduce_quantize, messages, {"out": guarded_messages(2, sent), **named}
        )


def dequantize_reduce_hadamard(shape: Shape) -> Iterator[KernelCase]:
    """See subtract_quantize."""
    counts = (2, 1, 4, 3, 0, 9, 16, 33)
    transform, dtype, count, dither = shape.choose((True, False), DTYPES, counts, DITHERS)
    parts, skips, has_own = shape.choose((1, 2, 3), (False, True), (False, True, True))
    # A power of two is exact in fp32, as for 2**k ranks; 1/96 is rounded.
    multiplier = 2.0**-12 if shape.edges else 1 / 96
    for place, bits in enumerate(ALL_BITS):
        layout, blocks, numel = shape.layout(bits, parts=parts), None, shape.numel
        if (shape.number + place) % 3 == 0:
            blocks, numel = make_blocks(layout, seed=16)
        out = guarded_values(torch.full((numel,), float("nan"), dtype=dtype), offset=shape.numel % 3)
        # The row of another node, or of this rank, which may have another dtype.
        row = shape.values(seed=8, dtype=DTYPES[place % 3])
        own = row.repeat(2 + numel // max(1, len(row)))[:numel] if has_own else None
        named = {"layout": layout, "hadamard": transform, "multiplier": multiplier, "dither": dither}
        named |= {
            "part": parts - 1,
            "own": own,
            "blocks": blocks,
            "own_multiplier": 1 / 3 if place % 2 else 1.0,
        }
        named["skip"] = shape.number % count if skips and count else None
        messages = make_messages(count, layout, seed=7, special=shape.edges)
        yield KernelCase(ops.dequantize_reduce_hadamard, messages, {"out": out, **named})


def dequantize_reduce_pieces(shape: Shape) -> Iterator[KernelCase]:
    """See subtract_quantize."""
    counts, strides = (2, 1, 4, 3, 0, 9), (0, 32, 96)
    transform, dtype, count, shorter = shape.choose((True, False), DTYPES, counts, strides)
    multiplier = 2.0**-12 if shape.edges else 1 / 96
    for place, bits in enumerate(ALL_BITS):
        layout, pieces = shape.layout(bits), 1 + (shape.number + place) % 4
        stride = max(0, shape.numel // BLOCK * BLOCK - shorter)
        values = torch.full(((pieces - 1) * stride + shape.numel,), float("nan"), dtype=dtype)
        named = {"out": guarded_values(values, offset=shape.numel % 3), "layout": layout, "pieces": pieces}
        named |= {"stride": stride, "hadamard": transform, "multiplier": multiplier}
        named["dither"] = SERIES[(shape.number + place) % len(SERIES)]
        messages = make_messages(count * pieces, layout, seed=19, special=shape.edges)
        yield KernelCase(ops.dequantize_reduce_pieces, messages, named)


def scales_that_round_up() -> Iterator[KernelCase]:
    """Yield groups whose unrounded scales have low 16 bits close to a bf16 rounding boundary."""
    for bits in with_scales():
        candidates = (torch.arange(1 << 22, dtype=torch.int32) + 0x40400000).view(torch.float32)
        step = candidates * torch.tensor(1.0 / format_of(bits).largest, dtype=torch.float32)
        low = step.view(torch.int32) & 0xFFFF
        main = torch.zeros(32, 32)
        main[:, 3] = torch.cat([candidates[low == edge % 0x10000][:2] for edge in range(0xFFF8, 0x10008)])
        main[:, 4] = -main[:, 3] / 3
        layout = MessageLayout(numel=1024, bits=bits, group_size=32)
        named = {"replica": None, "out": guarded_messages(1, layout)[0], "layout": layout}
        yield KernelCase(ops.subtract_quantize, main.view(-1), named)


def ends_of_random_numbers() -> Iterator[KernelCase]:
    """Yield calls with keys and counters at the ends of their ranges, on groups of two blocks and of one."""
    for k0, k1 in ((0xFFFFFFFF, 0x80000000), (0, 1)):
        for first, row_stride in ((0, 0), ((1 << 32) - 64, (1 << 32) - 32)):
            for dither, numel in ((False, 64), (True, 96)):
                layout = MessageLayout(numel=numel, bits=4, group_size=64, parts=2)
                values = make_values(1, 2, numel, seed=12)
                key = RoundingKey(k0, k1, first, row_stride, dither=dither, sender=255)
                named = {"out": guarded_messages(1, layout), "layout": layout, "hadamard": True}
                yield KernelCase(ops.hadamard_quantize, values, {**named, "rounding": key})


def dithered_zeros() -> Iterator[KernelCase]:
    """Yield calls on zeros, of 3.5 bits both values of a pair, either one or none; and on any codes."""
    values = make_values(1, 1, 64, seed=13)
    values[..., :20] = values[..., 32:40] = values[..., 48:60] = 0
    for bits in with_scales():
        layout = MessageLayout(numel=64, bits=bits, group_size=64)
        named = {"out": guarded_messages(1, layout), "layout": layout, "hadamard": False, "rounding": DITHER}
        yield KernelCase(ops.hadamard_quantize, values, named)
        read = {"hadamard": False, "multiplier": 1.0, "dither": DITHER}
        messages = make_messages(2, layout, seed=14)
        yield KernelCase(
            ops.dequantize_reduce_hadamard, messages, {"out": torch.zeros(64), "layout": layout, **read}
        )


def checksums() -> Iterator[KernelCase]:
    """Yield calls on any alignment and length in bytes, up to several pieces."""
    values = make_values(2 * 4 * STRIPE_WORDS + 4 * 1024 + 8, seed=15, dtype=torch.bfloat16).view(torch.uint8)
    for start, end in ((0, 0), (0, 1), (3, 11), (2, 18), (4, 4096), (6, -4), (0, -8)):
        yield KernelCase(ops.add_checksum, values[start:end], {"out": torch.tensor(-(2**62))})


BY_SHAPE: tuple[Callable[[Shape], Iterator[KernelCase]], ...] = (
    *(subtract_quantize, dequantize_add, hadamard_quantize),
    *(dequantize_reduce_quantize, dequantize_reduce_hadamard, dequantize_reduce_pieces),
)
EDGE_CASES: tuple[Callable[[], Iterator[KernelCase]], ...] = (
    *(scales_that_round_up, ends_of_random_numbers, dithered_zeros, checksums),
)


def quick_cases() -> Iterator[KernelCase]:
    """Yield one call of every operator, at one width."""
    shape = next(shape for shape in SHAPES if shape.numel > 2 * shape.group_size)
    for make in BY_SHAPE:
        yield next(case for case in make(shape) if _sent_bits(case) == 4)
    yield next(checksums())


def _sent_bits(case: KernelCase) -> Bits:
    layout: MessageLayout | None = case.named.get("sent", case.named.get("layout"))
    return None if layout is None else layout.bits


def all_cases() -> Iterator[KernelCase]:
    """Yield every call."""
    for shape in SHAPES:
        for make in BY_SHAPE:
            yield from make(shape)
    for make_edges in EDGE_CASES:
        yield from make_edges()


def difference(
    operator: Callable[..., None],
    first: Tensor,
    *,
    backend: ops.BackendName,
    device: torch.device = CPU,
    **named: Any,
) -> str | None:
    """Describe how any bit of the tensors' storage differs from the reference on the CPU, or None."""
    arguments = {"first": first, **named}
    written = {"out" if "out" in named else "replica", "nonfinite"}
    layout = named.get("sent", named.get("layout"))
    results = [_call(operator, arguments, "reference", CPU), _call(operator, arguments, backend, device)]
    for name in (name for name, value in arguments.items() if isinstance(value, Tensor)):
        expected, result = (whole(each[name]).to(CPU) for each in results)
        if name in written and result.dtype == torch.uint8 and layout and layout.format is FP32:
            # All NaNs compare equal.
            expected, result = expected.view(torch.float32), result.view(torch.float32)
        different = bits_of(result) != bits_of(expected)
        if different.any():
            where = different.nonzero()[:8].flatten().tolist()
            return f"{name}: {int(different.sum())} of {different.numel()} differ, first at {where}"
        outputs = {*written, "own" if "sent" in arguments else ""}
        if name not in outputs and not torch.equal(bits_of(result), bits_of(whole(arguments[name]))):
            return f"{name} is an input and was changed"
    return None


def _call(
    operator: Callable[..., None], arguments: dict[str, Any], backend: ops.BackendName, device: torch.device
) -> dict[str, Any]:
    copies = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            storage = whole(value).to(device, copy=True)
            copies[name] = storage.as_strided(value.shape, value.stride(), value.storage_offset())
    with ops.use_backend(backend):
        operator(copies["first"], **{name: value for name, value in copies.items() if name != "first"})
    return copies
