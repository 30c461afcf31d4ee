"""A call with one argument that does not fit is refused with the numbers, and nothing is written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import MAX_ELEMENTS, RoundingKey
from sdp4bit_lab.selftest.cases import POISON, bits_of, guarded_messages, whole
from tests.quantization.operator_calls import empty_messages, layout_of, values_of

NUMEL, BITS, GROUP, ROWS, PARTS = 128, 4, 64, 2, 3
"""A row without padding: one value more has another layout."""
LAYOUT, PARTED = layout_of(NUMEL, BITS, GROUP), layout_of(NUMEL, BITS, GROUP, parts=PARTS)
KEY = RoundingKey(1, 2, first=32, row_stride=128)
DITHER = KEY._replace(dither=True)


@pytest.fixture(autouse=True)
def reference_backend() -> Iterator[None]:
    """Calls are checked before a back end is chosen."""
    with ops.use_backend("reference"):
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
            "clip": 0.5,
        },
        "dequantize_add": {
            "messages": messages(ROWS, LAYOUT),
            "replica": torch.zeros(ROWS, NUMEL, dtype=torch.bfloat16),
            "layout": LAYOUT,
            "accumulate": True,
        },
        "hadamard_quantize": {
            "values": torch.ones(ROWS, PARTS, NUMEL),
            "out": guarded_messages(ROWS, PARTED),
            "layout": PARTED,
            "hadamard": True,
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
            "hadamard": True,
            "multiplier": 0.5,
            "dither": DITHER,
        },
        "dequantize_reduce_pieces": {
            "messages": messages(2 * ROWS, LAYOUT),
            "out": torch.zeros(NUMEL + 64),
            "layout": LAYOUT,
            "pieces": 2,
            "stride": 64,
            "hadamard": True,
            "multiplier": 0.5,
            "dither": None,
        },
    }


def call(name: str, arguments: dict[str, Any]) -> None:
    (_, first), *named = arguments.items()
    getattr(ops, name)(first, **dict(named))


# Texts of errors. A row has 128 values; its message 80 bytes with 4 bits, 144 with 8.

SUBTRACT, ADD, HADAMARD = "subtract_quantize", "dequantize_add", "hadamard_quantize"
REQUANTIZE, REDUCE = "dequantize_reduce_quantize", "dequantize_reduce_hadamard"
PIECES = "dequantize_reduce_pieces"
BAD_CALLS: list[tuple[str, dict[str, Any], list[str]]] = [
    *(
        (PIECES, {name: value}, [f"{name}={value}", "multiple of 32"])
        for name, value in (("pieces", 0), ("stride", -32), ("stride", 48), ("stride", 160))
    ),
    (PIECES, {"out": torch.zeros(NUMEL)}, ["out", "[192]", "[128]"]),
    (PIECES, {"messages": messages(3, LAYOUT)}, ["messages", "multiple of the 2 pieces", "3"]),
    (PIECES, {"layout": PARTED}, ["layout", "parts=1"]),
    (REQUANTIZE, {"sent": layout_of(NUMEL, BITS, GROUP, parts=2)}, ["2 parts of sent", "3 of received"]),
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
    (SUBTRACT, {"nonfinite": torch.zeros(())}, ["nonfinite", "bool scalar", "torch.float32"]),
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
    (REDUCE, {"dither": KEY}, ["dither must be None or the senders' key with dither=True", "k0=1"]),
    (REDUCE, {"dither": DITHER._replace(first=8)}, ["first=8", "32"]),
    (REQUANTIZE, {"dither": DITHER._replace(row_stride=MAX_ELEMENTS)}, [str(MAX_ELEMENTS)]),
    (
        HADAMARD,
        {"rounding": RoundingKey(1, 2, 32, MAX_ELEMENTS // 4)},
        [str(32 + 5 * MAX_ELEMENTS // 4 + 128), str(MAX_ELEMENTS)],
    ),
    (REQUANTIZE, {"out": messages(1, LAYOUT)[0]}, ["out", "2-D", "[80]"]),
    (REQUANTIZE, {"received": layout_of(128, 8, 64, parts=3)}, ["messages", "400", "[2, 208]"]),
    (REQUANTIZE, {"sent": layout_of(128, 8, 64)}, ["out", "144", "[3, 80]"]),
    (REQUANTIZE, {"sent": layout_of(64, 8, 64)}, ["received", "numel=64", "numel=128"]),
    (REQUANTIZE, {"out": messages(4, LAYOUT)}, ["out must hold 3 messages, got 4"]),
    (REQUANTIZE, {"own": torch.zeros(128)}, ["own needs skip"]),
    (REQUANTIZE, {"own": torch.zeros(128).half()}, ["own must be fp32", "float16"]),
    (REQUANTIZE, {"skip": 3}, ["skip=3 must be from 0 to 2"]),
    (HADAMARD, {"skip": 2}, ["skip=2 must be from 0 to 1"]),
    (HADAMARD, {"blocks": torch.zeros(3).long()}, ["blocks", "int64 [4]", "numel=128", "[3]"]),
    (REDUCE, {"blocks": torch.zeros(4)}, ["blocks", "int64 [4]", "torch.float32"]),
    (REDUCE, {"own": torch.zeros(127)}, ["own", "contiguous [128]", "[127]"]),
    (REDUCE, {"own": torch.zeros(128, device="meta")}, ["own", "meta", "cpu"]),
    (REDUCE, {"skip": -1}, ["skip=-1 must be from 0 to 1"]),
    (REDUCE, {"part": 1}, ["part=1 must be from 0 to 0"]),
    (REDUCE, {"part": -1}, ["part=-1 must be from 0 to 0"]),
    (REQUANTIZE, {"messages": empty_messages(2, PARTED, device="meta")}, ["messages", "meta", "cpu"]),
    (REQUANTIZE, {"rounding": KEY._replace(first=1)}, ["first=1", "row_stride=128", "32"]),
    (REDUCE, {"out": torch.zeros(1, 128)}, ["out", "1-D", "[1, 128]"]),
    (REDUCE, {"out": torch.zeros(256)[::2]}, ["out", "contiguous", "[128]"]),
    (REDUCE, {"out": torch.zeros(128).double()}, ["out", "torch.float64"]),
    (REDUCE, {"messages": messages(2, layout_of(64))}, ["messages", "80", "[2, 48]"]),
    (REDUCE, {"out": torch.zeros(128, device="meta")}, ["out", "meta", "cpu"]),
]


@pytest.mark.parametrize(("name", "change", "named"), BAD_CALLS, ids=[str(i) for i in range(len(BAD_CALLS))])
def test_bad_call_is_a_value_error_with_the_numbers(
    name: str, change: dict[str, Any], named: list[str]
) -> None:
    arguments = valid_calls()[name] | change
    written = arguments["replica" if name == ADD else "out"]
    before = whole(written).clone()
    with pytest.raises(ValueError) as error:
        call(name, arguments)
    for text in named:
        assert text in str(error.value)
    assert written.is_meta or torch.equal(whole(written), before)


def test_valid_calls_are_not_refused() -> None:
    for name, arguments in valid_calls().items():
        written = arguments["replica" if name == "dequantize_add" else "out"]
        before = bits_of(written).clone()
        call(name, arguments)
        assert not torch.equal(bits_of(written), before)


def test_multipliers_beyond_fp32_are_infinite() -> None:
    arguments = valid_calls()["dequantize_reduce_hadamard"] | {"multiplier": 1e300}
    call("dequantize_reduce_hadamard", arguments)
    assert arguments["out"].isinf().any() and not arguments["out"].isfinite().all()
