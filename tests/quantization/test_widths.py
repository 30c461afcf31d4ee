"""Codes of 2 and 3 bits: many drawn calls, unbiased on average, and messages that do not fit are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from sdp4bit.config import QUANTIZED_BITS
from sdp4bit.quantization import ops
from sdp4bit.quantization.hadamard import INVERSE_FACTOR
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import RoundingKey, derive_keys
from tests.quantization import property_cases as draws
from tests.quantization.operator_calls import empty_messages, quantized, values_of
from tests.quantization.property_cases import FEW, MANY, hold


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(FEW, id="few"),
        pytest.param(settings(MANY, max_examples=1000), id="many", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", draws.CALLS)
def test_numba_agrees_with_the_reference(
    name: str, profile: settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any length and group size, zeros, NaN, infinities, sums of other widths: the same bytes."""
    pytest.importorskip("numba", reason="needs numba")
    from tests.kernels.byte_tests import compare

    monkeypatch.setattr(draws, "bits", st.sampled_from([2, 3, 2, 3, 4]))

    def check(call: tuple[Tensor, dict[str, Any]]) -> None:
        compare(getattr(ops, name), call[0], backend="numba", **call[1])

    hold(profile, draws.CALLS[name](), check, name=name)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("bits", QUANTIZED_BITS)
def test_stochastic_rounding_is_unbiased(bits: int, hadamard: bool) -> None:
    """The mean over many draws is as far from the values as chance explains, in each value and in their sum.

    A code errs by less than a step, of at most 1 + 2**-6 times largest / qmax, with a variance of at most a
    quarter of its square; cutting to 16 fractional bits moves it by less than 2**-16 of a step.
    """
    numel, count = 1000, 600
    values = values_of(1, 1, numel, seed=bits)
    layout = MessageLayout(numel=numel, bits=bits, group_size=96)
    total = torch.zeros(numel, dtype=torch.float64)
    received = torch.empty(numel)
    for draw in range(count):
        message = quantized(values, layout, hadamard=hadamard, rounding=RoundingKey(*derive_keys(1, draw)))
        factor = INVERSE_FACTOR if hadamard else 1.0
        ops.dequantize_reduce_hadamard(
            message,
            out=received,
            layout=layout,
            hadamard=hadamard,
            multiplier=factor,
            dither=None,
        )
        total += received.double()
    error = total / count - values.flatten().double()
    # A transformed block has 32 times the squares; back, the mean of 32 independent errors, over 32.
    largest = values.abs().max().item() * (math.sqrt(32) if hadamard else 1)
    level = largest * (2 if hadamard else 1) / (2 ** (bits - 1) - 1) * (1 + 2**-6)
    deviation = level / 2 / math.sqrt(count) / (math.sqrt(32) if hadamard else 1)
    truncation = level * 2**-16
    # One in 10**9 of a normal deviate is beyond 6.1.
    assert error.abs().max().item() <= 6.1 * deviation + truncation
    assert abs(error.sum().item()) <= 6.1 * deviation * math.sqrt(numel) + truncation * numel
    # And the bound is not far: rounding did something.
    assert error.square().mean().sqrt().item() > deviation / 20


@pytest.mark.parametrize("bits", QUANTIZED_BITS)
def test_a_damaged_code_changes_its_value_and_a_damaged_scale_its_group(bits: int) -> None:
    layout = MessageLayout(numel=960, bits=bits, group_size=96)
    message = quantized(values_of(1, 1, 960), layout)
    out, damaged = torch.empty(960), torch.empty(960)
    named = {"layout": layout, "hadamard": False, "multiplier": 1.0}
    ops.dequantize_reduce_hadamard(message, out=out, **named, dither=None)
    for byte in (0, 5, 9, layout.code_bytes - 1, layout.scales_offset + 7):
        broken = message.clone()
        broken[0, byte] ^= 0x80
        ops.dequantize_reduce_hadamard(broken, out=damaged, **named, dither=None)
        changed = (damaged != out).nonzero().flatten().tolist()
        if byte < layout.scales_offset:
            assert len(changed) == 1
        else:
            assert {value // 96 for value in changed} == {3}


def test_a_row_without_values_is_an_empty_message() -> None:
    for bits in QUANTIZED_BITS:
        layout = MessageLayout(numel=0, bits=bits, group_size=64)
        assert empty_messages(3, layout).shape == (3, 0)
