"""A call with one argument that does not fit is refused with the numbers, and nothing is written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from sdp4bit.quantization import ops
from sdp4bit.quantization.hadamard import Hadamard
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import MAX_ELEMENTS, RoundingKey
from sdp4bit_lab.selftest.kernel_buffers import POISON, bits_of, guarded_messages, whole
from tests.quantization.operator_calls import empty_messages, layout_of, values_of
from tests.quantization.property_cases import PROFILES, hold

NUMEL, BITS, GROUP, ROWS, PARTS = 128, 4, 64, 2, 3
"""A row without padding: one value more has another layout."""
LAYOUT, PARTED = layout_of(NUMEL, BITS, GROUP), layout_of(NUMEL, BITS, GROUP, parts=PARTS)
KEY = RoundingKey(1, 2, first=32, row_stride=128)
DITHER = KEY._replace(dither=True)


@pytest.fixture(autouse=True, params=["reference", "numba"])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "numba":
        pytest.importorskip("numba", reason="needs numba")
    with ops.use_backend(request.param):
        yield


def messages(count: int, layout: MessageLayout) -> Tensor:
    return torch.full((count, layout.nbytes), POISON, dtype=torch.uint8)


def valid_calls() -> dict[str, dict[str, Any]]:
    """A call of each operator that fits."""
    return {
        "subtract_quantize": {
            "main": torch.ones(NUMEL),
            "replica": torch.zeros(NUMEL, dtype=torch.bfloat16),
            "out": guarded_messages(1, LAYOUT)[0],
            "layout": LAYOUT,
            "rounding": KEY,
            "clip": 0.5,
        },
        "dequantize_add": {
            "messages": messages(ROWS, LAYOUT),
            "replica": torch.zeros(ROWS, NUMEL, dtype=torch.bfloat16),
            "layout": LAYOUT,
            "accumulate": True,
            "dither": DITHER,
        },
        "hadamard_quantize": {
            "values": torch.ones(ROWS, PARTS, NUMEL),
            "out": guarded_messages(ROWS, PARTED),
            "layout": PARTED,
            "hadamard": Hadamard(5),
            "rounding": KEY,
        },
        "dequantize_reduce_quantize": {
            "messages": messages(ROWS, PARTED),
            "received": PARTED,
            "out": guarded_messages(PARTS, LAYOUT),
            "sent": LAYOUT,
            "rounding": KEY,
            "dither": DITHER,
        },
        "dequantize_reduce_hadamard": {
            "messages": messages(ROWS, LAYOUT),
            "out": torch.zeros(NUMEL),
            "layout": LAYOUT,
            "hadamard": Hadamard(5),
            "multiplier": 0.5,
            "dither": DITHER,
        },
    }


def call(name: str, arguments: dict[str, Any]) -> None:
    (_, first), *named = arguments.items()
    getattr(ops, name)(first, **dict(named))


# What is said. A row has 128 values; its message 80 bytes with 4 bits, 144 with 8.

SUBTRACT, ADD, HADAMARD = "subtract_quantize", "dequantize_add", "hadamard_quantize"
REQUANTIZE, REDUCE = "dequantize_reduce_quantize", "dequantize_reduce_hadamard"
BAD_CALLS: list[tuple[str, dict[str, Any], list[str]]] = [
    (SUBTRACT, {"main": None}, ["subtract_quantize", "main must be a tensor", "None"]),
    (SUBTRACT, {"main": values_of(2, 64)}, ["main", "1-D", "[2, 64]"]),
    (SUBTRACT, {"replica": values_of(65)}, ["[128]", "[65]"]),
    *((SUBTRACT, {"clip": clip}, [f"clip={clip}", "0.1 to 1"]) for clip in (0.0, 0.09, 1.01, -0.5, math.nan)),
    (SUBTRACT, {"main": values_of(256)[::2]}, ["main and replica must be contiguous"]),
    (SUBTRACT, {"out": messages(1, layout_of(64))[0]}, ["out", "80", "[1, 48]", "numel=128"]),
    (SUBTRACT, {"out": messages(1, LAYOUT)}, ["out", "[80]", "[1, 80]"]),
    (SUBTRACT, {"out": messages(1, LAYOUT)[0].view(torch.int8)}, ["out", "uint8", "torch.int8"]),
    (SUBTRACT, {"out": empty_messages(1, LAYOUT, device="meta")[0]}, ["main", "cpu", "meta"]),
    (SUBTRACT, {"main": values_of(128).double()}, ["main", "fp32, bf16 or fp16", "torch.float64"]),
    (SUBTRACT, {"replica": torch.zeros(128, dtype=torch.int32)}, ["replica", "torch.int32"]),
    (SUBTRACT, {"layout": layout_of(127, 4, 64)}, ["layout", "numel=128", "numel=127"]),
    (SUBTRACT, {"layout": PARTED}, ["layout", "parts=1", "parts=3"]),
    (ADD, {"replica": values_of(128)}, ["replica", "2-D", "[128]"]),
    (ADD, {"replica": values_of(2, 256)[:, ::2]}, ["replica", "contiguous", "[2, 128]"]),
    (ADD, {"replica": values_of(3, 128)}, ["messages must hold 3 messages, got 2"]),
    (ADD, {"messages": messages(2, layout_of(64))}, ["messages", "80", "[2, 48]"]),
    (ADD, {"replica": torch.zeros(2, 128).long()}, ["replica", "torch.int64"]),
    (ADD, {"replica": torch.zeros(2, 128, device="meta")}, ["replica", "meta", "cpu"]),
    (ADD, {"layout": layout_of(128, 8, 64)}, ["messages", "bits=8", "144", "[2, 80]"]),
    (HADAMARD, {"values": values_of(3, 128)}, ["values", "3-D", "[3, 128]"]),
    (HADAMARD, {"values": values_of(2, 3, 256)[..., ::2]}, ["values", "contiguous", "[2, 3, 128]"]),
    (HADAMARD, {"values": values_of(2, 3, 128).double()}, ["values", "torch.float64"]),
    (HADAMARD, {"values": values_of(4, 3, 128)}, ["out must hold 4 messages, got 2"]),
    (HADAMARD, {"values": values_of(2, 2, 128)}, ["layout", "parts=2", "parts=3"]),
    (HADAMARD, {"out": torch.zeros(2, 240).byte()[:, 1:209]}, ["out", "16-byte", "offset 1"]),
    (HADAMARD, {"out": torch.zeros(2, 209).byte()[:, :208]}, ["out", "16-byte", "(209, 1)"]),
    (HADAMARD, {"rounding": KEY._replace(first=16)}, ["first=16", "row_stride=128", "32"]),
    (HADAMARD, {"rounding": KEY._replace(row_stride=-32)}, ["row_stride=-32", "at least 0"]),
    (HADAMARD, {"rounding": KEY._replace(k0=1 << 32)}, ["k0=4294967296", "k1=2", "32-bit"]),
    (HADAMARD, {"rounding": KEY._replace(sender=-1)}, ["sender=-1", "at least 0"]),
    (HADAMARD, {"rounding": KEY._replace(dither=2)}, ["dither=2", "True or False"]),
    (ADD, {"dither": KEY}, ["dither must be a key with dither=True", "k0=1"]),
    (ADD, {"dither": DITHER._replace(first=8)}, ["first=8", "32"]),
    (REQUANTIZE, {"dither": DITHER._replace(row_stride=MAX_ELEMENTS)}, [str(MAX_ELEMENTS)]),
    (HADAMARD, {"hadamard": Hadamard(1 << 32)}, ["signs=4294967296", "32 bits"]),
    (
        HADAMARD,
        {"rounding": RoundingKey(1, 2, 32, MAX_ELEMENTS // 4)},
        [str(32 + 5 * MAX_ELEMENTS // 4 + 128), str(MAX_ELEMENTS)],
    ),
    (REQUANTIZE, {"out": messages(1, LAYOUT)[0]}, ["out", "2-D", "[80]"]),
    (REQUANTIZE, {"received": layout_of(128, 8, 64, parts=3)}, ["messages", "400", "[2, 208]"]),
    (REQUANTIZE, {"sent": layout_of(128, 8, 64)}, ["out", "144", "[3, 80]"]),
    (REQUANTIZE, {"sent": layout_of(64, 8, 64)}, ["received", "numel=64", "numel=128"]),
    (REQUANTIZE, {"out": messages(2, LAYOUT)}, ["received", "parts=2", "parts=3"]),
    (REQUANTIZE, {"messages": empty_messages(2, PARTED, device="meta")}, ["messages", "meta", "cpu"]),
    (REQUANTIZE, {"rounding": KEY._replace(first=1)}, ["first=1", "row_stride=128", "32"]),
    (REDUCE, {"out": torch.zeros(1, 128)}, ["out", "1-D", "[1, 128]"]),
    (REDUCE, {"out": torch.zeros(256)[::2]}, ["out", "contiguous", "[128]"]),
    (REDUCE, {"out": torch.zeros(128).double()}, ["out", "torch.float64"]),
    (REDUCE, {"hadamard": Hadamard(-1)}, ["signs=-1", "32 bits"]),
    (REDUCE, {"messages": messages(2, layout_of(64))}, ["messages", "80", "[2, 48]"]),
    (REDUCE, {"out": torch.zeros(128, device="meta")}, ["out", "meta", "cpu"]),
]


@pytest.mark.parametrize(("name", "change", "named"), BAD_CALLS, ids=[str(i) for i in range(len(BAD_CALLS))])
def test_bad_call_is_a_value_error_with_the_numbers(
    name: str, change: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        call(name, valid_calls()[name] | change)
    for text in named:
        assert text in str(error.value)


@pytest.mark.parametrize("numbers", [(128, 5, 64, 1), (128, 4, 48, 1), (-1, 4, 64, 1), (128, 4, 64, 0)])
def test_numbers_that_are_no_layout_are_refused_by_the_registered_operator(numbers: tuple[int, ...]) -> None:
    main, out = torch.ones(NUMEL), messages(1, LAYOUT)[0]
    with pytest.raises(ValueError, match=r"bits=5|group_size=48|numel=-1|parts=0"):
        torch.ops.sdp4bit.subtract_quantize(main, None, out, *numbers, None, 1.0)


# Any argument, anything wrong with it

junk = st.sampled_from([None, "4", b"4", 4.5, math.nan, [4], {}, object(), np.ones(3), 2**70, -(2**70)])
"""What no argument can be, save None for the replica of a difference, a transform or a rounding."""
wrong_layouts = {
    "bits": st.sampled_from([-4, 0, 1, 2, 3, 5, 7, 9, 16, 31, 33, 64, 2**40, True, False]),
    "group_size": st.sampled_from([-64, -1, 0, 1, 31, 33, 48, 65, 100, 2**40 + 1, True]),
    "numel": st.sampled_from([-100, -1, 0, 63, 64, 129, 1 << 40]),
    "parts": st.sampled_from([-1, 0, 2, 4, 1 << 40]),
}
wrong_numbers = st.sampled_from([-32, -1, 1, 31, 33, MAX_ELEMENTS, 2**40, -(2**40)])
wrong_keys = st.sampled_from([-1, 1 << 32, 1 << 40, -(1 << 31)])
wrong_roundings = {
    **{"k0": wrong_keys, "k1": wrong_keys, "first": wrong_numbers, "row_stride": wrong_numbers},
    "sender": st.sampled_from([-1, -(2**40)]),
}
wrong_signs = st.sampled_from([-1, -(1 << 31), 1 << 32, (1 << 32) + 5])
wrong_dtypes = st.sampled_from(
    [torch.float64, torch.int32, torch.int8, torch.bool, torch.complex64, torch.uint8, torch.float32]
)


def _misaligned(tensor: Tensor, offset: int) -> Tensor:
    """Messages whose rows begin where a kernel must not write."""
    rows, length = tensor.shape if tensor.dim() == 2 else (1, tensor.shape[0])
    buffer = torch.full((rows, length + 32), POISON, dtype=torch.uint8)
    view = buffer[:, offset : offset + length]
    return view if tensor.dim() == 2 else view[0]


def _strided(tensor: Tensor) -> Tensor:
    return torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]


shape_changes: dict[str, Callable[[Tensor], Tensor]] = {
    "longer": lambda x: torch.cat([x, x[..., -16:]], -1).clone(),
    "shorter": lambda x: x[..., :-48].clone(),
    "empty": lambda x: x[..., :0].clone(),
    "one more row": lambda x: torch.cat([x, x[-1:]]).clone(),
    "one more dimension": lambda x: x.unsqueeze(0).clone(),
    "no dimension": lambda x: x.new_zeros(()),
    "flat": lambda x: x.flatten().clone() if x.dim() > 1 else x.view(1, 1, -1).clone(),
    "every other value": _strided,
}
"""Each makes a tensor of any argument one that does not fit; the first of a reduction may have more rows."""


@st.composite
def wrong_arguments(draw: st.DrawFn) -> tuple[str, str, Callable[[Any], Any]]:
    """An operator, the argument that does not fit, and what makes it so."""
    name = draw(st.sampled_from(sorted(valid_calls())))
    arguments = valid_calls()[name]
    wrong = draw(st.sampled_from(sorted(arguments)))
    value = arguments[wrong]
    if isinstance(value, bool | float):  # PyTorch takes None for a bool, and numbers
        kinds = float | int | None if isinstance(value, bool) else float | int
        other = draw(junk.filter(lambda x: not isinstance(x, kinds)))
        return name, wrong, lambda _: other
    if not isinstance(value, Tensor) and draw(st.booleans()):
        other = draw(junk.filter(lambda x: x is not None or isinstance(value, MessageLayout)))
        return name, wrong, lambda _: other
    if isinstance(value, MessageLayout):
        field = draw(st.sampled_from(sorted(wrong_layouts)))
        number = draw(junk | wrong_layouts[field])
        return name, wrong, lambda layout: dataclasses.replace(layout, **{field: number})
    if isinstance(value, RoundingKey | Hadamard):
        wrong_fields = wrong_roundings if isinstance(value, RoundingKey) else {"signs": wrong_signs}
        # A single row has no next one, whose number could be wrong.
        fields = wrong_fields.keys() - ({"row_stride"} if name in (SUBTRACT, REDUCE) else set())
        field = draw(st.sampled_from(sorted(fields)))
        number = draw(junk.filter(lambda x: x is not None) | wrong_fields[field])
        return name, wrong, lambda record: record._replace(**{field: number})
    changes = [*shape_changes, "dtype", "value"]
    if value.dtype == torch.uint8:
        changes.append("misaligned")
    if wrong == "messages" and name != "dequantize_add":
        changes.remove("one more row")
    change = draw(st.sampled_from(changes))
    if change == "value":
        other = draw(junk.filter(lambda x: x is not None or wrong != "replica" or name == "dequantize_add"))
        return name, wrong, lambda _: other
    if change == "misaligned":
        offset = draw(st.integers(1, 15))
        return name, wrong, lambda tensor: _misaligned(tensor, offset)
    if change == "dtype":
        fitting = {value.dtype, torch.float32} if value.is_floating_point() else {value.dtype}
        dtype = draw(wrong_dtypes.filter(lambda dtype: dtype not in fitting))
        return name, wrong, lambda tensor: tensor.to(dtype)
    return name, wrong, shape_changes[change]


def check_refused(case: tuple[str, str, Callable[[Any], Any]]) -> None:
    """ValueError, TypeError or, from PyTorch's own check of types, RuntimeError; nothing has been written."""
    name, wrong, change = case
    arguments, before = valid_calls()[name], {}

    def attempt() -> None:
        arguments[wrong] = change(arguments[wrong])
        tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
        before.update((key, whole(value).clone()) for key, value in tensors.items())
        call(name, arguments)

    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        attempt()
    assert str(error.value).strip(), "refused without a word"
    for key, copy in before.items():
        assert torch.equal(whole(arguments[key]), copy)


def test_valid_calls_are_not_refused() -> None:
    for name, arguments in valid_calls().items():
        written = arguments["replica" if name == "dequantize_add" else "out"]
        before = bits_of(written).clone()
        call(name, arguments)
        assert not torch.equal(bits_of(written), before)


@PROFILES
def test_an_argument_that_does_not_fit_is_refused(profile: settings) -> None:
    hold(profile, wrong_arguments(), check_refused)


def test_multipliers_beyond_fp32_are_infinite() -> None:
    arguments = valid_calls()["dequantize_reduce_hadamard"] | {"multiplier": 1e300}
    call("dequantize_reduce_hadamard", arguments)
    assert arguments["out"].isinf().any() and not arguments["out"].isfinite().all()
