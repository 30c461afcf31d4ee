"""Values that property tests draw, and the number of cases: a few by default, many when marked slow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdp4bit.config import LEAST_CLIP
from sdp4bit.quantization.formats import with_scales
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import KeySeries, RoundingKey
from sdp4bit_lab.selftest.cases import (
    DTYPES,
    guarded_messages,
    guarded_values,
    make_blocks,
    make_messages,
    make_values,
)

FEW = settings(deadline=None, derandomize=True, max_examples=60)
MANY = settings(
    deadline=None, max_examples=1500, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
"""New ones in every run: a failure is printed with the way to repeat it."""
PROFILES = pytest.mark.parametrize(
    "profile",
    [
        pytest.param(FEW, id="few"),
        pytest.param(MANY, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)


def hold(
    profile: settings, strategy: st.SearchStrategy[Any], check: Callable[[Any], None], *, name: str = ""
) -> None:
    """The check passes for the number of cases of the profile; the smallest failing case is shown."""
    passed = 0

    def test(case: Any) -> None:
        nonlocal passed
        check(case)
        passed += 1

    # Repeatable cases are drawn by name.
    test.__name__ = test.__qualname__ = name or check.__name__
    profile(given(strategy)(test))()
    assert passed >= profile.max_examples


NAN, INF = float("nan"), float("inf")
SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-45,
    -1e-40,
    2.0**-126,
    2.0**-100,
    -(2.0**-101),
    1e-8,
    65504.0,
    3.4e38,
    NAN,
)
SPECIAL += (INF, -INF, -3.4028234663852886e38)

lengths = st.sampled_from([0, 1, 2, 31, 32, 33, 63, 64, 65]) | st.integers(0, 300) | st.integers(0, 6000)
group_sizes = st.sampled_from([32, 64, 96, 128, 160, 512, 2048, 8192]) | st.integers(1, 40).map(
    lambda blocks: 32 * blocks
)
bits = st.sampled_from([*with_scales(), 32])
"""Those of a configuration; 32 is its None."""
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31 - 1)
transforms = st.booleans()
numbers = st.integers(0, 1 << 20).map(lambda block: 32 * block)
words = st.integers(0, 2**32 - 1)
senders = st.integers(0, 300)
keys = st.builds(RoundingKey, words, words, numbers, numbers, st.booleans(), senders)
roundings = st.none() | keys
dithers = st.none() | keys.map(lambda key: key._replace(dither=True))
clips = st.just(1.0) | st.floats(LEAST_CLIP, 1.0)
counts = st.integers(0, 6) | st.sampled_from([16, 17])
"""Messages that are summed."""
special_values = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(SPECIAL)), max_size=5)


def _of_many_magnitudes(*shape: int, seed: int) -> Tensor:
    return make_values(*shape, seed=seed)


def _of_any_bits(*shape: int, seed: int) -> Tensor:
    """Every pattern of 32 bits is as likely: NaN of all kinds, infinities, subnormals, the largest."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32).view(torch.float32)


def _of_one_magnitude(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponent = int(torch.randint(-149, 127, (), generator=generator))
    return torch.randn(shape, generator=generator) * 2.0**exponent


def _of_levels(*shape: int, seed: int) -> Tensor:
    """Multiples of half a level: ties, wherever the scale is a power of two."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-14, 15, shape, generator=generator) / 2


def _constant(*shape: int, seed: int) -> Tensor:
    return torch.full(shape, float(SPECIAL[seed % len(SPECIAL)]))


_KINDS = (_of_many_magnitudes, _of_one_magnitude, _of_levels, _of_any_bits, _constant)


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> Tensor:
    """Values of every kind, some of them replaced by special ones; any dtype unless one is given."""
    values = draw(st.sampled_from(_KINDS))(*shape, seed=draw(seeds)).contiguous()
    if values.numel():
        flat = values.view(-1)
        for place, value in draw(special_values):
            flat[int(place * flat.numel())] = value
    return values.to(draw(dtypes) if dtype is None else dtype)


@st.composite
def laid_out(draw: st.DrawFn, values: Tensor) -> Tensor:
    """The same values in contiguous rows at any alignment, apart, the leading dimensions in any order."""
    offset, gap = draw(st.sampled_from([0, 1, 2, 3, 8])), draw(st.sampled_from([0, 1, 5, 16]))
    order = draw(st.permutations(range(values.dim() - 1)))
    rows = [values.shape[i] for i in order]
    buffer = torch.full((*rows, offset + values.shape[-1] + gap), 77.0, dtype=values.dtype)
    inverse = [order.index(i) for i in range(len(order))]
    view = buffer[..., offset : offset + values.shape[-1]].permute(*inverse, values.dim() - 1)
    view.copy_(values)
    return view


@st.composite
def received_messages(draw: st.DrawFn, count: int, layout: MessageLayout) -> Tensor:
    """Messages as another rank, or a broken one, might send: any codes, any scales, any fp32 numbers."""
    messages = make_messages(count, layout, draw(seeds), special=draw(st.booleans()))
    if layout.bits == 32 and messages.numel():
        values = draw(tensors((count, layout.parts * layout.padded_numel), dtype=torch.float32))
        messages[:, : layout.scales_offset] = values.view(torch.uint8)
    return messages


@st.composite
def layouts(draw: st.DrawFn, numel: int, *, parts: int = 1) -> MessageLayout:
    return MessageLayout(numel=numel, bits=draw(bits), group_size=draw(group_sizes), parts=parts)


# Calls of the operators: the first argument, and the others by their names.


@st.composite
def _subtract_quantize(draw: st.DrawFn) -> tuple[Tensor, dict[str, Any]]:
    layout = draw(layouts(draw(lengths)))
    blocks, numel = draw(_blocks(layout))
    main = draw(laid_out(draw(tensors((numel,)))))
    replica = draw(st.none() | tensors((numel,)).flatmap(laid_out))
    named = {"replica": replica, "out": guarded_messages(1, layout)[0], "layout": layout}
    flag = draw(st.sampled_from([None, torch.zeros((), dtype=torch.bool)]))
    return main, {**named, "clip": draw(clips), "blocks": blocks, "nonfinite": flag}


@st.composite
def _dequantize_add(draw: st.DrawFn) -> tuple[Tensor, dict[str, Any]]:
    rows, layout = draw(st.integers(0, 4)), draw(layouts(draw(lengths)))
    blocks, numel = draw(_blocks(layout))
    replica = draw(laid_out(draw(tensors((rows, numel)))))
    messages = draw(received_messages(rows, layout))
    named = {"layout": layout, "accumulate": draw(st.booleans()), "blocks": blocks}
    return messages, {"replica": replica, **named}


@st.composite
def _blocks(draw: st.DrawFn, layout: MessageLayout) -> tuple[Tensor | None, int]:
    """A table of blocks or None, and the length of the row."""
    return make_blocks(layout, draw(seeds)) if draw(st.booleans()) else (None, layout.numel)


def _index(count: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(0, count - 1) if count else st.none()


@st.composite
def _hadamard_quantize(draw: st.DrawFn) -> tuple[Tensor, dict[str, Any]]:
    destinations, parts = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    layout = draw(layouts(draw(lengths), parts=parts))
    blocks, numel = draw(_blocks(layout))
    values = draw(laid_out(draw(tensors((destinations, parts, numel)))))
    if destinations and draw(st.integers(0, 9)) == 0:
        values = values[:1].expand(destinations, -1, -1)
    named = {"hadamard": draw(transforms), "rounding": draw(roundings), "blocks": blocks}
    named["skip"] = draw(_index(destinations))
    return values, {"out": guarded_messages(destinations, layout), "layout": layout, **named}


@st.composite
def _dequantize_reduce_quantize(draw: st.DrawFn) -> tuple[Tensor, dict[str, Any]]:
    numel, parts = draw(lengths), draw(st.integers(1, 3))
    in_message = draw(st.integers(1, 2))
    received = draw(layouts(numel, parts=parts * in_message))
    sent = draw(layouts(numel, parts=in_message))
    messages = draw(received_messages(draw(counts), received))
    out = guarded_messages(parts, sent)
    named = {"rounding": draw(roundings), "dither": draw(dithers), "skip": draw(_index(parts))}
    if named["skip"] is not None and in_message == 1 and draw(st.booleans()):
        blocks, length = draw(_blocks(sent))
        named |= {"own": torch.full((length,), math.nan), "blocks": blocks}
        named |= {"hadamard": draw(transforms), "multiplier": 1 / 96}
    return messages, {"received": received, "out": out, "sent": sent, **named}


@st.composite
def _dequantize_reduce_hadamard(draw: st.DrawFn) -> tuple[Tensor, dict[str, Any]]:
    parts, count = draw(st.integers(1, 3)), draw(counts)
    layout = draw(layouts(draw(lengths), parts=parts))
    blocks, numel = draw(_blocks(layout))
    out = guarded_values(torch.full((numel,), math.nan, dtype=draw(dtypes)), offset=draw(st.integers(0, 8)))
    own = _of_many_magnitudes(numel, seed=9).to(draw(dtypes)) if draw(st.booleans()) else None
    multiplier = draw(st.sampled_from([1.0, 1 / 32, 1 / 96, -0.3, 0.0, 1e30, 1e-44, math.inf]))
    named = {"layout": layout, "hadamard": draw(transforms), "multiplier": multiplier}
    named |= {"dither": draw(dithers), "part": draw(st.integers(0, parts - 1)), "own": own, "blocks": blocks}
    named["own_multiplier"] = draw(st.sampled_from([1.0, 1 / 3, -2.0]))
    return draw(received_messages(count, layout)), {"out": out, **named, "skip": draw(_index(count))}


@st.composite
def _dequantize_reduce_pieces(draw: st.DrawFn) -> tuple[Tensor, dict[str, Any]]:
    pieces, layout = draw(st.integers(1, 4)), draw(layouts(draw(lengths)))
    stride = 32 * draw(st.integers(0, layout.numel // 32))
    values = torch.full(((pieces - 1) * stride + layout.numel,), math.nan, dtype=draw(dtypes))
    out = guarded_values(values, offset=draw(st.integers(0, 8)))
    series = st.builds(KeySeries, st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
    named = {"layout": layout, "pieces": pieces, "stride": stride, "hadamard": draw(transforms)}
    named |= {"multiplier": draw(st.sampled_from([1.0, 1 / 96])), "dither": draw(st.none() | series)}
    return draw(received_messages(pieces * draw(st.integers(0, 3)), layout)), {"out": out, **named}


CALLS = {
    "subtract_quantize": _subtract_quantize,
    "dequantize_add": _dequantize_add,
    "hadamard_quantize": _hadamard_quantize,
    "dequantize_reduce_quantize": _dequantize_reduce_quantize,
    "dequantize_reduce_hadamard": _dequantize_reduce_hadamard,
    "dequantize_reduce_pieces": _dequantize_reduce_pieces,
}
