"""Stochastic rounding of any number of bits is unbiased, with and without the transform."""

from __future__ import annotations

import math

import pytest
import torch

from sdp4bit.config import QUANTIZED_BITS
from sdp4bit.quantization import ops
from sdp4bit.quantization.formats import format_of
from sdp4bit.quantization.hadamard import INVERSE_FACTOR
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import RoundingKey, derive_keys
from tests.quantization.operator_calls import quantized, values_of


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("bits", QUANTIZED_BITS)
def test_stochastic_rounding_is_unbiased(bits: float, hadamard: bool) -> None:
    """The mean over many draws is as far from the values as chance explains, in each value and in their sum.

    A code errs by less than a step, of at most 1 + 2**-6 times largest / qmax, with a variance of at most a
    quarter of its square; cutting to 16 fractional bits moves it by less than 2**-16 of a step.
    """
    numel, count = 1000, 600
    values = values_of(1, 1, numel, seed=int(bits))
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
    level = largest * (2 if hadamard else 1) / format_of(bits).largest * (1 + 2**-6)
    deviation = level / 2 / math.sqrt(count) / (math.sqrt(32) if hadamard else 1)
    truncation = level * 2**-16
    # One in 10**9 of a normal deviate is beyond 6.1.
    assert error.abs().max().item() <= 6.1 * deviation + truncation
    assert abs(error.sum().item()) <= 6.1 * deviation * math.sqrt(numel) + truncation * numel
    # And the bound is not far: rounding did something.
    assert error.square().mean().sqrt().item() > deviation / 20
