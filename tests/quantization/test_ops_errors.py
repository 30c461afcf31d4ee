"""Calls of the operators that do not fit: each a ValueError with the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sdp4bit.quantization import ops
from sdp4bit.quantization.random import MAX_ELEMENTS
from tests.quantization.operator_calls import empty_messages, values_of


@pytest.fixture(autouse=True)
def reference_backend() -> Iterator[None]:
    with ops.use_backend("reference"):
        yield


def out_of(numel: int, bits: int = 4, group_size: int = 32, **options: Any) -> Tensor:
    return empty_messages(1, numel, bits, group_size, **options)


BAD_CALLS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "subtract: no main": (
        lambda: ops.subtract_quantize(None, None, out_of(64)[0], 4, 32, False, 0, 0),
        ["subtract_quantize", "main must be a tensor", "None"],
    ),
    "subtract: 2-D main": (
        lambda: ops.subtract_quantize(values_of(2, 32), None, out_of(64)[0], 4, 32, False, 0, 0),
        ["main", "1-D", "[2, 32]"],
    ),
    "subtract: replica of another length": (
        lambda: ops.subtract_quantize(values_of(64), values_of(65), out_of(64)[0], 4, 32, False, 0, 0),
        ["[64]", "[65]"],
    ),
    "subtract: out too short": (
        lambda: ops.subtract_quantize(values_of(64), None, out_of(32)[0], 4, 32, False, 0, 0),
        ["out", "48", "[1, 32]", "numel=64"],
    ),
    "subtract: 2-D out": (
        lambda: ops.subtract_quantize(values_of(64), None, out_of(64), 4, 32, False, 0, 0),
        ["out", "[48]", "[1, 48]"],
    ),
    "subtract: out of another dtype": (
        lambda: ops.subtract_quantize(
            values_of(64), None, out_of(64)[0].view(torch.int8), 4, 32, False, 0, 0
        ),
        ["out", "uint8", "torch.int8"],
    ),
    "subtract: out on another device": (
        lambda: ops.subtract_quantize(values_of(64), None, out_of(64, device="meta")[0], 4, 32, False, 0, 0),
        ["main", "cpu", "meta"],
    ),
    "subtract: fp64 main": (
        lambda: ops.subtract_quantize(
            values_of(64, dtype=torch.float64), None, out_of(64)[0], 4, 32, False, 0, 0
        ),
        ["main", "fp32, bf16 or fp16", "torch.float64"],
    ),
    "subtract: integer replica": (
        lambda: ops.subtract_quantize(
            values_of(64), torch.zeros(64, dtype=torch.int32), out_of(64)[0], 4, 32, False, 0, 0
        ),
        ["replica", "torch.int32"],
    ),
    "subtract: bits": (
        lambda: ops.subtract_quantize(values_of(64), None, out_of(64)[0], 5, 32, False, 0, 0),
        ["bits=5"],
    ),
    "subtract: group size": (
        lambda: ops.subtract_quantize(values_of(64), None, out_of(64)[0], 4, 48, False, 0, 0),
        ["group_size=48", "32"],
    ),
    "add: 1-D replica": (
        lambda: ops.dequantize_add(out_of(64), values_of(64), 4, 32, True),
        ["replica", "2-D", "[64]"],
    ),
    "add: strided replica": (
        lambda: ops.dequantize_add(out_of(64), values_of(1, 128)[:, ::2], 4, 32, True),
        ["replica", "contiguous", "[1, 64]"],
    ),
    "add: another number of messages": (
        lambda: ops.dequantize_add(out_of(64), values_of(2, 64), 4, 32, True),
        ["messages must hold 2 messages, got 1"],
    ),
    "add: messages of another size": (
        lambda: ops.dequantize_add(out_of(32), values_of(1, 64), 4, 32, True),
        ["messages", "48", "[1, 32]"],
    ),
    "add: integer replica": (
        lambda: ops.dequantize_add(out_of(64), torch.zeros(1, 64).long(), 4, 32, True),
        ["replica", "torch.int64"],
    ),
    "add: replica on another device": (
        lambda: ops.dequantize_add(out_of(64), torch.zeros(1, 64, device="meta"), 4, 32, True),
        ["replica", "meta", "cpu"],
    ),
    "hadamard: 2-D values": (
        lambda: ops.hadamard_quantize(values_of(1, 64), out_of(64), 4, 32, True, False, 0, 0, 0, 0),
        ["values", "3-D", "[1, 64]"],
    ),
    "hadamard: strided rows": (
        lambda: ops.hadamard_quantize(
            values_of(1, 64, 1).transpose(1, 2).expand(1, 1, 64)[..., ::2],
            out_of(32),
            4,
            32,
            True,
            False,
            0,
            0,
            0,
            0,
        ),
        ["values", "contiguous", "[1, 1, 32]"],
    ),
    "hadamard: fp64 values": (
        lambda: ops.hadamard_quantize(
            values_of(1, 1, 64).double(), out_of(64), 4, 32, True, False, 0, 0, 0, 0
        ),
        ["values", "torch.float64"],
    ),
    "hadamard: another number of messages": (
        lambda: ops.hadamard_quantize(values_of(2, 1, 64), out_of(64), 4, 32, True, False, 0, 0, 0, 0),
        ["out must hold 2 messages, got 1"],
    ),
    "hadamard: misaligned messages": (
        lambda: ops.hadamard_quantize(
            values_of(1, 1, 64),
            torch.zeros(64, dtype=torch.uint8)[1:49].view(1, 48),
            4,
            32,
            True,
            False,
            0,
            0,
            0,
            0,
        ),
        ["out", "16-byte", "offset 1"],
    ),
    "hadamard: misaligned rows": (
        lambda: ops.hadamard_quantize(
            values_of(2, 1, 64),
            torch.zeros(2, 49, dtype=torch.uint8)[:, :48],
            4,
            32,
            True,
            False,
            0,
            0,
            0,
            0,
        ),
        ["out", "16-byte", "(49, 1)"],
    ),
    "hadamard: first no multiple of 32": (
        lambda: ops.hadamard_quantize(values_of(1, 1, 64), out_of(64), 4, 32, True, True, 0, 0, 16, 64),
        ["first=16", "row_stride=64", "32"],
    ),
    "hadamard: negative row stride": (
        lambda: ops.hadamard_quantize(values_of(1, 1, 64), out_of(64), 4, 32, True, True, 0, 0, 0, -32),
        ["row_stride=-32", "at least 0"],
    ),
    "hadamard: keys beyond 32 bits": (
        lambda: ops.hadamard_quantize(values_of(1, 1, 64), out_of(64), 4, 32, True, True, 1 << 32, 0, 0, 0),
        ["k0=4294967296", "k1=0", "32-bit"],
    ),
    "hadamard: signs without a transform": (
        lambda: ops.hadamard_quantize(values_of(1, 1, 64), out_of(64), 4, 32, False, True, 0, 0, 0, 0, 5),
        ["signs=5", "hadamard=True"],
    ),
    "hadamard: more signs than a block has values": (
        lambda: ops.hadamard_quantize(
            values_of(1, 1, 64), out_of(64), 4, 32, True, True, 0, 0, 0, 0, 1 << 32
        ),
        ["signs=4294967296", "32 bits"],
    ),
    "hadamard: numbers beyond a key": (
        lambda: ops.hadamard_quantize(
            values_of(1, 2, 64), out_of(64, parts=2), 4, 32, True, True, 0, 0, 32, MAX_ELEMENTS - 64
        ),
        [str(MAX_ELEMENTS + 32), str(MAX_ELEMENTS)],
    ),
    "requantize: 1-D out": (
        lambda: ops.dequantize_reduce_quantize(
            out_of(64), out_of(64)[0], 64, 4, 32, 4, 32, False, 0, 0, 0, 0
        ),
        ["out", "2-D", "[48]"],
    ),
    "requantize: messages of another size": (
        lambda: ops.dequantize_reduce_quantize(out_of(64), out_of(64), 64, 8, 32, 4, 32, False, 0, 0, 0, 0),
        ["messages", "80", "[1, 48]"],
    ),
    "requantize: out of another size": (
        lambda: ops.dequantize_reduce_quantize(out_of(64), out_of(64), 64, 4, 32, 8, 32, False, 0, 0, 0, 0),
        ["out", "80", "[1, 48]"],
    ),
    "requantize: parts that do not match": (
        lambda: ops.dequantize_reduce_quantize(
            out_of(64), torch.zeros(2, 48, dtype=torch.uint8), 64, 4, 32, 4, 32, False, 0, 0, 0, 0
        ),
        ["messages", "parts=2", "[1, 48]"],
    ),
    "requantize: another device": (
        lambda: ops.dequantize_reduce_quantize(
            out_of(64, device="meta"), out_of(64), 64, 4, 32, 4, 32, False, 0, 0, 0, 0
        ),
        ["messages", "meta", "cpu"],
    ),
    "requantize: first no multiple of 32": (
        lambda: ops.dequantize_reduce_quantize(out_of(64), out_of(64), 64, 4, 32, 4, 32, True, 0, 0, 1, 64),
        ["first=1", "row_stride=64", "32"],
    ),
    "reduce: 2-D out": (
        lambda: ops.dequantize_reduce_hadamard(out_of(64), torch.zeros(1, 64), 4, 32, True, 1.0),
        ["out", "1-D", "[1, 64]"],
    ),
    "reduce: strided out": (
        lambda: ops.dequantize_reduce_hadamard(out_of(64), torch.zeros(128)[::2], 4, 32, True, 1.0),
        ["out", "contiguous", "[64]"],
    ),
    "reduce: fp64 out": (
        lambda: ops.dequantize_reduce_hadamard(out_of(64), torch.zeros(64).double(), 4, 32, True, 1.0),
        ["out", "torch.float64"],
    ),
    "reduce: signs without a transform": (
        lambda: ops.dequantize_reduce_hadamard(out_of(64), torch.zeros(64), 4, 32, False, 1.0, 5),
        ["signs=5", "hadamard=True"],
    ),
    "reduce: negative signs": (
        lambda: ops.dequantize_reduce_hadamard(out_of(64), torch.zeros(64), 4, 32, True, 1.0, -1),
        ["signs=-1", "32 bits"],
    ),
    "reduce: messages of another size": (
        lambda: ops.dequantize_reduce_hadamard(out_of(32), torch.zeros(64), 4, 32, True, 1.0),
        ["messages", "48", "[1, 32]"],
    ),
    "reduce: another device": (
        lambda: ops.dequantize_reduce_hadamard(out_of(64), torch.zeros(64, device="meta"), 4, 32, True, 1.0),
        ["out", "meta", "cpu"],
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call_is_a_value_error_with_the_numbers(name: str) -> None:
    call, named = BAD_CALLS[name]
    with pytest.raises(ValueError) as error:
        call()
    for text in named:
        assert text in str(error.value)
